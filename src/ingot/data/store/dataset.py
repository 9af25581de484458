"""Datasets: opened token data of any format, and Ingot's own format, the prepared folder.

A prepared folder contains shards, a document index per split, and dataset.json, which describes them. Opening the folder
runs only cheap checks (names, headers, sizes, counts); an index is checked on first use, and verify/ reads every byte. The
fingerprint covers the tokenizer and the splits but not where the text came from: the same text prepared on another machine has
the same fingerprint. formats/ opens the token files of other programs.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ingot.data import SPLITS
from ingot.data.store.documents import Document, Marks, check_index_size, cut, open_index, starts_at_marks
from ingot.data.store.shards import AGAIN, DataProblem, OpenTokens, TokenStream, open_shard, read_header
from ingot.data.text.text_files import kind_of
from ingot.data.tokenizers import Tokenizer, from_spec
from ingot.data.tokenizers.tokenizer_base import PACKED, IdType, NoSpacePiece, digest
from ingot.errors import DataError, Setting
from ingot.runtime.files import open_to_read, read_json

MANIFEST = "dataset.json"
VERSION = 2  # the newest version of dataset.json that this code reads
IDENTITY = ("format", "version", "tokenizer", "splits")  # the keys of dataset.json that the fingerprint covers
OPTIONAL = ("piece_bytes", "document_index_sha256", "buckets")  # keys of a split that older dataset.json files lack
FINGERPRINT_BYTES = 4096  # number of bytes at each end of another program's file that the fingerprint covers

Count = Annotated[int, Field(ge=0)]
FileName = Annotated[str, Field(pattern=r"^\w+\.(bin|index)$")]  # never a path: files are in the folder of dataset.json


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True)


class ShardRecord(_Record):
    """One shard; `documents` counts the documents that begin in it, and `bytes` is the size of its part of the original text."""

    file: FileName
    tokens: Count
    documents: Count
    bytes: Count
    sha256: str


class BucketRecord(_Record):
    """A named part of a split: consecutive documents, starting where the previous bucket ends."""

    name: str
    documents: Count
    tokens: Count
    bytes: Count
    piece_bytes: Count | None = None


class SplitRecord(_Record):
    """One split: its shards and its buckets, if it has any, in the order of the token stream.

    `bytes` is the UTF-8 size of the original text and `piece_bytes` that of the decoded tokens; with a lossless tokenizer, they
    are equal.
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
    """The tokenizer, fully defined by `spec`; the other fields are for programs that cannot read the spec."""

    kind: str
    vocab_size: Count
    bos: int | None
    fingerprint: str
    spec: dict[str, Any]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TokenizerRecord:
        """Build the record of a tokenizer for dataset.json."""
        facts = {"kind": tokenizer.kind, "vocab_size": tokenizer.vocab_size, "bos": tokenizer.bos, "spec": tokenizer.spec()}
        return cls(fingerprint=tokenizer.fingerprint(), **facts)


class Manifest(_Record):
    """The contents of dataset.json."""

    format: Literal["ingot-dataset"] = "ingot-dataset"
    version: Literal[1, 2] = 1  # 2: the shards have 32-bit ids
    tokenizer: TokenizerRecord
    splits: dict[str, SplitRecord]
    fingerprint: str = ""
    created_by: str = ""
    source: Any = None


def identity(record: dict[str, Any]) -> str:
    """Return the fingerprint of a dataset: a hash of its tokenizer, its shards with their checksums, and its counts.

    The tokenizer file is covered by the tokenizer's own fingerprint, which does not depend on how the file was compressed.
    `piece_bytes` and `buckets` are hashed only where they add information, and the index checksum is never hashed, so that data
    written before these fields existed keeps its fingerprint.
    """
    tokenizer = {**record["tokenizer"], "spec": {k: v for k, v in record["tokenizer"]["spec"].items() if k != PACKED}}
    splits = {}
    for name, split in record["splits"].items():
        counts_pieces = split.get("piece_bytes") not in (None, split.get("bytes"))
        counted = {"piece_bytes": counts_pieces, "buckets": bool(split.get("buckets"))}
        splits[name] = {key: value for key, value in split.items() if key not in OPTIONAL or counted.get(key)}
    return digest({key: record.get(key) for key in IDENTITY} | {"tokenizer": tokenizer, "splits": splits})


