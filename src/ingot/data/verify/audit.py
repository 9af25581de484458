"""Examine a folder of tokens: `inspect` summarises its splits, and `audit` reads every byte and lists all defects.

Tokens are counted in chunks of mapped shards, so memory grows only with the number of documents (8 bytes each). A check is
skipped if the data that it depends on is already known to be broken, so that one defect is not reported ten times. Scripts rely
on the codes of problems, so codes never change; a new kind of problem gets a new code.
"""

from __future__ import annotations

import hashlib
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ingot.data.formats.opener import open_tokens
from ingot.data.formats.shard_folder import paired_tokenizer
from ingot.data.store.dataset import MANIFEST, Dataset, Documents, Split, SplitCounts, tokenizer_problem
from ingot.data.store.documents import starts_at_marks
from ingot.data.store.shards import TOKEN_BYTES, DataProblem
from ingot.data.text.text_files import Progress, adding_up
from ingot.data.tokenizers import Tokenizer, open_tokenizer
from ingot.data.tokenizers.by_name import HEAD, round_trips
from ingot.data.tokenizers.tokenizer_base import NARROW, OUTSIDE
from ingot.errors import ConfigError, DataError
from ingot.runtime.files import file_sha256, reading

CHUNK_TOKENS = 1 << 20  # tokens counted at a time
BEGINNING_TOKENS, BEGINNING_CHARACTERS = 256, 100
Starts = NDArray[np.int64]  # the offset of each document, then the end of the last document
OnTokens = Callable[[int], None]  # called with the number of tokens just read


def open_for_audit(path: Path, tokenizer: str | None = None) -> Dataset:
    """Open a folder and list its defects in `problems`; `known_tokenizer` is None only if the tokenizer cannot be read.

    `tokenizer` names the tokenizer of another program's data; for a prepared folder it must match the recorded tokenizer.
    """
    with reading(path):
        if not path.is_dir():
            Dataset.open(path)  # raises an error that says what to do instead
        dataset = open_tokens(path, strict=False)
    if dataset.format == "nanogpt":
        made_by = "" if dataset.known_tokenizer else " --tokenizer NAME"
        command = f"ingot data convert {shlex.quote(str(path))} --to ingot{made_by} --output DIR"
        raise DataError(f"{path} is in nanoGPT's format, which cannot be inspected or verified; convert it with: {command}")
    for split in dataset.splits.values():
        split.dtype = np.dtype(np.uint32)  # one dtype for all splits, so that equal documents are equal arrays
    own = dataset.known_tokenizer
    if dataset.format == "shards":
        with suppress(DataError, OSError):  # ignore a damaged manifest.json, which may belong to other data
            own = _try_tokenizer(dataset, paired_tokenizer(path))
    given = _try_tokenizer(dataset, tokenizer)
    if tokenizer is None and own is None and dataset.format != "ingot":
        raise ConfigError(f"{path} does not name its tokenizer; name it with --tokenizer (gpt2, a .model or .json file)")
    if not dataset.is_prepared:
        dataset.known_tokenizer = given or own
    if own is not None and given is not None and own.fingerprint() != given.fingerprint():
        own_text, given_text = (f"{t.kind}, {t.vocab_size:,} ids, {t.fingerprint()[:12]}" for t in (own, given))
        problem = f"its tokenizer ({own_text}) is not the given tokenizer ({given_text})"
        advice = "leave out --tokenizer, or prepare the text again with the given tokenizer"
        dataset.problems.append(DataProblem("tokenizer-mismatch", str(path / MANIFEST), problem, advice, "tokenizer"))
    return dataset


def _try_tokenizer(dataset: Dataset, name: str | None) -> Tokenizer | None:
    try:
        return open_tokenizer(name) if name else None
    except DataError as error:
        dataset.problems.append(tokenizer_problem(str(name), error))
        return None


