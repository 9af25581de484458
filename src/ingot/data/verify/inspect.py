"""Inspect splits: counts, the use of the vocabulary, the lengths of documents and how some of them begin.

Tokens are counted in chunks of mapped shards, so memory grows only with the number of documents (8 bytes each).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ingot.data.store.dataset import Bucket, Split, SplitCounts, split_counts
from ingot.data.store.shards import TOKEN_BYTES
from ingot.data.tokenizers import Tokenizer
from ingot.data.verify.counting import Counts, OnTokens, Progress, Starts, count_documents, open_for_audit
from ingot.errors import DataError
from ingot.runtime.files import check_picture, save_picture

PLOT = "--plot"  # the option that names the image file
BEGINNING_TOKENS, BEGINNING_CHARACTERS = 256, 100


@dataclass(frozen=True)
class IdUse:
    """An id and how often it occurs; `text` is None for ids that stand for no text."""

    id: int
    text: str | None
    count: int
    share: float


@dataclass(frozen=True)
class Vocabulary:
    """The share of the vocabulary that a split uses."""

    size: int
    used: int
    never_used: int
    most_frequent: list[IdUse]


@dataclass(frozen=True)
class Bin:
    """Documents of `low` to `high` tokens, both included."""

    low: int
    high: int
    documents: int


@dataclass(frozen=True)
class Lengths:
    """The lengths of documents in tokens, their start mark included."""

    shortest: int
    mean: float
    median: float
    longest: int
    histogram: list[Bin]


@dataclass(frozen=True)
class Beginning:
    """The first words of a document."""

    document: int
    token: int
    tokens: int
    text: str


@dataclass(frozen=True)
class SplitInspection(SplitCounts):
    """The contents of a split: counts, ids and documents."""

    documents: int
    piece_bytes: int
    vocabulary: Vocabulary
    lengths: Lengths | None
    beginnings: list[Beginning]


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
    chosen = {name: one for name, one in dataset.splits.items() if split in (None, name)}
    done, total = 0, sum(one.tokens * (2 if one.record.buckets else 1) for one in chosen.values())

    def advance(tokens: int) -> None:
        nonlocal done
        done += tokens
        if progress:
            progress(TOKEN_BYTES * done, TOKEN_BYTES * total)

    splits = {}
    for name, one in chosen.items():
        parts: list[Split | Bucket] = [one, *dataset.buckets(name).values()]
        for part in parts:
            splits[part.name] = _inspect(dataset.tokenizer, part, top, beginnings, advance)
    return Inspection(path, dataset.tokenizer.kind, splits)


def plot(inspection: Inspection, file: Path) -> None:
    """Draw the lengths of documents into a PNG or SVG file."""
    check_picture(file, PLOT)
    from matplotlib.figure import Figure

    drawn = {name: split.lengths for name, split in inspection.splits.items() if split.lengths}
    figure = Figure(figsize=(8, 1 + 3 * len(drawn)), layout="constrained")
    for number, (name, lengths) in enumerate(drawn.items()):
        axes = figure.add_subplot(len(drawn), 1, number + 1)
        lows = [bin.low for bin in lengths.histogram]
        axes.bar(lows, [bin.documents for bin in lengths.histogram], width=lows, align="edge", edgecolor="white")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.axvline(lengths.median, color="black", linestyle="--", label=f"median {lengths.median:,.0f}")
        axes.set_title(f"{inspection.folder.resolve().name}, {name}", parse_math=False)
        axes.set(xlabel="tokens in a document", ylabel="documents")
        axes.legend()
    save_picture(figure, file, PLOT)


def _inspect(tokenizer: Tokenizer, split: Split | Bucket, top: int, beginnings: int, advance: OnTokens) -> SplitInspection:
    try:
        index = split.index() if isinstance(split, Split) else split.document_starts()
    except ValueError as problem:
        message = f"{split.folder}: the document index of {split.name} {problem}; ingot data verify lists everything"
        raise DataError(message) from None
    counts, starts = count_documents(split, tokenizer, index, advance)
    if (outside := int(counts.ids[tokenizer.vocab_size :].sum())) > 0:
        raise DataError(
            f"{split.folder}: {outside:,} tokens of {split.name} are outside the {tokenizer.kind} vocabulary of "
            f"{tokenizer.vocab_size:,} ids; give the tokenizer that made them"
        )
    size = split.bytes if split.is_prepared else None
    return SplitInspection(
        **vars(split_counts(len(starts) - 1, split.tokens, size, counts.piece_bytes)),
        vocabulary=_vocabulary(tokenizer, counts, top),
        lengths=_lengths(starts),
        beginnings=_beginnings(split, tokenizer, starts, beginnings),
    )


def _vocabulary(tokenizer: Tokenizer, counts: Counts, top: int) -> Vocabulary:
    ids = counts.ids[: tokenizer.vocab_size]
    used, tokens = int(np.count_nonzero(ids)), int(ids.sum())
    order = np.argsort(-ids, kind="stable")[: min(top, used)].tolist()
    most = [IdUse(i, _piece(tokenizer, i), int(ids[i]), int(ids[i]) / tokens) for i in order]
    return Vocabulary(tokenizer.vocab_size, used, tokenizer.vocab_size - used, most)


def _piece(tokenizer: Tokenizer, token: int) -> str | None:
    """Return the text of an id; bytes that are not a whole character are escaped as \\x.."""
    return None if tokenizer.is_special(token) else tokenizer.decode_bytes([token]).decode("utf-8", "backslashreplace")


def _lengths(starts: Starts) -> Lengths | None:
    """Count lengths in bins that double: 1, 2 to 3, 4 to 7, ..."""
    lengths = np.diff(starts)
    if not len(lengths):
        return None
    power = np.frexp(lengths.astype(np.float64))[1] - 1
    documents = np.bincount(np.maximum(power, 0))
    filled = np.flatnonzero(documents)
    bins = [Bin(1 << p, (2 << p) - 1, int(documents[p])) for p in range(int(filled[0]), int(filled[-1]) + 1)]
    return Lengths(int(lengths.min()), float(lengths.mean()), float(np.median(lengths)), int(lengths.max()), bins)


def _beginnings(split: Split | Bucket, tokenizer: Tokenizer, starts: Starts, count: int) -> list[Beginning]:
    """Return the first words of evenly spaced documents."""
    documents = len(starts) - 1
    numbers = (
        np.unique(np.linspace(0, documents - 1, min(max(count, 0), documents)).astype(np.int64)).tolist() if documents else []
    )
    shown = []
    for number in numbers:
        begin, end = int(starts[number]), int(starts[number + 1])
        text = tokenizer.decode(split.read(begin, min(end, begin + BEGINNING_TOKENS)))
        shown.append(Beginning(number, begin, end - begin, " ".join(text.split())[:BEGINNING_CHARACTERS]))
    return shown
