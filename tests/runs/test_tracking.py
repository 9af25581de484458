"""Weights & Biases, trackio and TensorBoard get the numbers of a run; what goes wrong there is told and training goes on."""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboardX.proto.event_pb2 import Event

from ingot.config.schema import TrackingSection
from ingot.runs.reporter import EvaluationReport, StepReport
from ingot.runs.tracking import Tracking


def step_report(step: int, loss: float = 2.5) -> StepReport:
    return StepReport(step, 20, loss, 0.5, 1e-3, 64 * step, 640.0, 0.1 * step, None, 0, None, step / 20)


def evaluation_report(step: int) -> EvaluationReport:
    return EvaluationReport(step, 2.0, 1.25, 100, 400, 0.1, 1.0, True, buckets={"web": {"val_loss": 3.0}})


def opened(folder: Path, said: list[str], step: int = 0, wandb_id: str | None = None, **settings: Any) -> Tracking:
    section = TrackingSection(**settings)
    return Tracking(section, folder, step, wandb_id, {"model": {"width": 16}}, lambda report: None, said.append)


def events(path: Path) -> list[tuple[int, dict[str, float] | str]]:
    """Return the values of every step of an event file, and the other events."""
    content, values, others = path.read_bytes(), dict[int, dict[str, float]](), list[tuple[int, dict[str, float] | str]]()
    while content:
        [length] = struct.unpack("<Q", content[:8])
        event = Event.FromString(content[12 : 12 + length])
        content = content[16 + length :]
        for value in event.summary.value:
            values.setdefault(event.step, {})[value.tag] = value.simple_value
        if not event.summary.value:
            others.append((event.step, event.file_version or "restart"))
    return [*others, *values.items()]


def test_tensorboard_gets_every_logged_step_and_evaluation(tmp_path: Path) -> None:
    said: list[str] = []
    with opened(tmp_path, said, tensorboard=True) as tracking:
        tracking.step(step_report(1), log=True)
        tracking.step(step_report(2), log=False)
        tracking.evaluation(evaluation_report(2))
    [path] = (tmp_path / "tensorboard").iterdir()
    begin, first, judged = events(path)
    assert begin == (0, "brain.Event:2") and said == []
    assert first[0] == 1 and first[1]["train/loss"] == 2.5 and first[1]["throughput/total_tokens"] == 64  # type: ignore[index]
    assert judged == (
        2,
        {"eval/loss": 2.0, "eval/perplexity": pytest.approx(7.389, abs=1e-3), "eval/bpb": 1.25, "eval/web/loss": 3.0},
    )


def test_a_session_that_goes_on_tells_tensorboard_to_forget_what_came_after_its_step(tmp_path: Path) -> None:
    with opened(tmp_path, [], step=8, tensorboard=True):
        pass
    [path] = (tmp_path / "tensorboard").iterdir()
    assert (9, "restart") in events(path)


def test_without_the_package_there_is_one_warning_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    said: list[str] = []
    with opened(tmp_path, said, wandb_project="words", trackio_project="words", tensorboard=True) as tracking:
        for step in (1, 2):
            tracking.step(step_report(step), log=True)
    for name, line in zip(("wandb", "trackio", "tensorboard"), said, strict=True):
        assert f"pip install 'ingot-lm[{name}]'" in line and line.endswith("training continues without this tracker")


def test_trackio_goes_on_with_a_run_that_is_resumed_and_prints_nothing_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun: list[dict[str, Any]] = []

    class Package:
        def init(self, **words: Any) -> Any:
            print("* words of its own")
            begun.append({**words, "sent": []})
            return self

        def log(self, values: Any, step: int) -> None:
            begun[-1]["sent"].append((step, values["train/loss"]))

        def finish(self) -> None:
            print("* please wait")
            begun[-1]["over"] = True

    monkeypatch.setattr(importlib, "import_module", lambda name: Package())
    for step in (0, 4):
        with opened(tmp_path / ".", [], step=step, trackio_project="words") as tracking:
            tracking.step(step_report(step + 1), log=True)
    assert capsys.readouterr().out == ""
    name = json.loads((tmp_path / "trackio.json").read_text())["id"]
    assert name.startswith(f"{tmp_path.name}-")
    assert [(words["project"], words["name"], words["resume"], words["sent"]) for words in begun] == [
        ("words", name, "never", [(1, 2.5)]),
        ("words", name, "allow", [(5, 2.5)]),
    ]
    assert begun[0]["config"] == {"model": {"width": 16}} and all(words["over"] for words in begun)


