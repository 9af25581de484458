"""Text files to documents, one at a time.

Text is taken as it is: no newline is translated and no byte dropped, because bits per byte are counted against the original. The
name of a file says how it is read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO

from ingot.data.text.hub_datasets import HUB, fetch
from ingot.data.text.records import read_json, read_lines, read_parquet, read_table, read_text
from ingot.data.text.unpacking import CODECS, open_unpacked
from ingot.errors import DataError
from ingot.runtime.files import reading

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
