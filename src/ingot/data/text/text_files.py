"""Find text files, decompress them, and read their documents one at a time: text, JSON, CSV tables or parquet.

Text is read unchanged: newlines are not translated and no byte is dropped, because bits per byte are computed for the original
text. Malformed input is never skipped silently: it raises an error that names the file and, where possible, the line. The suffix
of a file decides how it is read.
"""

from __future__ import annotations

import codecs
import csv
import io
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from json import JSONDecoder
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from pydantic_core import from_json

from ingot.data import SPLITS
from ingot.errors import ConfigError, DataError, Setting
from ingot.runtime.files import open_to_read, reading

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

Progress = Callable[[int, int], None]  # called with (bytes done, total bytes)
UTF8 = "utf-8"
CODECS = (".gz", ".xz", ".zst")
CHUNK_BYTES = 1 << 18  # bytes read from the disk at once
PIECE_BYTES = 1 << 10  # compressed bytes passed to the decompressor at once: zstd expands them to at most 32 MB
XZ_MEMORY = 1 << 30  # memory limit in bytes; `xz -9` needs 65 MB
ZST_WINDOW = 1 << 31  # maximum window in bytes; large public dumps are written with `zstd --long=31`
HUB = "hf:"  # prefix of a dataset name on the Hugging Face hub
CACHED = re.compile(r"/datasets--(?P<repository>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})/")  # matches paths in the hub's cache
TEXT_FIELD, NAME_IT = Setting("--text-field"), "use {0} to name the field that contains the text"
CONVERT = "convert the file, leave it out, or pass --encoding or --skip-unreadable to `ingot data prepare`"
BYTE_ORDER_MARK = "\ufeff"  # removed at the start of JSON files and CSV tables, but kept in .txt and .md files
JSON_WHITE = re.compile(r"[ \t\r\n]*")
BATCH_ROWS = 256  # rows read at once from a parquet file
LONGEST_FIELD = 2**31 - 1  # maximum number of characters in a CSV field; the csv module's default is 131,072
# Python may refuse to parse integers of more than 640 digits (4,300 by default), so longer ones become floats.
JSON = JSONDecoder(parse_int=lambda digits: int(digits) if len(digits) <= 640 else float(digits))


class NotUtf8(DataError):
    """Raised for a file that cannot be decoded."""


def read_text(stream: BinaryIO, path: Path, text_field: str) -> Iterator[str]:
    """Yield the whole text of a file as one document."""
    yield _decoded(stream.read(), path)


def read_lines(
    stream: Iterable[bytes], path: Path, text_field: str, lines_before: int = 0, bytes_before: int = 0
) -> Iterator[str]:
    """Yield the text of each line's JSON object. `lines_before` and `bytes_before` give the start of `stream` in the file."""
    for number, line in enumerate(stream, lines_before + 1):
        data = line if bytes_before else line.removeprefix(codecs.BOM_UTF8)
        if data and not data.isspace():
            try:
                try:
                    record = from_json(data, cache_strings="none")
                except ValueError:  # the fast parser rejects lone surrogates in any field, and long numbers; json accepts them
                    record = JSON.decode(_decoded(data, path, bytes_before + len(line) - len(data)))
                text = field_text(record, text_field)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}:{number}: not JSON ({error}); every line must be one JSON object") from None
            except NotUtf8:
                raise
            except DataError as error:
                raise error.within(f"{path}:{number}") from None
            yield text
        bytes_before += len(line)


def read_json(stream: BinaryIO, path: Path, text_field: str) -> Iterator[str]:
    """Yield the documents of a JSON file: objects or strings, in an array or one after another. The file is read into memory."""
    text, end = _decoded(stream.read(), path).removeprefix(BYTE_ORDER_MARK), 0
    while (begin := next(JSON_WHITE.finditer(text, end)).end()) < len(text):
        where = f"{path}:{1 + text.count(chr(10), 0, begin)}"
        try:
            value, end = JSON.raw_decode(text, begin)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: not JSON ({error}); a .json file must hold an array of objects or strings") from None
        for number, element in enumerate(value if isinstance(value, list) else [value], 1):
            try:
                yield field_text({text_field: element} if isinstance(element, str) else element, text_field)
            except DataError as error:
                raise error.within(f"{where}, element {number}" if isinstance(value, list) else where) from None


def read_table(stream: BinaryIO, path: Path, text_field: str, delimiter: str) -> Iterator[str]:
    """Yield one document per row of a CSV table; the first row is the header."""
    csv.field_size_limit(LONGEST_FIELD)

    def lines() -> Iterator[str]:
        offset = 0
        for line in stream:
            text = _decoded(line, path, offset)
            yield text if offset else text.removeprefix(BYTE_ORDER_MARK)
            offset += len(line)

    rows = csv.reader(lines(), delimiter=delimiter, strict=True)
    try:
        header = next(rows, [])
        if header and header.count(text_field) != 1:
            raise no_field(text_field, header, "column").within(f"{path}:1")
        for row in filter(None, rows):
            if len(row) != len(header):
                raise DataError(f"{path}:{rows.line_num}: {len(row)} columns, but the first row names {len(header)}")
            yield row[header.index(text_field)]
    except csv.Error as error:
        advice = "quote fields that contain quotes, delimiters or line ends"
        raise DataError(f"{path}:{rows.line_num}: malformed row ({error}); {advice}") from None


