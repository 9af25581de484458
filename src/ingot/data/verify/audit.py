"""Everything that can be wrong with a folder of tokens, as a list: `audit` reads all of it and stops at nothing it can step over.

A check that needs what another check found broken is left out, so that one mistake does not look like ten. Codes are for scripts
and never change; a new kind of problem gets a new one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ingot.data.store.dataset import MANIFEST, SplitCounts, recorded_counts, split_counts
from ingot.data.store.shards import TOKEN_BYTES, Finding
from ingot.data.tokenizers import Tokenizer
from ingot.data.tokenizers.by_name import HEAD, round_trips
from ingot.data.verify.folder import CHUNK_TOKENS, AuditSplit, Counts, Folder, Starts, count_documents, open_folder, read_index
from ingot.data.verify.overlap import ComparedSplit, Match, find_overlap
from ingot.errors import ConfigError
from ingot.runtime.files import file_sha256

# The checks of one split that need its tokens: checksums, ids, start marks, bytes, and whether the tokenizer fits.

BYTE_GAP = 0.005  # of the text that tokens may not stand for, where nobody counted it when they were made
FOLDED_GAP = 0.05  # and where somebody did: SentencePiece folds white space, 1% of Shakespeare's, and that is how it is
SAMPLED = 64  # documents whose text is encoded again
FOLDS = (
    "the tokenizer made them and changes this text so much; bits per byte by the text stay right: for those by pieces take a "
    "tokenizer that changes nothing (--kind bpe), or raise --byte-gap"
)
OTHER = "give the tokenizer that made the tokens, or prepare the text again"


def check_sha256(split: AuditSplit, findings: list[Finding]) -> bool:
    """Are shards what was written?"""
    before = len(findings)
    for shard in split.record.shards if split.record else ():
        path = split.folder / shard.file
        if path in split.paths and (found := file_sha256(path)) != shard.sha256:
            problem = f"is not what was written: its sha256 is {found[:16]}... and not {shard.sha256[:16]}..."
            findings.append(Finding("shard-sha256", str(path), problem))
    return len(findings) == before


def check_range(split: AuditSplit, tokenizer: Tokenizer, counts: Counts, findings: list[Finding]) -> bool:
    """Are all ids in the vocabulary?"""
    outside = int(counts.ids[tokenizer.vocab_size :].sum())
    if outside:
        vocabulary = f"the {tokenizer.kind} vocabulary of {tokenizer.vocab_size:,} ids"
        problem = f"tokens outside {vocabulary} begin here: {outside:,} in {split.name}, the largest {counts.largest:,}"
        file, place = split.place(_first_outside(split, tokenizer.vocab_size))
        findings.append(Finding("token-range", file, problem, OTHER, place))
    return not outside


def check_marks(split: AuditSplit, tokenizer: Tokenizer, counts: Counts, index: Starts | None, findings: list[Finding]) -> bool:
    """Does every document start with the mark, and nothing else?"""
    marks, bos, before = counts.marks, tokenizer.bos, len(findings)
    if bos is None or not split.tokens or split.starts is not None:  # gpt-simple's windows have a mark at their end, if any
        return True
    if index is None and (not len(marks) or marks[0] != 0):
        problem = f"{split.name} does not begin with the start mark (id {bos}), which occurs {len(marks):,} times in it"
        file, place = split.place(0)
        findings.append(Finding("document-marks", file, problem, OTHER, place))
    starts = marks if index is None else index[:-1]
    without, inside = np.setdiff1d(starts, marks), np.setdiff1d(marks, starts)
    if len(without) or len(inside):
        counted = f"{len(without):,} starts have no mark and {len(inside):,} marks are not start"
        problem = f"a document of {split.name} does not start at its mark (id {bos}) from here on: {counted}"
        file, place = split.place(int(min([*without[:1], *inside[:1]])))
        findings.append(Finding("document-marks", file, problem, OTHER, place))
    told = split.record.documents if split.record else split.listed
    if told is not None and told != len(marks):
        problem = f"{told:,} documents are said to be in {split.name} and there are {len(marks):,} start marks (id {bos})"
        findings.append(Finding("document-marks", str(split.folder), problem, OTHER))
    return len(findings) == before


def check_bytes(split: AuditSplit, tokenizer: Tokenizer, counts: Counts, asked: float | None, findings: list[Finding]) -> None:
    """Do the tokens stand for the bytes that were recorded, and are these about those of the text, up to the gap asked for?"""
    record = split.record
    if record is None:
        return
    found, file, place = counts.piece_bytes, str(split.folder / MANIFEST), f"splits.{split.name}"
    if record.piece_bytes is not None and found != record.piece_bytes:
        problem = f"the tokens stand for {found:,} bytes and when they were written it was {record.piece_bytes:,}"
        findings.append(Finding("byte-count", file, problem, OTHER, place))
    gap = asked if asked is not None else FOLDED_GAP if found == record.piece_bytes else BYTE_GAP
    apart = abs(found - record.bytes) / max(record.bytes, 1)
    if apart > gap or (tokenizer.lossless and found != record.bytes):
        limit = "this tokenizer loses none" if tokenizer.lossless else f"the limit is {gap:.2%}"
        problem = f"the tokens stand for {found:,} bytes and the text has {record.bytes:,}, {apart:.2%} apart ({limit})"
        advice = OTHER if tokenizer.lossless or found != record.piece_bytes else FOLDS
        findings.append(Finding("byte-count", file, f"{problem}, and bits per byte by pieces are as wrong", advice, place))


def check_round_trip(side: ComparedSplit, findings: list[Finding]) -> bool:
    """Does the tokenizer, given the text of some documents, make these tokens again? Another one hardly ever does."""
    split, starts, tokenizer = side.split, side.starts, side.tokenizer
    numbers = np.unique(np.linspace(0, len(starts) - 2, SAMPLED).astype(np.int64)) if len(starts) > 1 else np.empty(0, np.int64)
    begins, ends = starts[numbers].tolist(), starts[numbers + 1].tolist()
    found = round_trips(tokenizer, (split.read(a, min(b, a + 2 * HEAD)) for a, b in zip(begins, ends, strict=True)))
    if not found.fit:
        file, place = split.place(begins[found.wrong[0]])
        problem = f"the tokenizer makes other tokens of the text here, and of {len(found.wrong)} of {found.tried} documents tried"
        findings.append(Finding("tokenizer-mismatch", file, problem, OTHER, place))
        return False
    return True


def _first_outside(split: AuditSplit, vocab_size: int) -> int:
    for begin in range(0, split.tokens, CHUNK_TOKENS):
        wrong = np.flatnonzero(split.read(begin, min(begin + CHUNK_TOKENS, split.tokens)) >= vocab_size)
        if len(wrong):
            return begin + int(wrong[0])
    raise AssertionError("counted and not found")


Progress = Callable[[int, int], None]  # bytes done, bytes in all


MOST_WORDS = 1000  # in a row: each document is compared in as many places as it has words


@dataclass(frozen=True)
class Limits:
    """When a difference becomes a finding."""

    byte_gap: float | None = None  # between the bytes that tokens stand for and those of the text; None: as the check has it
    ngram_words: int = 13  # in a row that are compared
    overlap_share: float = 0.5  # of a document's runs of words that may be in train

    def __post_init__(self) -> None:
        if not 1 <= self.ngram_words <= MOST_WORDS:
            raise ConfigError(f"--ngram-words {self.ngram_words} is not a run of words; give 1 to {MOST_WORDS:,}")
        for name in ("byte_gap", "overlap_share"):
            if getattr(self, name) is not None and not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name)} is not a share; give 0 to 1")


@dataclass(frozen=True)
class Comparison:
    """Validation against the train split of a folder."""

    against: str
    documents: int
    copied: int
    similar: int
    runs: int
    runs_found: int
    share: float


@dataclass(frozen=True)
class Report:
    """What an audit came to."""

    folder: Path
    tokenizer: str | None
    vocab_size: int | None
    fingerprint: str | None
    splits: dict[str, SplitCounts]
    comparisons: list[Comparison]
    findings: list[Finding]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings


def audit(
    path: Path,
    *,
    tokenizer: str | None = None,
    against: Path | None = None,
    limits: Limits = Limits(),  # noqa: B008 (frozen)
    progress: Progress | None = None,
) -> Report:
    """Reads every byte of a folder, and compares its validation split with its train split and with that of `against`."""
    started = time.monotonic()
    folder = open_folder(path, tokenizer)
    trains = [folder] if "train" in folder.splits else []
    if against is not None and against.resolve() != path.resolve():
        trains.append(_other(folder, against, tokenizer))
    meter = _Meter(progress, folder, trains)
    sides, splits = {}, {}
    for name, split in folder.splits.items():
        sides[name], splits[name] = _audit_split(folder, split, limits, meter)
        for one in split.buckets:
            size = one.bytes if split.record else None
            splits[f"{name}/{one.name}"] = split_counts(one.documents, one.tokens, size, one.piece_bytes)
    comparisons = []
    for other in trains:
        train = sides["train"] if other is folder else _side(other, folder.findings, meter)
        val = sides.get("val")
        if val and train and len(val.starts) > 1 and len(train.starts) > 1:
            comparisons.append(_compare(folder, val, train, limits, meter))
    kind, size = (folder.tokenizer.kind, folder.tokenizer.vocab_size) if folder.tokenizer else (None, None)
    seconds = time.monotonic() - started
    return Report(path, kind, size, folder.fingerprint, splits, comparisons, folder.findings, seconds)


class _Meter:
    """Progress over several passes."""

    def __init__(self, progress: Progress | None, folder: Folder, trains: list[Folder]) -> None:
        self._progress, self._done = progress, 0
        val = folder.splits["val"].tokens if "val" in folder.splits else 0
        again = [other.splits["train"].tokens for other in trains if other is not folder]
        compared = sum(other.splits["train"].tokens + 2 * val for other in trains) if val else 0
        self._total = sum(split.tokens for split in folder.splits.values()) + sum(again) + compared

    def tell(self, tokens: int) -> None:
        """So many tokens more were read."""
        self._done += tokens
        if self._progress:
            self._progress(TOKEN_BYTES * self._done, TOKEN_BYTES * max(self._total, self._done))


def _other(folder: Folder, path: Path, tokenizer: str | None) -> Folder:
    bare = not (path / MANIFEST).is_file()
    other = open_folder(path, tokenizer if bare else None)
    if "val" not in folder.splits:
        raise ConfigError(f"{folder.path} has no validation split to compare with {path}")
    if "train" not in other.splits:
        raise ConfigError(f"--against {path} has no train split")
    folder.findings.extend(other.findings)
    return other


def _audit_split(folder: Folder, split: AuditSplit, limits: Limits, meter: _Meter) -> tuple[ComparedSplit | None, SplitCounts]:
    record, findings, tokenizer = split.record, folder.findings, folder.tokenizer
    sound = check_sha256(split, findings) and split.whole
    index = _index(split, findings)
    told = recorded_counts(record) if record else None
    if tokenizer is None:
        return None, told or split_counts(None, split.tokens, None, None)
    counts, starts = count_documents(split, tokenizer, index, meter.tell)
    side = ComparedSplit(split, starts, tokenizer)
    marked, same = _fits(side, counts, index, findings)
    if marked and split.whole and (index is not None or tokenizer.bos is not None):
        check_bytes(split, tokenizer, counts, limits.byte_gap, findings)
    recounted = sound and record is not None and record.piece_bytes not in (None, counts.piece_bytes)
    documents, piece_bytes = len(side.starts) - 1 if marked else None, counts.piece_bytes if same else None
    return side if same and not recounted else None, told or split_counts(documents, split.tokens, None, piece_bytes)


def _fits(side: ComparedSplit, counts: Counts, index: Starts | None, findings: list[Finding]) -> tuple[bool, bool]:
    """Whether ids and marks are the tokenizer's, and whether the text is too.

    Text by another tokenizer is not what was written, and all of it may look alike: it is neither counted nor compared.
    """
    split, tokenizer = side.split, side.tokenizer
    known = check_range(split, tokenizer, counts, findings)
    marked = (not split.whole or check_marks(split, tokenizer, counts, index, findings)) and known
    return marked, known and check_round_trip(side, findings) and marked


def _side(other: Folder, findings: list[Finding], meter: _Meter) -> ComparedSplit | None:
    """The train split of another folder, if its tokens can be the tokenizer's; those of a prepared folder are."""
    split, tokenizer = other.splits["train"], other.tokenizer
    if tokenizer is None:
        return None
    index = _index(split, [])
    if index is not None:
        meter.tell(split.tokens)
        return ComparedSplit(split, index, tokenizer)
    counts, starts = count_documents(split, tokenizer, None, meter.tell)
    side = ComparedSplit(split, starts, tokenizer)
    return side if _fits(side, counts, None, findings)[1] else None


