"""A folder of tokens as an audit meets it: what can be read of it, and a finding for everything that cannot.

`Dataset.open` refuses a folder at its first problem; here a problem becomes a finding and the rest is still read. Three layouts
are known: ours, with dataset.json, gpt-simple's pairs of .bin and .idx, and bare shards as golf has them, described at best by a
manifest.json two folders above.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.data import SPLITS
from ingot.data.formats.detect import detect, open_source
from ingot.data.formats.foreign import MANIFEST as PUBLISHED
from ingot.data.formats.foreign import bucket_of, listed_dataset, paired_tokenizer
from ingot.data.formats.gpt_simple_folder import Pair, find_pairs
from ingot.data.formats.shard_folder import NO_TOKENS, VALIDATION
from ingot.data.store.dataset import (
    MANIFEST,
    BucketRecord,
    Dataset,
    SplitRecord,
    open_index,
    read_description,
    shard_tokens,
    tokenizer_finding,
)
from ingot.data.store.shards import Finding, OpenTokens, TokenStream, open_shard
from ingot.data.tokenizers import Tokenizer, open_tokenizer
from ingot.data.tokenizers.tokenizer_base import NARROW, OUTSIDE
from ingot.errors import ConfigError, DataError
from ingot.runtime.files import reading

UNTOLD = "{} does not say what its tokens stand for; give --tokenizer (gpt2, a .model, tokenizer.json)"
Starts = NDArray[np.int64]  # where documents begin, and after them the end of the last
OPEN: OpenTokens = partial(open_shard, foreign=True)


class AuditSplit(TokenStream):
    """What can be read of a split. `record` is what dataset.json says, `listed` the documents a manifest.json counts.

    `starts`: where documents begin, where the files themselves say so.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        paths: list[Path],
        sizes: list[int],
        whole: bool,  # every shard can be read
        record: SplitRecord | None = None,
        listed: int | None = None,
        starts: Starts | None = None,
        buckets: Sequence[BucketRecord] = (),
        open_tokens: OpenTokens = OPEN,
    ) -> None:
        super().__init__(paths, sizes, open_tokens, dtype=np.dtype(np.uint32))
        self.name, self.folder, self.whole, self.record, self.listed = name, folder, whole, record, listed
        self.starts, self.buckets = starts, record.buckets if record else buckets


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
    with reading(path):
        if (path / MANIFEST).is_file():
            return _prepared(path, tokenizer)
        if path.is_dir() and any(find_pairs(path).values()):
            return _pairs(path, tokenizer)
        shards = sorted(file for file in path.glob("*.bin") if not NO_TOKENS.search(file.stem.lower()))
        if not any(path.glob("*_train_*.bin")) and not any(path.glob("*_val_*.bin")):
            _refuse_other_formats(path, tokenizer)
    return _bare(path, shards, tokenizer)


def _refuse_other_formats(path: Path, tokenizer: str | None) -> None:
    if not path.is_dir():
        Dataset.open(path)  # which says what the file is, or that there is none
    if (found := detect(path)) != "shards":
        made_by = "" if open_source(path).tokenizer is not None else f" --tokenizer {shlex.quote(tokenizer or 'NAME')}"
        command = f"ingot data convert {shlex.quote(str(path))} --to ingot{made_by} --output DIR"
        raise DataError(f"{path} holds tokens in the format {found}; make it a prepared folder with: {command}")


def _prepared(path: Path, name: str | None) -> Folder:
    found = read_description(path)
    if found.manifest is None:
        shards = [shard for split in SPLITS for shard in sorted(path.glob(f"{split}_*.bin"))]
        return _bare(path, shards, name, found.findings)
    folder = Folder(path, found.tokenizer, findings=found.findings, fingerprint=found.manifest.fingerprint)
    if name is not None and folder.tokenizer is not None:
        other = open_tokenizer(name)
        if other.fingerprint() != folder.tokenizer.fingerprint():
            told = [f"{one.kind}, {one.vocab_size:,} ids, {one.fingerprint()[:12]}" for one in (folder.tokenizer, other)]
            problem = f"its tokenizer ({told[0]}) is not the one given ({told[1]})"
            advice = "use the tokenizer that is inside, or prepare the text again with yours"
            folder.findings.append(Finding("tokenizer-mismatch", str(path / MANIFEST), problem, advice, "tokenizer"))
    for split, record in found.manifest.splits.items():
        folder.splits[split] = _split(folder, split, [path / shard.file for shard in record.shards], record)
    return folder


def _bare(path: Path, shards: list[Path], name: str | None, findings: list[Finding] | None = None) -> Folder:
    known, stats = _published(path)
    folder = Folder(path, None, findings=findings or [])
    if name is None and known is None and not findings:
        raise ConfigError(UNTOLD.format(path))
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


