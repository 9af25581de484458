"""gpt-simple's data: train/BUCKET and val/BUCKET with pairs of .bin (tokens) and .idx (window offsets).

A document longer than a window is stored as several windows, each of which may repeat the end of the previous one; the .idx
records the overlap. Reading merges the windows into whole documents without repeated tokens. The recorded overlap is not always
right: it is too large if windows overlap by more than half. Repeated tokens are therefore dropped only after a comparison with
the previous window.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.data import SPLITS
from ingot.data.store.dataset import BucketRecord, Dataset, Split, foreign_record
from ingot.data.store.documents import Document, Marks, marks_of
from ingot.data.store.shards import DataProblem, map_tokens
from ingot.data.text.text_files import file_bytes
from ingot.data.tokenizers import Tokenizer
from ingot.data.tokenizers.tokenizer_base import IdArray
from ingot.errors import ConfigError, DataError
from ingot.runtime.files import reading

MAGIC, VERSION = b"GPTS", 1
HEADER = struct.Struct("<4sIII")  # magic, version, bytes per token, number of windows
DTYPES = {2: "<u2", 4: "<u4"}  # bytes per token -> dtype
AGAIN = "copy the files again or tokenize the text again"


def open_gpt_simple(path: Path, strict: bool = True) -> Dataset:
    """Open gpt-simple data: a folder with train/ and val/, the folder of a single bucket, or one .bin with its .idx.

    With `strict` the first damaged pair raises an error; otherwise damaged pairs are skipped and listed in `Dataset.problems`.
    """
    files = {split: files for split, files in find_pairs(path).items() if files}
    if not files:
        raise DataError(f"{path} contains no .bin file with a matching .idx; it is not gpt-simple data")
    folder, problems, splits = path if path.is_dir() else path.parent, list[DataProblem](), {}
    for split, paths in files.items():
        pairs = {}
        for file in paths:
            try:
                pairs[file] = Pair(file)
            except DataError as error:
                if strict:
                    raise
                problems.append(DataProblem("pair", str(file), str(error)))
        splits[split] = WindowSplit(split, folder, paths, pairs)
    every = [file for paths in files.values() for file in paths]
    about = f"gpt-simple's .bin and .idx, {len(every)} pairs, buckets: {', '.join(sorted({file.parent.name for file in every}))}"
    return Dataset(path, "gpt-simple", splits, about, problems=problems)


def find_pairs(path: Path) -> dict[str, list[Path]]:
    """Return each split's .bin files, sorted by path; a folder without train/ and val/, or a single file, belongs to train."""
    if not path.is_dir():
        return {"train": [path.with_suffix(".bin")] if path.with_suffix(".idx").is_file() else []}
    folders = {split: path / split for split in SPLITS if (path / split).is_dir()}
    files = {split: [*folder.rglob("*.idx"), *folder.rglob("*.bin")] for split, folder in folders.items()}
    files = files or {"train": [*path.glob("*.idx"), *path.glob("*.bin")]}
    if not any(file.suffix == ".idx" for some in files.values() for file in some):
        return {}
    return {split: sorted({file.with_suffix(".bin") for file in some}) for split, some in files.items()}


def read_index(path: Path) -> tuple[int, NDArray[np.int64], NDArray[np.uint16]]:
    """Read an .idx: return the bytes per token, the N + 1 boundaries of its N windows, and each window's overlap."""
    with reading(path):
        contents = path.read_bytes()
    if (size := len(contents)) < HEADER.size:
        raise DataError(f"unexpected header in {path}: {size:,} bytes instead of {HEADER.size}; {AGAIN}")
    magic, version, width, count = HEADER.unpack_from(contents)
    if (magic, version) != (MAGIC, VERSION) or width not in DTYPES:
        raise DataError(f"unexpected header in {path}: magic {magic!r}, version {version}, {width} bytes per token; {AGAIN}")
    expected = HEADER.size + 8 * (count + 1) + 2 * count
    if size != expected:
        raise DataError(f"size mismatch in {path}: {expected:,} bytes expected for {count:,} windows, {size:,} found; {AGAIN}")
    offsets = np.frombuffer(contents, "<i8", count + 1, HEADER.size)
    repeats = np.frombuffer(contents, "<u2", count, HEADER.size + 8 * (count + 1))
    lengths = np.diff(offsets)
    if offsets[0] != 0 or (lengths <= 0).any():
        raise DataError(f"{path} is damaged: its window offsets do not increase from 0; {AGAIN}")
    if (repeats > lengths).any():
        raise DataError(f"{path} is damaged: a window repeats more tokens than it has; {AGAIN}")
    return width, offsets, repeats


