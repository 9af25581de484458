"""The curves of a run, as its metrics.jsonl tells them: training loss and bits per byte, over steps, tokens or seconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from ingot.runs.metrics import is_number
from ingot.runs.task_lines import scored_tasks

Axis = Literal["steps", "tokens", "seconds"]
Point = tuple[float, float]
FIELDS = {"steps": "step", "tokens": "tokens", "seconds": "elapsed_seconds"}
MOST_POINTS = 400  # of one curve: more are means of neighbours, which no picture shows apart


@dataclass(frozen=True)
class Curves:
    """What a run's numbers were, each with the place on the axis; `val_bpb` is empty where nothing was evaluated."""

    loss: list[Point]
    val_bpb: list[Point]
    tasks: dict[str, list[Point]] = field(default_factory=dict)  # the accuracy on each task that evaluations scored


def curves_of(records: Sequence[Mapping[str, Any]], axis: Axis = "steps") -> Curves:
    """The curves that records tell; a number that is not finite leaves a gap."""
    trained = [record for record in records if record.get("kind") == "train"]
    evaluations = [record for record in records if record.get("kind") == "evaluation"]
    if axis == "tokens":  # an evaluation's own are those that it scored
        evaluations = [{**record, "tokens": _trained_before(record, trained)} for record in evaluations]
    return Curves(thinned(_points(trained, axis, "loss")), _points(evaluations, axis, "val_bpb"), _accuracies(evaluations, axis))


def _trained_before(evaluation: Mapping[str, Any], trained: Sequence[Mapping[str, Any]]) -> Any:
    """The tokens trained on before an evaluation; in files that do not tell, those of the last step that was logged by then."""
    if "trained_tokens" in evaluation:
        return evaluation["trained_tokens"]
    return next((record.get("tokens") for record in reversed(trained) if record.get("step", 0) <= evaluation.get("step", 0)), 0)


def _accuracies(evaluations: Iterable[Mapping[str, Any]], axis: Axis) -> dict[str, list[Point]]:
    """Accuracies by task: per character where answers are of different lengths, as papers have it of most."""
    found: dict[str, list[Point]] = {}
    for record in evaluations:
        for name, task in scored_tasks(record).items():
            score = {**record, "accuracy": task.get("acc_norm", task.get("acc"))}
            found.setdefault(name, []).extend(_points([score], axis, "accuracy"))
    return found


def read_line(records: Iterable[Mapping[str, Any]], name: str) -> list[Point]:
    """A number of the records of steps, thinned out."""
    return thinned(_points((record for record in records if record.get("kind") == "train"), "steps", name))


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """As many points as asked for at most, each the mean of a stretch of neighbours."""
    if len(points) <= most:
        return list(points)
    bounds = [len(points) * i // most for i in range(most + 1)]
    stretches = [points[begin:end] for begin, end in pairwise(bounds)]
    return [(_mean(x for x, _ in stretch), _mean(y for _, y in stretch)) for stretch in stretches]


def _points(records: Iterable[Mapping[str, Any]], axis: Axis, name: str) -> list[Point]:
    pairs: list[tuple[Any, Any]] = [(record.get(FIELDS[axis]), record.get(name)) for record in records]
    return [(float(x), float(y)) for x, y in pairs if is_number(x) and is_number(y)]


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)
