"""Benchmark tasks: multiple-choice questions and last-word prediction, from files or from the Hugging Face hub.

Each item becomes the same request that lm-eval 0.4 makes: the log-probability of a continuation given a context, with lm-eval's
prompt format and a space between context and continuation. Accuracies therefore match lm-eval's exactly.
"""

from __future__ import annotations

import json
import lzma
import math
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ingot.errors import ConfigError, DataError
from ingot.runtime.files import open_to_read, readable, reading


@dataclass(frozen=True)
class Item:
    """An item of a task. The model chooses the likeliest continuation; a single one is correct if greedy decoding produces it."""

    pairs: tuple[tuple[str, str], ...]  # contexts and continuations, each continuation with a leading space
    gold: int = 0


@dataclass(frozen=True)
class Task:
    """A task, with its file patterns (the first match is used), its hub dataset, and a function from a record to an item."""

    files: tuple[str, ...]
    hub: str
    read: Callable[[Mapping[str, Any]], Item]
    metrics: tuple[str, ...] = ("acc", "acc_norm")


@dataclass(frozen=True)
class TaskScore:
    """A model's metrics on a task, with standard errors."""

    items: int
    metrics: dict[str, tuple[float, float | None]]
    parts: dict[str, TaskScore] = field(default_factory=dict)  # scores per file, for a task with several files

    def record(self) -> dict[str, Any]:
        """Return the score as a JSON object."""
        record: dict[str, Any] = {"items": self.items}
        for name, (value, error) in self.metrics.items():
            record |= {name: value, f"{name}_stderr": error}
        return record | ({"parts": {name: part.record() for name, part in self.parts.items()}} if self.parts else {})


def _choices(context: str, choices: Sequence[str], gold: int) -> Item:
    return _item([(context, choice) for choice in choices], gold)


def _item(pairs: Sequence[tuple[str, str]], gold: int = 0) -> Item:
    if not 0 <= gold < len(pairs):
        raise ValueError(f"the answer has index {gold}, but there are {len(pairs)} choices")
    if not all(rest.strip() for _, rest in pairs):
        raise ValueError("a continuation is empty")
    return Item(tuple((context, f" {rest}") for context, rest in pairs), gold)


def _hellaswag(line: Mapping[str, Any]) -> Item:
    """Read a HellaSwag record, either as published (activity_label, ctx_a, ctx_b) or with these fields joined as ctx."""
    whole = line["ctx"]
    if "activity_label" in line:
        whole = f"{line['activity_label']}: {line['ctx_a']} {line['ctx_b'].capitalize()}"
    return _choices(_cleaned(whole), [_cleaned(ending) for ending in line["endings"]], int(line["label"]))


def _cleaned(text: str) -> str:
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def _question(line: Mapping[str, Any]) -> Item:
    """Read an ARC record (as published or from the hub), a PIQA record, or a record with the fields query, choices and gold."""
    if "query" in line:
        return _choices(f"{line['query'].rstrip()}\nAnswer:", line["choices"], int(line["gold"]))
    if "goal" in line:
        return _choices(f"Question: {line['goal']}\nAnswer:", [line["sol1"], line["sol2"]], int(line["label"]))
    published = isinstance(line["question"], dict)
    question = line["question"]["stem"] if published else line["question"]
    choices = (line["question"] if published else line)["choices"]
    if not isinstance(choices, dict):
        choices = {name: [choice[name] for choice in choices] for name in ("text", "label")}
    if (answer := line["answerKey"]) not in choices["label"]:
        raise ValueError("answerKey is not the label of a choice")
    return _choices(f"Question: {question}\nAnswer:", choices["text"], choices["label"].index(answer))


def _lambada(line: Mapping[str, Any]) -> Item:
    """Read a LAMBADA record (OpenAI's version): the whole text, or context and last word separately."""
    if "text" not in line:
        return _item([(line["context"], line["continuation"].strip())])
    context, _, word = line["text"].rstrip().rpartition(" ")
    if not context.strip():
        raise ValueError("the text has only one word")
    return _item([(context, word)])


def _winogrande(line: Mapping[str, Any]) -> Item:
    """Read a WinoGrande record: the contexts contain the choices, and the scored continuation is the same for both."""
    if "context_options" in line:
        contexts, rest, gold = line["context_options"], line["continuation"], int(line["gold"])
    else:
        before, _, rest = line["sentence"].partition("_")
        contexts, gold = [before + line["option1"], before + line["option2"]], int(line["answer"]) - 1
    return _item([(context, rest.strip()) for context in contexts], gold)


TASKS = {
    "hellaswag": Task(
        ("hellaswag_val.jsonl", "hellaswag.jsonl", "hellaswag/hellaswag_val.jsonl"), "hf:Rowan/hellaswag:validation", _hellaswag),
    "lambada": Task(
        ("lambada_openai.jsonl", "lambada_test.jsonl", "lambada.jsonl"), "hf:EleutherAI/lambada_openai/default:test", _lambada,
        ("acc", "perplexity")),
    "arc_easy": Task(
        ("arc_easy.jsonl", "ARC-Easy-Test.jsonl", "ARC-Easy/ARC-Easy-Test.jsonl"), "hf:allenai/ai2_arc/ARC-Easy:test", _question),
    "arc_challenge": Task(
        ("arc_challenge.jsonl", "ARC-Challenge-Test.jsonl", "ARC-Challenge/ARC-Challenge-Test.jsonl"),
        "hf:allenai/ai2_arc/ARC-Challenge:test", _question),
    "piqa": Task(("piqa.jsonl", "piqa/valid.jsonl"), "hf:baber/piqa:validation", _question),
    "winogrande": Task(
        ("winogrande.jsonl", "winogrande/dev.jsonl", "dev.jsonl"), "hf:allenai/winogrande/winogrande_xl:validation", _winogrande,
        ("acc",)),
    "blimp": Task(
        ("blimp.tar.xz", "blimp/data/*.jsonl", "blimp/*.jsonl"), "hf:nyu-mll/blimp/*:train",
        lambda line: _item([("", line["sentence_good"]), ("", line["sentence_bad"])]), ("acc",)),
}  # fmt: skip


