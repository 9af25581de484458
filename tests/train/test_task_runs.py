"""Tasks while training: scored at every evaluation as `ingot eval` scores them, without a trace, and checked first."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import TINY, Train, records, state_of

import ingot
from ingot.config.loading import load_config
from ingot.errors import IngotError
from ingot.inference.scoring import read_items, score_tasks, task_rows
from ingot.preflight.validate import validate
from ingot.runs.reporter import Reporter

LINES = [{"text": "ab cd"}, {"text": "a a a"}, {"text": "bb c d"}]


@pytest.fixture
def tasks(tmp_path: Path) -> dict[str, Any]:
    """Settings that ask for two tasks, of made-up items."""
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "lambada.jsonl").write_text("\n".join(map(json.dumps, LINES)))
    piqa = {"goal": "", "sol1": "a", "sol2": "bcd", "label": 1}
    (tmp_path / "tasks" / "piqa.jsonl").write_text(json.dumps(piqa))
    return {
        "evaluation__tasks": "lambada, piqa",
        "evaluation__task_data": str(tmp_path / "tasks"),
        "evaluation__task_truncate": True,
    }


def test_every_evaluation_scores_them_as_ingot_eval_does(train: Train, tmp_path: Path, tasks: dict[str, Any]) -> None:
    run = tmp_path / "run"
    settings = {"training__max_steps": 4, "evaluation__every": 2, "model__dropout": 0.3, "evaluation__task_items": 2}
    train(run, tracking__tensorboard=True, **settings, **tasks)
    found = {record["step"]: record["tasks"] for record in records(run, "evaluation")}
    model = ingot.load(run, device="cpu")
    items = read_items(["lambada", "piqa"], tmp_path / "tasks", limit=2)
    alone = score_tasks(task_rows(items, model.tokenizer, model.context, None), model.backend)
    assert list(found) == [2, 4] and found[2] != found[4]
    assert found[4] == {name: score.record() for name, score in alone.items()}
    assert found[4]["lambada"]["items"] == 2
    accuracy, perplexity = (found[4]["lambada"][metric] for metric in ("acc", "perplexity"))
    assert f"tasks 4  lambada acc {accuracy:.4f} perplexity {perplexity:.4g}  piqa acc" in (run / "log.txt").read_text()
    [events] = (run / "tensorboard").iterdir()
    assert b"tasks/lambada/perplexity" in events.read_bytes()


def test_scoring_tasks_leaves_no_trace_in_the_training(train: Train, tmp_path: Path, tasks: dict[str, Any]) -> None:
    settings = {"training__max_steps": 5, "evaluation__every": 2, "model__dropout": 0.3}
    train(tmp_path / "with", **settings, **tasks)
    train(tmp_path / "without", **settings)
    assert state_of(tmp_path / "with") == state_of(tmp_path / "without")
    first, second = (records(tmp_path / name, "evaluation") for name in ("with", "without"))
    assert [one["val_bpb"] for one in first] == [one["val_bpb"] for one in second] and second[0]["tasks"] == {}


def test_a_stop_while_tasks_are_scored_leaves_the_step_to_the_next_session(
    train: Train, tmp_path: Path, tasks: dict[str, Any]
) -> None:
    class Stop(Reporter):
        def waiting(self, what: str, done: int = 0, total: int = 0) -> None:
            if what == "scoring tasks":
                os.kill(os.getpid(), signal.SIGTERM)

    settings = {"training__max_steps": 4, "evaluation__every": 2, **tasks}
    assert train(tmp_path / "run", Stop(), **settings).status == "stopped"
    assert records(tmp_path / "run", "evaluation") == []
    assert train(tmp_path / "run", **settings).status == "completed"
    assert [record["step"] for record in records(tmp_path / "run", "evaluation")] == [2, 4]


@pytest.mark.parametrize(
    ("change", "code", "told"),
    [
        ({"evaluation__tasks": ["lambada", "mmlu"]}, 2, "unknown task 'mmlu'"),
        ({"evaluation__tasks": "blimp"}, 3, "blimp.tar.xz"),
        ({"evaluation__task_data": "nowhere"}, 3, "nowhere"),
        (
            {"evaluation__task_truncate": False},
            2,
            "evaluation.task_truncate=true",
        ),
    ],
)
def test_what_is_wrong_is_told_before_the_first_step_and_by_validate(
    train: Train, data: Path, tmp_path: Path, tasks: dict[str, Any], change: dict[str, Any], code: int, told: str
) -> None:
    settings = {**tasks, **change}
    with pytest.raises(IngotError) as caught:
        train(tmp_path / "run", **settings)
    assert told in str(caught.value) and caught.value.exit_code == code
    assert not (tmp_path / "run").exists()
    given = {name.replace("__", "."): value for name, value in settings.items()}
    values = {**TINY, "data.path": str(data), "training.output_dir": str(tmp_path / "run"), **given}
    [finding] = [one for one in validate(load_config(python=values, environment={}).config).findings if one.blocks]
    assert finding.code == "evaluation.tasks_unusable" and told in finding.render()
