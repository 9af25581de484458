"""The runs of a sweep: each in a process of its own, what is complete left alone, what was broken off gone on with."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from ingot.errors import ConfigError
from ingot.experiments import sweep as running
from ingot.experiments.sweep import make_arms, plan_trials, run_trials, summarise, train_apart
from ingot.runs.view import Run
from ingot.train.start import run


def nothing(*_):
    pass


def losses(folder):
    return Run.open(folder).series.read().curves().loss


@pytest.fixture
def trials(tmp_path, resolve):
    return plan_trials(make_arms(["data.sampling=shuffle,redraw"]), [1, 2], tmp_path / "sweep", resolve)


def test_every_run_of_a_sweep_is_what_it_would_be_alone(trials, tmp_path, resolve):
    order = []
    assert run_trials(trials, nothing, lambda trial, error: order.append((trial.arm, trial.seed, error))) == {}
    assert order == [(trial.arm, trial.seed, None) for trial in trials]
    alone = resolve(
        {"data.sampling": "redraw", "training.seed": 2, "data.seed": 2, "training.output_dir": str(tmp_path / "alone")}
    )
    score = run(alone).val_bpb
    assert losses(trials[3].folder) == losses(tmp_path / "alone")
    found = summarise(trials, "val_bpb")
    assert found[1].trials[1].score == score
    assert [arm.n for arm in found] == [2, 2] and [arm.best for arm in found].count(True) == 1
    assert found[0].difference is None and found[0].p is None
    assert found[1].mean - found[0].mean == pytest.approx(found[1].difference) and 0 < found[1].p <= 1


def test_what_is_complete_is_not_run_again(trials):
    run_trials(trials[:1], nothing, nothing)
    before = (trials[0].folder / "result.json").stat().st_mtime_ns
    shutil.rmtree(trials[0].folder / "checkpoints")  # its score is there
    again = []
    run_trials(trials[:2], nothing, lambda trial, error: again.append(trial))
    assert again == [trials[1]]
    assert (trials[0].folder / "result.json").stat().st_mtime_ns == before


def test_a_complete_run_that_is_damaged_fails_alone(trials):
    run_trials(trials[:1], nothing, nothing)
    shutil.rmtree(trials[0].folder / "checkpoints")
    (trials[0].folder / "config.yaml").write_text("model: [")
    errors = run_trials(trials[:2], nothing, nothing)
    assert list(errors) == [trials[0].folder] and "holds no checkpoint" in errors[trials[0].folder]


def test_a_place_where_no_run_can_be_is_one_sentence(trials, tmp_path):
    (tmp_path / "sweep").write_text("a file")
    with pytest.raises(ConfigError, match=r"sweep.*cannot be written: Not a directory"):
        run_trials(trials, nothing, nothing)


def test_a_run_that_fails_does_not_stop_the_others(tmp_path, resolve):
    trials = plan_trials(make_arms(["training.device=cuda:7,cpu"]), [1], tmp_path / "sweep", resolve)
    errors = run_trials(trials, nothing, nothing)
    assert list(errors) == [trials[0].folder] and "cuda:7" in errors[trials[0].folder]
    failed, fine = summarise(trials, "val_bpb", errors)
    assert failed.trials[0].status == "failed" and failed.trials[0].error == errors[trials[0].folder] and failed.mean is None
    assert fine.n == 1 and fine.difference is None


@pytest.fixture
def long(tmp_path, resolve, monkeypatch):
    """A trial that lasts for many looks at it."""
    monkeypatch.setattr("ingot.experiments.sweep.TICK_SECONDS", 0.01)
    settings = ["training.max_steps=400", "training.save_every=1000"]
    return plan_trials(make_arms(settings), [1], tmp_path / "long", resolve)[0]


def once_it_trains(trial, act):
    if (trial.folder / "metrics.jsonl").is_file() and (trial.folder / "metrics.jsonl").stat().st_size:
        act()


def printed(trial) -> Path:
    return trial.folder.parent / f"output-{trial.folder.name}.txt"


def test_a_process_that_dies_is_told_with_where_it_printed(long):
    def kill():
        for process in multiprocessing.active_children():
            os.kill(process.pid, signal.SIGKILL)

    error = train_apart(long, lambda trial: once_it_trains(trial, kill))
    assert error == f"its process was killed by signal 9; its output is in {printed(long)}"
    assert "max_steps 400" in printed(long).read_text()  # the first line of the run


def test_a_process_that_fails_unforeseen_is_told_with_the_last_line_of_why(long):
    unfit = replace(long, resolved=SimpleNamespace(config=long.config))  # no more than what is read before the run
    error = train_apart(unfit)
    assert error is not None and error.startswith("AttributeError: ")
    assert error.endswith(f"; its output is in {printed(long)}") and "\n" not in error


@pytest.mark.skipif(sys.platform != "linux", reason="runs are forks on Linux")
def test_the_process_that_runs_are_forked_from_touches_no_device():
    code = """
import sys, threading, torch
torch.cuda.is_available = torch._C._cuda_getDeviceCount = lambda: sys.exit("it asks for a GPU, after which forks cannot use it")
from importlib import import_module
from ingot.backends.open import preloadable
for name in preloadable("auto"):
    import_module(name)
assert "torch._inductor.compile_fx" not in sys.modules and threading.active_count() == 1
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert running._processes("auto").get_start_method() == "forkserver"


def test_a_run_whose_sweep_is_gone_ends_without_a_traceback(trials):
    trial, context = trials[0], multiprocessing.get_context("spawn")
    printed(trial).parent.mkdir(parents=True)
    process = context.Process(target=running._train, args=(trial.resolved, printed(trial)))
    process.start()
    process.join()
    assert process.exitcode == 0 and "Traceback" not in printed(trial).read_text()
    assert Run.open(trial.folder).status().status == "completed"


def test_a_sweep_that_is_broken_off_saves_its_run_and_goes_on_with_it(long):
    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_trials([long], lambda trial: once_it_trains(trial, interrupt), nothing)
    state = json.loads((long.folder / "state.json").read_text())
    assert (state["status"], state["stop_reason"]) == ("stopped", "signal:SIGTERM") and 0 < state["step"] < 400
    assert summarise([long], "val_bpb")[0].trials[0].status == "stopped"
    assert run_trials([long], nothing, nothing) == {}
    assert [step for step, _ in losses(long.folder)] == list(range(1, 401))