def task_names(words: str) -> list[str]:
    """Parse a comma-separated list of task names; raise ConfigError if one is unknown."""
    names = list(dict.fromkeys(word.strip() for word in words.split(",") if word.strip()))
    unknown = [name for name in names if name not in TASKS]
    if unknown or not names:
        what = f"unknown task {unknown[0]!r:.60}" if unknown else "no task was named"
        raise ConfigError(f"{what}; choose from {', '.join(TASKS)}")
    return names


def read_task(name: str, folder: Path | None, limit: int | None = None) -> dict[str, list[Item]]:
    """Return the items of a task by file name, at most `limit` per file; without a folder, read them from the hub."""
    task = TASKS[name]
    if folder is None:
        from ingot.data.hub import EVERY, fetch
        from ingot.data.text.text_files import check_pyarrow, folder_of, parquet_rows

        check_pyarrow(f"the task {name} from the hub")
        files: dict[str, list[Path]] = {}  # files by dataset configuration, for a task with several configurations
        for path in fetch(task.hub, "give the folder with its files"):
            files.setdefault(folder_of(path) if f"/{EVERY}:" in task.hub else name, []).append(path)
        items = {}
        for part, paths in files.items():
            rows = (record for path in paths for rows in parquet_rows(path) for record in rows)
            items[part] = _read_items(task, task.hub, part, islice(rows, limit))
        return items
    for pattern in task.files:
        if paths := sorted(folder.glob(pattern)):
            parts = _archive(paths[0]) if paths[0].suffix == ".xz" else {path.stem: _content(path) for path in paths}
            labels_file = paths[0].with_name(f"{paths[0].stem}-labels.lst")  # PIQA keeps labels in a separate file
            labels = "\n".join(_lines(labels_file, _content(labels_file))).split() if labels_file.is_file() else None
            lines = {part: islice(_lines(paths[0], text), limit) for part, text in parts.items()}
            return {part: _read_items(task, paths[0], part, records, labels) for part, records in lines.items()}
    raise DataError(f"the task {name} needs one of the files {', '.join(task.files)} in {folder}")


def _content(path: Path) -> bytes:
    with reading(path), open_to_read(path) as file:
        return file.read()


def _archive(path: Path) -> dict[str, bytes]:
    try:
        with open_to_read(path) as file, tarfile.open(fileobj=file) as archive:
            files = [member for member in archive.getmembers() if member.isfile() and member.name.endswith(".jsonl")]
            opened = {Path(member.name).stem: archive.extractfile(member) for member in files}
            return {name: file.read() for name, file in sorted(opened.items()) if file is not None}
    except (tarfile.TarError, lzma.LZMAError, EOFError, OSError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None


def _read_items(
    task: Task, where: Path | str, part: str, records: Iterable[Any], labels: Sequence[str] | None = None
) -> list[Item]:
    """Build items from records or JSON lines; `labels` holds the labels if they come from a separate file."""
    items: list[Item] = []
    for number, line in enumerate(records):
        try:
            record = json.loads(line) if isinstance(line, str) else line
            items.append(task.read(record if labels is None else {**record, "label": labels[number]}))
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise DataError(f"{where}: line {number + 1} of {part} is not a valid item of the task: {reason}") from None
    if not items:
        raise DataError(f"{where} has no items in {part}")
    return items


def _lines(path: Path, text: bytes) -> Iterator[str]:
    with readable(path, DataError):
        return (line for line in text.decode().split("\n") if line.strip())


def score_items(task: Task, items: Sequence[Item], answers: Sequence[Sequence[tuple[float, bool]]]) -> TaskScore:
    """Compute a task's metrics; `answers` holds (log-probability, is_greedy) for every pair of every item."""
    values: dict[str, list[float]] = {name: [] for name in task.metrics}
    for item, pairs in zip(items, answers, strict=True):
        lls = np.array([log for log, _ in pairs])
        if "perplexity" in values:
            values["perplexity"].append(float(lls[0]))
            values["acc"].append(float(pairs[0][1]))
            continue
        values["acc"].append(float(np.argmax(lls) == item.gold))
        if "acc_norm" in values:
            lengths = [len(rest.removeprefix(" ")) for _, rest in item.pairs]  # length of each choice in characters
            values["acc_norm"].append(float(np.argmax(lls / np.array(lengths, float)) == item.gold))
    score, count = TaskScore(len(items), {}), len(items)
    for name, numbers in values.items():
        mean = sum(numbers) / count
        error = math.sqrt(sum((n - mean) ** 2 for n in numbers) / (count - 1)) / math.sqrt(count) if count > 1 else None
        if name == "perplexity":  # derive the standard error of a perplexity from that of the mean log-probability
            mean = math.exp(min(-mean, 700.0))
            error = None if error is None else mean * error
        score.metrics[name] = mean, error
    return score
