"""The curves of a run are what its metrics say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ingot.runs.series import Axis, curves_of, thinned
from ingot.runs.view import Run


def run_of(folder: Path, *records: dict[str, Any]) -> Run:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return Run(folder)


@pytest.mark.parametrize(("axis", "places"), [("steps", [1, 2]), ("tokens", [64, 128]), ("seconds", [0.5, 1.5])])
def test_loss_and_score_stand_over_the_axis_that_is_asked_for(tmp_path: Path, axis: Axis, places: list[float]):
    run = run_of(
        tmp_path,
        {"kind": "train", "step": 1, "loss": 5.0, "tokens": 64, "elapsed_seconds": 0.5},
        {"kind": "train", "step": 2, "loss": 4.0, "tokens": 128, "elapsed_seconds": 1.5},
        {"kind": "evaluation", "step": 2, "val_bpb": 3.0, "tokens": 999, "elapsed_seconds": 1.5},
    )
    found = curves_of(run.metrics()[0], axis)
    assert found.loss == [(places[0], 5.0), (places[1], 4.0)]
    assert found.val_bpb == [(places[1], 3.0)]


def test_every_task_has_a_curve_of_its_accuracy(tmp_path: Path):
    of_two = {"lambada": {"items": 3, "acc": 0.5, "perplexity": 9.0}, "piqa": {"items": 3, "acc": 0.1, "acc_norm": 0.2}}
    run = run_of(tmp_path, {"kind": "evaluation", "step": 2, "val_bpb": 3.0, "tasks": of_two}, {"kind": "evaluation", "step": 3})
    assert curves_of(run.metrics()[0]).tasks == {"lambada": [(2, 0.5)], "piqa": [(2, 0.2)]}


def test_a_number_that_is_not_finite_leaves_a_gap(tmp_path: Path):
    run = run_of(
        tmp_path, *({"kind": "train", "step": step, "loss": loss} for step, loss in enumerate([2.0, None, float("nan")]))
    )
    assert curves_of(run.metrics()[0]).loss == [(0, 2.0)]


def test_many_points_become_means_of_neighbours_and_few_stay_as_they_are():
    points = [(float(x), float(x % 2)) for x in range(1000)]
    assert thinned(points, 1000) == points
    few = thinned(points, 100)
    assert len(few) == 100 and few[0] == (4.5, 0.5) and few[-1] == (994.5, 0.5)


def test_evaluations_between_two_logged_steps_lie_at_the_tokens_trained_on():
    records = [
        {"kind": "evaluation", "step": 0, "val_bpb": 8.0, "tokens": 999},
        {"kind": "train", "step": 20, "loss": 5.0, "tokens": 2000},
        {"kind": "evaluation", "step": 25, "val_bpb": 3.0, "tokens": 999},
        {"kind": "train", "step": 30, "loss": 4.0, "tokens": 3000},
        {"kind": "evaluation", "step": 33, "val_bpb": 2.0, "tokens": 999, "trained_tokens": 3300},
    ]
    assert curves_of(records, "tokens").val_bpb == [(0, 8.0), (2000, 3.0), (3300, 2.0)]
