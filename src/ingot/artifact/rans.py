"""An order-0 entropy coder (rANS): each part of a payload is coded with the frequencies of its bytes.

Neighbouring weights are not correlated, so dictionary codecs find no repetitions in low-bit codes, and Huffman coding wastes
space because it spends whole bits on every symbol. Many coder states are processed in parallel (of n states, state i codes
symbols i, i + n, i + 2n and so on), so numpy decodes 28M weights in seconds. Each byte position within a float has its own
frequency table, because exponents repeat and mantissas do not. docs/artifact.md specifies the format.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

PRECISION = 16  # bits per frequency and per output word
WHOLE = 1 << PRECISION  # sum of all frequencies in a table
LOW = 1 << 24  # states are in [2^24, 2^40); LOW is 256 times WHOLE, so rounding costs only 0.01%
STATE_BYTES = 5
TURNS = 1 << 14  # maximum number of symbols per state; a state adds about three bytes to the file, but fewer states are slower
FEW, FEW_TURNS = 32, 1 << 10  # small payloads have one state per 1,024 symbols, but at most 32
LEAST = 2048  # parts of fewer bytes are stored uncoded, without frequency tables
PLACES = (1, 2, 4, 8)  # possible item sizes in bytes; each byte position within an item has its own frequency table
COUNT = struct.Struct("<I")
SECTION = struct.Struct("<BQ")  # item size (0: bytes stored uncoded in the head) and number of bytes

Bytes = NDArray[np.uint8]
Frequencies = NDArray[np.int64]  # frequency of each of the 256 symbols


def encode(parts: Sequence[bytes | memoryview], progress: Callable[[int], None] = lambda done: None) -> bytes:
    """Compress the parts into one byte string; each part has its own frequency tables."""
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
    """Return the `size` decompressed bytes; raise ValueError if the data is damaged or its header gives a different size."""
    head_end = COUNT.size + int.from_bytes(data[: COUNT.size], "little")
    if len(data) < head_end:
        raise ValueError("it is cut short")
    unpacker = zlib.decompressobj()
    try:
        # The extra 1 MiB leaves room for empty and very small parts: each has a nine-byte entry in the head.
        head = memoryview(unpacker.decompress(data[COUNT.size : head_end], 2 * size + (1 << 20)))
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if not unpacker.eof or unpacker.unused_data:
        raise ValueError("the compressed header is invalid")
    end = COUNT.size + int.from_bytes(head[: COUNT.size], "little") * SECTION.size
    if len(head) < max(end, COUNT.size):
        raise ValueError("the header is cut short")
    sections = list(SECTION.iter_unpack(head[COUNT.size : end]))  # item size and byte count of each part
    if any(places and (places not in PLACES or length < LEAST or length % places) for places, length in sections):
        raise ValueError("the header describes an invalid part")
    if sum(length for _, length in sections) != size:
        raise ValueError("the sizes of the parts do not add up to the declared size")
    tables, rest = _tables(head[end:], sum(places for places, _ in sections))
    if len(rest) != sum(length for places, length in sections if not places):
        raise ValueError("the header has the wrong length")
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
    _decode(streams, tables, data[head_end:])
    return out.tobytes()


def _places(array: Bytes) -> int:
    def cost(places: int) -> float:
        counts = [np.bincount(array[place::places], minlength=256) for place in range(places)]
        return sum(entropy_bytes(count) + len(_packed(_frequencies(count))) for count in counts)

    return min((places for places in PLACES if len(array) % places == 0), key=cost)


def entropy_bytes(counts: NDArray[np.int64]) -> float:
    """Return the total entropy, in bytes, of symbols with these counts, excluding the frequency table."""
    seen = counts[counts > 0]
    return float((seen * np.log2(seen.sum() / seen)).sum() / 8)


def _frequencies(counts: NDArray[np.int64]) -> Frequencies:
    """Scale counts to sum to WHOLE, keeping nonzero counts at 1 or more. The most common symbol absorbs the rounding error."""
    found = np.where(counts > 0, np.maximum(1, counts * WHOLE // counts.sum()), 0)
    found[counts.argmax()] += WHOLE - found.sum()
    return found


def _packed(frequencies: Frequencies) -> bytes:
    """Pack a frequency table: a bitmap of the symbols that occur, then their frequencies minus one."""
    seen = frequencies > 0
    return np.packbits(seen).tobytes() + (frequencies[seen] - 1).astype("<u2").tobytes()


def _tables(head: memoryview, count: int) -> tuple[list[Frequencies], memoryview]:
    tables = []
    for _ in range(count):
        seen = np.unpackbits(np.frombuffer(head[:32], np.uint8)) > 0
        end = 32 + 2 * int(seen.sum())
        if len(seen) != 256 or len(head) < end:
            raise ValueError("the header is cut short")
        table = np.zeros(256, np.int64)
        table[seen] = np.frombuffer(head[32:end], "<u2").astype(np.int64) + 1
        if table.sum() != WHOLE:
            raise ValueError("the header contains a frequency table with the wrong sum")
        tables.append(table)
        head = head[end:]
    return tables, head


def _lanes(streams: Sequence[Bytes]) -> int:
    """Return the number of coder states. It depends only on the stream sizes, so a file cannot force a slow decode."""
    total = sum(map(len, streams))
    return max(-(-total // TURNS), min(FEW, -(-total // FEW_TURNS)))


def _turns(stream: Bytes, lanes: int) -> list[tuple[int, int]]:
    """Return the start and end of each group of symbols; a group has one symbol per state and is processed at once."""
    return list(pairwise([*range(0, len(stream), lanes), len(stream)]))


def _encoded(streams: Sequence[Bytes], tables: Sequence[Frequencies], progress: Callable[[int], None]) -> list[bytes]:
    """Encode from the last symbol to the first; return the initial states for decoding, then the words that decoding consumes."""
    lanes = _lanes(streams)
    states, words = np.full(lanes, LOW, np.uint64), list[bytes]()
    for stream, table in zip(reversed(streams), reversed(tables), strict=True):
        symbols = np.ascontiguousarray(stream)
        frequency = table.astype(np.uint64)
        start = (np.cumsum(table) - table).astype(np.uint64)
        full = frequency << np.uint64(24)  # states of at least this value emit a word
        for begin, end in reversed(_turns(stream, lanes)):
            x, s = states[: end - begin], symbols[begin:end]
            over = np.flatnonzero(x >= full[s])
            left = x[over]
            words.append(left.astype("<u2").tobytes())  # emit the low 16 bits of the state
            x[over] = left >> np.uint64(PRECISION)
            times, rest = np.divmod(x, frequency[s])
            x[:] = (times << np.uint64(PRECISION)) + rest + start[s]
        progress(len(stream))
    kept = states.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :STATE_BYTES]
    return [kept.tobytes(), *reversed(words)]


def _decode(streams: Sequence[Bytes], tables: Sequence[Frequencies], data: memoryview) -> None:
    """Decode `data` into `streams`; raise ValueError if the data has too few or too many words, or the final states are wrong."""
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
        raise ValueError("the coded data does not end where the last part ends")
