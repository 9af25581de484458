"""Many rows of tokens scored by a model: those of about one length together, as many as the memory holds.

Ranks share the batches, and each of them calls the model as often as the others: a sharded model gathers inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ingot.backends.base import Inference
from ingot.backends.sampling import RowScores
from ingot.data.formats.documents import marks_of
from ingot.data.tokenizers import GPT2Tokenizer, HFTokenizer, Tokenizer
from ingot.errors import ConfigError, DataError, Interrupted, RunError, Setting
from ingot.eval.tasks import TASKS, Item, Score, read_task, score_items

BATCH_TOKENS = 1 << 14  # of all rows that are scored at once, filling included


def score_rows(
    backend: Inference,
    rows: Sequence[Sequence[int]],
    firsts: Sequence[int],
    top: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[RowScores]:
    """Log-probabilities of each row's tokens from its place `first` (1 or more) on, in the order of the rows; of one rank."""
    found: dict[int, RowScores] = {}
    for done, scores in score_batches(backend, rows, firsts, top):
        found |= scores
        progress(done, len(rows))
    return [found[i] for i in range(len(rows))]


def score_batches(
    backend: Inference,
    rows: Sequence[Sequence[int]],
    firsts: Sequence[int],
    top: int = 1,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[int, dict[int, RowScores]]]:
    """How many rows the ranks have scored so far, and the scores of those that this one has just scored, by their numbers.

    Every rank calls it with the same rows; Interrupted, on all of them, where `stop` says so on any.
    """
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))  # the largest first: what does not fit is known at once
    most, ranks = BATCH_TOKENS, backend.ranks
    while order:
        parts, end = [], 0
        for _ in range(ranks.world_size):
            # Where nothing is left for a rank it scores the last row again, which nobody asks for.
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
                raise RunError("the device's memory does not hold one row; use another device")
            most //= 2
            continue
        order = order[end:]
        yield len(rows) - len(order), dict(zip(mine, scores, strict=False))


# A model's scores on tasks: every item is read and measured before the first is scored.

Row = tuple[list[int], int]  # tokens, and the place of the first that is scored
Key = tuple[str, str]  # a task and one of its files


Items = Mapping[Key, list[Item]]


@dataclass(frozen=True)
class TaskRows:
    """The items of tasks, and the rows of tokens of all their pairs."""

    items: Items
    rows: Sequence[Row]


def read_items(names: Sequence[str], folder: Path | None, limit: int | None = None) -> Items:
    """The items of tasks whose files lie in a folder, or on the hub; of each file the first `limit`."""
    if folder is not None and not folder.is_dir():
        raise DataError(f"there is no folder {folder}; give the one with the files of the tasks")
    return {(name, part): found for name in names for part, found in read_task(name, folder, limit).items()}


def task_rows(items: Items, tokenizer: Tokenizer, context: int, truncate: Setting | None) -> TaskRows:
    """The rows of items; what is longer than the context is told now.

    `truncate` names the setting that would cut the beginnings of such texts, as lm-eval does; None: they are cut.
    """
    return TaskRows(items, [row for key, some in items.items() for row in _rows(tokenizer, context, key, some, truncate)])


def score_tasks(
    tasks: TaskRows,
    backend: Inference,
    progress: Callable[[int, int], None] = lambda done, total: None,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, Score]:
    """The scores of tasks. Every rank calls it and gets them; Interrupted, on all of them, where `stop` says so on any."""
    rows, firsts = [tokens for tokens, _ in tasks.rows], [first for _, first in tasks.rows]
    logs, greedy = [0.0] * len(rows), [0.0] * len(rows)  # what other ranks find is added to what this one does
    progress(0, len(rows))
    for done, scores in score_batches(backend, rows, firsts, stop=stop):
        for row, one in scores.items():
            logs[row], greedy[row] = one.total, float(one.is_greedy(rows[row][firsts[row] :]))
        progress(done, len(rows))
    summed = backend.total([*logs, *greedy])
    found = iter(list(zip(summed[: len(rows)], map(bool, summed[len(rows) :]), strict=True)))
    answers = {key: [[next(found) for _ in item.pairs] for item in items] for key, items in tasks.items.items()}
    return {name: _score(name, tasks.items, answers) for name in dict.fromkeys(name for name, _ in tasks.items)}


def _score(name: str, read: Items, answers: Mapping[Key, list[list[tuple[float, bool]]]]) -> Score:
    keys = [key for key in read if key[0] == name]
    parts = {part: score_items(TASKS[name], read[name, part], answers[name, part]) for _, part in keys}
    if len(parts) == 1:
        return next(iter(parts.values()))
    whole = score_items(TASKS[name], [i for key in keys for i in read[key]], [a for key in keys for a in answers[key]])
    return Score(whole.items, whole.metrics, parts)


def _rows(tokenizer: Tokenizer, context: int, key: Key, items: Sequence[Item], truncate: Setting | None) -> list[Row]:
    """The rows of all pairs; one that the model cannot see is told at once."""
    most, found = context + 1, []  # the last token is only asked for
    pairs = [pair for item in items for pair in item.pairs]
    longer = 0
    for before, continuation in pairs:
        known, after = encode_pair(tokenizer, before, continuation)
        row = known + after
        longer += len(row) > most
        if len(after) >= most:
            raise DataError(f"{key[1]} has a continuation of {len(after):,} tokens, and the model sees {context:,} at most")
        row = row[-most:]
        found.append((row, max(1, len(row) - len(after))))
    if longer and truncate is not None:
        raise ConfigError(
            f"{longer:,} of {len(pairs):,} texts of {key[1]} are longer than the {context:,} tokens that the model sees",
            truncate,
            advice="{0} cuts their beginnings off",
        )
    return found


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """The ids of a context and of what follows it; spaces at the end of a context belong to the continuation."""
    if not context:
        if (start := marks_of(tokenizer).bos) is None:
            raise DataError(f"the {tokenizer.kind} tokenizer has no mark for the start of a text, which this task begins with")
        return [start], tokenizer.encode(continuation).tolist()
    kept = context.rstrip()
    whole, before = (text_ids(tokenizer, text) for text in (context + continuation, kept))
    if whole[: len(before)] != before and tokenizer.unfinished(whole[: len(before)]):
        # The mark of the continuation's first capital joined the end of the context.
        same = next(place for place, pair in enumerate(zip(before, whole, strict=False)) if pair[0] != pair[1])
        return before[:same], whole[same:]
    return before, whole[len(before) :]


def text_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids as the tokenizer of the exported model gives them to lm-eval: after the start of a document, but for GPT-2's."""
    return (tokenizer.encode_document(text) if marks_texts(tokenizer) else tokenizer.encode(text)).tolist()


def marks_texts(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer of the exported model puts the start of a document in front of a text."""
    return tokenizer.marks_texts if isinstance(tokenizer, HFTokenizer) else not isinstance(tokenizer, GPT2Tokenizer)
