"""A run that is stopped and goes on ends as one that was not; runs do not get into each other's way."""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import chdir, redirect_stdout
from pathlib import Path

import pytest
from golf_toys import Golf, Ran, run_here, variables

from ingot.compat.golf.log import RunLog
from ingot.compat.golf.main import main
from ingot.compat.golf.translate import translate
from ingot.compat.golf.variables import read_variables
from ingot.optim.schedules import learning_rate_scale

LONG = {"ITERATIONS": "14", "WARMDOWN_ITERS": "8", "VAL_LOSS_EVERY": "6", "WARMUP_STEPS": "1", "TRAIN_LOG_EVERY": "1"}


@pytest.fixture(scope="module")
def unbroken(toys: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ran]:
    """The folder of a run that nothing happened to, and what it printed."""
    folder = tmp_path_factory.mktemp("unbroken")
    with chdir(folder):
        return folder, run_here(toys, **LONG)


def checkpoints(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))


@pytest.mark.parametrize("at", ["warmup_step:1/", "step:0/", "step:6/14 val_loss", "step:9/", "step:13/"])
def test_a_run_stopped_anywhere_goes_on_to_the_numbers_of_an_unbroken_one(
    golf: Golf, stop: None, unbroken: tuple[Path, Ran], tmp_path: Path, at: str
) -> None:
    whole = unbroken[1]
    first = golf(**LONG, STOP_AT=at)
    assert "final_" not in first.out
    (step,) = map(
        int, re.findall(r"^note: stopped after step (\d+) and saved; the same command with RUN_ID=toy", first.out, re.M)
    )
    second = golf(**LONG)
    assert (f"note: resumes from step {step}" in second.out.splitlines()) == (step > 0)
    assert second.exact == whole.exact
    assert first.losses | second.losses == whole.losses and len(whole.losses) == 14
    assert whole.evaluations.items() >= second.evaluations.items()
    for name in ("final_model.pt", "final_model.int8.ptz"):
        assert (tmp_path / name).read_bytes() == (unbroken[0] / name).read_bytes()


def test_the_log_of_a_run_that_went_on_holds_both_parts(golf: Golf, stop: None, tmp_path: Path) -> None:
    first = golf(**LONG, STOP_AT="step:3/")
    second = golf(**LONG)
    text = (tmp_path / "logs/toy.txt").read_text()
    assert text.count("Running PyTorch") == 2
    assert first.out.partition("\n")[2] in text and text.endswith(second.out.partition("\n")[2])
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [".lock", "toy", "toy.txt"]


def test_a_run_stopped_in_its_second_pass_does_not_announce_that_pass_again(golf: Golf, stop: None) -> None:
    passes = {"ITERATIONS": "26", "TRAIN_LOG_EVERY": "1"}
    assert "starting epoch 2" in golf(**passes, STOP_AT="step:15/").out
    second = golf(**passes)
    assert "starting epoch 2" not in second.out and "starting epoch 3" in second.out


