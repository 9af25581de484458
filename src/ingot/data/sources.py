"""Text files to documents, one at a time.

Text is taken as it is: no newline is translated and no byte dropped, because bits per byte are counted against the original.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from ingot.errors import DataError

SUFFIXES = (".txt", ".jsonl")


def find_files(inputs: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """The text files of `inputs` and the files passed over; folders are searched to the bottom, in the order of their paths."""
    files: list[Path] = []
    ignored: list[Path] = []
    for path in inputs:
        try:
            if path.is_dir():
                found = _files_below(path)
                files += (file for file in found if is_text(file))
                ignored += (file for file in found if not is_text(file))
            else:
                files.append(_checked_file(path))
        except OSError as error:
            raise DataError(f"cannot read {error.filename or path}: {error.strerror}") from error
    return files, ignored


def is_text(path: Path) -> bool:
    """Whether the name says that documents can be read from this file."""
    return path.suffix.lower() in SUFFIXES


def file_bytes(path: Path) -> int:
    """The size of a file."""
    try:
        return path.stat().st_size
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def read_documents(files: Iterable[Path], text_field: str, advance: Callable[[int], None] = lambda _: None) -> Iterator[str]:
    """Every document: a .txt file is one, a .jsonl file has one per line. `advance` is told the bytes read."""
    for path in files:
        try:
            with path.open("rb") as file:
                if path.suffix.lower() == ".jsonl":
                    yield from _read_lines(file, path, text_field, advance)
                else:
                    data = file.read()
                    yield _decode(data, path, 0)
                    advance(len(data))
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from error


def count_documents(files: Iterable[Path], text_field: str, limit: int) -> int:
    """How many documents are not empty, counted no further than `limit`."""
    count = 0
    for path in files:
        if path.suffix.lower() == ".txt":
            count += file_bytes(path) > 0
        else:
            documents = read_documents([path], text_field)
            while count < limit and (text := next(documents, None)) is not None:
                count += bool(text)
        if count >= limit:
            break
    return count


def _checked_file(path: Path) -> Path:
    if not path.is_file():
        raise DataError(f"no input at {path}; give a {' or '.join(SUFFIXES)} file or a folder of them")
    if not is_text(path):
        raise DataError(
            f"cannot read {path}: inputs are {' and '.join(SUFFIXES)} files or folders of them; rename it if it is one"
        )
    if not file_bytes(path):
        raise DataError(f"{path} is empty; give a file with text")
    return path


def _files_below(folder: Path) -> list[Path]:
    def refuse(error: OSError) -> None:
        raise error

    found = (Path(root, name) for root, _, names in os.walk(folder, onerror=refuse) for name in names)
    return sorted((file for file in found if file.is_file()), key=lambda file: file.relative_to(folder).as_posix())


def _read_lines(file: BinaryIO, path: Path, text_field: str, advance: Callable[[int], None]) -> Iterator[str]:
    offset = 0
    for number, line in enumerate(file, 1):
        text = _decode(line, path, offset)
        if number == 1:
            text = text.removeprefix("\ufeff")  # a mark of the file, never part of a document
        if text and not text.isspace():
            yield _field(text, f"{path}:{number}", text_field)
        offset += len(line)
        advance(len(line))


def _decode(data: bytes, path: Path, offset: int) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8: byte 0x{data[error.start]:02x} at offset {offset + error.start:,}; convert it or leave it out"
        ) from None


def _field(line: str, place: str, name: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: not JSON ({error}); every line of a .jsonl file is one JSON object") from None
    if not isinstance(record, dict):
        raise DataError(f"{place}: expected a JSON object with a field {name!r}, found {type(record).__name__}")
    if name not in record:
        found = ", ".join(map(repr, list(record)[:10])) or "none"
        raise DataError(f"{place}: no field {name!r}; fields found: {found}; name the right one with --text-field")
    text = record[name]
    if not isinstance(text, str):
        raise DataError(
            f"{place}: field {name!r} is not a string but {type(text).__name__}; name the right one with --text-field"
        )
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DataError(f"{place}: field {name!r} holds half a surrogate pair, which is no character; remove it") from None
    return text
