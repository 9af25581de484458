"""A folder of tokens as an audit meets it: what can be read of it, and a finding for everything that cannot.

`Dataset.open` refuses a folder at its first problem; here a problem becomes a finding and the rest is still read. Two layouts are
known: ours, with dataset.json, and bare shards as golf has them, described at best by a manifest.json two folders above.
"""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from ingot.data.formats.base import Stream
from ingot.data.formats.manifest import MANIFEST as PUBLISHED
from ingot.data.formats.manifest import listed_dataset, paired_tokenizer
from ingot.data.formats.open import detect
from ingot.data.formats.shards import NO_TOKENS, VALIDATION, WIDE_MAGIC, WIDE_VERSION, open_tokens
from ingot.data.store.dataset import AGAIN, MANIFEST, SPLITS, Dataset, Manifest, ShardRecord, SplitRecord, identity
from ingot.data.store.shards import HEADER_BYTES, MAGIC, TOKEN_BYTES, VERSION
from ingot.data.tokenizers import Tokenizer, from_spec, open_tokenizer
from ingot.data.tokenizers.base import NoSpacePiece
from ingot.errors import ConfigError, DataError

HEADERS = {MAGIC: (VERSION, TOKEN_BYTES), WIDE_MAGIC: (WIDE_VERSION, 2 * TOKEN_BYTES)}
Starts = NDArray[np.int64]  # where documents begin, and behind them the end of the last


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong. Codes never change their meaning; docs/data-audit.md explains each."""

    code: str
    file: str
    problem: str
    advice: str
    place: str = ""

    @property
    def line(self) -> str:
        """All of it in one line."""
        where = f"{self.file}, {self.place}" if self.place else self.file
        return " ".join(f"{self.code}: {where}: {self.problem}; {self.advice}".split())


@dataclass(frozen=True)
class AuditSplit:
    """What can be read of a split. `record` is what dataset.json says, `listed` the documents a manifest.json counts."""

    name: str
    folder: Path
    paths: list[Path]
    sizes: list[int]
    whole: bool  # every shard can be read
    record: SplitRecord | None = None
    listed: int | None = None

    @cached_property
    def stream(self) -> Stream:
        """The tokens of the readable shards."""
        return Stream(self.paths, self.sizes, open_tokens)

    @property
    def tokens(self) -> int:
        return sum(self.sizes)

    def read(self, start: int, stop: int) -> NDArray[np.uint16]:
        """Tokens start..stop of the stream."""
        parts = self.stream.slice(start, stop)
        return np.concatenate(parts) if parts else np.empty(0, np.uint16)

    def place(self, token: int) -> tuple[str, str]:
        """The file of a token of the stream, and its place there."""
        ends = np.cumsum(self.sizes)
        number = min(int(np.searchsorted(ends, token, "right")), len(self.paths) - 1)
        return str(self.paths[number]), f"token {token - int(ends[number]) + self.sizes[number]:,}"


@dataclass
class Folder:
    """A folder of tokens; `tokenizer` is None where it cannot be read."""

    path: Path
    tokenizer: Tokenizer | None
    splits: dict[str, AuditSplit] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    fingerprint: str | None = None


def open_folder(path: Path, tokenizer: str | None = None) -> Folder:
    """Reads what there is; `tokenizer` says what made the tokens of bare shards, and must be that of a prepared folder."""
    try:
        if (path / MANIFEST).is_file():
            return _prepared(path, tokenizer)
        shards = sorted(file for file in path.glob("*.bin") if not NO_TOKENS.search(file.stem.lower()))
        if not any(path.glob("*_train_*.bin")) and not any(path.glob("*_val_*.bin")):
            _refuse_other_formats(path)
    except OSError as error:
        raise DataError(f"cannot read {error.filename or path}: {error.strerror}") from error
    return _bare(path, shards, tokenizer)


def _refuse_other_formats(path: Path) -> None:
    if not path.is_dir():
        Dataset.open(path)  # which says what the file is, or that there is none
    if (found := detect(path)) != "shards":
        command = f"ingot data convert {shlex.quote(str(path))} --to ingot --output DIR"
        raise DataError(f"{path} holds tokens in the format {found}; make it a prepared folder with: {command}")


def _prepared(path: Path, name: str | None) -> Folder:
    file = path / MANIFEST
    try:
        record = json.loads(file.read_bytes())
        manifest = Manifest.model_validate(record, strict=True)
    except (ValueError, RecursionError) as error:
        reason = str(error) or type(error).__name__
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        finding = Finding("dataset-json", str(file), f"cannot be understood: {reason}", AGAIN)
        shards = [shard for split in SPLITS for shard in sorted(path.glob(f"{split}_*.bin"))]
        return _bare(path, shards, name, [finding])
    folder = Folder(path, None, fingerprint=manifest.fingerprint)
    if manifest.fingerprint != identity(record):
        problem = "was edited or damaged: its fingerprint does not fit its contents"
        folder.findings.append(Finding("dataset-json", str(file), problem, AGAIN))
    folder.tokenizer = _own_tokenizer(folder, manifest)
    if name is not None and folder.tokenizer is not None:
        other = open_tokenizer(name)
        if other.fingerprint() != folder.tokenizer.fingerprint():
            told = [f"{one.kind}, {one.vocab_size:,} ids, {one.fingerprint()[:12]}" for one in (folder.tokenizer, other)]
            problem = f"its tokenizer ({told[0]}) is not the one given ({told[1]})"
            advice = "use the tokenizer that is inside, or prepare the text again with yours"
            folder.findings.append(Finding("tokenizer-mismatch", str(file), problem, advice, "tokenizer"))
    for split, told_split in manifest.splits.items():
        _check_sums(folder, file, split, told_split)
        paths = [path / shard.file for shard in told_split.shards]
        folder.splits[split] = _split(folder, split, paths, told_split)
    return folder


def _own_tokenizer(folder: Folder, manifest: Manifest) -> Tokenizer | None:
    file, told = str(folder.path / MANIFEST), manifest.tokenizer
    try:
        tokenizer = from_spec(told.spec)
    except DataError as error:
        folder.findings.append(_tokenizer_finding(file, error))
        return None
    if (told.kind, told.vocab_size, told.bos, told.fingerprint) != (
        tokenizer.kind,
        tokenizer.vocab_size,
        tokenizer.bos,
        tokenizer.fingerprint(),
    ):
        problem = "the tokenizer inside is not the one that its fingerprint is of"
        folder.findings.append(Finding("tokenizer-mismatch", file, problem, AGAIN, "tokenizer"))
    return tokenizer


def _tokenizer_finding(file: str, error: DataError) -> Finding:
    """Why a tokenizer cannot be read."""
    if isinstance(error, NoSpacePiece):
        problem = "the tokenizer has no piece for a single space (U+2581), so the bytes of a text are counted wrong"
        return Finding("space-piece", file, problem, "prepare the text again with another tokenizer", "tokenizer")
    return Finding("tokenizer", file, f"the tokenizer cannot be read: {error}", AGAIN, "tokenizer")


def _check_sums(folder: Folder, file: Path, name: str, split: SplitRecord) -> None:
    for key in ("tokens", "documents", "bytes"):
        found, told = sum(getattr(shard, key) for shard in split.shards), getattr(split, key)
        if found != told:
            problem = f"its shards have {found:,} {key} together and the split {told:,}"
            folder.findings.append(Finding("dataset-json", str(file), problem, AGAIN, f"splits.{name}"))


def _bare(path: Path, shards: list[Path], name: str | None, findings: list[Finding] | None = None) -> Folder:
    known, stats = _published(path)
    folder = Folder(path, None, findings=findings or [])
    if name is None and known is None and not findings:
        raise ConfigError(f"{path} does not say what its tokens stand for; give --tokenizer (gpt2, a .model, tokenizer.json)")
    opened = {one: _open_tokenizer(folder, one) for one in (name, known) if one}
    folder.tokenizer = opened.get(name or known or "")
    if name and known and (mine := opened[name]) and (its := opened[known]) and mine.fingerprint() != its.fingerprint():
        problem = f"was made with {known} by its {PUBLISHED}, and {name} is another tokenizer"
        folder.findings.append(Finding("tokenizer-mismatch", str(path), problem, f"give --tokenizer {known}"))
    for split in SPLITS:
        paths = [shard for shard in shards if bool(VALIDATION.search(shard.stem.lower())) == (split == "val")]
        if paths:
            complete = stats.get(f"files_{split}") == len(paths)
            told = stats.get(f"docs_{split}") if complete else None
            folder.splits[split] = _split(folder, split, paths, listed=told if isinstance(told, int) else None)
    return folder


def _open_tokenizer(folder: Folder, name: str) -> Tokenizer | None:
    try:
        return open_tokenizer(name)
    except DataError as error:
        folder.findings.append(_tokenizer_finding(name, error))
        return None


def _published(path: Path) -> tuple[str | None, dict[str, Any]]:
    """The tokenizer and the counts of published data; a manifest.json that is damaged may be somebody else's."""
    try:
        stats = (listed_dataset(path) or {}).get("stats")
        return paired_tokenizer(path), stats if isinstance(stats, dict) else {}
    except (DataError, OSError):
        return None, {}