@dataclass(frozen=True)
class TokenCounts:
    """Counts from one pass over a split.

    `ids` holds the count of each id in the vocabulary and of some larger ids; the last entry counts all remaining ids.
    `outside` is the position of the first token outside the vocabulary.
    """

    ids: NDArray[np.int64]
    largest: int
    marks: NDArray[np.int64]
    piece_bytes: int
    outside: int | None


def count_documents(
    split: Documents, tokenizer: Tokenizer, index: NDArray[Any] | None, on_tokens: OnTokens = lambda tokens: None
) -> tuple[TokenCounts, Starts]:
    """Read a split once; return its counts and its document offsets, from `index` or, if that is None, from the BOS tokens."""
    starts = None if index is None else np.asarray(index).astype(np.int64)
    slots = max(NARROW, tokenizer.vocab_size) + 1
    sizes = np.zeros(slots, np.int64)
    sizes[: tokenizer.vocab_size] = tokenizer.token_bytes()
    special = np.append(sizes == 0, True)  # the last entry is for OUTSIDE
    ids, largest = np.zeros(slots, np.int64), 0
    outside: int | None = None
    marks, extra, previous = [np.empty(0, np.int64)], 0, OUTSIDE
    for begin in range(0, split.tokens, CHUNK_TOKENS):
        tokens = split.read(begin, min(begin + CHUNK_TOKENS, split.tokens))
        largest = max(largest, int(tokens.max()))
        if outside is None and largest >= tokenizer.vocab_size:
            outside = begin + int(np.argmax(tokens >= tokenizer.vocab_size))
        part = np.minimum(tokens.astype(np.int64), slots - 1)
        ids += np.bincount(part, minlength=slots)
        if tokenizer.bos is not None:
            marks.append(np.flatnonzero(part == tokenizer.bos) + begin)
        before = np.append(previous, part[:-1])
        if starts is not None:
            first, last = np.searchsorted(starts, [begin, begin + len(part)])
            before[starts[first:last] - begin] = OUTSIDE
        places = np.flatnonzero(special[before])
        extra += int((tokenizer.target_bytes(before[places], part[places]) - sizes[part[places]]).sum())
        previous = int(part[-1])
        on_tokens(len(part))
    counts = TokenCounts(ids, largest, np.concatenate(marks), int(ids @ sizes) + extra, outside)
    return counts, starts_at_marks(split.tokens, counts.marks) if starts is None else starts


@dataclass
class SplitInspection(SplitCounts):
    """The contents of a split: counts, ids and documents.

    `vocabulary` holds its size, the numbers of used and unused ids, and a list of the most frequent ids, each with its text (None
    if special), count and share. `lengths` describes document lengths in tokens, including BOS; a histogram row has `low`, `high`
    (inclusive) and `documents`. `beginnings` lists documents with their number, offset, length in tokens and first words.
    """

    documents: int
    piece_bytes: int
    vocabulary: dict[str, Any]
    lengths: dict[str, Any] | None
    beginnings: list[dict[str, Any]]


@dataclass(frozen=True)
class Inspection:
    """The contents of a folder of tokens."""

    folder: Path
    tokenizer: str
    splits: dict[str, SplitInspection]


def inspect(
    path: Path, split: str | None = None, *, tokenizer: str | None = None, top: int = 10, beginnings: int = 5
) -> Inspection:
    """Inspect a split (default: all) of a folder; list the `top` most frequent ids and the first words of some documents."""
    dataset = open_for_audit(path, tokenizer)
    if dataset.problems:
        raise DataError(f"{dataset.problems[0].line} (ingot data verify {path} lists all problems)")
    if split is not None and split not in dataset.splits:
        raise DataError(f"{path} has no split {split!r}; it has {', '.join(dataset.splits)}")
    names = [split] if split else list(dataset.splits)
    parts: list[Documents] = []
    for name in names:
        parts += [dataset.splits[name], *dataset.buckets(name).values()]
    inspected = {part.name: _inspect(dataset.tokenizer, part, top, beginnings) for part in parts}
    return Inspection(path, dataset.tokenizer.kind, inspected)


