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

from pydantic_core import from_json

from ingot.errors import ConfigError, DataError, Setting

TEXT_FIELD, NAME_IT = Setting("--text-field"), "name the right one with {0}"
BYTE_ORDER_MARK = "\ufeff"  # removed at the start of a file, because it is not text
JSON_WHITE = re.compile(r"[ \t\r\n]*")
BATCH_ROWS = 256  # rows read at once from a parquet file
LONGEST_FIELD = 2**31 - 1  # maximum characters in a CSV field; the csv module's default is 131,072
# Python may refuse to parse integers of more than 640 digits (4,300 by default), so longer ones become floats.
JSON = JSONDecoder(parse_int=lambda digits: int(digits) if len(digits) <= 640 else float(digits))


def read_text(stream: BinaryIO, path: Path, text_field: str) -> Iterator[str]:
    """Yield the whole text of a file as one document."""
    try:
        text = stream.read().decode()
    except UnicodeDecodeError as error:
        raise _not_utf8(path, error) from None
    yield text


def read_lines(
    stream: Iterable[bytes], path: Path, text_field: str, lines_before: int = 0, bytes_before: int = 0
) -> Iterator[str]:
    """Yield the text of each line's JSON object; errors count lines and bytes from the start of the file."""
    for number, line in enumerate(stream, lines_before + 1):
        data = line if bytes_before else line.removeprefix(codecs.BOM_UTF8)
        if data and not data.isspace():
            try:
                record = from_json(data, cache_strings="none")
            except ValueError:  # the fast parser rejects lone surrogates in any field, and long numbers; json accepts them
                try:
                    record = JSON.decode(data.decode())
                except UnicodeDecodeError as error:
                    raise _not_utf8(path, error, bytes_before + len(line) - len(data)) from None
                except (ValueError, RecursionError) as error:
                    raise DataError(f"{path}:{number}: not JSON ({error}); every line is one JSON object") from None
            yield field_text(record, f"{path}:{number}", text_field)
        bytes_before += len(line)


def read_json(stream: BinaryIO, path: Path, text_field: str) -> Iterator[str]:
    """Yield the documents of a JSON array of objects or strings, or of concatenated objects; reads the whole file into memory."""
    try:
        text = stream.read().decode().removeprefix(BYTE_ORDER_MARK)
    except UnicodeDecodeError as error:
        raise _not_utf8(path, error) from None

    def after_white(position: int) -> int:
        white = JSON_WHITE.match(text, position)
        return white.end() if white else position

    at, line = after_white(0), 1 + text.count("\n", 0, after_white(0))
    is_array = text.startswith("[", at)
    begin = at + is_array
    while (begin := after_white(begin)) < len(text) and not (is_array and text[begin] == "]"):
        line += text.count("\n", at, begin)
        place = f"{path}:{line}"
        try:
            value, at = JSON.raw_decode(text, begin)
        except (ValueError, RecursionError) as error:
            reason = error.msg if isinstance(error, JSONDecodeError) else str(error)
            raise DataError(f"{place}: not JSON ({reason}); a .json file holds an array of objects or strings") from None
        yield field_text({text_field: value} if is_array and isinstance(value, str) else value, place, text_field)
        at = after_white(at)
        line += text.count("\n", begin, at)
        begin = at + (is_array and text.startswith(",", at))
        if is_array and at == begin < len(text) and text[at] != "]":
            raise DataError(f"{path}:{line}: a comma or the end of the array is missing")
    if is_array and begin == len(text):
        raise DataError(f"{path}:{line}: the array has no end; the file is cut short")
    if is_array and (rest := after_white(begin + 1)) < len(text):
        line += text.count("\n", at, rest)
        raise DataError(f"{path}:{line}: text follows the array; a .json file is one array, or a series of objects")


def read_table(stream: BinaryIO, path: Path, text_field: str, delimiter: str) -> Iterator[str]:
    """Yield one document per row of a CSV table; the first row is the header."""
    csv.field_size_limit(LONGEST_FIELD)

    def lines() -> Iterator[str]:
        offset = 0
        for line in stream:
            try:
                text = line.decode()
            except UnicodeDecodeError as error:
                raise _not_utf8(path, error, offset) from None
            yield text if offset else text.removeprefix(BYTE_ORDER_MARK)
            offset += len(line)

    rows = csv.reader(lines(), delimiter=delimiter, strict=True)
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
    """Yield one document per row of a parquet column; `advance` receives each row group's share of the file size in bytes."""
    row = 0
    for values in parquet_rows(path, text_field, advance):
        for value in values:
            row += 1
            yield field_text({text_field: value}, f"{path}, row {row}", text_field)


def check_pyarrow(what: str) -> None:
    """Raise an error that names the package to install if pyarrow is missing."""
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
    """Return the text of a record, or raise an error that gives the record's position."""
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


class NotUtf8(DataError):
    """Raised for a file that cannot be decoded."""


def _not_utf8(path: Path, error: UnicodeDecodeError, offset: int = 0) -> DataError:
    """Return an error with the byte offset in the file; `offset` is where the decoded bytes begin."""
    byte, offset = error.object[error.start], offset + error.start
    return NotUtf8(f"{path} is not UTF-8: byte 0x{byte:02x} at offset {offset:,}; convert it or leave it out")
