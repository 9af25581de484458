"""Tasks that are scored while a run trains, as `ingot eval --tasks` scores them when it is over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from ingot.backends.base import Backend
from ingot.config.schema import Config
from ingot.data.tokenizers import Tokenizer
from ingot.errors import Setting
from ingot.eval.tasks import task_names
from ingot.runs.report import Reporter
from ingot.runtime.files import user_path
from ingot.trained.tasks import TaskRows, read_items, score_tasks, task_rows


def open_tasks(config: Config, tokenizer: Tokenizer) -> TaskRows:
    """The items of evaluation.tasks; whatever is wrong with them is told now and not at the first evaluation."""
    e, asked = config.evaluation, config.evaluation.tasks or ""
    names = task_names(asked if isinstance(asked, str) else ",".join(asked))
    folder = user_path(e.task_data) if e.task_data is not None else None
    truncate = None if e.task_truncate else Setting("evaluation.task_truncate", "true")
    items = read_items(names, folder, e.task_items)
    return task_rows(items, tokenizer, config.model.context or config.data.seq_len, truncate)


def task_records(tasks: TaskRows, backend: Backend, reporter: Reporter, stop: Callable[[], bool]) -> dict[str, dict[str, Any]]:
    """What metrics.jsonl says of each task; Interrupted where a rank was asked to stop. Every rank calls it."""
    scores = score_tasks(tasks, backend, partial(reporter.waiting, "scoring tasks"), stop)
    return {name: replace(score, parts={}).record() for name, score in scores.items()}
