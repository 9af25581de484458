"""Read the documents of one file: plain text, JSON lines, JSON arrays, CSV tables or parquet.

Nothing is skipped silently: anything that is not a document is an error that names the file and the line.
"""

from __future__ import annotations

import codecs
import csv
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from json import JSONDecodeError, JSONDecoder
from pathlib import Path
from typing import Any, BinaryIO

from ingot.errors import ConfigError, DataError, Setting

TEXT_FIELD, NAME_IT = Setting("--text-field"), "name the right one with {0}"
BYTE_ORDER_MARK = "\ufeff"  # a file may begin with it; it belongs to no document
DECODE_BYTES = 1 << 20  # UTF-8 is decoded in parts of this size: as str it may take four times the memory
JSON_BYTES = 1 << 16  # read at once from a JSON file
JSON_TOKEN = 16  # longest escape or literal: an error this close to the end of the buffer may only mean that more must be read
JSON_WHITE = re.compile(r"[ \t\r\n]*")
BATCH_ROWS = 256  # read at once from a parquet file
LONGEST_FIELD = 2**31 - 1  # characters in a table's field; the csv module's default is 131,072
# Python may refuse to parse integers of more than 640 digits (4,300 by default), so longer ones become floats.
JSON = JSONDecoder(parse_int=lambda digits: int(digits) if len(digits) <= 640 else float(digits))


def read_text(stream: BinaryIO, path: Path, text_field: str) -> Iterator[bytes]:
    """Yield the UTF-8 of a file that is one document."""
    data = stream.read()
    try:
        for _ in decode_parts(data):
            pass
    except UnicodeDecodeError:
        try:
            data.decode()
        except UnicodeDecodeError as error:  # its offset counts from the start of the file
            raise _not_utf8(path, data[error.start], error.start) from None
    yield data


