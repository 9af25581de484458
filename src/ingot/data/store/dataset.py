"""The prepared folder: shards, a document index per split, and dataset.json, which says what they hold.

Opening checks what is cheap (names, headers, sizes, counts), and an index when it is first asked for; verify/ reads every byte.
The fingerprint covers the tokenizer and the splits and leaves out where they came from: the same text prepared on another machine
is the same data.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ingot.data import SPLITS
from ingot.data.store.shards import AGAIN, Finding, OpenTokens, TokenStream, open_shard, read_header
from ingot.data.text.text_files import is_text
from ingot.data.tokenizers import Tokenizer, digest, from_spec
from ingot.data.tokenizers.tokenizer_base import PACKED, IdType, NoSpacePiece
from ingot.errors import DataError
from ingot.runtime.files import file_sha256, read_json

MANIFEST = "dataset.json"
VERSION = 2  # the newest that is read
IDENTITY = ("format", "version", "tokenizer", "splits")  # what the fingerprint covers
UNTOLD = ("piece_bytes", "document_index_sha256", "buckets")  # of a split, which older data does not say

Count = Annotated[int, Field(ge=0)]
FileName = Annotated[str, Field(pattern=r"^\w+\.(bin|index)$")]  # never a path: files lie beside dataset.json


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True)


class ShardRecord(_Record):
    """One shard; `documents` counts those that begin in it, `bytes` the original text its tokens stand for."""

    file: FileName
    tokens: Count
    documents: Count
    bytes: Count
    sha256: str


class BucketRecord(_Record):
    """A part of a split, kept apart by its name: so many documents of the stream, after those of the buckets before."""

    name: str
    documents: Count
    tokens: Count
    bytes: Count
    piece_bytes: Count | None = None


class SplitRecord(_Record):
    """One split; its token stream is that of its shards, one after the other, or of its buckets.

    `bytes` is the UTF-8 size of the text, `piece_bytes` what its tokens stand for; a tokenizer that loses nothing has them equal.
    """

    documents: Count
    tokens: Count
    bytes: Count
    piece_bytes: Count | None = None
    shards: list[ShardRecord]
    document_index: FileName
    document_index_sha256: str | None = None
    buckets: list[BucketRecord] = []


class TokenizerRecord(_Record):
    """The tokenizer, complete in `spec`; the rest is for readers without us."""

    kind: str
    vocab_size: Count
    bos: int | None
    fingerprint: str
    spec: dict[str, Any]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TokenizerRecord:
        """What dataset.json says of a tokenizer."""
        facts = {"kind": tokenizer.kind, "vocab_size": tokenizer.vocab_size, "bos": tokenizer.bos, "spec": tokenizer.spec()}
        return cls(fingerprint=tokenizer.fingerprint(), **facts)


class Manifest(_Record):
    """dataset.json."""

    format: Literal["ingot-dataset"] = "ingot-dataset"
    version: Literal[1, 2] = 1  # 2: its shards have ids of 32 bits
    tokenizer: TokenizerRecord
    splits: dict[str, SplitRecord]
    fingerprint: str = ""
    created_by: str = ""
    source: Any = None


def identity(record: dict[str, Any]) -> str:
    """The fingerprint of a dataset: equal when tokenizer, tokens, documents and bytes are.

    A file inside the tokenizer is covered by the tokenizer's own fingerprint, whatever compressed it. `piece_bytes` and `buckets`
    count only where they say something new and the index's checksum never, so that data from before they were recorded keeps its
    fingerprint.
    """
    tokenizer = {**record["tokenizer"], "spec": {k: v for k, v in record["tokenizer"]["spec"].items() if k != PACKED}}
    splits = {name: _told(split) for name, split in record["splits"].items()}
    return digest({key: record.get(key) for key in IDENTITY} | {"tokenizer": tokenizer, "splits": splits})


def _told(split: dict[str, Any]) -> dict[str, Any]:
    """What a split says that its fingerprint covers."""
    news = {"piece_bytes": split.get("piece_bytes") not in (None, split.get("bytes")), "buckets": bool(split.get("buckets"))}
    return {key: value for key, value in split.items() if key not in UNTOLD or news.get(key)}


class Documents(Protocol):
    """Tokens and where documents begin among them: a split, or one bucket of it."""

    tokens: int
    documents: int
    bytes: int
    piece_bytes: int | None
    eos: int | None  # the mark after a document, where documents have it; else they may have one in front

    def read(self, start: int, stop: int, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Tokens start..stop, copied into `out` where it is given."""

    def document_starts(self) -> NDArray[np.uint64]:
        """Where each document begins, and after them the end of the last."""

    def document_repeats(self) -> NDArray[np.uint16] | None:
        """How many tokens each document repeats of the one before, which are not to be predicted again; None: none does."""


