"""What a line of a log says of tasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def task_metrics(task: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a task, without their standard errors."""
    return {name: value for name, value in task.items() if name != "items" and not name.endswith("_stderr")}


def scored_tasks(record: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The tasks that a record of an evaluation tells, but for what is damaged."""
    found = record.get("tasks")
    return {name: task for name, task in found.items() if isinstance(task, dict)} if isinstance(found, dict) else {}


def tasks_line(step: int, tasks: Mapping[str, Mapping[str, Any]]) -> str:
    """The tasks of an evaluation as one line."""
    shown = {"perplexity": ".4g"}
    told = (
        " ".join([name, *(f"{metric} {value:{shown.get(metric, '.4f')}}" for metric, value in task_metrics(task).items())])
        for name, task in tasks.items()
    )
    return f"tasks {step}  {'  '.join(told)}"