class Pair:
    """A .bin and its .idx, checked against each other."""

    def __init__(self, path: Path) -> None:
        width, self.offsets, self.repeats = read_index(path.with_suffix(".idx"))
        size = file_bytes(path)
        self.path, self.tokens, self.dtype = path, int(self.offsets[-1]), np.dtype(DTYPES[width])
        if size != (expected := width * self.tokens):
            raise DataError(f"size mismatch in {path}: {expected:,} bytes expected by its .idx, {size:,} found; {AGAIN}")

    def map(self) -> NDArray[Any]:
        """Memory-map the tokens of the .bin."""
        return map_tokens(self.path, self.dtype.str, 0, self.tokens)

    def documents(self, eos: int | None) -> Iterator[Document]:
        """Yield whole documents without EOS. In files that end with EOS, a window without EOS is continued by the next one."""
        tokens = np.asarray(self.map())
        marked = self.tokens > 0 and int(tokens[-1]) == eos
        document: Document = []
        last: IdArray | None = None
        for number, repeats in enumerate(self.repeats.tolist()):
            window = tokens[self.offsets[number] : self.offsets[number + 1]]
            ended = last is not None and marked and int(last[-1]) == eos
            skip = _repeated(window, last, repeats, ended) if repeats else 0
            if skip is None:
                problem = f"window {number} does not begin with the last {repeats} tokens of the previous window"
                raise DataError(f"{self.path} is damaged: {problem}; {AGAIN}")
            if skip == len(window):
                continue
            if not repeats and last is not None and (ended or not marked):
                yield _without_mark(document, eos if marked else None)
                document = []
            document.append(window[skip:])
            last = window
        if last is not None:
            yield _without_mark(document, eos if marked else None)


class WindowSplit(Split):
    """A split of gpt-simple data, indexed by window; only `bucket_documents` merges the windows of a document."""

    def __init__(self, name: str, folder: Path, paths: list[Path], pairs: Mapping[Path, Pair]) -> None:
        self._pairs = pairs
        buckets = []
        for bucket, some in groupby(pairs.values(), lambda pair: pair.path.parent):
            if bucket.parent == folder / name:
                group = list(some)
                windows, tokens = sum(len(pair.repeats) for pair in group), sum(pair.tokens for pair in group)
                buckets.append(BucketRecord(name=bucket.name, documents=windows, tokens=tokens, bytes=0))
        sizes = {path: pair.tokens for path, pair in pairs.items()}
        documents = sum(len(pair.repeats) for pair in pairs.values())
        record = foreign_record(folder, dict.fromkeys(paths, 0) | sizes, documents=documents, buckets=buckets)
        dtype = max([np.dtype(np.uint16), *(pair.dtype for pair in pairs.values())], key=lambda dtype: dtype.itemsize)
        super().__init__(name, folder, record, sizes, lambda path: pairs[path].map(), dtype=dtype)
        begins = np.cumsum([0, *sizes.values()])
        starts = [pair.offsets[:-1] + begin for pair, begin in zip(pairs.values(), begins[:-1], strict=True)]
        self._starts = np.concatenate([*starts, begins[-1:]]).astype(np.uint64)
        self._repeats = np.concatenate([np.empty(0, np.uint16), *(pair.repeats for pair in pairs.values())])

    def use_tokenizer(self, tokenizer: Tokenizer) -> None:
        super().use_tokenizer(tokenizer)
        self.eos = marks_of(tokenizer).eos

    def index(self) -> NDArray[np.uint64] | None:
        return self._starts

    def document_repeats(self) -> NDArray[np.uint16] | None:
        return self._repeats if self._repeats.any() else None

    def bucket_documents(self, marks: Marks) -> Iterator[tuple[str | None, Iterator[Document]]]:
        for bucket, pairs in groupby(self._pairs.values(), lambda pair: pair.path.parent):
            name = bucket.name if bucket.parent == self.folder / self.name else None
            yield name, (document for pair in pairs for document in pair.documents(marks.eos))


def check_windows(max_length: int, overlap: int) -> None:
    """Raise an error if the overlap is more than half a window, or more than an .idx can record."""
    if not 0 <= 2 * overlap <= max_length or max_length < 1 or overlap > 0xFFFF:
        problem = f"an overlap of {overlap:,} tokens does not fit windows of {max_length:,}"
        raise ConfigError(f"{problem}; give at most half the window length, and at most 65,535")


def cut_windows(length: int, max_length: int, overlap: int) -> Iterator[tuple[int, int, int]]:
    """Yield the start, end and overlap, in tokens, of each window of a document; `length` includes the EOS token.

    Every window contains at least one token that is not in an earlier window.
    """
    start = repeats = 0
    while start + repeats < length:
        stop = min(start + max_length, length)
        yield start, stop, repeats
        start, repeats = stop - overlap, overlap


def index_bytes(offsets: list[int], repeats: list[int], width: int) -> bytes:
    """Return the contents of an .idx; `offsets` holds the start of each window and the end of the last window."""
    header = HEADER.pack(MAGIC, VERSION, width, len(repeats))
    return header + np.array(offsets, "<i8").tobytes() + np.array(repeats, "<u2").tobytes()


def token_width(vocab_size: int) -> int:
    """Return the bytes per token in a .bin: 2, or 4 for vocabularies of 65,536 ids or more."""
    return 2 if vocab_size < 1 << 16 else 4


def _repeated(window: IdArray, last: IdArray | None, recorded: int, ended: bool) -> int | None:
    """Return how many of a window's first tokens repeat the end of the previous window (`last`); None if the tokens differ."""
    if last is None:
        return None

    def ends_with(ids: IdArray, end: IdArray) -> bool:
        return len(end) <= len(ids) and bool((ids[len(ids) - len(end) :] == end).all())

    trailer = len(window) == recorded + 1 and window[-1] == last[-1] and ends_with(last[:-1], window[:-1])
    if ended and trailer:
        return len(window)
    for count in (min(recorded, len(last) - len(last) // 2), recorded):
        if ends_with(last, window[:count]):
            return count
    return len(window) if trailer else None


def _without_mark(document: Document, eos: int | None) -> Document:
    if eos is not None and int(document[-1][-1]) == eos:
        document = [*document[:-1], document[-1][:-1]]
    return [part for part in document if len(part)]