def _inspect(tokenizer: Tokenizer, split: Documents, top: int, beginnings: int) -> SplitInspection:
    try:
        index = split.index() if isinstance(split, Split) else split.document_starts()
    except ValueError as problem:
        message = f"{split.folder}: the document index of {split.name} {problem}; ingot data verify lists all problems"
        raise DataError(message) from None
    counts, starts = count_documents(split, tokenizer, index)
    if (outside := int(counts.ids[tokenizer.vocab_size :].sum())) > 0:
        raise DataError(
            f"{split.folder}: {outside:,} tokens of {split.name} are outside the {tokenizer.kind} vocabulary of "
            f"{tokenizer.vocab_size:,} ids; give the tokenizer that made them"
        )

    ids = counts.ids[: tokenizer.vocab_size]
    used = int(np.count_nonzero(ids))
    most_frequent = []
    for token in np.argsort(-ids, kind="stable")[: min(top, used)].tolist():
        text = None if tokenizer.is_special(token) else tokenizer.decode_bytes([token]).decode("utf-8", "backslashreplace")
        count = int(ids[token])
        most_frequent.append({"id": token, "text": text, "count": count, "share": count / split.tokens})
    unused = tokenizer.vocab_size - used
    vocabulary = {"size": tokenizer.vocab_size, "used": used, "never_used": unused, "most_frequent": most_frequent}

    documents, lengths, shown = len(starts) - 1, None, []
    if documents:
        sizes = np.diff(starts)
        powers = np.bincount(np.maximum(np.frexp(sizes.astype(np.float64))[1] - 1, 0))  # bins of doubling width: 1, 2-3, 4-7, ...
        doublings = range(int(np.flatnonzero(powers)[0]), len(powers))  # all bins from the first to the last that is not empty
        bins = [{"low": 1 << p, "high": (2 << p) - 1, "documents": int(powers[p])} for p in doublings]
        ends, middle = (int(sizes.min()), int(sizes.max())), (float(sizes.mean()), float(np.median(sizes)))
        lengths = {"shortest": ends[0], "mean": middle[0], "median": middle[1], "longest": ends[1], "histogram": bins}
        spread = np.linspace(0, documents - 1, min(max(beginnings, 0), documents)).astype(np.int64)
        for number in np.unique(spread).tolist():
            begin, end = int(starts[number]), int(starts[number + 1])
            text = tokenizer.decode(split.read(begin, min(end, begin + BEGINNING_TOKENS)))
            words = " ".join(text.split())[:BEGINNING_CHARACTERS]
            shown.append({"document": number, "token": begin, "tokens": end - begin, "text": words})

    size = split.bytes if split.is_prepared else None
    return SplitInspection(documents, split.tokens, size, counts.piece_bytes, vocabulary, lengths, shown)


# The audit: check every split, and compare the validation split with one or more train splits.

# Allowed relative gaps between decoded and original bytes. The larger one applies if the decoded byte count equals the recorded
# one, because SentencePiece collapses runs of white space (about 1% of the bytes of Shakespeare).
BYTE_GAP = 0.005
FOLDED_GAP = 0.05
SAMPLED = 64  # number of documents that are decoded and re-encoded to check the tokenizer
MAX_RUN_WORDS = 1000  # largest allowed value of `ngram_words`
FOLDS = (
    "the tokens are correct, but the tokenizer normalises this text, which affects only bits per decoded byte, not bits per byte "
    "of the original text; for bits per decoded byte use a lossless tokenizer (--kind bpe), otherwise raise --byte-gap"
)
OTHER = "give the tokenizer that made the tokens, or prepare the text again"


@dataclass(frozen=True)
class TrainComparison:
    """A comparison of the validation split with a train split; `runs` is the number of word n-grams in the validation split."""

    against: str
    documents: int
    copied: int
    similar: int
    runs: int
    runs_found: int  # number of word n-grams that also occur in train
    share: float