def foreign_record(folder: Path, sizes: Mapping[Path, int], **counts: Any) -> SplitRecord:
    """Build the record of a split whose format stores no document counts, text sizes or checksums."""
    shards = [
        ShardRecord.model_construct(file=str(path.relative_to(folder)), tokens=size, documents=0, bytes=0, sha256="")
        for path, size in sizes.items()
    ]
    empty: dict[str, Any] = {"documents": 0, "bytes": 0, "piece_bytes": None, "document_index": "", "buckets": []}
    return SplitRecord.model_construct(**(empty | {"tokens": sum(sizes.values()), "shards": shards} | counts))


class Split(TokenStream):
    """The tokens and document boundaries of one split.

    `record` describes all files of the split; if damaged data is opened for an audit, the stream contains only readable files.
    `marks_after` is True if separators follow documents (EOS), and False if they precede documents (BOS).
    """

    eos: int | None = None  # the id after each document; None in formats with BOS ids or without separators

    def __init__(
        self,
        name: str,
        folder: Path,
        record: SplitRecord,
        sizes: Mapping[Path, int] | None = None,
        open_tokens: OpenTokens = open_shard,
        *,
        dtype: IdType | None = None,
        marks_after: bool = False,
    ) -> None:
        sizes = {folder / shard.file: shard.tokens for shard in record.shards} if sizes is None else sizes
        super().__init__(list(sizes), list(sizes.values()), open_tokens, dtype=dtype)
        self.name, self.folder, self.record, self._marks_after = name, folder, record, marks_after
        self.documents, self.bytes, self.piece_bytes = record.documents, record.bytes, record.piece_bytes
        self.is_prepared = bool(record.document_index)  # True if dataset.json describes the split
        self._mark: int | None = None
        self._starts: NDArray[np.uint64] | None = None

    def use_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Use this tokenizer's dtype for the ids, and its BOS id as the start of documents."""
        self.dtype, self._mark = tokenizer.dtype, tokenizer.bos

    def index(self) -> NDArray[Any] | None:
        """Return the stored document starts, followed by the end of the last document; None if the format has only separators.

        Raises ValueError if the index is damaged.
        """
        if not self.is_prepared:
            return None
        record = self.record
        return open_index(self.folder / record.document_index, record.documents, record.tokens, record.document_index_sha256)

    def document_starts(self) -> NDArray[np.uint64]:
        """Return the offset of each document in the stream, followed by the end of the last document."""
        if self._starts is not None:  # cached, because every row with a document mask needs the offsets
            return self._starts
        try:
            starts = self.index()
        except ValueError as problem:
            raise DataError(f"{self.folder / self.record.document_index} {problem}; {AGAIN}") from None
        if starts is None:
            marks = np.fromiter(self.positions(self._mark), np.int64) if self._mark is not None else np.empty(0, np.int64)
            if not len(marks):
                command = f"ingot data convert {self.folder} --mark ID"
                raise DataError(f"{self.folder} does not record where documents begin; convert it with: {command}")
            starts = starts_at_marks(self.tokens, marks).astype(np.uint64)
        self._starts = starts
        return starts

    def document_repeats(self) -> NDArray[np.uint16] | None:
        """Return how many tokens each document repeats from the previous document; None if no document repeats any."""
        return None

    def bucket_documents(self, marks: Marks) -> Iterator[tuple[str | None, Iterator[Document]]]:
        """Yield (name, documents without separators) for each bucket; a split without buckets counts as one bucket named None."""
        if not self.is_prepared:
            yield None, cut(self, marks, self._marks_after)
            return
        first = 0
        buckets: list[tuple[str | None, int]] = [(bucket.name, bucket.documents) for bucket in self.record.buckets]
        for name, documents in buckets or [(None, self.documents)]:
            yield name, self._indexed_documents(first, first + documents)
            first += documents

    def _indexed_documents(self, first: int, stop: int) -> Iterator[Document]:
        starts, bos = self.document_starts(), self._mark
        for number in range(first, stop):
            start, end = int(starts[number]), int(starts[number + 1])
            if bos is not None and (start >= end or self.token(start) != bos):
                where = f"document {number} of {self.name}"
                raise DataError(f"{self.folder} is damaged: {where} starts without its BOS token; prepare the data again")
            yield self.slice(start + (bos is not None), end)