class Split(TokenStream):
    """The tokens of one split, and where its documents begin; its files stay mapped, for rows come from any of them.

    `mark`: the id in front of documents, by which they are found where there is no index.
    """

    eos: int | None = None

    def __init__(
        self,
        folder: Path,
        record: SplitRecord,
        open_tokens: OpenTokens = open_shard,
        keep: int | None = None,
        dtype: IdType | None = None,
        mark: int | None = None,
    ) -> None:
        paths, sizes = [folder / shard.file for shard in record.shards], [shard.tokens for shard in record.shards]
        super().__init__(paths, sizes, open_tokens, keep=keep, dtype=dtype)
        self.documents, self.bytes, self.piece_bytes = record.documents, record.bytes, record.piece_bytes
        self._index = folder / record.document_index if record.document_index else None
        self._index_sha256, self._mark = record.document_index_sha256, mark

    def document_starts(self) -> NDArray[np.uint64]:
        """Where each document begins in the stream, and after them the end of the last."""
        return self._checked_starts

    @cached_property
    def _checked_starts(self) -> NDArray[np.uint64]:  # every row with a document mask asks for them

        if self._index is None:
            starts = starts_at_marks(self, self._mark) if self._mark is not None else None
            if starts is None:
                where = self.paths[0].parent
                raise DataError(
                    f"nothing says where documents begin in {where}: there is no index, and no mark in front of documents; make "
                    f"a folder that does: ingot data convert {where} --mark ID"
                )
            return starts
        try:
            return open_index(self._index, self.documents, self.tokens, self._index_sha256)
        except ValueError as problem:
            raise DataError(f"{self._index} {problem}; {AGAIN}") from None

    def document_repeats(self) -> NDArray[np.uint16] | None:
        """How many tokens each document repeats of the one before; None: none does."""
        return None


class Dataset:
    """A prepared folder that passed the cheap checks; `Dataset.open` makes it."""

    def __init__(self, folder: Path, manifest: Manifest, tokenizer: Tokenizer, splits: Mapping[str, Split]) -> None:
        self.folder, self.manifest, self.tokenizer, self._splits = folder, manifest, tokenizer, splits

    @classmethod
    def open(cls, path: Path | str, fitting: str = "byte") -> Dataset:
        """Opens a prepared folder and checks headers, sizes and counts of its files; advises a tokenizer where there is none."""
        folder = Path(path)
        _refuse_other(folder, fitting)
        found = read_description(folder)
        if found.manifest is None or found.tokenizer is None or found.findings:
            raise found.findings[0].error()
        for split in found.manifest.splits.values():
            _check_files(folder, split)
        dtype = found.tokenizer.dtype
        splits = {name: Split(folder, record, dtype=dtype) for name, record in found.manifest.splits.items()}
        return cls(folder, found.manifest, found.tokenizer, splits)

    @property
    def fingerprint(self) -> str:
        """Equal for datasets with the same tokenizer, tokens and documents."""
        return self.manifest.fingerprint

    def split(self, name: str) -> Split:
        """The split called `name`: train or val."""
        if name not in self._splits:
            raise DataError(f"{self.folder} has no split {name!r}; it has {', '.join(self._splits)}")
        return self._splits[name]

    def buckets(self, name: str) -> dict[str, Bucket]:
        """The buckets of a split by their names; {} where it has none."""
        if not (records := self.manifest.splits[name].buckets):
            return {}

        return split_buckets(self.split(name), records)


def prepare_command(source: Path | str, output: Path | str, tokenizer: str = "byte") -> str:
    """The command that makes a folder out of a text file."""
    source, tokenizer, output = (shlex.quote(str(word)) for word in (source, tokenizer, output))
    return f"ingot data prepare --input {source} --tokenizer {tokenizer} --output {output}"


@dataclass(frozen=True)
class SplitCounts:
    """What a split holds; `bytes` is the size of the original text, where that was recorded, and None is not known."""

    documents: int | None
    tokens: int
    bytes: int | None
    piece_bytes: int | None  # what its tokens stand for
    bytes_per_token: float | None


def split_counts(documents: int | None, tokens: int, size: int | None, piece_bytes: int | None) -> SplitCounts:
    """The counts, with the bytes of the text, or else those that the tokens stand for, by tokens."""
    known = piece_bytes if size is None else size
    return SplitCounts(documents, tokens, size, piece_bytes, known / tokens if tokens and known is not None else None)