@dataclass(frozen=True)
class AuditReport:
    """The result of an audit: counts of every split, comparisons with train splits, and all problems found."""

    folder: Path
    tokenizer: str | None
    vocab_size: int | None
    fingerprint: str | None
    splits: dict[str, SplitCounts]
    comparisons: list[TrainComparison]
    findings: list[DataProblem]
    seconds: float

    @property
    def ok(self) -> bool:
        """Return True if the audit found no problems."""
        return not self.findings


def audit(
    path: Path,
    *,
    tokenizer: str | None = None,
    against: Path | None = None,
    byte_gap: float | None = None,
    ngram_words: int = 13,
    overlap_share: float = 0.5,
    progress: Progress | None = None,
) -> AuditReport:
    """Read every byte of a folder, and compare its validation split with its train split and with that of `against`.

    `byte_gap` is the allowed relative difference between decoded and original bytes, by default BYTE_GAP or FOLDED_GAP. A
    validation document with more than `overlap_share` of its word n-grams (n = `ngram_words`) in train is reported.
    """
    started = time.monotonic()
    if not 1 <= ngram_words <= MAX_RUN_WORDS:
        raise ConfigError(f"--ngram-words {ngram_words} is out of range; give a number from 1 to {MAX_RUN_WORDS:,}")
    for option, share in (("--byte-gap", byte_gap), ("--overlap-share", overlap_share)):
        if share is not None and not 0 <= share <= 1:
            raise ConfigError(f"{option} {share} is not a fraction; give a number from 0 to 1")
    dataset = open_for_audit(path, tokenizer)
    trains = [dataset] if "train" in dataset.splits else []
    if against is not None and against.resolve() != path.resolve():
        other = open_for_audit(against, None if (against / MANIFEST).is_file() else tokenizer)
        if "val" not in dataset.splits:
            raise ConfigError(f"{path} has no validation split to compare with {against}")
        if "train" not in other.splits:
            raise ConfigError(f"--against {against} has no train split")
        trains.append(other)
    val_tokens = dataset.split("val").tokens
    total = sum(split.tokens for split in dataset.splits.values())
    total += sum(other.split("train").tokens for other in trains if other is not dataset)
    total += sum(other.split("train").tokens + val_tokens for other in trains) if val_tokens else 0
    add_bytes = adding_up(progress, TOKEN_BYTES * total)

    def advance(tokens: int) -> None:
        add_bytes(TOKEN_BYTES * tokens)

    sides, splits = {}, {}
    for name, split in dataset.splits.items():
        sides[name], splits[name] = _audit_split(dataset, split, byte_gap, advance)
        for bucket in split.record.buckets:
            recorded = SplitCounts.recorded(bucket)
            splits[f"{name}/{bucket.name}"] = recorded if split.is_prepared else replace(recorded, bytes=None)
    comparisons, val = [], sides.get("val")
    for other in trains:
        if other is not dataset:
            sides["train"], _ = _audit_split(other, other.splits["train"], byte_gap, advance)
            dataset.problems.extend(other.problems)
        train = sides["train"]
        if val and train and len(val.starts) > 1 and len(train.starts) > 1:
            comparison, matches = find_overlap(val, train, ngram_words, overlap_share, advance)
            comparisons.append(comparison)
            dataset.problems.extend(_overlap_problem(match, val, train, ngram_words) for match in matches)
    own, fingerprint = dataset.known_tokenizer, dataset.fingerprint if dataset.is_prepared else None
    kind, vocab_size = (own.kind, own.vocab_size) if own else (None, None)
    seconds = time.monotonic() - started
    return AuditReport(path, kind, vocab_size, fingerprint, splits, comparisons, dataset.problems, seconds)


@dataclass(frozen=True)
class ComparedSplit:
    """A split to compare: its tokens, document boundaries and tokenizer."""

    split: Split
    starts: Starts
    tokenizer: Tokenizer

    def document(self, number: int) -> NDArray[Any]:
        """Return the tokens of one document."""
        return self.split.read(int(self.starts[number]), int(self.starts[number + 1]))


