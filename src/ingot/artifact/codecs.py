"""Compress an artifact's payload, and decompress it without ever producing more bytes than the file declares.

Files may be untrusted. Every codec stops at the declared size, so a decompression bomb costs no more memory than
`is_plausible_size` allows.
"""

from __future__ import annotations

import lzma
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from ingot.artifact import rans
from ingot.errors import ConfigError

CODECS = ("none", "zlib", "lzma", "rans")
CHUNK_BYTES = 1 << 20
# LZMA dictionaries larger than 8 MiB do not help with weights, and compression needs ten times the dictionary size in memory.
# Tuning LZMA's parameters lc, lp and pb saves 1% on quantised codes but costs 4% on floats.
LZMA_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 1 << 23}]
LZMA_MEMORY_BYTES = 1 << 27  # memory limit for decompression; 8 MiB dictionaries need far less
FREE_BYTES, MAX_RATIO = 1 << 24, 1000  # reject payloads that decompress to more than 16 MiB plus 1,000 bytes per stored byte
MAX_PAYLOAD_BYTES = 1 << 36

Progress = Callable[[int, int], None]


def is_plausible_size(size: int, stored: int) -> bool:
    """Return False if expanding `stored` compressed bytes to `size` bytes would indicate a decompression bomb."""
    return 0 <= size <= min(FREE_BYTES + MAX_RATIO * stored, MAX_PAYLOAD_BYTES)


def check_codec(codec: str) -> None:
    """Raise ConfigError if `codec` is unknown."""
    if codec not in CODECS:
        raise ConfigError(f"unknown codec {codec!r}; choose one of {', '.join(CODECS)}")


def compress(codec: str, parts: Sequence[bytes | memoryview], progress: Progress = lambda done, total: None) -> bytes:
    """Concatenate the parts and compress the result with `codec`."""
    total, done = sum(map(len, parts)), 0

    def report(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    if codec == "rans":
        return rans.encode(parts, report)
    stream: Any = (
        zlib.compressobj(9) if codec == "zlib" else lzma.LZMACompressor(lzma.FORMAT_XZ, lzma.CHECK_CRC32, filters=LZMA_FILTERS)
    )
    pieces = []
    for part in parts:
        for first in range(0, len(part), CHUNK_BYTES):
            chunk = part[first : first + CHUNK_BYTES]
            pieces.append(stream.compress(chunk))
            report(len(chunk))
    return b"".join([*pieces, stream.flush()])


def decompress(codec: str, data: memoryview, size: int) -> bytes:
    """Return exactly `size` bytes; raise ValueError if the data decompresses to fewer or more bytes, or is damaged."""
    try:
        if codec == "rans":
            payload, whole = rans.decode(data, size), True
        else:
            limits: Any = {"format": lzma.FORMAT_XZ, "memlimit": LZMA_MEMORY_BYTES}
            stream: Any = zlib.decompressobj() if codec == "zlib" else lzma.LZMADecompressor(**limits)
            payload = stream.decompress(data, size + 1)
            whole = stream.eof and not stream.unused_data
    except (zlib.error, lzma.LZMAError, EOFError, ValueError) as error:
        raise ValueError(f"the {codec} data is damaged ({error})") from None
    if not whole or len(payload) != size:
        raise ValueError(f"the {codec} data does not decompress to the {size:,} bytes that the header declares")
    return payload