def recorded_counts(record: SplitRecord) -> SplitCounts:
    """What dataset.json says of a split."""
    return split_counts(record.documents, record.tokens, record.bytes, record.piece_bytes)


@dataclass(frozen=True)
class Description:
    """What dataset.json says; manifest and tokenizer are None where they cannot be read."""

    manifest: Manifest | None
    tokenizer: Tokenizer | None
    findings: list[Finding]


def read_description(folder: Path) -> Description:
    """The dataset.json of a folder, and everything that is wrong with it by itself."""
    file = folder / MANIFEST
    record, manifest = _read_manifest(file)
    if isinstance(manifest, Finding):
        return Description(None, None, [manifest])
    findings = []
    if manifest.fingerprint != identity(record):
        problem = "was edited or damaged: its fingerprint does not fit its contents"
        findings.append(Finding("dataset-json", str(file), problem))
    tokenizer: Tokenizer | None = None
    try:
        tokenizer = from_spec(manifest.tokenizer.spec)
        if TokenizerRecord.of(tokenizer).model_copy(update={"spec": {}}) != manifest.tokenizer.model_copy(update={"spec": {}}):
            problem = "is damaged: its tokenizer does not fit its fingerprint"
            findings.append(Finding("tokenizer-mismatch", str(file), problem, place="tokenizer"))
    except DataError as error:
        findings.append(tokenizer_finding(str(file), error))
    if missing := [name for name in SPLITS if name not in manifest.splits]:
        findings.append(Finding("dataset-json", str(file), f"is damaged: it has no split {missing[0]}", place="splits"))
    for name, split in manifest.splits.items():
        for key in ("tokens", "documents", "bytes"):
            found, told = sum(getattr(shard, key) for shard in split.shards), getattr(split, key)
            if found != told:
                problem = f"is damaged: shards of {found:,} {key} in a split of {told:,}"
                findings.append(Finding("dataset-json", str(file), problem, place=f"splits.{name}"))
    return Description(manifest, tokenizer, findings)


def tokenizer_finding(file: str, error: DataError) -> Finding:
    """Why a tokenizer cannot be read."""
    if isinstance(error, NoSpacePiece):
        problem = "holds a tokenizer without a piece for a single space (U+2581), so the bytes of a text are counted wrong"
        return Finding("space-piece", file, problem, "prepare the text again with another tokenizer", "tokenizer")
    return Finding("tokenizer", file, f"holds no tokenizer that can be read: {error}", place="tokenizer")


def shard_tokens(path: Path, told: ShardRecord | None = None) -> int | Finding:
    """The tokens of a shard, if its header and its size fit and dataset.json agrees."""
    header = read_header(path, foreign=told is None)
    if isinstance(header, Finding):
        return header
    if told and header.tokens != told.tokens:
        return Finding("shard-size", str(path), f"holds {header.tokens:,} tokens and {MANIFEST} says {told.tokens:,}")
    return header.tokens


def _refuse_other(folder: Path, tokenizer: str) -> None:
    if folder.is_file():
        source = folder if is_text(folder) else "FILE"
        command = prepare_command(source, folder.with_name(f"{folder.stem}-{Path(tokenizer).stem}"), tokenizer)
        raise DataError(f"{folder} is a file, not a prepared folder; prepare one with: {command}")
    if not folder.is_dir():
        command = prepare_command("FILE", folder, tokenizer)
        raise DataError(f"no data at {folder}: there is no such folder; prepare it with: {command}")
    if not (folder / MANIFEST).is_file():
        command = prepare_command(folder, "DIR", tokenizer)
        raise DataError(f"no data at {folder}: the folder has no {MANIFEST}; if it holds text, prepare it with: {command}")