def _audit_split(
    dataset: Dataset, split: Split, byte_gap: float | None, advance: OnTokens
) -> tuple[ComparedSplit | None, SplitCounts]:
    """Check a split. Return the split to compare (None if its tokens do not match the tokenizer), and its counts.

    Decoding with the wrong tokenizer gives meaningless text, so such a split is neither counted nor compared.
    """
    record, problems, tokenizer = split.record, dataset.problems, dataset.known_tokenizer
    for shard in record.shards if split.is_prepared else ():
        file = split.folder / shard.file
        if file in split.paths and (sha256 := file_sha256(file)) != shard.sha256:
            problem = f"has changed since it was written: its sha256 is {sha256[:16]}... instead of {shard.sha256[:16]}..."
            problems.append(DataProblem("shard-sha256", str(file), problem))
    index = None
    try:
        index = split.index()
    except ValueError as error:
        problems.append(DataProblem("document-index", str(split.folder / record.document_index), str(error)))
    complete = len(split.paths) == len(record.shards)
    if split.is_prepared and not (complete and split.tokens == record.tokens):
        index = None
    recorded = SplitCounts.recorded(record) if split.is_prepared else None
    if tokenizer is None:
        return None, recorded or SplitCounts(None, split.tokens, None, None)
    counts, starts = count_documents(split, tokenizer, index, advance)
    side, fits = ComparedSplit(split, starts, tokenizer), counts.outside is None
    if counts.outside is not None:
        vocabulary = f"the {tokenizer.kind} vocabulary of {tokenizer.vocab_size:,} ids"
        tokens = int(counts.ids[tokenizer.vocab_size :].sum())
        problem = f"first of {tokens:,} tokens outside {vocabulary} in {split.name}; the largest is {counts.largest:,}"
        where, place = split.place(counts.outside)
        problems.append(DataProblem("token-range", where, problem, OTHER, place))
    marked = (not complete or _check_marks(side, counts, index, problems)) and fits
    if marked and complete and split.is_prepared and (index is not None or tokenizer.bos is not None):
        _check_bytes(side, counts, byte_gap, problems)
    if fits:  # check that sampled documents round-trip through the tokenizer, which fails with nearly every wrong tokenizer
        numbers = np.unique(np.linspace(0, len(starts) - 2, SAMPLED).astype(np.int64)) if len(starts) > 1 else starts[:0]
        begins, ends = starts[numbers].tolist(), starts[numbers + 1].tolist()
        samples = (split.read(begin, min(end, begin + 2 * HEAD)) for begin, end in zip(begins, ends, strict=True))
        result = round_trips(tokenizer, samples)
        if not result.fit:
            counted = f"{len(result.wrong)} of the {result.tried} sampled documents"
            problem = f"re-encoding the decoded document gives different tokens, as it does for {counted}"
            where, place = split.place(begins[result.wrong[0]])
            problems.append(DataProblem("tokenizer-mismatch", where, problem, OTHER, place))
        if result.fit and marked:
            return side, recorded or SplitCounts(len(starts) - 1, split.tokens, None, counts.piece_bytes)
    return None, recorded or SplitCounts(None, split.tokens, None, None)


def _check_marks(side: ComparedSplit, counts: TokenCounts, index: NDArray[Any] | None, problems: list[DataProblem]) -> bool:
    """Return True if BOS starts every document and occurs nowhere else, or if there is no BOS id; otherwise, append a problem."""
    split, bos, marks = side.split, side.tokenizer.bos, counts.marks
    is_windows = index is not None and not split.is_prepared  # the windows of gpt-simple end with EOS and have no BOS
    if bos is None or not split.tokens or is_windows:
        return True
    starts = side.starts[:-1]  # without an index: every BOS position and the first token, which must be BOS
    unmarked, inside = np.setdiff1d(starts, marks), np.setdiff1d(marks, starts)
    if len(unmarked) or len(inside):
        counted = f"{len(unmarked):,} documents start without BOS and {len(inside):,} BOS tokens are inside documents"
        problem = f"from here on, BOS (id {bos}) does not mark the starts of documents in {split.name}: {counted}"
        file, place = split.place(int(min([*unmarked[:1], *inside[:1]])))
        problems.append(DataProblem("document-marks", file, problem, OTHER, place))
    return not (len(unmarked) or len(inside))