def _pairs(path: Path, name: str | None) -> Folder:
    if name is None:
        raise ConfigError(UNTOLD.format(path))
    folder = Folder(path, None)
    folder.tokenizer = _open_tokenizer(folder, name)
    for split, files in find_pairs(path).items():
        pairs: list[Pair] = []
        for file in files:
            try:
                pairs.append(Pair(file))
            except DataError as error:
                folder.findings.append(Finding("pair", str(file), str(error)))
        streams, begins = {pair.path: pair.stream for pair in pairs}, np.cumsum([0, *(pair.stream.tokens for pair in pairs)])
        starts = [pair.offsets[:-1] + begin for pair, begin in zip(pairs, begins[:-1], strict=True)]
        named = groupby((pair for pair in pairs if pair.path.parent.parent == path / split), lambda pair: pair.path.parent.name)
        folder.splits[split] = AuditSplit(
            split,
            path,
            list(streams),
            [stream.tokens for stream in streams.values()],
            len(pairs) == len(files),
            starts=np.concatenate([*starts, begins[-1:]]).astype(np.int64),
            buckets=[bucket_of(bucket, list(some)) for bucket, some in named],
            open_tokens=partial(_mapped, streams),
        )
    return folder


def _mapped(streams: Mapping[Path, TokenStream], path: Path) -> NDArray[Any]:
    return streams[path].shard(0)


def _open_tokenizer(folder: Folder, name: str) -> Tokenizer | None:
    try:
        return open_tokenizer(name)
    except DataError as error:
        folder.findings.append(tokenizer_finding(name, error))
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
    counted = [(path, shard_tokens(path, shard)) for path, shard in zip(paths, told, strict=True)]
    folder.findings.extend(found for _, found in counted if isinstance(found, Finding))
    sound = [(path, found) for path, found in counted if isinstance(found, int)]
    return AuditSplit(
        name, folder.path, [path for path, _ in sound], [size for _, size in sound], len(sound) == len(paths), record, listed
    )


# One pass over a split: how often each id occurs, where start marks stand, and the bytes that the tokens stand for.

CHUNK_TOKENS = 1 << 20


@dataclass(frozen=True)
class Counts:
    """What a pass came to; `ids` has a count for every id of the vocabulary, some outside it, and last all above those."""

    ids: NDArray[np.int64]
    largest: int
    marks: NDArray[np.int64]
    piece_bytes: int


class AuditBucket:
    """One bucket of a split, which begins where the buckets before it end."""

    def __init__(self, split: AuditSplit, starts: Starts, number: int) -> None:
        before, record = split.buckets[:number], split.buckets[number]
        self.name, self.folder, self.tokens = f"{split.name}/{record.name}", split.folder, record.tokens
        self.bytes = record.bytes if split.record else None
        self._split, self._first = split, sum(bucket.tokens for bucket in before)
        first = sum(bucket.documents for bucket in before)
        self.starts: Starts = starts[first : first + record.documents + 1] - self._first

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Tokens start..stop of the bucket."""
        return self._split.read(self._first + start, self._first + stop)


def count_tokens(
    split: AuditSplit | AuditBucket,
    tokenizer: Tokenizer,
    starts: Starts | None = None,
    tell: Callable[[int], None] = lambda tokens: None,
) -> Counts:
    """Reads a split. `starts` is where documents begin, if more than their marks says so; `tell` hears of the tokens read."""
    slots = max(NARROW, tokenizer.vocab_size) + 1
    sizes = np.zeros(slots, np.int64)
    sizes[: tokenizer.vocab_size] = tokenizer.token_bytes()
    special = np.append(sizes == 0, True)  # the last row is for OUTSIDE
    ids, largest = np.zeros(slots, np.int64), 0
    marks, extra, previous = [np.empty(0, np.int64)], 0, OUTSIDE
    for begin in range(0, split.tokens, CHUNK_TOKENS):
        found = split.read(begin, min(begin + CHUNK_TOKENS, split.tokens))
        largest = max(largest, int(found.max()))
        part = np.minimum(found, slots - 1)
        ids += np.bincount(part, minlength=slots)
        if tokenizer.bos is not None:
            marks.append(np.flatnonzero(part == tokenizer.bos) + begin)
        before = np.empty(len(part), np.int64)
        before[0], before[1:] = previous, part[:-1]
        if starts is not None:
            first, last = np.searchsorted(starts, [begin, begin + len(part)])
            before[starts[first:last] - begin] = OUTSIDE
        places = np.flatnonzero(special[before])
        extra += int((tokenizer.target_bytes(before[places], part[places]) - sizes[part[places]]).sum())
        previous = int(part[-1])
        tell(len(part))
    return Counts(ids, largest, np.concatenate(marks), int(ids @ sizes) + extra)


def count_documents(
    split: AuditSplit | AuditBucket, tokenizer: Tokenizer, index: Starts | None, tell: Callable[[int], None]
) -> tuple[Counts, Starts]:
    """Reads a split; documents begin where its index says, or else at their marks."""
    counts = count_tokens(split, tokenizer, index, tell)
    return counts, starts_by_marks(split, counts.marks) if index is None else index


def starts_by_marks(split: AuditSplit | AuditBucket, marks: NDArray[np.int64]) -> Starts:
    """Where documents begin if each has a mark in front; what comes before the first mark is a document too."""
    before = [0] if split.tokens and (not len(marks) or marks[0]) else []
    return np.concatenate([np.array(before, np.int64), marks, np.array([split.tokens], np.int64)])


def read_index(split: AuditSplit) -> Starts | str | None:
    """Where documents begin by the document index, or what is wrong with it; None where nothing says it."""
    if split.record is None:
        return split.starts
    record = split.record
    try:
        index = open_index(split.folder / record.document_index, record.documents, record.tokens, record.document_index_sha256)
    except ValueError as problem:
        return str(problem)
    return np.asarray(index).astype(np.int64)