def check_pyarrow(what: str) -> None:
    """Raise an error that names the package to install if pyarrow is missing."""
    try:
        import pyarrow  # type: ignore[import-not-found, import-untyped] # noqa: F401
    except ImportError:
        raise ConfigError(f"reading {what} needs the package pyarrow", advice="pip install 'ingot-lm[parquet]'") from None


def parquet_rows(
    path: Path, column: str | None = None, advance: Callable[[int], None] = lambda size: None
) -> Iterator[list[Any]]:
    """Yield batches of rows; a row is its value in `column` or, if `column` is None, a dict of all columns."""
    check_pyarrow(str(path))
    import pyarrow
    from pyarrow.parquet import ParquetFile  # type: ignore[import-not-found, import-untyped]

    size, row = path.stat().st_size, 0
    try:
        with ParquetFile(path) as file:
            names, groups = file.schema_arrow.names, file.num_row_groups
            if column is not None and names.count(column) != 1:
                raise no_field(column, names, "column").within(str(path))
            for group in range(groups):
                for batch in file.iter_batches(BATCH_ROWS, row_groups=[group], columns=[column] if column is not None else None):
                    yield batch.column(0).to_pylist() if column is not None else batch.to_pylist()
                    row += len(batch)
                advance(size * (group + 1) // groups - size * group // groups)
            if not groups:
                advance(size)
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{path} is not a parquet file, or it is damaged after row {row:,}: {reason}; copy it again") from None


def field_text(record: Any, name: str) -> str:
    """Return the text of a record, or raise an error that says what is wrong with the record."""
    if not isinstance(record, dict):
        raise DataError(f"expected a JSON object with a field {name!r}, found {type(record).__name__}")
    if name not in record:
        raise no_field(name, list(record), "field")
    text = record[name]
    if text is None:
        raise DataError(f"field {name!r} is null; remove the record or use an empty string")
    if not isinstance(text, str):
        raise DataError(f"field {name!r} is not a string but {type(text).__name__}", TEXT_FIELD, advice=NAME_IT)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DataError(f"field {name!r} contains an unpaired surrogate, which is not a character; remove it") from None
    return text


def no_field(name: str, names: Sequence[str], what: str) -> DataError:
    """Return the error for a record or table in which a field is missing or occurs twice."""
    if (count := names.count(name)) > 1:
        return DataError(f"{count} {what}s are named {name!r}; keep one of them or rename the others")
    listed = ", ".join(map(repr, names[:10])) or "none"
    return DataError(f"no {what} {name!r}; {what}s found: {listed}", TEXT_FIELD, advice=NAME_IT)


def _decoded(data: bytes, path: Path, offset: int = 0) -> str:
    """Decode UTF-8; `offset` is the position of `data` in the file, for the error message."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        byte, offset = data[error.start], offset + error.start
        raise NotUtf8(f"{path} is not UTF-8: byte 0x{byte:02x} at offset {offset:,}; {CONVERT}") from None


READERS: dict[str, Callable[[BinaryIO, Path, str], Iterator[str]]] = {
    ".txt": read_text,
    ".jsonl": read_lines,
    ".ndjson": read_lines,
    ".json": read_json,
    ".csv": partial(read_table, delimiter=","),
    ".tsv": partial(read_table, delimiter="\t"),
    ".md": read_text,
}
README = "readme.md"  # skipped in folders, because it describes the data
PARQUET = ".parquet"  # compressed internally, so .parquet.gz is not supported
SUFFIXES = (*READERS, PARQUET)
WHAT = f"{', '.join(SUFFIXES[:-1])} (also with {', '.join(CODECS)}) or {PARQUET}"


def open_unpacked(path: Path, advance: Callable[[int], None], encoding: str = UTF8) -> BinaryIO:
    """Open a file as UTF-8, decompressed according to its suffix; `advance` is called with the number of bytes read from disk."""
    chunks = _chunks(path, advance)
    return io.BufferedReader(_ChunkStream(chunks if encoding == UTF8 else _to_utf8(chunks, path, encoding)), CHUNK_BYTES)


def is_readable(path: Path, encoding: str) -> bool:
    """Return True if a whole file can be decoded with `encoding`; parquet files are not checked."""
    try:
        with reading(path):
            for _ in _to_utf8(_chunks(path, lambda _: None), path, encoding) if kind_of(path) != PARQUET else ():
                pass
    except NotUtf8:
        return False
    return True


def _to_utf8(chunks: Iterator[bytes], path: Path, encoding: str) -> Iterator[bytes]:
    try:
        yield from (text.encode() for text in codecs.iterdecode(chunks, encoding))
    except UnicodeError as error:
        raise NotUtf8(f"{path} is not {encoding} ({error}); {CONVERT}") from None


class _ChunkStream(io.RawIOBase):
    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._rest = filter(None, chunks), memoryview(b"")

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


def _chunks(path: Path, advance: Callable[[int], None]) -> Iterator[bytes]:
    codec = path.suffix.lower()
    make: Callable[[], Any] | None = None
    codec_error: type[Exception] = zlib.error
    if codec == ".gz":
        make = partial(zlib.decompressobj, zlib.MAX_WBITS | 16)
    elif codec == ".xz":
        make, codec_error = partial(lzma.LZMADecompressor, lzma.FORMAT_XZ, memlimit=XZ_MEMORY), lzma.LZMAError
    elif codec == ".zst":
        try:
            import zstandard
        except ImportError:
            raise ConfigError(f"reading {path} needs the package zstandard", advice="pip install 'ingot-lm[zst]'") from None
        make, codec_error = zstandard.ZstdDecompressor(max_window_size=ZST_WINDOW).decompressobj, zstandard.ZstdError
    unpacker: Any = make and make()
    with open_to_read(path) as file:
        while piece := file.read(PIECE_BYTES if make else CHUNK_BYTES):
            advance(len(piece))
            if make is None:
                yield piece
                continue
            while piece:
                if unpacker.eof:
                    piece = piece.lstrip(b"\0")  # compressed streams may be padded with zeros
                    unpacker = make() if piece else unpacker
                    continue
                try:
                    yield unpacker.decompress(piece)
                except codec_error as error:
                    raise DataError(f"{path} is damaged ({error}); copy it again") from None
                piece = unpacker.unused_data if unpacker.eof else b""
    if make and not unpacker.eof:
        raise DataError(f"{path} is cut short: the end of its {codec} stream is missing; copy it again")


def find_files(inputs: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Return the text files of `inputs`, and the files ignored in folders, which are searched recursively in path order.

    Files of other types, hidden files, README.md and broken symlinks are ignored; a folder reached through several symlinks is
    read once. The input hf:ORG/NAME[/CONFIG][:SPLIT] means the parquet files of a dataset on the hub.
    """
    files: list[Path] = []
    ignored: list[Path] = []
    for path in inputs:
        with reading(path):
            if str(path).startswith(HUB):
                from ingot.data.hub import fetch

                files += fetch(str(path))
            elif path.is_dir():
                for file in _files_below(path):
                    hidden = any(part.startswith(".") for part in file.relative_to(path).parts) or file.name.lower() == README
                    (ignored if hidden or not kind_of(file) or not file.is_file() else files).append(file)
            elif not path.is_file():
                hub = f"; for a dataset on the hub, use {HUB}{path}" if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(path)) else ""
                raise DataError(f"no input at {path}; give a file ({WHAT}) or a folder of such files{hub}")
            elif not kind_of(path):
                raise DataError(f"cannot read {path}: expected {WHAT}, or a folder; if only the suffix is wrong, rename the file")
            elif not path.stat().st_size:
                raise DataError(f"{path} is empty; give a file with text")
            else:
                files.append(path)
    return files, ignored


