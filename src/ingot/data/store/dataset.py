"""The prepared folder: shards, a document index per split, and dataset.json, which says what they hold.

Opening checks what is cheap (names, headers, sizes, counts); audit.py reads every byte. The fingerprint covers the tokenizer and
the splits and leaves out where they came from: the same text prepared on another machine is the same data.
"""

from __future__ import annotations

import json
import shlex
from bisect import bisect_right
from collections.abc import Callable
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ingot.data.store.shards import open_shard, token_count
from ingot.data.text.files import is_text
from ingot.data.tokenizers import Tokenizer, digest, from_spec
from ingot.data.tokenizers.base import PACKED
from ingot.errors import DataError

MANIFEST = "dataset.json"
VERSION = 1
SPLITS = ("train", "val")
IDENTITY = ("format", "version", "tokenizer", "splits")  # what the fingerprint covers
UNTOLD = ("piece_bytes", "document_index_sha256")  # of a split, which older data does not say
AGAIN = "copy the folder again or prepare the data again"

Count = Annotated[int, Field(ge=0)]
OpenTokens = Callable[[Path], NDArray[np.uint16]]
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


class SplitRecord(_Record):
    """One split; its token stream is that of its shards, one after the other.

    `bytes` is the UTF-8 size of the text, `piece_bytes` what its tokens stand for; a tokenizer that loses nothing has them equal.
    """

    documents: Count
    tokens: Count
    bytes: Count
    piece_bytes: Count | None = None
    shards: list[ShardRecord]
    document_index: FileName
    document_index_sha256: str | None = None


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
    version: Literal[1] = 1
    tokenizer: TokenizerRecord
    splits: dict[str, SplitRecord]
    fingerprint: str = ""
    created_by: str = ""
    source: Any = None


def identity(record: dict[str, Any]) -> str:
    """The fingerprint of a dataset: equal when tokenizer, tokens, documents and bytes are.

    A file inside the tokenizer is covered by the tokenizer's own fingerprint, whatever compressed it. `piece_bytes` counts only
    where it says something new and the index's checksum never, so that data from before they were recorded keeps its fingerprint.
    """
    tokenizer = {**record["tokenizer"], "spec": {k: v for k, v in record["tokenizer"]["spec"].items() if k != PACKED}}
    splits = {
        name: {k: v for k, v in split.items() if k not in UNTOLD or (k == "piece_bytes" and v not in (None, split.get("bytes")))}
        for name, split in record["splits"].items()
    }
    return digest({key: record.get(key) for key in IDENTITY} | {"tokenizer": tokenizer, "splits": splits})


