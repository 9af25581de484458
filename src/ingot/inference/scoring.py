"""Compute log-probabilities of rows of tokens, and benchmark scores from these log-probabilities.

Rows of similar length share a batch; the batch size is halved when memory runs out. Batches are distributed over the ranks, and
all ranks call the model the same number of times, because a sharded model gathers its weights in each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ingot.artifact.hf_tokenizer import marks_texts
from ingot.backends.base import Inference
from ingot.backends.sampling import RowScores
from ingot.data.store.documents import marks_of
from ingot.data.tokenizers import Tokenizer
from ingot.errors import ConfigError, DataError, Interrupted, RunError, Setting
from ingot.eval.tasks import TASKS, Item, TaskScore, read_task, score_items

BATCH_TOKENS = 1 << 14  # maximum tokens in a batch, padding included


def score_rows(
    backend: Inference,
    rows: Sequence[Sequence[int]],
    firsts: Sequence[int],
    top: int = 1,
) -> list[RowScores]:
    """Return the log-probabilities of the tokens in each row i from position firsts[i] >= 1 onwards; for a single rank only."""
    by_row: dict[int, RowScores] = {}
    for _, scores in score_batches(backend, rows, firsts, top):
        by_row |= scores
    return [by_row[i] for i in range(len(rows))]


def score_batches(
    backend: Inference,
    rows: Sequence[Sequence[int]],
    firsts: Sequence[int],
    top: int = 1,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[int, dict[int, RowScores]]]:
    """Yield, after each batch, (number of rows scored so far by all ranks, scores of this rank's rows by row index).

    Every rank must pass the same rows. Raises Interrupted on all ranks if `stop` returns True on any of them.
    """
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))  # longest first, so that running out of memory happens early
    most, ranks = BATCH_TOKENS, backend.ranks
    while order:
        parts, end = [], 0
        for _ in range(ranks.world_size):
            # A rank with no rows left scores the last row again and discards the result.
            longest = len(rows[order[min(end, len(order) - 1)]])
            parts.append(order[end : end + max(1, most // longest)])
            end += len(parts[-1])
        mine = parts[ranks.rank]
        scored = mine or order[-1:]
        full = False
        try:
            scores = backend.score_rows([rows[i] for i in scored], [firsts[i] for i in scored], top)
        except MemoryError:
            full = True
        anybody_full, stopped = backend.maximum([full, stop()])
        if stopped:
            raise Interrupted
        if anybody_full:
            if all(len(part) <= 1 for part in parts):
                raise RunError("a single row does not fit in the device's memory; use a device with more memory")
            most //= 2
            continue
        order = order[end:]
        yield len(rows) - len(order), dict(zip(mine, scores, strict=False))


# Tasks: all items are read and checked before any is scored.

Row = tuple[list[int], int]  # tokens, and the position of the first scored token
Key = tuple[str, str]  # a task and one of its files
Items = Mapping[Key, list[Item]]


@dataclass(frozen=True)
class TaskRows:
    """The items of tasks, with one row of tokens per (context, continuation) pair."""

    items: Items
    rows: Sequence[Row]


def read_items(names: Sequence[str], folder: Path | None, limit: int | None = None) -> Items:
    """Read the items of tasks from a folder or from the Hugging Face Hub, at most the first `limit` items of each file."""
    if folder is not None and not folder.is_dir():
        raise DataError(f"{folder} is not a folder; give the folder with the task files")
    return {(name, part): items for name in names for part, items in read_task(name, folder, limit).items()}


def task_rows(items: Items, tokenizer: Tokenizer, context: int, truncate: Setting | None) -> TaskRows:
    """Tokenize items into rows; raise ConfigError for texts longer than the context.

    With `truncate` None, such texts are truncated on the left, as in lm-eval; otherwise, the error suggests setting `truncate`.
    """
    most, rows = context + 1, []  # one token more than the context, because a row's last token is only a target
    for (_, part), some in items.items():
        pairs = [pair for item in some for pair in item.pairs]
        longer = 0
        for before, continuation in pairs:
            prefix, after = encode_pair(tokenizer, before, continuation)
            row = prefix + after
            longer += len(row) > most
            if len(after) >= most:
                raise DataError(f"{part} has a continuation of {len(after):,} tokens, but the model's context has {context:,}")
            row = row[-most:]
            rows.append((row, max(1, len(row) - len(after))))
        if longer and truncate is not None:
            what = f"{longer:,} of {len(pairs):,} texts of {part} are longer than the model's context of {context:,} tokens"
            raise ConfigError(what, truncate, advice="use {0} to truncate them from the left")
    return TaskRows(items, rows)


def score_tasks(
    tasks: TaskRows,
    backend: Inference,
    progress: Callable[[int, int], None] = lambda done, total: None,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, TaskScore]:
    """Score tasks on all ranks; raise Interrupted on all ranks if `stop` returns True on any of them."""
    rows, firsts = [tokens for tokens, _ in tasks.rows], [first for _, first in tasks.rows]
    logs, greedy = [0.0] * len(rows), [0.0] * len(rows)  # zero for rows of other ranks, because results are summed over ranks
    progress(0, len(rows))
    for done, scores in score_batches(backend, rows, firsts, stop=stop):
        for row, row_scores in scores.items():
            logs[row], greedy[row] = row_scores.total, float(row_scores.is_greedy(rows[row][firsts[row] :]))
        progress(done, len(rows))
    summed = backend.total([*logs, *greedy])
    pairs = iter(list(zip(summed[: len(rows)], map(bool, summed[len(rows) :]), strict=True)))
    answers = {key: [[next(pairs) for _ in item.pairs] for item in items] for key, items in tasks.items.items()}
    result = {}
    for name in dict.fromkeys(name for name, _ in tasks.items):
        keys = [key for key in tasks.items if key[0] == name]
        whole = [item for key in keys for item in tasks.items[key]]
        result[name] = score_items(TASKS[name], whole, [answer for key in keys for answer in answers[key]])
        if len(keys) > 1:
            result[name].parts.update({key[1]: score_items(TASKS[name], tasks.items[key], answers[key]) for key in keys})
    return result


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Return the ids of a context and of its continuation; trailing spaces of the context move to the continuation."""
    if not context:
        if (start := marks_of(tokenizer).bos) is None:
            raise DataError(f"the {tokenizer.kind} tokenizer has no start token, which this task needs to score whole texts")
        return [start], tokenizer.encode(continuation).tolist()
    kept = context.rstrip()
    whole, before = (text_ids(tokenizer, text) for text in (context + continuation, kept))
    if whole[: len(before)] != before and tokenizer.unfinished(whole[: len(before)]):
        # The mark that encodes the capital at the start of the continuation was merged into the last token of the context.
        same = next(place for place, pair in enumerate(zip(before, whole, strict=False)) if pair[0] != pair[1])
        return before[:same], whole[same:]
    return before, whole[len(before) :]


def text_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids that lm-eval gets for a text from the exported tokenizer, which may add a start token."""
    return (tokenizer.encode_document(text) if marks_texts(tokenizer) else tokenizer.encode(text)).tolist()
