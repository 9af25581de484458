"""An order-0 entropy coder (rANS): every part of a payload takes the bits that the frequencies of its own bytes ask for.

Neighbouring weights are not alike, so codecs that look for repetitions find none in codes of few bits, and waste what lies
between their entropy and whole bits. Many states are worked on at once, symbol i by state i modulo their number, so that numpy
decodes 28M weights in seconds. Floats have a table for each byte of an item, because exponents repeat and mantissas do not.
docs/artifact.md describes the format for other readers.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

PRECISION = 16  # bits of a frequency, and of a word
WHOLE = 1 << PRECISION  # what the frequencies of a table add up to
LOW = 1 << 24  # states are from here to 2^40; 256 times WHOLE, so that rounding them costs 0.01%
STATE_BYTES = 5
TURNS = 1 << 14  # symbols of one state, at most: more states cost three bytes each, and fewer take longer
FEW, FEW_TURNS = 32, 1 << 10  # a small payload has so many states, if each has so many symbols
LEAST = 2048  # bytes: smaller parts have no tables of their own
PLACES = (1, 2, 4, 8)  # bytes of an item, each with a table
COUNT = struct.Struct("<I")
SECTION = struct.Struct("<BQ")  # places, or 0 for bytes that stand in the head; and how many bytes

Bytes = NDArray[np.uint8]
Frequencies = NDArray[np.int64]  # of all 256 symbols


def encode(parts: Sequence[bytes | memoryview], progress: Callable[[int], None] = lambda done: None) -> bytes:
    """The compressed bytes of all parts in a row, each with tables of its own."""
    sections, small = bytearray(COUNT.pack(len(parts))), bytearray()
    streams: list[Bytes] = []
    for part in parts:
        array = np.frombuffer(part, np.uint8)
        places = _places(array) if len(array) >= LEAST else 0
        sections += SECTION.pack(places, len(array))
        if places:
            streams += [array[place::places] for place in range(places)]
        else:
            small += array.data
    tables = [_frequencies(np.bincount(stream, minlength=256)) for stream in streams]
    head = zlib.compress(bytes(sections) + b"".join(map(_packed, tables)) + small, 9)
    progress(len(small))
    return b"".join([COUNT.pack(len(head)), head, *_encoded(streams, tables, progress)])


def decode(data: memoryview, size: int) -> bytes:
    """Exactly `size` bytes; ValueError where the data holds anything else, before memory is taken for it."""
    end = COUNT.size + int.from_bytes(data[: COUNT.size], "little")
    if len(data) < end:
        raise ValueError("it is cut short")
    unpacker = zlib.decompressobj()
    try:
        # An empty part takes nine bytes of it, and there may be a few thousand.
        head = memoryview(unpacker.decompress(data[COUNT.size : end], 2 * size + (1 << 20)))
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if not unpacker.eof or unpacker.unused_data:
        raise ValueError("its head is not one")
    sections, rest = _sections(head, size)
    tables, rest = _tables(rest, sum(places for places, _ in sections))
    if len(rest) != sum(length for places, length in sections if not places):
        raise ValueError("its head does not fit its parts")
    out = np.empty(size, np.uint8)
    streams, begin, taken = [], 0, 0
    for places, length in sections:
        part = out[begin : begin + length]
        begin += length
        if places:
            streams += [part[place::places] for place in range(places)]
        else:
            part[:] = np.frombuffer(rest[taken : taken + length], np.uint8)
            taken += length
    _decode(streams, tables, data[end:])
    return out.tobytes()


def _sections(head: memoryview, size: int) -> tuple[list[tuple[int, int]], memoryview]:
    """How the parts are stored and how many bytes they have, and what stands after that in the head."""
    end = COUNT.size + int.from_bytes(head[: COUNT.size], "little") * SECTION.size
    if len(head) < max(end, COUNT.size):
        raise ValueError("its head is cut short")
    sections = list(SECTION.iter_unpack(head[COUNT.size : end]))
    for places, length in sections:
        if places and (places not in PLACES or length < LEAST or length % places):
            raise ValueError("its head names a part that cannot be")
    if sum(length for _, length in sections) != size:
        raise ValueError("its parts have another size")
    return sections, head[end:]


def _places(array: Bytes) -> int:
    """How many bytes an item has, by which the part is smallest."""

    def cost(places: int) -> float:
        counts = [np.bincount(array[place::places], minlength=256) for place in range(places)]
        return sum(entropy_bytes(count) + len(_packed(_frequencies(count))) for count in counts)

    return min((places for places in PLACES if len(array) % places == 0), key=cost)


def entropy_bytes(counts: NDArray[np.int64]) -> float:
    """The bytes that symbols of these counts need at least, without their table."""
    seen = counts[counts > 0]
    return float((seen * np.log2(seen.sum() / seen)).sum() / 8)


def _frequencies(counts: NDArray[np.int64]) -> Frequencies:
    """Counts as shares of WHOLE; what occurs has one at least. The commonest symbol takes what rounding leaves: it has most."""
    found = np.where(counts > 0, np.maximum(1, counts * WHOLE // counts.sum()), 0)
    found[counts.argmax()] += WHOLE - found.sum()
    return found


def _packed(frequencies: Frequencies) -> bytes:
    """A table: a bit for each symbol that occurs, and the frequencies of those, each less one."""
    seen = frequencies > 0
    return np.packbits(seen).tobytes() + (frequencies[seen] - 1).astype("<u2").tobytes()


def _tables(head: memoryview, count: int) -> tuple[list[Frequencies], memoryview]:
    tables = []
    for _ in range(count):
        seen = np.unpackbits(np.frombuffer(head[:32], np.uint8)) > 0
        end = 32 + 2 * int(seen.sum())
        if len(seen) != 256 or len(head) < end:
            raise ValueError("its head is cut short")
        table = np.zeros(256, np.int64)
        table[seen] = np.frombuffer(head[32:end], "<u2").astype(np.int64) + 1
        if table.sum() != WHOLE:
            raise ValueError("its head holds a table that does not add up")
        tables.append(table)
        head = head[end:]
    return tables, head


def _lanes(streams: Sequence[Bytes]) -> int:
    """How many states there are: it follows from the sizes, so that no file can ask for many turns."""
    total = sum(map(len, streams))
    return max(-(-total // TURNS), min(FEW, -(-total // FEW_TURNS)))


def _turns(stream: Bytes, lanes: int) -> list[tuple[int, int]]:
    """The symbols that are worked on at once, by where they begin and end."""
    return list(pairwise([*range(0, len(stream), lanes), len(stream)]))


def _encoded(streams: Sequence[Bytes], tables: Sequence[Frequencies], progress: Callable[[int], None]) -> list[bytes]:
    """The states with which reading begins, and the words it takes. Written from the last symbol to the first."""
    lanes = _lanes(streams)
    states, words = np.full(lanes, LOW, np.uint64), list[bytes]()
    for stream, table in zip(reversed(streams), reversed(tables), strict=True):
        symbols = np.ascontiguousarray(stream)
        frequency = table.astype(np.uint64)
        start = (np.cumsum(table) - table).astype(np.uint64)
        full = frequency << np.uint64(24)  # from here on a word leaves the state
        for begin, end in reversed(_turns(stream, lanes)):
            x, s = states[: end - begin], symbols[begin:end]
            over = np.flatnonzero(x >= full[s])
            left = x[over]
            words.append(left.astype("<u2").tobytes())  # the low 16 bits
            x[over] = left >> np.uint64(PRECISION)
            times, rest = np.divmod(x, frequency[s])
            x[:] = (times << np.uint64(PRECISION)) + rest + start[s]
            progress(end - begin)
    kept = states.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :STATE_BYTES]
    return [kept.tobytes(), *reversed(words)]


def _decode(streams: Sequence[Bytes], tables: Sequence[Frequencies], data: memoryview) -> None:
    """Fill the streams; ValueError where the words are too few, too many or not those of these symbols."""
    lanes = _lanes(streams)
    first = lanes * STATE_BYTES
    if len(data) < first or (len(data) - first) % 2:
        raise ValueError("it is cut short")
    padded = np.zeros((lanes, 8), np.uint8)
    padded[:, :STATE_BYTES] = np.frombuffer(data[:first], np.uint8).reshape(-1, STATE_BYTES)
    states = padded.view("<u8").astype(np.uint64).reshape(-1)
    words, done = np.frombuffer(data[first:], "<u2").astype(np.uint64), 0
    for stream, table in zip(streams, tables, strict=True):
        symbol_at = np.repeat(np.arange(256, dtype=np.uint8), table)  # (WHOLE)
        frequency = table.astype(np.uint64)
        start = (np.cumsum(table) - table).astype(np.uint64)
        for begin, end in _turns(stream, lanes):
            x = states[: end - begin]
            place = x & np.uint64(WHOLE - 1)
            s = symbol_at[place]
            stream[begin:end] = s
            x >>= np.uint64(PRECISION)
            x *= frequency[s]
            x += place
            x -= start[s]
            under = np.flatnonzero(x < LOW)
            if done + len(under) > len(words):
                raise ValueError("it is cut short")
            x[under] = (x[under] << np.uint64(PRECISION)) | words[done : done + len(under)]
            done += len(under)
    if done != len(words) or (states != LOW).any():
        raise ValueError("it does not end where its parts do")