class Split:
    """The tokens of one split as one stream, wherever its shards end."""

    def __init__(self, folder: Path, record: SplitRecord, open_tokens: OpenTokens = open_shard) -> None:
        self.tokens, self.documents = record.tokens, record.documents
        self.bytes, self.piece_bytes = record.bytes, record.piece_bytes
        self._paths = [folder / shard.file for shard in record.shards]
        self._sizes = [shard.tokens for shard in record.shards]
        self._ends = list(accumulate(self._sizes))
        self._arrays: list[NDArray[np.uint16] | None] = [None] * len(self._paths)
        self._index = folder / record.document_index if record.document_index else None
        self._open = open_tokens

    def shard(self, number: int) -> NDArray[np.uint16]:
        """The tokens of one shard, mapped at the first call."""
        array = self._arrays[number]
        if array is None:
            array = self._open(self._paths[number])
            if len(array) != self._sizes[number]:
                raise DataError(f"{self._paths[number]} was replaced while it was in use; start again with the new data")
            self._arrays[number] = array
        return array

    @property
    def shards(self) -> list[NDArray[np.uint16]]:
        """The tokens of every shard."""
        return [self.shard(number) for number in range(len(self._paths))]

    def document_starts(self) -> NDArray[np.uint64]:
        """Where each document begins in the stream, and behind them the end of the last."""
        if self._index is None:
            where = self._paths[0].parent
            raise DataError(f"nothing says where documents begin in {where}; make a folder that does: ingot data convert {where}")
        try:
            return np.memmap(self._index, dtype="<u8", mode="r", shape=(self.documents + 1,))
        except (OSError, ValueError) as error:
            raise DataError(f"cannot map {self._index}: {error}; {AGAIN}") from error

    def read(self, start: int, stop: int, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Tokens start..stop of the stream, copied into `out` (any integer type) where it is given."""
        if not 0 <= start <= stop <= self.tokens:
            raise IndexError(f"tokens {start} to {stop} of a split of {self.tokens}")
        count = stop - start
        out = np.empty(count, np.uint16) if out is None else out[:count]
        number, filled = bisect_right(self._ends, start), 0
        while filled < count:
            array = self.shard(number)
            begin = start + filled - (self._ends[number] - self._sizes[number])
            part = array[begin : begin + count - filled]
            out[filled : filled + len(part)] = part
            filled += len(part)
            number += 1
        return out


class Dataset:
    """A prepared folder that passed the cheap checks; `Dataset.open` makes it."""

    def __init__(self, folder: Path, manifest: Manifest, tokenizer: Tokenizer, open_tokens: OpenTokens = open_shard) -> None:
        self.folder, self.manifest, self.tokenizer, self._open_tokens = folder, manifest, tokenizer, open_tokens

    @classmethod
    def open(cls, path: Path | str) -> Dataset:
        """Opens a prepared folder and checks headers, sizes and counts of its files."""
        folder = Path(path)
        manifest = _read_manifest(folder)
        tokenizer = _read_tokenizer(folder / MANIFEST, manifest.tokenizer)
        for split in manifest.splits.values():
            _check_split(folder, split)
        return cls(folder, manifest, tokenizer)

    @property
    def fingerprint(self) -> str:
        """Equal for datasets with the same tokenizer, tokens and documents."""
        return self.manifest.fingerprint

    @cached_property
    def _splits(self) -> dict[str, Split]:
        return {name: Split(self.folder, record, self._open_tokens) for name, record in self.manifest.splits.items()}

    def split(self, name: str) -> Split:
        """The split called `name`: train or val."""
        if name not in self._splits:
            raise DataError(f"{self.folder} has no split {name!r}; it has {', '.join(self._splits)}")
        return self._splits[name]


def prepare_command(source: Path | str, output: Path | str) -> str:
    """The command that makes a folder out of a text file."""
    return f"ingot data prepare --input {shlex.quote(str(source))} --tokenizer byte --output {shlex.quote(str(output))}"


def _read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    try:
        if folder.is_file():
            source = folder if is_text(folder) else "FILE"
            command = prepare_command(source, folder.with_name(folder.stem + "-byte"))
            raise DataError(f"{folder} is a file, not a prepared folder; prepare one with: {command}")
        if not folder.is_dir():
            raise DataError(f"no data at {folder}: there is no such folder; prepare it with: {prepare_command('FILE', folder)}")
        if not path.is_file():
            command = prepare_command(folder, "DIR")
            raise DataError(f"no data at {folder}: the folder has no {MANIFEST}; if it holds text, prepare it with: {command}")
        record = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged: {error}; {AGAIN}") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    if not isinstance(record, dict) or record.get("format") != "ingot-dataset":
        raise DataError(f"{path} does not describe an ingot dataset; prepare one with: {prepare_command('FILE', 'DIR')}")
    if isinstance(version := record.get("version"), int) and version > VERSION:
        raise DataError(
            f"{path} has version {version} and this ingot reads up to {VERSION}; upgrade ingot or prepare the data again"
        )
    try:
        manifest = Manifest.model_validate(record, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        raise DataError(f"{path} is damaged: {'.'.join(map(str, first['loc']))}: {first['msg']}; {AGAIN}") from None
    if manifest.fingerprint != identity(record):
        raise DataError(f"{path} was edited or damaged: its fingerprint does not fit its contents; {AGAIN}")
    return manifest


def _read_tokenizer(path: Path, record: TokenizerRecord) -> Tokenizer:
    tokenizer = from_spec(record.spec)
    told = (record.kind, record.vocab_size, record.bos, record.fingerprint)
    if told != (tokenizer.kind, tokenizer.vocab_size, tokenizer.bos, tokenizer.fingerprint()):
        raise DataError(f"{path} is damaged: its tokenizer does not fit its fingerprint; {AGAIN}")
    return tokenizer


def _check_split(folder: Path, split: SplitRecord) -> None:
    for shard in split.shards:
        if (found := token_count(folder / shard.file)) != shard.tokens:
            raise DataError(f"{folder / shard.file} holds {found:,} tokens and {MANIFEST} says {shard.tokens:,}; {AGAIN}")
    if (found := sum(shard.tokens for shard in split.shards)) != split.tokens:
        raise DataError(f"{folder / MANIFEST} is damaged: shards of {found:,} tokens in a split of {split.tokens:,}; {AGAIN}")
    index = folder / split.document_index
    expected = 8 * (split.documents + 1)
    try:
        size = index.stat().st_size
    except FileNotFoundError:
        raise DataError(f"missing document index {index}; {AGAIN}") from None
    except OSError as error:
        raise DataError(f"cannot read {index}: {error.strerror}") from error
    if size != expected:
        raise DataError(
            f"size mismatch in {index}: {expected:,} bytes expected for {split.documents:,} documents, {size:,} found; {AGAIN}"
        )
