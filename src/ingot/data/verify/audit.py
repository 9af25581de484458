"""List everything that is wrong with a folder of tokens: `audit` reads all of it and continues past every problem it can.

A check that needs what another check found broken is skipped, so that one mistake does not look like ten. Codes are for scripts
and never change; a new kind of problem gets a new one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ingot.data.store.dataset import MANIFEST, Dataset, Split, SplitCounts, recorded_counts, split_counts
from ingot.data.store.shards import TOKEN_BYTES, DataProblem
from ingot.data.tokenizers import Tokenizer
from ingot.data.tokenizers.by_name import HEAD, round_trips
from ingot.data.verify.counting import CHUNK_TOKENS, Counts, Progress, Starts, count_documents, listed_documents, open_for_audit
from ingot.data.verify.overlap import ComparedSplit, Match, find_overlap
from ingot.errors import ConfigError
from ingot.runtime.files import file_sha256

BYTE_GAP = 0.005  # allowed share of the text that tokens do not stand for, if nobody counted it when they were made
FOLDED_GAP = 0.05  # and if the same number was counted then: SentencePiece folds white space, 1% of Shakespeare's
SAMPLED = 64  # documents whose text is encoded again
MAX_RUN_WORDS = 1000  # each document is compared at as many positions as it has words
FOLDS = (
    "the tokenizer made them and changes this text so much; bits per byte by the text stay right: for those by pieces take a "
    "tokenizer that changes nothing (--kind bpe), or raise --byte-gap"
)
OTHER = "give the tokenizer that made the tokens, or prepare the text again"


@dataclass(frozen=True)
class Limits:
    """When a difference becomes a finding."""

    byte_gap: float | None = None  # between the bytes of the tokens and of the text; None: BYTE_GAP or FOLDED_GAP
    ngram_words: int = 13  # length of the runs of words that are compared
    overlap_share: float = 0.5  # allowed share of a document's runs of words that are in train

    def __post_init__(self) -> None:
        if not 1 <= self.ngram_words <= MAX_RUN_WORDS:
            raise ConfigError(f"--ngram-words {self.ngram_words} is not a run of words; give 1 to {MAX_RUN_WORDS:,}")
        for name in ("byte_gap", "overlap_share"):
            if getattr(self, name) is not None and not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name)} is not a share; give 0 to 1")


@dataclass(frozen=True)
class Comparison:
    """Validation compared with the train split of a folder."""

    against: str
    documents: int
    copied: int
    similar: int
    runs: int
    runs_found: int
    share: float


@dataclass(frozen=True)
class AuditReport:
    """The result of an audit."""

    folder: Path
    tokenizer: str | None
    vocab_size: int | None
    fingerprint: str | None
    splits: dict[str, SplitCounts]
    comparisons: list[Comparison]
    findings: list[DataProblem]
    seconds: float

    @property
    def ok(self) -> bool:
        """True if the audit found nothing."""
        return not self.findings


def audit(
    path: Path,
    *,
    tokenizer: str | None = None,
    against: Path | None = None,
    limits: Limits = Limits(),  # noqa: B008 (frozen)
    progress: Progress | None = None,
) -> AuditReport:
    """Read every byte of a folder, and compare its validation split with its train split and with that of `against`."""
    started = time.monotonic()
    dataset = open_for_audit(path, tokenizer)
    trains = [dataset] if "train" in dataset.splits else []
    if against is not None and against.resolve() != path.resolve():
        trains.append(_open_other(dataset, against, tokenizer))
    meter = _Meter(progress, dataset, trains)
    sides, splits = {}, {}
    for name, split in dataset.splits.items():
        sides[name], splits[name] = _audit_split(dataset, split, limits, meter)
        for bucket in split.record.buckets:
            size = bucket.bytes if split.is_prepared else None
            splits[f"{name}/{bucket.name}"] = split_counts(bucket.documents, bucket.tokens, size, bucket.piece_bytes)
    comparisons, val = [], sides.get("val")
    for other in trains:
        train = sides["train"] if other is dataset else _other_side(other, dataset.problems, meter)
        if val and train and len(val.starts) > 1 and len(train.starts) > 1:
            comparisons.append(_compare(dataset, val, train, limits, meter))
    known = dataset.known_tokenizer
    kind, size, fingerprint = known.kind if known else None, known.vocab_size if known else None, None
    if dataset.is_prepared:
        fingerprint = dataset.fingerprint
    return AuditReport(path, kind, size, fingerprint, splits, comparisons, dataset.problems, time.monotonic() - started)


class _Meter:
    """Progress over several passes."""

    def __init__(self, progress: Progress | None, dataset: Dataset, trains: list[Dataset]) -> None:
        self._progress, self._done = progress, 0
        val = dataset.split("val").tokens
        again = [other.split("train").tokens for other in trains if other is not dataset]
        compared = sum(other.split("train").tokens + 2 * val for other in trains) if val else 0
        self._total = sum(split.tokens for split in dataset.splits.values()) + sum(again) + compared

    def advance(self, tokens: int) -> None:
        """Report that more tokens were read."""
        self._done += tokens
        if self._progress:
            self._progress(TOKEN_BYTES * self._done, TOKEN_BYTES * max(self._total, self._done))


def _open_other(dataset: Dataset, path: Path, tokenizer: str | None) -> Dataset:
    other = open_for_audit(path, None if (path / MANIFEST).is_file() else tokenizer)
    if "val" not in dataset.splits:
        raise ConfigError(f"{dataset.folder} has no validation split to compare with {path}")
    if "train" not in other.splits:
        raise ConfigError(f"--against {path} has no train split")
    dataset.problems.extend(other.problems)
    return other


def _audit_split(dataset: Dataset, split: Split, limits: Limits, meter: _Meter) -> tuple[ComparedSplit | None, SplitCounts]:
    """Check a split; return it for comparison if its tokens are what they are said to be, and its counts."""
    record, problems, tokenizer = split.record, dataset.problems, dataset.known_tokenizer
    sound = _check_sha256(split, problems) and split.complete
    index = _checked_index(split, problems)
    recorded = recorded_counts(record) if split.is_prepared else None
    if tokenizer is None:
        return None, recorded or split_counts(None, split.tokens, None, None)
    counts, starts = count_documents(split, tokenizer, index, meter.advance)
    side = ComparedSplit(split, starts, tokenizer)
    marked, same = _check_tokens(side, counts, index, problems)
    if marked and split.complete and split.is_prepared and (index is not None or tokenizer.bos is not None):
        _check_bytes(split, tokenizer, counts, limits.byte_gap, problems)
    recounted = sound and split.is_prepared and record.piece_bytes not in (None, counts.piece_bytes)
    documents, piece_bytes = len(side.starts) - 1 if marked else None, counts.piece_bytes if same else None
    return side if same and not recounted else None, recorded or split_counts(documents, split.tokens, None, piece_bytes)


def _check_tokens(side: ComparedSplit, counts: Counts, index: Starts | None, problems: list[DataProblem]) -> tuple[bool, bool]:
    """Check whether ids and marks are the tokenizer's, and whether the text is too.

    Text by another tokenizer is not what was written, and all of it may look alike: it is neither counted nor compared.
    """
    split, tokenizer = side.split, side.tokenizer
    in_range = _check_range(split, tokenizer, counts, problems)
    marked = (not split.complete or _check_marks(split, tokenizer, counts, index, problems)) and in_range
    return marked, in_range and _check_round_trip(side, problems) and marked


def _checked_index(split: Split, problems: list[DataProblem]) -> Starts | None:
    """Return where documents begin by the files themselves, unless that is damaged or does not match the shards."""
    try:
        index = split.index()
    except ValueError as problem:
        problems.append(DataProblem("document-index", str(split.folder / split.record.document_index), str(problem)))
        return None
    if index is None or (split.is_prepared and not (split.complete and split.tokens == split.record.tokens)):
        return None
    return np.asarray(index).astype(np.int64)


def _check_sha256(split: Split, problems: list[DataProblem]) -> bool:
    before = len(problems)
    for shard in split.record.shards if split.is_prepared else ():
        path = split.folder / shard.file
        if path in split.paths and (sha256 := file_sha256(path)) != shard.sha256:
            problem = f"is not what was written: its sha256 is {sha256[:16]}... and not {shard.sha256[:16]}..."
            problems.append(DataProblem("shard-sha256", str(path), problem))
    return len(problems) == before


def _check_range(split: Split, tokenizer: Tokenizer, counts: Counts, problems: list[DataProblem]) -> bool:
    outside = int(counts.ids[tokenizer.vocab_size :].sum())
    if outside:
        vocabulary = f"the {tokenizer.kind} vocabulary of {tokenizer.vocab_size:,} ids"
        problem = f"tokens outside {vocabulary} begin here: {outside:,} in {split.name}, the largest {counts.largest:,}"
        file, place = split.place(_first_outside(split, tokenizer.vocab_size))
        problems.append(DataProblem("token-range", file, problem, OTHER, place))
    return not outside


def _first_outside(split: Split, vocab_size: int) -> int:
    for begin in range(0, split.tokens, CHUNK_TOKENS):
        wrong = np.flatnonzero(split.read(begin, min(begin + CHUNK_TOKENS, split.tokens)) >= vocab_size)
        if len(wrong):
            return begin + int(wrong[0])
    raise AssertionError("counted and not found")


def _check_marks(split: Split, tokenizer: Tokenizer, counts: Counts, index: Starts | None, problems: list[DataProblem]) -> bool:
    """Check that every document starts with the start mark, and that nothing else has it."""
    marks, bos, before = counts.marks, tokenizer.bos, len(problems)
    if bos is None or not split.tokens or (index is not None and not split.is_prepared):  # gpt-simple's windows end with marks
        return True
    if index is None and (not len(marks) or marks[0] != 0):
        problem = f"{split.name} does not begin with the start mark (id {bos}), which occurs {len(marks):,} times in it"
        file, place = split.place(0)
        problems.append(DataProblem("document-marks", file, problem, OTHER, place))
    starts = marks if index is None else index[:-1]
    unmarked, inside = np.setdiff1d(starts, marks), np.setdiff1d(marks, starts)
    if len(unmarked) or len(inside):
        counted = f"{len(unmarked):,} starts have no mark and {len(inside):,} marks are not at a start"
        problem = f"a document of {split.name} does not start at its mark (id {bos}) from here on: {counted}"
        file, place = split.place(int(min([*unmarked[:1], *inside[:1]])))
        problems.append(DataProblem("document-marks", file, problem, OTHER, place))
    listed = listed_documents(split)
    if listed is not None and listed != len(marks):
        problem = f"{split.name} is listed with {listed:,} documents and has {len(marks):,} start marks (id {bos})"
        problems.append(DataProblem("document-marks", str(split.folder), problem, OTHER))
    return len(problems) == before


def _check_bytes(split: Split, tokenizer: Tokenizer, counts: Counts, limit: float | None, problems: list[DataProblem]) -> None:
    """Check that the tokens stand for the recorded bytes, and that these are the bytes of the text up to the allowed gap."""
    record, counted, file, place = split.record, counts.piece_bytes, str(split.folder / MANIFEST), f"splits.{split.name}"
    if record.piece_bytes is not None and counted != record.piece_bytes:
        problem = f"the tokens stand for {counted:,} bytes and when they were written it was {record.piece_bytes:,}"
        problems.append(DataProblem("byte-count", file, problem, OTHER, place))
    gap = limit if limit is not None else FOLDED_GAP if counted == record.piece_bytes else BYTE_GAP
    apart = abs(counted - record.bytes) / max(record.bytes, 1)
    if apart > gap or (tokenizer.lossless and counted != record.bytes):
        allowed = "this tokenizer loses none" if tokenizer.lossless else f"the limit is {gap:.2%}"
        problem = f"the tokens stand for {counted:,} bytes and the text has {record.bytes:,}, {apart:.2%} apart ({allowed})"
        advice = OTHER if tokenizer.lossless or counted != record.piece_bytes else FOLDS
        problems.append(DataProblem("byte-count", file, f"{problem}, and bits per byte by pieces are as wrong", advice, place))


def _check_round_trip(side: ComparedSplit, problems: list[DataProblem]) -> bool:
    """Check that the tokenizer makes the same tokens of the text of some documents; another tokenizer hardly ever does."""
    split, starts = side.split, side.starts
    numbers = np.unique(np.linspace(0, len(starts) - 2, SAMPLED).astype(np.int64)) if len(starts) > 1 else np.empty(0, np.int64)
    begins, ends = starts[numbers].tolist(), starts[numbers + 1].tolist()
    samples = (split.read(a, min(b, a + 2 * HEAD)) for a, b in zip(begins, ends, strict=True))
    result = round_trips(side.tokenizer, samples)
    if not result.fit:
        file, place = split.place(begins[result.wrong[0]])
        counted = f"{len(result.wrong)} of {result.tried} documents tried"
        problem = f"the tokenizer makes other tokens of the text here, and of {counted}"
        problems.append(DataProblem("tokenizer-mismatch", file, problem, OTHER, place))
    return bool(result.fit)


def _other_side(other: Dataset, problems: list[DataProblem], meter: _Meter) -> ComparedSplit | None:
    """Return the train split of another folder if its tokens can be the tokenizer's; those of an indexed folder are."""
    split, tokenizer = other.splits["train"], other.known_tokenizer
    if tokenizer is None:
        return None
    index = _checked_index(split, [])
    if index is not None:
        meter.advance(split.tokens)
        return ComparedSplit(split, index, tokenizer)
    counts, starts = count_documents(split, tokenizer, None, meter.advance)
    side = ComparedSplit(split, starts, tokenizer)
    return side if _check_tokens(side, counts, None, problems)[1] else None