def _split(
    folder: Folder, name: str, paths: list[Path], record: SplitRecord | None = None, listed: int | None = None
) -> AuditSplit:
    told = record.shards if record else [None] * len(paths)
    counted = [(path, _count(path, shard)) for path, shard in zip(paths, told, strict=True)]
    folder.findings.extend(found for _, found in counted if isinstance(found, Finding))
    sound = [(path, found) for path, found in counted if isinstance(found, int)]
    return AuditSplit(
        name, folder.path, [path for path, _ in sound], [size for _, size in sound], len(sound) == len(paths), record, listed
    )


def _count(path: Path, told: ShardRecord | None) -> int | Finding:
    """The tokens of a shard by its header, if its size fits and dataset.json agrees."""
    try:
        with path.open("rb") as file:
            header, size = file.read(HEADER_BYTES), os.fstat(file.fileno()).st_size
    except OSError as error:
        return Finding("shard-missing", str(path), f"cannot be read: {error.strerror}", AGAIN)
    if len(header) < HEADER_BYTES:
        problem = f"{len(header):,} bytes, and a header alone has {HEADER_BYTES:,}: the file is cut short or no shard"
        return Finding("shard-header", str(path), problem, AGAIN, "header")
    magic, version, count = (int(value) for value in np.frombuffer(header, "<i4", 3))
    if magic not in HEADERS or version != HEADERS[magic][0] or count < 0:
        problem = (
            f"magic {magic}, version {version} and {count:,} tokens instead of {MAGIC} and {VERSION}: damaged or no shard of ours"
        )
        return Finding("shard-header", str(path), problem, AGAIN, "header")
    expected = HEADER_BYTES + HEADERS[magic][1] * count
    if size != expected:
        state = "is cut short" if size < expected else "is too long"
        problem = f"{state}: {size:,} bytes, and {expected:,} belong to the {count:,} tokens of its header"
        return Finding("shard-size", str(path), problem, AGAIN)
    if told and count != told.tokens:
        return Finding("shard-size", str(path), f"holds {count:,} tokens and {MANIFEST} says {told.tokens:,}", AGAIN)
    return count