def _check_bytes(side: ComparedSplit, counts: TokenCounts, limit: float | None, problems: list[DataProblem]) -> None:
    """Check that the tokens decode to the recorded number of bytes and, within a relative gap of `limit`, to the text's size."""
    split, record, counted, lossless = side.split, side.split.record, counts.piece_bytes, side.tokenizer.lossless
    file, place = str(split.folder / MANIFEST), f"splits.{split.name}"
    if record.piece_bytes is not None and counted != record.piece_bytes:
        problem = f"the tokens decode to {counted:,} bytes but {record.piece_bytes:,} were recorded when the data was written"
        problems.append(DataProblem("byte-count", file, problem, OTHER, place))
    gap = limit if limit is not None else FOLDED_GAP if counted == record.piece_bytes else BYTE_GAP
    apart = abs(counted - record.bytes) / max(record.bytes, 1)
    if apart > gap or (lossless and counted != record.bytes):
        allowed = "this tokenizer is lossless" if lossless else f"the limit is {gap:.2%}"
        problem = f"the tokens decode to {counted:,} bytes but the text has {record.bytes:,}: a gap of {apart:.2%} ({allowed})"
        problem += "; bits per decoded byte are wrong by the same percentage"
        advice = OTHER if lossless or counted != record.piece_bytes else FOLDS
        problems.append(DataProblem("byte-count", file, problem, advice, place))


# Train/validation overlap: validation documents that occur in train, as a whole or with many of their word n-grams ("runs").
# The hashes of the validation split are kept in memory and train is streamed once, so memory grows only with validation.

Hashes = NDArray[np.uint64]
FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so that multiplication modulo 2**64 is invertible
READ_TOKENS = 1 << 18  # tokens of a document decoded at once; a word that crosses the boundary counts as two words
FILTER_SLOTS = 16  # filter slots per validation n-gram, so the false-positive rate is about 1/16
NOWHERE = -1


@dataclass(frozen=True)
class Match:
    """A validation document that occurs in train, and the train document that equals it or shares the most n-grams with it.

    `kind` says what is equal: all tokens, all words (ignoring case, white space and punctuation) or a `share` of the n-grams.
    """

    document: int
    train: int
    kind: Literal["tokens", "words", "runs"]
    share: float


def find_overlap(
    val: ComparedSplit, train: ComparedSplit, run_words: int, least_share: float, on_tokens: OnTokens = lambda tokens: None
) -> tuple[TrainComparison, list[Match]]:
    """Find validation documents that equal a train document or have more than `least_share` of their n-grams in train."""
    documents: dict[bytes, list[int]] = {}
    runs: list[Hashes] = [np.empty(0, np.uint64)]
    for number, (key, hashes) in enumerate(_hashed_documents(val, run_words, on_tokens)):
        runs.append(hashes)
        documents.setdefault(key, []).append(number)
    known, which = np.unique(np.concatenate(runs), return_inverse=True)
    source = np.full(len(known), NOWHERE, np.int64)  # the last train document that contains each n-gram
    bits = (FILTER_SLOTS * len(known) + 1).bit_length()
    # Prefilter: a binary search for every train n-gram would be far slower.
    may_be_known, shift = np.zeros(1 << bits, bool), np.uint64(64 - bits)
    may_be_known[known >> shift] = True
    copies: dict[int, int] = {}
    for number, (key, hashes) in enumerate(_hashed_documents(train, run_words, on_tokens)):
        hashes = hashes[may_be_known[hashes >> shift]]
        places = np.searchsorted(known, hashes)
        places = np.minimum(places, len(known) - 1)
        source[places[known[places] == hashes]] = number
        for document in documents.get(key, ()) if key else ():
            copies.setdefault(document, number)
    same_ids = val.tokenizer.fingerprint() == train.tokenizer.fingerprint()
    total, total_found, matches = 0, 0, []
    for document, sources in enumerate(np.split(source[which], np.cumsum([len(one) for one in runs[1:]])[:-1])):
        numbers, counts = np.unique(sources[sources != NOWHERE], return_counts=True)
        found = int(counts.sum())
        total, total_found, share = total + len(sources), total_found + found, found / max(1, len(sources))
        if document in copies:
            equal = same_ids and np.array_equal(val.document(document), train.document(copies[document]))
            share = share if len(sources) else 1.0
            matches.append(Match(document, copies[document], "tokens" if equal else "words", share))
        elif share > least_share:
            matches.append(Match(document, int(numbers[counts.argmax()]), "runs", share))
    similar = sum(match.kind == "runs" for match in matches)
    documents_of_val, against, share = len(val.starts) - 1, str(train.split.folder), total_found / max(1, total)
    copied = len(matches) - similar
    return TrainComparison(against, documents_of_val, copied, similar, total, total_found, share), matches


