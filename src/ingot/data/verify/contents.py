"""The contents of token data: open it for an audit, count its tokens, and summarise a split.

Tokens are counted in chunks of mapped shards, so memory grows only with the number of documents (8 bytes each).
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.data.formats.opener import open_tokens
from ingot.data.formats.shard_folder import paired_tokenizer
from ingot.data.store.dataset import MANIFEST, Bucket, Dataset, Split, SplitCounts, tokenizer_problem
from ingot.data.store.documents import starts_at_marks
from ingot.data.store.shards import TOKEN_BYTES, DataProblem
from ingot.data.text.text_files import adding_up
from ingot.data.tokenizers import Tokenizer, open_tokenizer
from ingot.data.tokenizers.tokenizer_base import NARROW, OUTSIDE
from ingot.errors import ConfigError, DataError
from ingot.runtime.files import reading

CHUNK_TOKENS = 1 << 20  # tokens counted at a time
BEGINNING_TOKENS, BEGINNING_CHARACTERS = 256, 100
Starts = NDArray[np.int64]  # document offsets, then the end of the last
Progress = Callable[[int, int], None]  # called with (bytes done, total bytes)
OnTokens = Callable[[int], None]  # called with the number of tokens just read


def open_for_audit(path: Path, tokenizer: str | None = None) -> Dataset:
    """Open a folder and collect its problems; the tokenizer is None only if it cannot be read.

    `tokenizer` is the one that produced other programs' tokens; for a prepared folder it must match the recorded one.
    """
    with reading(path):
        if not path.is_dir():
            Dataset.open(path)  # raises an error with advice
        dataset = open_tokens(path, strict=False)
    if dataset.format == "nanogpt":
        made_by = "" if dataset.known_tokenizer else " --tokenizer NAME"
        command = f"ingot data convert {shlex.quote(str(path))} --to ingot{made_by} --output DIR"
        raise DataError(f"{path} holds tokens in the format nanogpt; make it a prepared folder with: {command}")
    for split in dataset.splits.values():
        split.dtype = np.dtype(np.uint32)  # equal documents of two splits must be equal arrays
    own = dataset.known_tokenizer
    if dataset.format == "shards":
        with suppress(DataError, OSError):  # a damaged manifest.json may be unrelated
            own = _try_tokenizer(dataset, paired_tokenizer(path))
    given = _try_tokenizer(dataset, tokenizer)
    if tokenizer is None and own is None and dataset.format != "ingot":
        raise ConfigError(f"{path} does not name its tokenizer; give --tokenizer (gpt2, a .model, tokenizer.json)")
    if not dataset.is_prepared:
        dataset.known_tokenizer = given or own
    if own is not None and given is not None and own.fingerprint() != given.fingerprint():
        own_text, given_text = (f"{t.kind}, {t.vocab_size:,} ids, {t.fingerprint()[:12]}" for t in (own, given))
        problem = f"its tokenizer ({own_text}) is not the one given ({given_text})"
        advice = "leave --tokenizer out, or prepare the text again with yours"
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
    """Counts from one pass; `ids` has an entry per id of the vocabulary, some above it, and a last one for larger ids."""

    ids: NDArray[np.int64]
    largest: int
    marks: NDArray[np.int64]
    piece_bytes: int


def count_documents(
    split: Split | Bucket, tokenizer: Tokenizer, index: NDArray[Any] | None, on_tokens: OnTokens
) -> tuple[TokenCounts, Starts]:
    """Read a split once; return its counts and document offsets: from the index or, without one, from the separators."""
    starts = None if index is None else np.asarray(index).astype(np.int64)
    slots = max(NARROW, tokenizer.vocab_size) + 1
    sizes = np.zeros(slots, np.int64)
    sizes[: tokenizer.vocab_size] = tokenizer.token_bytes()
    special = np.append(sizes == 0, True)  # the last entry is for OUTSIDE
    ids, largest = np.zeros(slots, np.int64), 0
    marks, extra, previous = [np.empty(0, np.int64)], 0, OUTSIDE
    for begin in range(0, split.tokens, CHUNK_TOKENS):
        tokens = split.read(begin, min(begin + CHUNK_TOKENS, split.tokens))
        largest = max(largest, int(tokens.max()))
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
    counts = TokenCounts(ids, largest, np.concatenate(marks), int(ids @ sizes) + extra)
    return counts, starts_at_marks(split.tokens, counts.marks) if starts is None else starts


@dataclass(frozen=True)
class Lengths:
    """The lengths of documents in tokens, including BOS; a histogram row has `low`, `high` (included) and `documents`."""

    shortest: int
    mean: float
    median: float
    longest: int
    histogram: list[dict[str, int]]


@dataclass
class SplitInspection(SplitCounts):
    """The contents of a split: counts, ids and documents.

    `vocabulary` has its size, the numbers of used and of never used ids, and the id, text (None if it represents none), count
    and share of the most frequent ones. A beginning has a document's number, first token, length in tokens and first words.
    """

    documents: int
    piece_bytes: int
    vocabulary: dict[str, Any]
    lengths: Lengths | None
    beginnings: list[dict[str, Any]]


@dataclass(frozen=True)
class Inspection:
    """The contents of a folder."""

    folder: Path
    tokenizer: str
    splits: dict[str, SplitInspection]


def inspect(
    path: Path,
    split: str | None = None,
    *,
    tokenizer: str | None = None,
    top: int = 10,
    beginnings: int = 5,
    progress: Progress | None = None,
) -> Inspection:
    """Inspect one split of a folder, or all; list the `top` most frequent ids and the beginnings of some documents."""
    dataset = open_for_audit(path, tokenizer)
    if dataset.problems:
        raise DataError(f"{dataset.problems[0].line} (ingot data verify {path} lists everything)")
    if split is not None and split not in dataset.splits:
        raise DataError(f"{path} has no split {split!r}; it has {', '.join(dataset.splits)}")
    names = [split] if split else list(dataset.splits)
    parts: list[Split | Bucket] = []
    for name in names:
        parts += [dataset.splits[name], *dataset.buckets(name).values()]
    advance = adding_up(progress, TOKEN_BYTES * sum(part.tokens for part in parts))
    inspected = {part.name: _inspect(dataset.tokenizer, part, top, beginnings, advance) for part in parts}
    return Inspection(path, dataset.tokenizer.kind, inspected)


def _inspect(tokenizer: Tokenizer, split: Split | Bucket, top: int, beginnings: int, advance: OnTokens) -> SplitInspection:
    try:
        index = split.index() if isinstance(split, Split) else split.document_starts()
    except ValueError as problem:
        message = f"{split.folder}: the document index of {split.name} {problem}; ingot data verify lists everything"
        raise DataError(message) from None
    counts, starts = count_documents(split, tokenizer, index, lambda tokens: advance(TOKEN_BYTES * tokens))
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
    vocabulary = {
        "size": tokenizer.vocab_size,
        "used": used,
        "never_used": tokenizer.vocab_size - used,
        "most_frequent": most_frequent,
    }

    documents, lengths, shown = len(starts) - 1, None, []
    if documents:
        sizes = np.diff(starts)
        powers = np.bincount(np.maximum(np.frexp(sizes.astype(np.float64))[1] - 1, 0))  # bins double: 1, 2 to 3, 4 to 7, ...
        filled = np.flatnonzero(powers)
        doublings = range(int(filled[0]), int(filled[-1]) + 1)
        bins = [{"low": 1 << p, "high": (2 << p) - 1, "documents": int(powers[p])} for p in doublings]
        lengths = Lengths(int(sizes.min()), float(sizes.mean()), float(np.median(sizes)), int(sizes.max()), bins)
        spread = np.linspace(0, documents - 1, min(max(beginnings, 0), documents)).astype(np.int64)
        for number in np.unique(spread).tolist():
            begin, end = int(starts[number]), int(starts[number + 1])
            text = tokenizer.decode(split.read(begin, min(end, begin + BEGINNING_TOKENS)))
            words = " ".join(text.split())[:BEGINNING_CHARACTERS]
            shown.append({"document": number, "token": begin, "tokens": end - begin, "text": words})

    size = split.bytes if split.is_prepared else None
    return SplitInspection(documents, split.tokens, size, counts.piece_bytes, vocabulary, lengths, shown)