def test_with_a_cap_the_seconds_spent_are_remembered_and_the_rate_goes_on_where_it_was(
    golf: Golf, stop: None, step_clock: None, tmp_path: Path
) -> None:
    capped = {"MAX_WALLCLOCK_SECONDS": "600", "ITERATIONS": "100000", "WARMDOWN_ITERS": "20", "TRAIN_LOG_EVERY": "1"}
    golf(**capped, STOP_AT="step:5/")
    spent = json.loads((tmp_path / "logs/toy/state.json").read_text())["elapsed_seconds"]
    cap = spent + 1.0
    second = golf(**capped | {"MAX_WALLCLOCK_SECONDS": str(cap)})
    steps = [json.loads(line) for line in (tmp_path / "logs/toy/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in steps if line["kind"] == "train"]
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    times = [line["elapsed_seconds"] for line in steps]
    assert times == sorted(times) and min(line["elapsed_seconds"] for line in steps if line["session"] == 2) >= spent > 0
    assert int(second.value("step").split("/")[0]) >= 6
    assert int(re.findall(r"^stopping_early: wallclock_cap train_time:(\d+)ms", second.out, re.M)[0]) >= int(1000 * cap)
    assert times[-2] < cap
    # The rate of a step follows from the clock at its beginning; the step before it may be told of a moment later.
    for earlier, before, line in zip(steps, steps[1:], steps[2:], strict=False):
        seconds = "600" if line["session"] == 1 else str(cap)
        config = translate(read_variables(capped | {"MAX_WALLCLOCK_SECONDS": seconds})).config
        low, high = (
            0.04 * learning_rate_scale(config, before["step"], elapsed)
            for elapsed in (line["elapsed_seconds"], earlier["elapsed_seconds"])
        )
        assert low - 1e-9 <= line["learning_rate"] <= high + 1e-9


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"NUM_LAYERS": "3"}, "NUM_LAYERS was 2 and is 3"),
        ({"SEED": "5"}, "SEED was 1337 and is 5"),
        ({"TRAIN_BATCH_TOKENS": "768"}, "TRAIN_BATCH_TOKENS was 512 and is 768"),
        ({"EMBED_DTYPE": "bf16"}, "EMBED_DTYPE was fp32 and is bf16"),
    ],
)
def test_a_run_does_not_go_on_as_another_one(golf: Golf, stop: None, change: dict[str, str], said: str) -> None:
    golf(**LONG, STOP_AT="step:2/")
    found = golf.refuses(4, **LONG | change)
    assert said in found and found.endswith("choose another RUN_ID")


def test_a_run_may_go_on_with_other_settings_of_what_is_to_come(golf: Golf, stop: None) -> None:
    golf(**LONG, STOP_AT="step:2/")
    assert list(golf(**LONG | {"ITERATIONS": "4", "VAL_LOSS_EVERY": "0", "MATRIX_LR": "0.01"}).evaluations) == [4]


def test_a_second_run_in_one_folder_is_refused_while_the_first_is_there(
    golf: Golf, toys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, refused = RunLog.line, []

    def line(run_log: RunLog, text: str, console: bool = True) -> None:
        write(run_log, text, console)
        if text.startswith("step:2/"):
            refused.append(run_here(toys, RUN_ID="second"))

    monkeypatch.setattr(RunLog, "line", line)
    first = golf()
    (second,) = refused
    assert second.code == 1 and second.out == ""
    assert re.fullmatch(
        r"train_gpt\.py: error: logs is in use by process \d+ .*; "
        r"wait for that process, stop it, or choose another folder to run in\n",
        second.err,
    )
    assert not (tmp_path / "logs/second.txt").exists() and len(first.exact) == 2


def test_what_a_kill_left_is_no_obstacle(golf: Golf, unbroken: tuple[Path, Ran], tmp_path: Path) -> None:
    shutil.copytree(unbroken[0], tmp_path, dirs_exist_ok=True)
    run = tmp_path / "logs/toy"
    state = json.loads((run / "state.json").read_text())
    (run / "state.json").write_text(json.dumps(state | {"status": "running", "pid": 999_999_999}))
    for step in checkpoints(run)[1:]:
        shutil.rmtree(run / "checkpoints" / f"step-{step:08d}")
    again = golf(**LONG)
    assert f"note: resumes from step {checkpoints(run)[0]}" in again.out and again.exact == unbroken[1].exact


def test_a_run_folder_can_be_scored_and_exported_like_any_other(golf: Golf, finished: Ran, tmp_path: Path) -> None:
    from ingot.inference.model import open_weights
    from ingot.runs.state import read_state

    source = open_weights(tmp_path / "logs/toy")
    state = read_state(tmp_path / "logs/toy")
    assert sum(1 for name in source.tensors if name.endswith("weight")) == 13 and state is not None
    assert (state.status, state.step) == ("completed", 4)


def test_a_reader_of_the_console_may_leave(golf: Golf, monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as console, redirect_stdout(console), monkeypatch.context() as patch:  # noqa: PTH123 (no path)
        for name, value in variables(golf.toys).items():
            patch.setenv(name, value)
        assert main() == 141
    golf()  # and nothing is in the way of the next run
