"""Find text files, decompress them, and read their documents one at a time.

Text is read unchanged: newlines are not translated and no byte is dropped, because bits per byte are computed for the original
text. The file suffix decides how a file is read.
"""

from __future__ import annotations

import codecs
import io
import lzma
import os
import re
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ingot.data import SPLITS
from ingot.data.text.hub_datasets import HUB, fetch
from ingot.data.text.records import NotUtf8, read_json, read_lines, read_parquet, read_table, read_text
from ingot.errors import ConfigError, DataError
from ingot.runtime.files import open_to_read, reading

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

UTF8 = "utf-8"
CODECS = (".gz", ".xz", ".zst")
CHUNK_BYTES = 1 << 18  # bytes read from the disk at once
PIECE_BYTES = 1 << 10  # compressed bytes passed to the decompressor at once: zstd expands them to at most 32 MB
# A file that decompresses to more than 256 MiB plus 200 times its size is rejected as a decompression bomb; log files compress
# about a hundredfold.
FREE_BYTES, MAX_RATIO = 1 << 28, 200
XZ_MEMORY = 1 << 30  # memory limit in bytes; `xz -9` needs 65 MB
ZST_WINDOW = 1 << 31  # maximum window in bytes; large public dumps are written with `zstd --long=31`
READERS: dict[str, Callable[[BinaryIO, Path, str], Iterator[str]]] = {
    ".txt": read_text,
    ".jsonl": read_lines,
    ".ndjson": read_lines,
    ".json": read_json,
    ".csv": partial(read_table, delimiter=","),
    ".tsv": partial(read_table, delimiter="\t"),
    ".md": read_text,
}
README = "readme.md"  # skipped in folders: it describes the data
PARQUET = ".parquet"  # compressed internally, so .parquet.gz is not supported
SUFFIXES = (*READERS, PARQUET)
WHAT = f"{', '.join(SUFFIXES[:-1])} (also with {', '.join(CODECS)}) or {PARQUET}"


def open_unpacked(path: Path, advance: Callable[[int], None], encoding: str = UTF8) -> BinaryIO:
    """Open a file as UTF-8, decompressed according to its suffix; `advance` receives the number of bytes read from the disk."""
    codec = path.suffix.lower()
    chunks = (_unpack if codec in CODECS else _read)(path, codec, advance)
    return io.BufferedReader(_ChunkStream(chunks if encoding == UTF8 else _to_utf8(chunks, path, encoding)), CHUNK_BYTES)


def _to_utf8(chunks: Iterable[bytes], path: Path, encoding: str) -> Generator[bytes, None, None]:
    decoder = codecs.getincrementaldecoder(encoding)()
    try:
        for chunk in chain(chunks, [b""]):
            if text := decoder.decode(chunk, final=not chunk):
                yield text.encode()
    except UnicodeError as error:
        raise NotUtf8(f"{path} is not {encoding} ({error}); convert it or leave it out") from None


def is_readable(path: Path, encoding: str) -> bool:
    """Return True if all bytes of a file can be decoded."""
    if kind_of(path) == PARQUET:
        return True
    decoder = codecs.getincrementaldecoder(UTF8)()
    try:
        with reading(path), open_unpacked(path, lambda _: None, encoding) as stream:
            while chunk := stream.read(CHUNK_BYTES):
                decoder.decode(chunk)
        decoder.decode(b"", final=True)
    except (UnicodeDecodeError, NotUtf8):
        return False
    return True


def _read(path: Path, codec: str, advance: Callable[[int], None]) -> Generator[bytes, None, None]:
    with open_to_read(path) as file:
        while chunk := file.read(CHUNK_BYTES):
            advance(len(chunk))
            yield chunk


class _ChunkStream(io.RawIOBase):
    def __init__(self, chunks: Generator[bytes, None, None]) -> None:
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


def _unpack(path: Path, codec: str, advance: Callable[[int], None]) -> Generator[bytes, None, None]:
    make: Callable[[], Any]
    codec_error: type[Exception]
    if codec == ".gz":
        make, codec_error = partial(zlib.decompressobj, zlib.MAX_WBITS | 16), zlib.error
    elif codec == ".xz":
        make, codec_error = partial(lzma.LZMADecompressor, lzma.FORMAT_XZ, memlimit=XZ_MEMORY), lzma.LZMAError
    else:
        try:
            import zstandard
        except ImportError:
            raise ConfigError(
                f"reading {path} needs the package zstandard; install it with: pip install 'ingot-lm[zst]'"
            ) from None
        make, codec_error = zstandard.ZstdDecompressor(max_window_size=ZST_WINDOW).decompressobj, zstandard.ZstdError
    unpacker, text_bytes, file_bytes_read = make(), 0, 0
    with open_to_read(path) as file:
        while piece := file.read(PIECE_BYTES):
            advance(len(piece))
            file_bytes_read += len(piece)
            while piece:
                if unpacker.eof:
                    piece = piece.lstrip(b"\0")  # compressed streams may be padded with zeros
                    unpacker = make() if piece else unpacker
                    continue
                try:
                    data = unpacker.decompress(piece)
                except codec_error as error:
                    raise DataError(f"{path} is damaged after {text_bytes:,} bytes of text ({error}); copy it again") from None
                piece = unpacker.unused_data if unpacker.eof else b""
                text_bytes += len(data)
                if text_bytes > FREE_BYTES + MAX_RATIO * file_bytes_read:
                    raise DataError(f"{path} decompresses to more than {MAX_RATIO} times its size, which no text does; check it")
                if data:
                    yield data
    if not unpacker.eof:
        raise DataError(f"{path} is cut short: its {codec} stream ends after {text_bytes:,} bytes of text; copy it again")