def _compare(dataset: Dataset, val: ComparedSplit, train: ComparedSplit, limits: Limits, meter: _Meter) -> Comparison:
    overlap = find_overlap(val, train, limits.ngram_words, limits.overlap_share, meter.advance)
    dataset.problems.extend(_overlap_problem(match, val, train, limits.ngram_words) for match in overlap.matches)
    similar = sum(match.kind == "runs" for match in overlap.matches)
    copied, against = len(overlap.matches) - similar, str(train.split.folder)
    return Comparison(against, overlap.documents, copied, similar, overlap.runs, overlap.runs_found, overlap.share)


def _overlap_problem(match: Match, val: ComparedSplit, train: ComparedSplit, run_words: int) -> DataProblem:
    file, place = val.split.place(int(val.starts[match.document]))
    train_file, train_place = train.split.place(int(train.starts[match.train]))
    where = f"document {match.train:,} of train ({train_file}, {train_place})"
    advice = "remove it from train or from validation and prepare the data again"
    place = f"document {match.document:,} of val, {place}"
    if match.kind == "runs":
        problem = f"{match.share:.0%} of its runs of {run_words} words are in train, most of them in {where}"
        return DataProblem("overlap-ngrams", file, problem, advice, place)
    how = "token for token" if match.kind == "tokens" else "but for case, white space and punctuation"
    return DataProblem("overlap-documents", file, f"is {where}, {how}", advice, place)