def folder_of(path: Path) -> str:
    """Return the top-level folder of a cached hub file within its repository; it is often named after a configuration."""
    return CACHED.split(path.as_posix())[-1].partition("/")[0]


def commits(files: Iterable[Path]) -> dict[str, str]:
    """Return the commit of each dataset from the hub, taken from the paths of its files in the hub's cache."""
    matches = (CACHED.search(str(path)) for path in files)
    return {match["repository"].replace("--", "/"): match["commit"] for match in matches if match}


def file_identity(path: Path) -> list[str | int]:
    """Return the path, size and modification time of a file, to detect that it has changed."""
    with reading(path):
        status = path.stat()
    return [str(path.resolve()), status.st_size, status.st_mtime_ns]


def file_bytes(path: Path) -> int:
    """Return the size of a file in bytes."""
    with reading(path):
        return path.stat().st_size


def adding_up(progress: Progress | None, total: int) -> Callable[[int], None]:
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

    `advance` is called with the number of bytes just read.
    """
    for path in files:
        with reading(path):
            if kind_of(path) == PARQUET:
                values = chain.from_iterable(parquet_rows(path, text_field, advance))
                for row, value in enumerate(values, 1):
                    try:
                        yield field_text({text_field: value}, text_field)
                    except DataError as error:
                        raise error.within(f"{path}, row {row}") from None
                continue
            with open_unpacked(path, advance, encoding) as stream:
                yield from READERS[kind_of(path)](stream, path, text_field)


def count_documents(files: Iterable[Path], text_field: str, limit: int, encoding: str = UTF8) -> int:
    """Count the non-empty documents, up to `limit`."""
    return sum(1 for _ in islice(filter(None, read_documents(files, text_field, encoding=encoding)), limit))


def kind_of(path: Path) -> str:
    """Return the suffix that determines how a file is read, ignoring compression suffixes; "" for unsupported types."""
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


def find_buckets(folder: Path, wanted: Callable[[Path], object]) -> Buckets:
    """Return the files in train/BUCKET/ and val/BUCKET/ that `wanted` accepts, by split and bucket; {} if there are none.

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
        raise DataError(f"{folder / has / name} has files but {folder / lacks / name} has none; add files to the latter")
    return buckets if buckets["train"] else {}