def _read_manifest(file: Path) -> tuple[dict[str, Any], Manifest | Finding]:
    def wrong(problem: str, advice: str = AGAIN) -> tuple[dict[str, Any], Finding]:
        return {}, Finding("dataset-json", str(file), problem, advice)

    try:
        record = read_json(file)
        if not isinstance(record, dict) or record.get("format") != "ingot-dataset":
            return wrong("does not describe an ingot dataset", f"prepare one with: {prepare_command('FILE', 'DIR')}")
        if isinstance(version := record.get("version"), int) and version > VERSION:
            problem = f"has version {version} and this ingot reads up to {VERSION}"
            return wrong(problem, "upgrade ingot or prepare the data again")
        return record, Manifest.model_validate(record, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        return wrong(f"is damaged: {'.'.join(map(str, first['loc']))}: {first['msg']}")
    except ValueError as error:
        return wrong(f"is damaged: {error}")
    except OSError as error:
        return wrong(f"cannot be read: {error.strerror}")


def _check_files(folder: Path, split: SplitRecord) -> None:
    """Refuse files that are not what dataset.json says, as far as their headers and sizes tell."""
    for shard in split.shards:
        if isinstance(found := shard_tokens(folder / shard.file, shard), Finding):
            raise found.error()
    index, expected = folder / split.document_index, 8 * (split.documents + 1)
    try:
        size = index.stat().st_size
    except OSError as error:
        raise DataError(f"missing document index {index} ({error.strerror}); {AGAIN}") from None
    if size != expected:
        raise DataError(
            f"size mismatch in {index}: {expected:,} bytes expected for {split.documents:,} documents, {size:,} found; {AGAIN}"
        )


# The buckets of a split: stretches of whole documents that follow each other in its stream and keep their names.


class Bucket:
    """A stretch of whole documents of a split."""

    def __init__(self, split: Split, record: BucketRecord, first_token: int, first_document: int) -> None:
        self.tokens, self.documents, self.eos = record.tokens, record.documents, split.eos
        self.bytes, self.piece_bytes = record.bytes, record.piece_bytes
        self._split, self._first_token = split, first_token
        self._here = slice(first_document, first_document + record.documents)

    def read(self, start: int, stop: int, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Tokens start..stop of the bucket."""
        if not 0 <= start <= stop <= self.tokens:
            raise IndexError(f"tokens {start} to {stop} of a bucket of {self.tokens}")
        return self._split.read(self._first_token + start, self._first_token + stop, out)

    def document_starts(self) -> NDArray[np.uint64]:
        """Where each document begins in the bucket, and after them the end of the last."""
        return self._starts

    @cached_property
    def _starts(self) -> NDArray[np.uint64]:  # every row with a document mask asks for them
        starts = self._split.document_starts()[self._here.start : self._here.stop + 1]
        return np.asarray(starts) - np.uint64(self._first_token)

    def document_repeats(self) -> NDArray[np.uint16] | None:
        """How many tokens each document repeats of the one before; None: none does."""
        repeats = self._split.document_repeats()
        return None if repeats is None else repeats[self._here]


def split_buckets(split: Split, records: Sequence[BucketRecord]) -> dict[str, Bucket]:
    """The buckets of a split by their names."""
    found, tokens, documents = {}, 0, 0
    for record in records:
        found[record.name] = Bucket(split, record, tokens, documents)
        tokens, documents = tokens + record.tokens, documents + record.documents
    return found


# The document index of a split, checked when it is opened.

PART = 1 << 20  # numbers that are looked at together


def open_index(path: Path, documents: int, tokens: int, sha256: str | None) -> NDArray[np.uint64]:
    """Where each document begins, and after them the end of the last; ValueError says what is wrong with the file."""
    try:
        size, expected = path.stat().st_size, 8 * (documents + 1)
        if size != expected:
            raise ValueError(f"has {size:,} bytes, and {expected:,} belong to {documents:,} documents")
        starts = np.memmap(path, dtype="<u8", mode="r", shape=(documents + 1,))
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
    for first in range(0, documents, PART):
        part = np.asarray(starts[first : first + PART + 1])
        if len(falls := np.flatnonzero(part[1:] <= part[:-1])):
            begin, after = part[falls[0]], part[falls[0] + 1]
            raise ValueError(f"does not rise: document {first + falls[0]:,} begins at {begin:,} and the next at {after:,}")
    if starts[0] != 0 or starts[-1] != tokens:
        raise ValueError(f"goes from {starts[0]:,} to {starts[-1]:,} and not from 0 to {tokens:,}")
    if sha256 is not None and file_sha256(path) != sha256:
        raise ValueError("is not what was written: documents begin elsewhere")
    return starts


def starts_at_marks(stream: TokenStream, mark: int) -> NDArray[np.uint64] | None:
    """The same for tokens without an index: a document begins with each mark, and with the first token; None without any mark.

    Where marks are after documents instead, each begins with the mark of the one before: the same tokens lie side by side.
    """
    marks = np.fromiter(stream.positions(mark), np.uint64)
    if not len(marks):
        return None
    first = [] if marks[0] == 0 else [0]
    return np.concatenate([first, marks, [stream.tokens]]).astype(np.uint64)
