"""Open token data for an audit, and count it: how often each id occurs, where start marks are, and the bytes of its text."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.data.formats.opener import detect, open_tokens
from ingot.data.formats.shard_folder import MANIFEST as GOLF_MANIFEST
from ingot.data.formats.shard_folder import listed_dataset, paired_tokenizer
from ingot.data.store.dataset import MANIFEST, Bucket, Dataset, Split, tokenizer_problem
from ingot.data.store.documents import starts_at_marks
from ingot.data.store.shards import DataProblem
from ingot.data.tokenizers import Tokenizer, open_tokenizer
from ingot.data.tokenizers.tokenizer_base import NARROW, OUTSIDE
from ingot.errors import ConfigError, DataError
from ingot.runtime.files import reading

CHUNK_TOKENS = 1 << 20  # tokens counted at a time
Starts = NDArray[np.int64]  # where documents begin, then the end of the last
Progress = Callable[[int, int], None]  # bytes done, bytes in total
OnTokens = Callable[[int], None]  # called with the number of tokens that were just read


def open_for_audit(path: Path, tokenizer: str | None = None) -> Dataset:
    """Open a folder and collect its problems; the tokenizer is None only if it cannot be read.

    `tokenizer` names what made the tokens of other programs' data, and must be that of a prepared folder.
    """
    with reading(path):
        if not path.is_dir():
            Dataset.open(path)  # refuses it and says what to do
        if detect(path) == "nanogpt":
            known = open_tokens(path).known_tokenizer is not None
            made_by = "" if known else f" --tokenizer {shlex.quote(tokenizer or 'NAME')}"
            command = f"ingot data convert {shlex.quote(str(path))} --to ingot{made_by} --output DIR"
            raise DataError(f"{path} holds tokens in the format nanogpt; make it a prepared folder with: {command}")
        dataset = open_tokens(path, strict=False)
    for split in dataset.splits.values():
        split.dtype = np.dtype(np.uint32)  # equal documents of two splits must be equal arrays
    if dataset.is_prepared:
        _compare_tokenizer(dataset, tokenizer)
        return dataset
    known_name = None
    if dataset.format != "gpt-simple":
        try:
            known_name = paired_tokenizer(path)
        except (DataError, OSError):  # a damaged manifest.json may belong to something else
            known_name = None
    if tokenizer is None and known_name is None and dataset.format != "ingot":
        raise ConfigError(f"{path} does not name its tokenizer; give --tokenizer (gpt2, a .model, tokenizer.json)")
    opened = {name: _try_tokenizer(dataset, name) for name in (tokenizer, known_name) if name}
    dataset.known_tokenizer = opened.get(tokenizer or known_name or "")
    given, listed = opened.get(tokenizer or ""), opened.get(known_name or "")
    if given is not None and listed is not None and given.fingerprint() != listed.fingerprint():
        problem = f"was made with {known_name} by its {GOLF_MANIFEST}, and {tokenizer} is another tokenizer"
        dataset.problems.append(DataProblem("tokenizer-mismatch", str(path), problem, f"give --tokenizer {known_name}"))
    return dataset


def listed_documents(split: Split) -> int | None:
    """Return how many documents dataset.json or golf's manifest.json says the split has; None if neither does."""
    if split.is_prepared:
        return split.record.documents
    try:
        stats = (listed_dataset(split.folder) or {}).get("stats")
    except (DataError, OSError):
        return None
    if not isinstance(stats, dict) or stats.get(f"files_{split.name}") != len(split.record.shards):
        return None
    documents = stats.get(f"docs_{split.name}")
    return documents if isinstance(documents, int) else None


def _compare_tokenizer(dataset: Dataset, name: str | None) -> None:
    own = dataset.known_tokenizer
    if name is None or own is None or (given := open_tokenizer(name)).fingerprint() == own.fingerprint():
        return
    own_text, given_text = (f"{one.kind}, {one.vocab_size:,} ids, {one.fingerprint()[:12]}" for one in (own, given))
    problem = f"its tokenizer ({own_text}) is not the one given ({given_text})"
    advice = "use the tokenizer inside the folder, or prepare the text again with yours"
    dataset.problems.append(DataProblem("tokenizer-mismatch", str(dataset.folder / MANIFEST), problem, advice, "tokenizer"))


def _try_tokenizer(dataset: Dataset, name: str) -> Tokenizer | None:
    try:
        return open_tokenizer(name)
    except DataError as error:
        dataset.problems.append(tokenizer_problem(name, error))
        return None


@dataclass(frozen=True)
class Counts:
    """The result of one pass; `ids` has a count for every id of the vocabulary, some outside it, and last all above those."""

    ids: NDArray[np.int64]
    largest: int
    marks: NDArray[np.int64]
    piece_bytes: int


def count_documents(
    split: Split | Bucket, tokenizer: Tokenizer, index: NDArray[Any] | None, on_tokens: OnTokens
) -> tuple[Counts, Starts]:
    """Read a split once; return its counts and where documents begin: by the index or, without one, at their marks."""
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
        before = np.empty(len(part), np.int64)
        before[0], before[1:] = previous, part[:-1]
        if starts is not None:
            first, last = np.searchsorted(starts, [begin, begin + len(part)])
            before[starts[first:last] - begin] = OUTSIDE
        places = np.flatnonzero(special[before])
        extra += int((tokenizer.target_bytes(before[places], part[places]) - sizes[part[places]]).sum())
        previous = int(part[-1])
        on_tokens(len(part))
    counts = Counts(ids, largest, np.concatenate(marks), int(ids @ sizes) + extra)
    return counts, starts_at_marks(split.tokens, counts.marks) if starts is None else starts