def decode_parts(data: bytes) -> Iterator[str]:
    """Yield the characters of UTF-8, a part at a time."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, len(data), DECODE_BYTES):
        yield decoder.decode(data[start : start + DECODE_BYTES])
    decoder.decode(b"", final=True)


def read_lines(
    stream: Iterable[bytes], path: Path, text_field: str, lines_before: int = 0, bytes_before: int = 0
) -> Iterator[str]:
    """Yield the text of each line's JSON object; errors count lines and bytes from the start of the file."""
    for number, line in enumerate(_lines(stream, path, bytes_before), lines_before + 1):
        if line and not line.isspace():
            place = f"{path}:{number}"
            try:
                record = JSON.decode(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{place}: not JSON ({error}); every line is one JSON object") from None
            yield field_text(record, place, text_field)


def read_json(stream: BinaryIO, path: Path, text_field: str) -> Iterator[str]:
    """Yield the documents of an array of objects or strings, or of objects one after the other."""
    text = _JsonText(stream, path)
    is_array = text.peek() == "["
    if is_array:
        text.skip()
    while (character := text.peek()) and not (is_array and character == "]"):
        place = f"{path}:{text.line}"
        value = text.value()
        yield field_text({text_field: value} if is_array and isinstance(value, str) else value, place, text_field)
        if is_array and text.peek() == ",":
            text.skip()
        elif is_array and text.peek() not in ("]", ""):
            raise DataError(f"{path}:{text.line}: a comma or the end of the array is missing")
    if is_array and not text.peek():
        raise DataError(f"{path}:{text.line}: the array has no end; the file is cut short")
    if is_array:
        text.skip()
    if text.peek():
        raise DataError(f"{path}:{text.line}: text follows the array; a .json file is one array, or a series of objects")


def read_table(stream: BinaryIO, path: Path, text_field: str, delimiter: str) -> Iterator[str]:
    """Yield one document per row; the first row names the columns."""
    csv.field_size_limit(LONGEST_FIELD)
    rows = csv.reader(_lines(stream, path), delimiter=delimiter, strict=True)
    try:
        header = next(rows, [])
        if header and header.count(text_field) != 1:
            raise no_field(f"{path}:1", text_field, header, "column")
        for row in filter(None, rows):
            if len(row) != len(header):
                raise DataError(f"{path}:{rows.line_num}: {len(row)} columns where the first row names {len(header)}")
            yield row[header.index(text_field)]
    except csv.Error as error:
        raise DataError(
            f"{path}:{rows.line_num}: not a row of a table ({error}); quote fields that contain quotes, delimiters or line ends"
        ) from None


def read_parquet(path: Path, text_field: str, advance: Callable[[int], None]) -> Iterator[str]:
    """Yield one document per row of a column; `advance` receives each row group's share of the file's bytes."""
    row = 0
    for values in parquet_rows(path, text_field, advance):
        for value in values:
            row += 1
            yield field_text({text_field: value}, f"{path}, row {row}", text_field)


def check_pyarrow(what: str) -> None:
    """Raise an error that names the package to install if parquet files cannot be read."""
    try:
        import pyarrow  # type: ignore[import-not-found, import-untyped] # noqa: F401
    except ImportError:
        raise ConfigError(f"reading {what} needs the package pyarrow; install it with: pip install 'ingot-lm[parquet]'") from None


def parquet_rows(
    path: Path, column: str | None = None, advance: Callable[[int], None] = lambda size: None
) -> Iterator[list[Any]]:
    """Yield batches of rows: the values of one column, or dicts of all columns."""
    check_pyarrow(str(path))
    import pyarrow
    from pyarrow.parquet import ParquetFile  # type: ignore[import-not-found, import-untyped]

    size, row = path.stat().st_size, 0
    try:
        with ParquetFile(path) as file:
            names, groups = file.schema_arrow.names, file.num_row_groups
            if column is not None and names.count(column) != 1:
                raise no_field(str(path), column, names, "column")
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


def field_text(record: Any, place: str, name: str) -> str:
    """Return the text of a record, or raise an error that names its place."""
    if not isinstance(record, dict):
        raise DataError(f"{place}: expected a JSON object with a field {name!r}, found {type(record).__name__}")
    if name not in record:
        raise no_field(place, name, list(record), "field")
    text = record[name]
    if text is None:
        raise DataError(f"{place}: field {name!r} is null; remove the record or give it an empty text")
    if not isinstance(text, str):
        raise DataError(f"{place}: field {name!r} is not a string but {type(text).__name__}", TEXT_FIELD, advice=NAME_IT)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DataError(f"{place}: field {name!r} holds half a surrogate pair, which is not a character; remove it") from None
    return text


def no_field(place: str, name: str, names: Sequence[str], what: str) -> DataError:
    """Return the error for a record or table in which a field is missing or occurs twice."""
    if (count := names.count(name)) > 1:
        return DataError(f"{place}: {count} {what}s are named {name!r}; keep one of them or rename the others")
    listed = ", ".join(map(repr, names[:10])) or "none"
    return DataError(f"{place}: no {what} {name!r}; {what}s found: {listed}", TEXT_FIELD, advice=NAME_IT)


class _JsonText:
    """A reader of JSON values that keeps only the current one in memory."""

    def __init__(self, stream: BinaryIO, path: Path) -> None:
        self.line = 1
        self._stream, self._path = stream, path
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._text, self._at, self._bytes = "", 0, 0

    def peek(self) -> str:
        """Return the next character that is not white space, or "" at the end."""
        while True:
            white = JSON_WHITE.match(self._text, self._at)
            self._move(white.end() if white else self._at)
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more(JSON_BYTES):
                return ""

    def skip(self) -> None:
        """Move past the character that `peek` returned."""
        self._move(self._at + 1)

    def value(self) -> Any:
        """Parse and return the value that begins here."""
        while True:
            try:
                value, end = JSON.raw_decode(self._text, self._at)
            except (JSONDecodeError, RecursionError) as error:
                cut = isinstance(error, JSONDecodeError) and (
                    error.msg.startswith("Unterminated string") or error.pos > len(self._text) - JSON_TOKEN
                )
                # Read twice as much each time: with a fixed amount, long documents would take quadratic time.
                if not cut or not self._more(max(JSON_BYTES, len(self._text) - self._at)):
                    reason = error.msg if isinstance(error, JSONDecodeError) else str(error)
                    raise DataError(
                        f"{self._path}:{self.line}: not JSON ({reason}); a .json file holds an array of objects or strings"
                    ) from None
            else:
                self._move(end)
                return value

    def _move(self, end: int) -> None:
        self.line += self._text.count("\n", self._at, end)
        self._at = end

    def _more(self, count: int) -> bool:
        data = self._stream.read(count)
        try:
            text = self._utf8.decode(data, final=not data)
        except UnicodeDecodeError as error:
            start = self._bytes + len(data) - len(error.object)  # includes bytes of half a character kept by the decoder
            raise _not_utf8(self._path, error.object[error.start], start + error.start) from None
        self._text = self._text[self._at :] + (text if self._bytes else text.removeprefix(BYTE_ORDER_MARK))
        self._at, self._bytes = 0, self._bytes + len(data)
        return bool(data)


def _lines(stream: Iterable[bytes], path: Path, offset: int = 0) -> Iterator[str]:
    """Yield every line with its line end; `offset` is the number of bytes before them."""
    for line in stream:
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            raise _not_utf8(path, line[error.start], offset + error.start) from None
        yield text if offset else text.removeprefix(BYTE_ORDER_MARK)
        offset += len(line)


def _not_utf8(path: Path, byte: int, offset: int) -> DataError:
    return DataError(f"{path} is not UTF-8: byte 0x{byte:02x} at offset {offset:,}; convert it or leave it out")