def _index(split: AuditSplit, findings: list[Finding]) -> Starts | None:
    """The document index, where there is one that fits the shards."""
    if split.record is None:
        return split.starts
    if isinstance(found := read_index(split), str):
        findings.append(Finding("document-index", str(split.folder / split.record.document_index), found))
        return None
    return found if split.whole and split.tokens == split.record.tokens else None


def _compare(folder: Folder, val: ComparedSplit, train: ComparedSplit, limits: Limits, meter: _Meter) -> Comparison:
    found = find_overlap(val, train, limits.ngram_words, limits.overlap_share, meter.tell)
    folder.findings.extend(_overlap_finding(match, val, train, limits.ngram_words) for match in found.matches)
    similar = sum(match.kind == "runs" for match in found.matches)
    copied = len(found.matches) - similar
    return Comparison(str(train.split.folder), found.documents, copied, similar, found.runs, found.runs_found, found.share)


def _overlap_finding(match: Match, val: ComparedSplit, train: ComparedSplit, run_words: int) -> Finding:
    file, place = val.split.place(int(val.starts[match.document]))
    train_file, train_place = train.split.place(int(train.starts[match.train]))
    where = f"document {match.train:,} of train ({train_file}, {train_place})"
    advice = "remove it from train or from validation and prepare the data again"
    place = f"document {match.document:,} of val, {place}"
    if match.kind == "runs":
        problem = f"{match.share:.0%} of its runs of {run_words} words are in train, most of them in {where}"
        return Finding("overlap-ngrams", file, problem, advice, place)
    how = "token for token" if match.kind == "tokens" else "but for case, white space and punctuation"
    return Finding("overlap-documents", file, f"is {where}, {how}", advice, place)