class Bucket:
    """A named range of consecutive documents in a split."""

    def __init__(self, split: Split, record: BucketRecord, first_token: int, first_document: int) -> None:
        self.name, self.folder = f"{split.name}/{record.name}", split.folder
        self.tokens, self.documents, self.eos = record.tokens, record.documents, split.eos
        self.bytes, self.piece_bytes, self.is_prepared = record.bytes, record.piece_bytes, split.is_prepared
        self._split, self._first_token = split, first_token
        self._documents = slice(first_document, first_document + record.documents)
        self._starts: NDArray[np.uint64] | None = None

    def read(self, start: int, stop: int, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Return a copy of the bucket's tokens[start:stop], in `out` if it is given."""
        return self._split.read(self._first_token + start, self._first_token + stop, out)

    def document_starts(self) -> NDArray[np.uint64]:
        """Return the offset of each document in the bucket, followed by the end of the last document."""
        if self._starts is None:  # cached, because every row with a document mask needs the offsets
            starts = self._split.document_starts()[self._documents.start : self._documents.stop + 1]
            self._starts = np.asarray(starts) - np.uint64(self._first_token)
        return self._starts

    def document_repeats(self) -> NDArray[np.uint16] | None:
        """Return how many tokens each document repeats from the previous document; None if no document repeats any."""
        repeats = self._split.document_repeats()
        return None if repeats is None else repeats[self._documents]


Documents = Split | Bucket  # tokens with document boundaries


class NoTokenizer(DataError):
    """Raised for token data that does not record its tokenizer."""

    def __init__(self, folder: Path) -> None:
        super().__init__(f"{folder} holds tokens but does not name their tokenizer; set {{0}} to it", Setting("data.tokenizer"))


@dataclass(eq=False)
class Dataset:
    """Token data in any supported format: its splits and, if the data or the user specifies one, its tokenizer."""

    folder: Path
    format: str
    splits: Mapping[str, Split]
    about: str = ""  # a description of the files for users
    known_tokenizer: Tokenizer | None = None
    problems: list[DataProblem] = field(default_factory=list)  # defects found when damaged data was opened for an audit
    record: Manifest | None = None  # the contents of dataset.json, if readable

    @classmethod
    def open(cls, path: Path | str, fitting: str = "byte", *, strict: bool = True) -> Dataset:
        """Open a prepared folder and check the headers, sizes and counts of its files.

        With `strict` the first problem raises an error; otherwise all problems are collected. `fitting` is the tokenizer that the
        error message suggests if the path is not a prepared folder.
        """
        folder, problems, splits = Path(path), list[DataProblem](), dict[str, Split]()
        if strict and not (folder / MANIFEST).is_file():
            holds_text = folder.is_dir() or (folder.is_file() and kind_of(folder))
            command = prepare_command(folder if holds_text else "FILE", "DIR" if folder.exists() else folder, fitting)
            problem = f"it has no {MANIFEST}" if folder.exists() else "there is no such file or folder"
            raise DataError(f"no data at {folder}: {problem}", advice=f"if you have text, prepare it with: {command}")
        manifest, tokenizer = _read_manifest(folder / MANIFEST, problems), None
        if manifest is not None:
            file = str(folder / MANIFEST)
            try:
                tokenizer = from_spec(manifest.tokenizer.spec)
                made = TokenizerRecord.of(tokenizer)
                if made.model_dump(exclude={"spec"}) != manifest.tokenizer.model_dump(exclude={"spec"}):
                    problem = "is damaged: its tokenizer does not match its fingerprint"
                    problems.append(DataProblem("tokenizer-mismatch", file, problem, place="tokenizer"))
            except DataError as error:
                problems.append(tokenizer_problem(file, error))
            for name, record in manifest.splits.items():
                paths = [folder / shard.file for shard in record.shards]
                sizes, dtype = readable_shards(paths, problems)
                for path, shard in zip(paths, record.shards, strict=True):
                    if path in sizes and sizes[path] != shard.tokens:
                        problem = f"holds {sizes.pop(path):,} tokens but {MANIFEST} records {shard.tokens:,}"
                        problems.append(DataProblem("shard-size", str(path), problem))
                if strict:  # audits open data with strict=False and check the whole index themselves
                    try:
                        check_index_size(folder / record.document_index, record.documents)
                    except ValueError as fault:
                        problems.append(DataProblem("document-index", str(folder / record.document_index), str(fault)))
                splits[name] = Split(name, folder, record, sizes, dtype=dtype)
        if strict and problems:
            raise problems[0].error()
        about = f"a prepared folder, {sum(split.documents for split in splits.values()):,} documents"
        dataset = cls(folder, "ingot", splits, about, None, problems, manifest)
        if tokenizer is not None:
            dataset.use_tokenizer(tokenizer)
        return dataset

    @property
    def manifest(self) -> Manifest:
        """The dataset.json of a prepared folder."""
        assert self.record is not None
        return self.record

    @property
    def is_prepared(self) -> bool:
        """True if the data has a readable dataset.json."""
        return self.record is not None

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that produced the tokens; raises NoTokenizer if neither the data nor the user specifies it."""
        if self.known_tokenizer is None:
            raise NoTokenizer(self.folder)
        return self.known_tokenizer

    def use_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Set the tokenizer that produced the tokens."""
        self.known_tokenizer = tokenizer
        for split in self.splits.values():
            split.use_tokenizer(tokenizer)

    @property
    def tokens(self) -> dict[str, int]:
        """The token count of each non-empty split."""
        return {name: split.tokens for name, split in self.splits.items() if split.tokens}

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the tokenizer, the shards and the counts in dataset.json.

        For other programs' data, it covers the tokenizer and the name, size, first and last bytes of every file, so
        computing it is fast even for a hundred files.
        """
        if self.record is not None:
            return self.record.fingerprint
        files: Any
        if self.format == "gpt-simple":
            pairs = [pair for split in self.splits.values() for path in split.paths for pair in (path, path.with_suffix(".idx"))]
            files = [[str(path.relative_to(self.folder)), _checksum_of_ends(path)] for path in pairs]
        else:
            files = {name: [[path.name, _checksum_of_ends(path)] for path in self.split(name).paths] for name in SPLITS}
        return digest({"tokenizer": self.tokenizer.fingerprint(), "files": files})

    def split(self, name: str) -> Split:
        """Return the train or val split; a split without files is empty."""
        if name in self.splits:
            return self.splits[name]
        if name not in SPLITS:
            raise DataError(f"{self.folder} has no split {name!r}; it has {', '.join(self.splits)}")
        return Split(name, self.folder, foreign_record(self.folder, {}))

    def buckets(self, name: str) -> dict[str, Bucket]:
        """Return the buckets of a split by name; {} if it has none."""
        split = self.split(name)
        buckets, tokens, documents = {}, 0, 0
        for record in split.record.buckets:
            buckets[record.name] = Bucket(split, record, tokens, documents)
            tokens, documents = tokens + record.tokens, documents + record.documents
        return buckets


def _checksum_of_ends(path: Path) -> str:
    with open_to_read(path) as file:
        start = file.read(FINGERPRINT_BYTES)
        size = file.seek(0, 2)
        file.seek(max(0, size - FINGERPRINT_BYTES))
        return hashlib.sha256(start + file.read() + str(size).encode()).hexdigest()


def prepare_command(source: Path | str, output: Path | str, tokenizer: str = "byte") -> str:
    """Return the `ingot data prepare` command for a text file or folder."""
    source, tokenizer, output = (shlex.quote(str(word)) for word in (source, tokenizer, output))
    return f"ingot data prepare --input {source} --tokenizer {tokenizer} --output {output}"


@dataclass
class SplitCounts:
    """Counts of a split or bucket, None if unknown; `bytes` measures the original text, `piece_bytes` the decoded tokens."""

    documents: int | None
    tokens: int
    bytes: int | None
    piece_bytes: int | None
    bytes_per_token: float | None = field(init=False)  # counts the original text or, if its size is unknown, the decoded tokens

    def __post_init__(self) -> None:
        known_bytes = self.piece_bytes if self.bytes is None else self.bytes
        self.bytes_per_token = known_bytes / self.tokens if self.tokens and known_bytes is not None else None

    @classmethod
    def recorded(cls, record: SplitRecord | BucketRecord) -> SplitCounts:
        """Return the counts that dataset.json records for a split or a bucket."""
        return SplitCounts(record.documents, record.tokens, record.bytes, record.piece_bytes)


def tokenizer_problem(file: str, error: DataError) -> DataProblem:
    """Return a DataProblem for a tokenizer that cannot be read."""
    if isinstance(error, NoSpacePiece):
        problem = "has a tokenizer without a piece for a single space (U+2581), so byte counts would be wrong"
        return DataProblem("space-piece", file, problem, "prepare the text again with another tokenizer", "tokenizer")
    return DataProblem("tokenizer", file, f"holds no readable tokenizer: {error}", place="tokenizer")


def readable_shards(paths: Sequence[Path], problems: list[DataProblem]) -> tuple[dict[Path, int], IdType]:
    """Return the token counts of the readable shards and their widest dtype; add the defects of the others to `problems`."""
    sizes, dtype = {}, np.dtype(np.uint16)
    for path in paths:
        header = read_header(path)
        if isinstance(header, DataProblem):
            problems.append(header)
        else:
            sizes[path] = header[1]
            dtype = max(dtype, np.dtype(header[0]), key=lambda dtype: dtype.itemsize)
    return sizes, dtype


def _read_manifest(file: Path, problems: list[DataProblem]) -> Manifest | None:
    """Read dataset.json and check its consistency; add defects to `problems`, and return None if it cannot be used."""
    advice = AGAIN
    try:
        record = read_json(file)
        if not isinstance(record, dict) or record.get("format") != "ingot-dataset":
            advice = f"prepare a dataset with: {prepare_command('FILE', 'DIR')}"
            problem = "does not describe an ingot dataset"
        elif isinstance(version := record.get("version"), int) and version > VERSION:
            advice = "upgrade ingot or prepare the data again"
            problem = f"has version {version} but this version of ingot reads only versions up to {VERSION}"
        else:
            manifest = Manifest.model_validate(record, strict=True)
            damaged = partial(DataProblem, "dataset-json", str(file))
            if manifest.fingerprint != identity(record):
                problems.append(damaged("was edited or damaged: its fingerprint does not match its contents"))
            if missing := [name for name in SPLITS if name not in manifest.splits]:
                problems.append(damaged(f"is damaged: it has no split {missing[0]}", place="splits"))
            for name, split in manifest.splits.items():
                for key in ("tokens", "documents", "bytes"):
                    if (total := sum(getattr(shard, key) for shard in split.shards)) != (recorded := getattr(split, key)):
                        problem = f"is damaged: the shards have {total:,} {key} in total, but the split records {recorded:,}"
                        problems.append(damaged(problem, place=f"splits.{name}"))
            return manifest
    except ValidationError as error:
        first = error.errors()[0]
        problem = f"is damaged: {'.'.join(map(str, first['loc']))}: {first['msg']}"
    except ValueError as error:
        problem = f"is damaged: {error}"
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    problems.append(DataProblem("dataset-json", str(file), problem, advice))
    return None