IN_TRACKIO = """
import json, sys
from pathlib import Path
from ingot.config.schema import TrackingSection
from ingot.runs.reporter import EvaluationReport, StepReport
from ingot.runs.tracking import Tracking

settings, words = TrackingSection(trackio_project="words"), lambda report: None
# A run, one in a folder of the same name elsewhere, a session of the first that goes on, a run that begins anew in its folder,
# and a copy of a run of which trackio has never heard.
for folder, first, loss in (("a/run", 0, 2.5), ("b/run", 0, 5.0), ("a/run", 1, 2.0), ("a/run", 0, 7.0), ("c/run", 8, 9.0)):
    Path(folder).mkdir(parents=True, exist_ok=True)
    with Tracking(settings, Path(folder), first, None, {}, words, print) as told:
        told.step(StepReport(first + 1, 20, loss, 0.5, 1e-3, 64, 640.0, 0.1, None, 0, None, 0.1), log=True)
        if first == 1:
            told.evaluation(EvaluationReport(2, 2.0, 1.25, 100, 400, 0.1, 1.0, True))
from trackio.sqlite_storage import SQLiteStorage
runs = [SQLiteStorage.get_logs("words", one["name"], run_id=one["id"]) for one in SQLiteStorage.get_run_records("words")]
print(json.dumps([[(one["step"], one.get("train/loss"), one.get("eval/bpb")) for one in run] for run in runs]))
"""


def test_the_real_trackio_keeps_the_numbers_on_this_machine_and_joins_no_two_runs(tmp_path: Path) -> None:
    """In a process of its own, because it reads where its store lies when it is imported."""
    if importlib.util.find_spec("trackio") is None:
        pytest.skip("trackio is not installed (the extra `trackio`)")
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "store"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", IN_TRACKIO], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first = [[1, 2.5, None], [2, 2.0, None], [2, None, 1.25]]
    assert sorted(json.loads(done.stdout)) == [first, [[1, 5.0, None]], [[1, 7.0, None]], [[9, 9.0, None]]]
    assert (tmp_path / "store").is_dir()


def test_what_takes_no_more_values_is_told_once_and_left_out(tmp_path: Path) -> None:
    def log(step: int, values: Any) -> None:
        raise builtins.ConnectionError("the network\nis gone")

    def close(failed: bool) -> None:
        raise AssertionError("it was left out")

    said: list[str] = []
    with opened(tmp_path, said, tensorboard=True) as tracking:
        tracking.trackers["a broken one"] = (log, close)
        tracking.step(step_report(1), log=True)
        tracking.step(step_report(2), log=True)
    assert said == ["a broken one failed and receives no more values: the network is gone; training continues"]
    [path] = (tmp_path / "tensorboard").iterdir()
    assert [step for step, _ in events(path)] == [0, 1, 2]


def test_an_end_that_goes_wrong_there_is_told_and_does_not_end_the_run(tmp_path: Path) -> None:
    def close(failed: bool) -> None:
        raise OSError(28, "No space left on device")

    said: list[str] = []
    with opened(tmp_path, said) as tracking:
        tracking.trackers["a full one"] = (lambda step, values: None, close)
    assert said == ["a full one could not be closed: [Errno 28] No space left on device"]


def test_weights_and_biases_goes_on_with_the_run_of_a_checkpoint_or_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[dict[str, Any]] = []

    class Package:
        def init(self, **words: Any) -> Any:
            begun.append(words)
            return self

        def log(self, values: Any, step: int) -> None:
            begun[-1].setdefault("sent", []).append((step, values["train/loss"]))

        def finish(self, exit_code: int) -> None:
            begun[-1]["exit_code"] = exit_code

    monkeypatch.setattr(importlib, "import_module", lambda name: Package())
    settings = {"wandb_project": "words", "wandb_mode": "offline"}
    with opened(tmp_path / ".", [], **settings) as tracking:
        tracking.step(step_report(1), log=True)
    kept = json.loads((tmp_path / "wandb.json").read_text())["id"]
    assert tracking.wandb_id == kept and begun[0]["sent"] == [(1, 2.5)] and begun[0]["exit_code"] == 0
    assert (begun[0]["project"], begun[0]["name"], begun[0]["mode"]) == ("words", tmp_path.name, "offline")
    opened(tmp_path, [], **settings)
    opened(tmp_path, [], wandb_id="of-a-checkpoint", **settings)
    assert [words["id"] for words in begun] == [kept, kept, "of-a-checkpoint"]
    assert all(words["resume"] == "allow" for words in begun)
