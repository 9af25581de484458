"""Compression of an artifact's payload, and decompression that never makes more than was announced.

A file may come from anybody. Every codec here stops at the announced size, so a small file that unfolds into a huge one costs no
more memory than `plausible` allows for its own size.
"""

from __future__ import annotations

import lzma
import zlib
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from ingot.artifact import rans
from ingot.errors import ConfigError

CODECS = ("none", "zlib", "lzma", "rans", "zstd", "brotli")
MODULES = {"zstd": "zstandard", "brotli": "brotli"}  # of the extra `codecs`
CHUNK = 1 << 20
# A larger dictionary than 8 MiB finds nothing more in weights and takes ten times its size in memory to compress; other settings
# of lc, lp and pb win 1% on codes and lose 4% on floats.
LZMA = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 1 << 23}]
LZMA_MEMORY = 1 << 27  # to decompress; 8 MiB dictionaries need far less
FREE, RATIO = 1 << 24, 1000  # a payload may have 16 MiB, and 1,000 bytes for every stored one
MAX_PAYLOAD = 1 << 36

Progress = Callable[[int, int], None]


def plausible(size: int, stored: int) -> bool:
    """Whether so many stored bytes may unfold into `size`."""
    return 0 <= size <= min(FREE + RATIO * stored, MAX_PAYLOAD)


def check_codec(codec: str) -> None:
    """Refuse a codec that is unknown or not installed."""
    if codec not in CODECS:
        raise ConfigError(f"there is no codec {codec!r}; choose {', '.join(CODECS)}")
    if codec in MODULES:
        _module(codec)


def available_codecs() -> list[str]:
    """The codecs that can be used here."""
    found = []
    for codec in CODECS:
        try:
            check_codec(codec)
        except ConfigError:
            continue
        found.append(codec)
    return found


def compress(codec: str, parts: Sequence[bytes | memoryview], progress: Progress = lambda done, total: None) -> bytes:
    """The compressed bytes of all parts in a row."""
    total, done = sum(map(len, parts)), 0
    if codec == "rans":
        return _entropy_coded(parts, total, progress)
    feed, finish = _compressor(codec, total)
    pieces = []
    for part in parts:
        for first in range(0, len(part), CHUNK):
            chunk = part[first : first + CHUNK]
            pieces.append(feed(chunk))
            done += len(chunk)
            progress(done, total)
    return b"".join([*pieces, finish()])


def _entropy_coded(parts: Sequence[bytes | memoryview], total: int, progress: Progress) -> bytes:
    done = told = 0

    def coded(count: int) -> None:
        nonlocal done, told
        done += count
        if done - told >= CHUNK or done == total:
            told = done
            progress(done, total)

    return rans.encode(parts, coded)


def decompress(codec: str, data: memoryview, size: int) -> bytes:
    """Exactly `size` bytes; ValueError where the data unfolds into less, more or nothing."""
    damage: tuple[type[Exception], ...] = (zlib.error, lzma.LZMAError, EOFError, ValueError)
    if codec in MODULES:
        damage += (getattr(_module(codec), "ZstdError" if codec == "zstd" else "error"),)
    try:
        found = _DECOMPRESS[codec](data, size)
    except damage as error:
        raise ValueError(f"its {codec} data is damaged ({error})") from None
    if found is None or len(found) != size:
        raise ValueError(f"its {codec} data does not unfold into the {size:,} bytes it announces")
    return found


def _compressor(codec: str, total: int) -> tuple[Callable[[Any], bytes], Callable[[], bytes]]:
    if codec == "zlib":
        deflate = zlib.compressobj(9)
        return deflate.compress, deflate.flush
    if codec == "lzma":
        xz = lzma.LZMACompressor(lzma.FORMAT_XZ, lzma.CHECK_CRC32, filters=LZMA)
        return xz.compress, xz.flush
    if codec == "zstd":
        zstd = _module(codec).ZstdCompressor(level=22).compressobj(size=total)
        return zstd.compress, zstd.flush
    brotli = _module(codec).Compressor(quality=11, lgwin=24)
    return brotli.process, brotli.finish


def _unfold(stream: Any, data: memoryview, size: int) -> bytes | None:
    found = stream.decompress(data, size + 1)
    return found if stream.eof and not stream.unused_data else None


def _unzstd(data: memoryview, size: int) -> bytes | None:
    zstandard = _module("zstd")
    if zstandard.get_frame_parameters(data[:18]).content_size != size:  # decompress would make room for it before it looks
        return None
    return zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)


def _unbrotli(data: memoryview, size: int) -> bytes | None:
    stream, found, fed = _module("brotli").Decompressor(), bytearray(), 0
    while len(found) <= size and not stream.is_finished():
        more = b"" if not stream.can_accept_more_data() else bytes(data[fed : fed + CHUNK])
        fed += len(more)
        piece = stream.process(more, output_buffer_limit=min(CHUNK, size + 1))
        if not piece and not more:
            return None
        found += piece
    return bytes(found) if stream.is_finished() and fed == len(data) else None


_DECOMPRESS: dict[str, Callable[[memoryview, int], bytes | None]] = {
    "zlib": lambda data, size: _unfold(zlib.decompressobj(), data, size),
    "lzma": lambda data, size: _unfold(lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=LZMA_MEMORY), data, size),
    "rans": rans.decode,
    "zstd": _unzstd,
    "brotli": _unbrotli,
}


def _module(codec: str) -> Any:
    name = MODULES[codec]
    try:
        module = import_module(name)
    except ImportError:
        raise ConfigError(f"the codec {codec} needs the package {name}: pip install 'ingot-lm[codecs]'") from None
    if codec == "brotli" and not hasattr(module.Decompressor, "can_accept_more_data"):
        raise ConfigError("the codec brotli needs the package brotli in version 1.2 or newer: pip install 'ingot-lm[codecs]'")
    return module