def find_files(inputs: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Return the text files of `inputs` and the files that were ignored; folders are searched recursively, sorted by path.

    Hidden files, README.md and broken symlinks are ignored; a folder reached through several symlinks is read once. The input
    hf:ORG/NAME[/CONFIG][:SPLIT] means the parquet files of a dataset on the hub.
    """
    files: list[Path] = []
    ignored: list[Path] = []
    for path in inputs:
        with reading(path):
            if str(path).startswith(HUB):
                files += fetch(str(path))
            elif path.is_dir():
                for file in _files_below(path):
                    hidden = any(part.startswith(".") for part in file.relative_to(path).parts) or file.name.lower() == README
                    (ignored if hidden or not is_text(file) or not file.is_file() else files).append(file)
            elif not path.is_file():
                hub = f"; write a dataset on the hub as {HUB}{path}" if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(path)) else ""
                raise DataError(f"no input at {path}; give a file ({WHAT}) or a folder of them{hub}")
            elif not is_text(path):
                raise DataError(f"cannot read {path}: inputs are {WHAT} files, or folders of them; rename it if it is one")
            elif not path.stat().st_size:
                raise DataError(f"{path} is empty; give a file with text")
            else:
                files.append(path)
    return files, ignored


def file_identity(path: Path) -> list[str | int]:
    """Return the path, size and modification time of a file, to detect that it has changed."""
    with reading(path):
        status = path.stat()
    return [str(path.resolve()), status.st_size, status.st_mtime_ns]


def is_text(path: Path) -> bool:
    """Return True if documents can be read from the file, judging by its suffix."""
    return bool(kind_of(path))


def file_bytes(path: Path) -> int:
    """Return the size of a file."""
    with reading(path):
        return path.stat().st_size


def adding_up(progress: Callable[[int, int], None] | None, total: int) -> Callable[[int], None]:
    """Return an `advance` callback that accumulates byte counts and reports (done, total) to `progress`."""
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress:
            progress(done, total)

    return advance


def read_documents(
    files: Iterable[Path], text_field: str, advance: Callable[[int], None] = lambda _: None, encoding: str = UTF8
) -> Iterator[str]:
    """Yield every document: a whole .txt or .md file, or a line, element or row of other files.

    `advance` receives the number of bytes read.
    """
    for path in files:
        with reading(path):
            if kind_of(path) == PARQUET:
                yield from read_parquet(path, text_field, advance)
                continue
            with open_unpacked(path, advance, encoding) as stream:
                yield from READERS[kind_of(path)](stream, path, text_field)


def count_documents(files: Iterable[Path], text_field: str, limit: int, encoding: str = UTF8) -> int:
    """Count the non-empty documents, up to `limit`."""
    return sum(1 for _ in islice(filter(None, read_documents(files, text_field, encoding=encoding)), limit))


def kind_of(path: Path) -> str:
    """Return the suffix that determines how to read a file, without the compression suffix; "" if it is unsupported."""
    suffix = path.suffix.lower()
    if suffix in CODECS:
        inner = path.with_suffix("").suffix.lower()
        return inner if inner in READERS else ""
    return suffix if suffix in SUFFIXES else ""


def _files_below(folder: Path) -> list[Path]:
    def refuse(error: OSError) -> None:
        raise error

    files: list[Path] = []
    seen: set[str] = set()
    for root, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        if (real := os.path.realpath(root)) in seen:  # already visited through another symlink, or a symlink to its own parent
            folders.clear()
            continue
        seen.add(real)
        folders.sort()
        files += [Path(root, name) for name in names]
    return sorted(files, key=lambda file: file.relative_to(folder).as_posix())


Buckets = dict[str, dict[str, list[Path]]]  # split -> bucket -> files


def find_buckets(folder: Path, wanted: Callable[[Path], bool]) -> Buckets:
    """Return the files of each bucket in train/BUCKET/ and val/BUCKET/ for which `wanted` is True, sorted; {} if there are none.

    A bucket with files in only one split is an error.
    """
    buckets: Buckets = {split: {} for split in SPLITS}
    for split in SPLITS:
        for bucket in sorted(path for path in folder.glob(f"{split}/*") if path.is_dir()):
            if files := sorted(file for file in bucket.iterdir() if wanted(file) and file.is_file()):
                buckets[split][bucket.name] = files
    train, val = buckets["train"], buckets["val"]
    for name in sorted(train.keys() ^ val.keys()):
        has, lacks = SPLITS if name in train else reversed(SPLITS)
        raise DataError(f"{folder / has / name} has files and {folder / lacks / name} has none; add some to it")
    return buckets if train else {}