def _hashed_documents(side: ComparedSplit, run_words: int, on_tokens: OnTokens) -> Iterator[tuple[bytes, Hashes]]:
    """Yield the key of each document, which is the same for copies, and the hashes of the document's word n-grams.

    The key is a hash of the words or, in a document without words, of the text; a document without text has the key b"".
    """
    for start, stop in pairwise(map(int, side.starts)):
        parts, texts = [], []
        for begin in range(start, stop, READ_TOKENS):
            ids = side.split.read(begin, min(begin + READ_TOKENS, stop))
            text = side.tokenizer.decode(ids)
            words = text.lower().translate(_word_borders()).split()
            # Hashes of str are comparable within one process only.
            parts.append(np.fromiter(map(hash, words), np.int64, len(words)).view(np.uint64))
            texts += [] if words else [text]
            on_tokens(len(ids))
        hashes = np.concatenate([np.empty(0, np.uint64), *parts])
        content = hashes.tobytes() if len(hashes) else "".join(texts).encode()
        yield hashlib.blake2b(content, digest_size=16).digest() if content else b"", run_hashes(hashes, run_words)


@cache
def _word_borders() -> dict[int, str]:
    """Return a `str.translate` table that keeps letters and digits, puts spaces around those from U+3000 on, and blanks the rest.

    Chinese and Japanese have no spaces between words, so every character from U+3000 on counts as a word.
    """
    codes = (code for code in range(0x10000) if code >= 0x3000 or not chr(code).isalnum())
    return {code: f" {chr(code)} " if chr(code).isalnum() else " " for code in codes}


def run_hashes(words: Hashes, count: int) -> Hashes:
    """Return a polynomial hash of each n-gram of `count` words, given the hash of each word."""
    if count == 1 or len(words) < count:
        return words[: max(0, len(words) - count + 1)]
    half = count // 2
    parts = run_hashes(words, half)
    pairs = parts[:-half] * np.uint64(pow(int(FACTOR), half, 1 << 64)) + parts[half:]
    return pairs[: len(words) - count + 1] * FACTOR + words[count - 1 :] if count % 2 else pairs


def _overlap_problem(match: Match, val: ComparedSplit, train: ComparedSplit, run_words: int) -> DataProblem:
    file, place = val.split.place(int(val.starts[match.document]))
    train_file, train_place = train.split.place(int(train.starts[match.train]))
    where = f"document {match.train:,} of train ({train_file}, {train_place})"
    advice = "remove the document from train or from validation and prepare the data again"
    place = f"document {match.document:,} of val, {place}"
    if match.kind == "runs":
        problem = f"{match.share:.0%} of its {run_words}-word n-grams are in train, most of them in {where}"
        return DataProblem("overlap-ngrams", file, problem, advice, place)
    how = "token for token" if match.kind == "tokens" else "except for case, white space and punctuation"
    return DataProblem("overlap-documents", file, f"equals {where}, {how}", advice, place)
