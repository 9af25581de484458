"""Text files to documents, one at a time.

Text is taken as it is: no newline is translated and no byte dropped, because bits per byte are counted against the original. The
name of a file says how it is read.
"""

from __future__ import annotations

import io
import lzma
import os
import re
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ingot.data import SPLITS
from ingot.data.text.hub_datasets import HUB, fetch
from ingot.data.text.records import read_json, read_lines, read_parquet, read_table, read_text
from ingot.errors import ConfigError, DataError
from ingot.runtime.files import open_plain, open_to_read, reading

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


# Files that may be compressed, as one stream of bytes.

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
        raise ConfigError(f"reading {path} needs the package zstandard; install it with: pip install 'ingot-lm[zst]'") from None
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


Text = str | bytes  # a document, or its UTF-8
READERS: dict[str, Callable[[BinaryIO, Path, str], Iterator[Text]]] = {
    ".txt": read_text,
    ".jsonl": read_lines,
    ".ndjson": read_lines,
    ".json": read_json,
    ".csv": partial(read_table, delimiter=","),
    ".tsv": partial(read_table, delimiter="\t"),
    ".md": read_text,
}
ABOUT = "readme.md"  # tells of a folder of texts and is none of them
WHOLE = (".txt", ".md")  # one document each
PARQUET = ".parquet"  # compressed inside, so never .parquet.gz
SUFFIXES = (*READERS, PARQUET)
WHAT = f"{', '.join(SUFFIXES[:-1])} (also with {', '.join(CODECS)}) or {PARQUET}"


def find_files(inputs: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """The text files of `inputs` and the files passed over; folders are searched to the bottom, in the order of their paths.

    Hidden files, a README.md and links that lead nowhere are passed over; a folder that links lead to twice is read once. An
    input hf:ORG/NAME[/CONFIG][:SPLIT] is the parquet files of a dataset on the hub.
    """
    files: list[Path] = []
    ignored: list[Path] = []
    for path in inputs:
        with reading(path):
            if str(path).startswith(HUB):
                files += fetch(str(path))
            elif path.is_dir():
                for file in _files_below(path):
                    hidden = any(part.startswith(".") for part in file.relative_to(path).parts) or file.name.lower() == ABOUT
                    (ignored if hidden or not is_text(file) or not file.is_file() else files).append(file)
            else:
                files.append(_checked_file(path))
    return files, ignored


def file_identity(path: Path) -> list[str | int]:
    """What tells a file from another, or from itself before it was changed, without reading it."""
    with reading(path):
        status = path.stat()
    return [str(path.resolve()), status.st_size, status.st_mtime_ns]


def is_text(path: Path) -> bool:
    """Whether the name says that documents can be read from this file."""
    return bool(_kind(path))


def file_bytes(path: Path) -> int:
    """The size of a file."""
    with reading(path):
        return path.stat().st_size


def adding_up(progress: Callable[[int, int], None] | None, total: int) -> Callable[[int], None]:
    """An `advance` that tells `progress` what is done so far, of a total."""
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress:
            progress(done, total)

    return advance


def read_documents(files: Iterable[Path], text_field: str, advance: Callable[[int], None] = lambda _: None) -> Iterator[str]:
    """Every document: a .txt or .md file is one, of other files each line, element or row. `advance` is told the bytes read."""
    for text in read_texts(files, text_field, advance):
        yield text if isinstance(text, str) else text.decode()


def read_texts(files: Iterable[Path], text_field: str, advance: Callable[[int], None] = lambda _: None) -> Iterator[Text]:
    """`read_documents`, with a document that is a file of its own, and may be large, as the UTF-8 that it is."""
    for path in files:
        with reading(path):
            if _kind(path) == PARQUET:
                yield from read_parquet(path, text_field, advance)
                continue
            with open_unpacked(path, advance) as stream:
                yield from READERS[_kind(path)](stream, path, text_field)


def count_documents(files: Iterable[Path], text_field: str, limit: int) -> int:
    """How many documents are not empty, counted no further than `limit`."""
    count = 0
    for path in files:
        if path.suffix.lower() in WHOLE:
            count += file_bytes(path) > 0
        else:
            documents = read_documents([path], text_field)
            while count < limit and (text := next(documents, None)) is not None:
                count += bool(text)
        if count >= limit:
            break
    return count


def _kind(path: Path) -> str:
    """The suffix that says how to read a file; empty for a file that cannot be read."""
    suffix = path.suffix.lower()
    if suffix in CODECS:
        inner = path.with_suffix("").suffix.lower()
        return inner if inner in READERS else ""
    return suffix if suffix in SUFFIXES else ""


def _checked_file(path: Path) -> Path:
    if not path.is_file():
        hub = f"; a dataset on the hub is written {HUB}{path}" if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(path)) else ""
        raise DataError(f"no input at {path}; give a file ({WHAT}) or a folder of them{hub}")
    if not is_text(path):
        raise DataError(f"cannot read {path}: inputs are {WHAT} files, or folders of them; rename it if it is one")
    if not file_bytes(path):
        raise DataError(f"{path} is empty; give a file with text")
    return path


def _files_below(folder: Path) -> list[Path]:
    def refuse(error: OSError) -> None:
        raise error

    found: list[Path] = []
    seen: set[str] = set()
    for root, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        if (real := os.path.realpath(root)) in seen:  # a link back to it, or another to the same
            folders.clear()
            continue
        seen.add(real)
        folders.sort()
        found += [Path(root, name) for name in names]
    return sorted(found, key=lambda file: file.relative_to(folder).as_posix())


# Folders in which data lies in buckets: train/NAME/ and val/NAME/, whatever files these hold.

Buckets = dict[str, dict[str, list[Path]]]  # of each split, the files of each bucket


def find_buckets(folder: Path, wanted: Callable[[Path], bool]) -> Buckets:
    """Of each split the buckets, and of each bucket those of its files that are wanted, in order; {} where there are none.

    A bucket to train on that has no validation files, or the other way round, is refused.
    """
    found: Buckets = {split: {} for split in SPLITS}
    for split in SPLITS:
        for bucket in sorted(path for path in folder.glob(f"{split}/*") if path.is_dir()):
            if files := sorted(file for file in bucket.iterdir() if wanted(file) and file.is_file()):
                found[split][bucket.name] = files
    train, val = found["train"], found["val"]
    for name in sorted(train.keys() ^ val.keys()):
        has, lacks = SPLITS if name in train else reversed(SPLITS)
        raise DataError(f"{folder / has / name} has no counterpart: there is nothing in {folder / lacks / name}; add some to it")
    return found if train else {}
