"""Files that may be compressed, as one stream of bytes.

A file of several compressed streams is their sum, as `cat a.gz b.gz` makes it. One that ends in the middle is an error: half a
corpus would train without complaint.
"""

from __future__ import annotations

import io
import lzma
import zlib
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ingot.errors import ConfigError, DataError
from ingot.runtime.files import open_plain, open_to_read

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

Bytes = Generator[bytes, None, None]
CODECS = (".gz", ".xz", ".zst")
CHUNK_BYTES = 1 << 18  # read from the disk at once
PIECE_BYTES = 1 << 10  # unpacked at once: of this zstd can make 32 MB, and no more
FREE, RATIO = 1 << 28, 200  # a file may unfold into 256 MiB, and 200 bytes for every one of its own: logs come to a hundred
XZ_MEMORY = 1 << 30  # `xz -9` needs 65 MB
ZST_WINDOW = 1 << 31  # `zstd --long=31`, as the large public dumps have it


def open_unpacked(path: Path, advance: Callable[[int], None]) -> BinaryIO:
    """The contents of a file, unpacked if its name says so; `advance` is told the bytes that were read from the disk."""
    if (codec := path.suffix.lower()) in CODECS:
        return io.BufferedReader(_Chunks(_unpack(path, _read(path, advance), *_codec(codec, path))), CHUNK_BYTES)
    return io.BufferedReader(_Counted(path, advance), CHUNK_BYTES)


class _Counted(io.FileIO):
    def __init__(self, path: Path, advance: Callable[[int], None]) -> None:
        super().__init__(path, opener=open_plain)
        self._advance = advance

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        count = super().readinto(buffer)
        self._advance(count)
        return count

    def readall(self) -> bytes:
        data = super().readall()
        self._advance(len(data))
        return data


class _Chunks(io.RawIOBase):
    def __init__(self, chunks: Bytes) -> None:
        self._chunks, self._rest = chunks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        if not self._rest:
            self._rest = memoryview(next(self._chunks, b""))
        view = memoryview(buffer)
        count = min(len(view), len(self._rest))
        view[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count

    def close(self) -> None:
        self._chunks.close()
        super().close()


def _read(path: Path, advance: Callable[[int], None]) -> Bytes:
    with open_to_read(path) as file:
        while chunk := file.read(CHUNK_BYTES):
            advance(len(chunk))
            yield chunk


def _codec(name: str, path: Path) -> tuple[Callable[[], Any], type[Exception]]:
    """What makes an unpacker for one stream, and the error it raises."""
    if name == ".gz":
        return lambda: zlib.decompressobj(zlib.MAX_WBITS | 16), zlib.error
    if name == ".xz":
        return lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=XZ_MEMORY), lzma.LZMAError
    try:
        import zstandard
    except ImportError:
        raise ConfigError(
            f"reading {path} needs the package zstandard; install it with: pip install 'ingot-lm[codecs]'"
        ) from None
    return zstandard.ZstdDecompressor(max_window_size=ZST_WINDOW).decompressobj, zstandard.ZstdError


def _unpack(path: Path, chunks: Iterable[bytes], new: Callable[[], Any], broken: type[Exception]) -> Bytes:
    unpacker, found, read = new(), 0, 0
    for chunk in chunks:
        for start in range(0, len(chunk), PIECE_BYTES):
            piece = chunk[start : start + PIECE_BYTES]
            read += len(piece)
            while piece:
                if unpacker.eof:
                    piece = piece.lstrip(b"\0")  # streams may be padded with zeros
                    unpacker = new() if piece else unpacker
                    continue
                try:
                    data = unpacker.decompress(piece)
                except broken as error:
                    raise DataError(f"{path} is damaged after {found:,} bytes of text ({error}); copy it again") from None
                piece = unpacker.unused_data if unpacker.eof else b""
                found += len(data)
                if found > FREE + RATIO * read:
                    raise DataError(f"{path} unfolds into more than {RATIO} times its bytes, which no text does; look at it")
                if data:
                    yield data
    if not unpacker.eof:
        raise DataError(f"{path} is cut short: its {path.suffix} stream ends after {found:,} bytes of text; copy it again")
