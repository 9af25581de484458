"""A trained model's scores on tasks: every item is read and measured before the first is scored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ingot.data.tokenizers import GPT2Tokenizer, HFTokenizer, Tokenizer
from ingot.errors import ConfigError, DataError
from ingot.eval.tasks import TASKS, Item, Score, read_task, score_items
from ingot.trained.model import LoadedModel
from ingot.trained.scoring import score_rows

Row = tuple[list[int], int]  # tokens, and the place of the first that is scored


def run_tasks(
    model: LoadedModel,
    names: Sequence[str],
    folder: Path,
    limit: int | None = None,
    truncate: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Score]:
    """The scores of tasks whose files lie in a folder; of each file the first `limit` items. `truncate` cuts the beginning of
    contexts that are too long, as lm-eval does."""
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}; give the one with the files of the tasks")
    read = {(name, part): items for name in names for part, items in read_task(name, folder, limit).items()}
    rows = {key: _rows(model, key, items, truncate) for key, items in read.items()}
    flat = [row for found in rows.values() for row in found]
    scores = score_rows(model, [tokens for tokens, _ in flat], [first for _, first in flat], progress=progress)
    found = iter([(one.total, one.is_greedy(tokens[first:])) for one, (tokens, first) in zip(scores, flat, strict=True)])
    answers = {key: [[next(found) for _ in item.pairs] for item in items] for key, items in read.items()}
    return {name: _score(name, read, answers) for name in names}


def _score(
    name: str, read: Mapping[tuple[str, str], list[Item]], answers: Mapping[tuple[str, str], list[list[tuple[float, bool]]]]
) -> Score:
    keys = [key for key in read if key[0] == name]
    parts = {part: score_items(TASKS[name], read[name, part], answers[name, part]) for _, part in keys}
    if len(parts) == 1:
        return next(iter(parts.values()))
    whole = score_items(TASKS[name], [i for key in keys for i in read[key]], [a for key in keys for a in answers[key]])
    return Score(whole.items, whole.metrics, parts)


def _rows(model: LoadedModel, key: tuple[str, str], items: Sequence[Item], truncate: bool) -> list[Row]:
    """The rows of all pairs; one that the model cannot see is told at once."""
    tokenizer, most, found = model.tokenizer, model.context + 1, []  # the last token is only asked for
    pairs = [pair for item in items for pair in item.pairs]
    longer = 0
    for context, continuation in pairs:
        before, after = encode_pair(tokenizer, context, continuation)
        row = before + after
        longer += len(row) > most
        if len(after) >= most:
            raise DataError(f"{key[1]} has a continuation of {len(after):,} tokens, and the model sees {most - 1:,} at most")
        row = row[-most:]
        found.append((row, max(1, len(row) - len(after))))
    if longer and not truncate:
        raise ConfigError(
            f"{longer:,} of {len(pairs):,} texts of {key[1]} are longer than the {most - 1:,} tokens that the model sees",
            advice="--truncate cuts their beginnings off",
        )
    return found


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """The ids of a context and of what follows it; spaces at the end of a context belong to the continuation."""
    if not context:
        start = tokenizer.bos if tokenizer.bos is not None else tokenizer.eos
        if start is None:
            raise DataError(f"the {tokenizer.kind} tokenizer has no mark for the start of a text, which this task begins with")
        return [start], tokenizer.encode(continuation).tolist()
    kept = context.rstrip()
    whole, before = (text_ids(tokenizer, text) for text in (context + continuation, kept))
    return before, whole[len(before) :]


def text_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """As the tokenizer of the exported model gives them to lm-eval: with the start of a document in front, but for GPT-2's."""
    marked = tokenizer.marks_texts if isinstance(tokenizer, HFTokenizer) else not isinstance(tokenizer, GPT2Tokenizer)
    return (tokenizer.encode_document(text) if marked else tokenizer.encode(text)).tolist()
