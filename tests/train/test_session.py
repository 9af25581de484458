"""Whole runs of a tiny model in this process: what continues, what is refused, and what leaves no trace."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import TINY, Train, records, state_of, train_tiny, write_text

from ingot.artifact.container import read_artifact
from ingot.backends.torch.backend import TorchBackend
from ingot.config.loading import load_config
from ingot.data.prepare.pipeline import write_dataset
from ingot.data.tokenizers import CharTokenizer
from ingot.errors import CheckpointError, ConfigError, RunError, Unreadable
from ingot.runs.checkpoints import load_checkpoint
from ingot.runs.folder import saved_steps
from ingot.runs.reporter import BeginReport, Reporter, StepReport
from ingot.runs.view import Run
from ingot.runtime.tensors import read_tensors
from ingot.train.end import Exported
from ingot.train.resume import completed_result
from ingot.train.start import run


class StopAt(Reporter):
    """Sends this process SIGTERM when it hears of a step, and notes the lines of the log."""

    def __init__(self, step: int = -1) -> None:
        self.stop_at = step
        self.lines: list[str] = []

    def step(self, report: StepReport, log: bool) -> None:
        if report.step == self.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)

    def message(self, text: str) -> None:
        self.lines.append(text)


def steps_of(folder: Path) -> list[int]:
    return list(saved_steps(folder / "checkpoints"))


def progress_of(folder: Path) -> dict:
    return load_checkpoint(saved_steps(folder / "checkpoints")[max(steps_of(folder))]).progress


def status_of(folder: Path) -> dict:
    return json.loads((folder / "state.json").read_text())


def without(folder: Path, above: int) -> Path:
    """The run folder as it was before it went beyond a step."""
    for step, path in saved_steps(folder / "checkpoints").items():
        if step > above:
            shutil.rmtree(path)
    return folder


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"model__dropout": 0.3},
        {"optimizer__name": "adamw", "data__sampling": "random"},
        {"model__bias": False, "training__micro_batch": 3, "optimizer__schedule": "cosine"},
        {"training__gradient_checkpointing": True, "model__dropout": 0.1},
        {"model__family": "llama", "model__kv_heads": 1, "model__dropout": 0.1},
        {"model__family": "golf", "model__kv_heads": 1, "data__sampling": "stream", "data__spans": 2},
        {"data__sampling": "pack", "data__document_mask": True},
        {"optimizer__ema_decay": 0.9, "optimizer__muon_momentum_start": 0.5, "optimizer__muon_momentum_warmup_steps": 15},
        {"optimizer__muon_coefficients": "polar-express", "optimizer__muon_normalise_rows": True, "training__loss_chunk": 7},
        {"model__family": "golf", "model__embedding_dtype": "bf16", "model__kv_heads": 1, "training__precision": "bf16"},
    ],
    ids=[
        *("muon", "dropout", "adamw-random", "micro-batches", "checkpointed"),
        *("llama", "golf-stream", "packed", "averaged", "polar-express", "golf-bf16"),
    ],
)
def test_a_stopped_run_ends_bitwise_as_an_unbroken_one(train: Train, tmp_path, unbroken, settings):
    stopped = train(tmp_path / "run", StopAt(9), **settings)
    assert (stopped.status, stopped.total_steps, status_of(tmp_path / "run")["status"]) == ("stopped", 10, "stopped")
    assert stopped.artifact_path is None
    train(tmp_path / "run", StopAt(13), **settings)
    assert train(tmp_path / "run", **settings).status == "completed"
    assert state_of(tmp_path / "run") == unbroken(**settings)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "settings",
    [
        {"model__dropout": 0.1},
        {"model__dropout": 0.1, "training__precision": "fp16", "optimizer__name": "adamw", "data__sampling": "random"},
        {"model__family": "llama", "model__kv_heads": 1, "optimizer__ema_decay": 0.9, "training__loss_chunk": 7},
        {"model__family": "golf", "model__kv_heads": 1, "data__sampling": "stream", "data__spans": 2},
        {"data__sampling": "pack", "data__document_mask": True},
    ],
    ids=["muon", "fp16", "llama", "golf", "masked"],
)
@pytest.mark.parametrize("compiled", [False, "auto"], ids=["eager", "auto"])
def test_a_gpu_in_deterministic_mode_too(train: Train, tmp_path, unbroken, settings, compiled):
    on_gpu = {"model__width": 64, "training__device": "cuda", "training__precision": "bf16", "training__compile": compiled}
    settings = {**on_gpu, "training__deterministic": True, **settings}
    train(tmp_path / "run", StopAt(9), **settings)
    assert train(tmp_path / "run", **settings).status == "completed"
    assert state_of(tmp_path / "run") == unbroken(**settings)


@pytest.fixture
def stop_in_evaluation(monkeypatch):
    """SIGTERM at a batch of an evaluation, counted from the start of the run; gives the batches that were evaluated."""
    plain = TorchBackend.score

    def at(batch_number: int) -> list[Any]:
        batches: list[Any] = []

        def score(backend: TorchBackend, batch: Any) -> float:
            batches.append(batch)
            if len(batches) == batch_number:
                os.kill(os.getpid(), signal.SIGTERM)
            return plain(backend, batch)

        monkeypatch.setattr(TorchBackend, "score", score)
        return batches

    return at


EVALUATED = {"evaluation__every": 4, "evaluation__at_start": True, "evaluation__micro_batch": 4, "evaluation__train_rows": 8}
BATCHES = 10 + 2  # of 38 rows of validation and 8 of training


@pytest.mark.parametrize("number", [0, 2, 5], ids=["the first", "one on the way", "the last"])
def test_an_evaluation_ends_at_a_signal_and_is_made_up_for(train: Train, tmp_path, unbroken, stop_in_evaluation, number):
    expected = unbroken(**EVALUATED)
    batches = stop_in_evaluation(number * BATCHES + 3)
    stopped = train(tmp_path / "run", **EVALUATED)
    assert len(batches) == number * BATCHES + 3  # none after the signal
    assert (stopped.status, stopped.total_steps, stopped.artifact_path) == ("stopped", 4 * number, None)
    if number:
        assert [r["step"] for r in records(tmp_path / "run", "evaluation")] == [4 * n for n in range(number)]
    finished = train(tmp_path / "run", **EVALUATED)
    assert finished.status == "completed" and finished.artifact_path is not None
    assert state_of(tmp_path / "run") == expected
    found, whole = ([(r["step"], r["val_bpb"]) for r in records(tmp_path / name, "evaluation")] for name in ("run", "unbroken"))
    assert found == whole and [step for step, _ in found] == [0, 4, 8, 12, 16, 20]


def test_dropout_is_really_there_and_depends_on_the_seed(train: Train, tmp_path):
    states = [
        (train(tmp_path / str(i), model__dropout=p, training__seed=seed), state_of(tmp_path / str(i)))[1]["model.safetensors"]
        for i, (p, seed) in enumerate([(0.0, 1), (0.3, 1), (0.3, 2)])
    ]
    assert len(set(states)) == 3


def test_the_record_of_a_stopped_run_is_that_of_an_unbroken_one(train: Train, tmp_path):
    train(tmp_path / "unbroken")
    train(tmp_path / "run", StopAt(9))
    train(tmp_path / "run")
    expected = [(r["step"], r["loss"], r["learning_rate"], r["tokens"]) for r in records(tmp_path / "unbroken", "train")]
    assert [(r["step"], r["loss"], r["learning_rate"], r["tokens"]) for r in records(tmp_path / "run", "train")] == expected
    assert [step for step, *_ in expected] == list(range(1, 21))


def test_priming_steps_leave_no_trace(train: Train, tmp_path, unbroken):
    train(tmp_path / "run", training__priming_steps=3, model__dropout=0.2)
    assert state_of(tmp_path / "run") == unbroken(model__dropout=0.2)


def test_priming_steps_leave_no_trace_in_a_continued_run(train: Train, tmp_path, unbroken):
    train(tmp_path / "run", StopAt(9))
    train(tmp_path / "run", training__priming_steps=3)
    assert state_of(tmp_path / "run") == unbroken()


def test_garbage_is_collected_again_once_a_run_has_started(train: Train, tmp_path):
    collects = []

    class Noting(Reporter):
        def begin(self, report: BeginReport) -> None:
            collects.append(gc.isenabled())

        def step(self, report: StepReport, log: bool) -> None:
            collects.append(gc.isenabled())

    train(tmp_path / "run", Noting(), training__max_steps=1)
    assert collects == [False, True]


def test_evaluations_and_samples_leave_no_trace(train: Train, tmp_path, unbroken):
    judged = {"evaluation__every": 3, "evaluation__at_start": True, "evaluation__rows": 2, "evaluation__sample_tokens": 5}
    train(tmp_path / "run", model__dropout=0.2, **judged)
    assert state_of(tmp_path / "run") == unbroken(model__dropout=0.2)
    assert [r["step"] for r in records(tmp_path / "run", "evaluation")] == [0, 3, 6, 9, 12, 15, 18, 20]
    assert len(list((tmp_path / "run" / "samples").glob("step-*.txt"))) == 8


def test_how_often_it_saves_and_logs_leaves_no_trace(train: Train, tmp_path, unbroken):
    train(tmp_path / "run", training__save_every=1, training__keep_every=0, tracking__log_every=7)
    assert state_of(tmp_path / "run") == unbroken()


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) * 3 // 4] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    train_tiny(data, folder)
    return folder


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "checkpoint.json"])
@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
def test_a_damaged_newest_checkpoint_is_named_and_the_run_ends_bitwise_as_an_unbroken_one(
    train: Train, tmp_path, finished: Path, file, damage: Callable[[Path], None]
):
    shutil.copytree(finished, tmp_path / "run")
    expected = state_of(finished)
    without(tmp_path / "run", above=16)
    damage(tmp_path / "run" / "checkpoints" / "step-00000016" / file)
    reporter = StopAt()
    train(tmp_path / "run", reporter)
    assert [line for line in reporter.lines if "step-00000016" in line and file in line]
    assert state_of(tmp_path / "run") == expected
    assert [r["step"] for r in records(tmp_path / "run", "train")] == list(range(1, 21))


def test_when_all_checkpoints_are_damaged_the_run_is_refused(train: Train, tmp_path, finished: Path):
    shutil.copytree(finished, tmp_path / "run")
    for path in saved_steps(tmp_path / "run" / "checkpoints").values():
        flip(path / "model.safetensors")
    with pytest.raises(CheckpointError, match="restore a checkpoint or choose another"):
        train(tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("model__width", 32, "model.width was 16 and is 32"),
        ("model__dropout", 0.1, "model.dropout was 0.0 and is 0.1"),
        ("training__seed", 7, "training.seed was 1337 and is 7"),
        ("data__seed", 7, "data.seed was 1337 and is 7"),
        ("data__sampling", "random", "data.sampling was shuffle and is random"),
        ("training__tokens_per_step", 128, "training.tokens_per_step was 64 and is 128"),
        ("data__seq_len", 8, "data.seq_len was 16 and is 8"),
        ("optimizer__name", "adamw", "optimizer.name was muon and is adamw"),
    ],
)
def test_a_run_is_not_continued_with_what_would_make_it_another(train: Train, tmp_path, name, value, said):
    train(tmp_path / "run", training__max_steps=2)
    with pytest.raises(CheckpointError, match=said):
        train(tmp_path / "run", **{"training__max_steps": 2, name: value})


@pytest.mark.parametrize(
    ("sampling", "name", "before", "after"),
    [
        ("stream", "spans", 1, 2),
        ("pack", "overlap", 0, 4),
        ("pack", "document_mask", False, True),
    ],
)
def test_a_run_is_not_continued_with_rows_that_are_cut_otherwise(train: Train, tmp_path, sampling, name, before, after):
    given = {"training__max_steps": 2, "data__sampling": sampling}
    train(tmp_path / "run", **given, **{f"data__{name}": before})
    with pytest.raises(CheckpointError, match=rf"data\.{name} was {before} and is {after}".lower()):
        train(tmp_path / "run", **given, **{f"data__{name}": after})


def test_a_run_is_not_continued_on_other_data(train: Train, tmp_path, other_data):
    train(tmp_path / "run", training__max_steps=2)
    with pytest.raises(CheckpointError, match="trained on data with the fingerprint"):
        train(tmp_path / "run", training__max_steps=2, data__path=str(other_data))


def test_data_that_only_moved_is_the_same_data(train: Train, tmp_path, data):
    train(tmp_path / "run", training__max_steps=2)
    shutil.copytree(data, tmp_path / "moved")
    assert train(tmp_path / "run", training__max_steps=4, data__path=str(tmp_path / "moved")).total_steps == 4


def test_a_refused_continuation_leaves_the_run_as_it_was(train: Train, tmp_path):
    train(tmp_path / "run", training__max_steps=2)
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file() and path.name not in (".lock", "log.txt")]
    before = {path: path.read_bytes() for path in files}
    with pytest.raises(CheckpointError):
        train(tmp_path / "run", training__max_steps=2, training__seed=7)
    assert [path.name for path in files if path.read_bytes() != before[path]] == []


def test_more_steps_for_a_finished_run_continue_it(train: Train, tmp_path):
    constant = {"optimizer__schedule": "constant"}
    train(tmp_path / "run", training__max_steps=12, **constant)
    assert train(tmp_path / "run", training__max_steps=20, **constant).total_steps == 20
    train(tmp_path / "unbroken", training__max_steps=20, **constant)
    assert state_of(tmp_path / "run") == state_of(tmp_path / "unbroken")


def test_fewer_steps_than_were_taken_end_the_run_where_it_is(train: Train, tmp_path):
    train(tmp_path / "run", training__max_steps=12)
    assert train(tmp_path / "run", training__max_steps=8, budget__seconds=3.0).total_steps == 12


def test_a_finished_run_started_again_takes_no_step_and_records_nothing_twice(train: Train, tmp_path):
    first = train(tmp_path / "run")
    before = state_of(tmp_path / "run")
    again = train(tmp_path / "run")
    assert state_of(tmp_path / "run") == before
    assert (again.total_steps, again.val_bpb) == (20, first.val_bpb)
    assert [r["step"] for r in records(tmp_path / "run", "train")] == list(range(1, 21))
    assert [r["step"] for r in records(tmp_path / "run", "evaluation")] == [20]


def test_a_run_is_complete_with_the_very_settings_it_had_and_while_its_files_are_there(train: Train, data, tmp_path):
    folder = tmp_path / "run"

    def is_complete(kept: bool = True, **settings: Any) -> bool:
        given = {name.replace("__", "."): value for name, value in settings.items()}
        values = {**TINY, "data.path": str(data), "training.output_dir": str(folder), **given}
        return completed_result(load_config(python=values, environment={}).config, kept) is not None

    train(folder, StopAt(3))
    assert not is_complete()
    result = train(folder)
    assert is_complete() and is_complete(tracking__log_every=7, training__max_runtime_seconds=9)
    for name, value in {"training__max_steps": 30, "optimizer__floor": 0.2, "training__resume": "never"}.items():
        assert not is_complete(**{name: value}), name
    for lost in (result.artifact_path, result.checkpoint_path):
        lost.rename(tmp_path / "away")
        assert not is_complete() and is_complete(kept=False)
        (tmp_path / "away").rename(lost)
    assert is_complete()


class Break(Reporter):
    """Ends the run in the middle of it, at the report of a step or of a sample."""

    def __init__(self, step: int = -1, sample: int = -1) -> None:
        self.at_step, self.at_sample = step, sample

    def step(self, report: StepReport, log: bool) -> None:
        if report.step == self.at_step:
            raise KeyboardInterrupt

    def sample(self, step: int, text: str) -> None:
        if step == self.at_sample:
            raise KeyboardInterrupt


def test_an_evaluation_at_the_start_that_is_repeated_after_a_break_is_recorded_once(train: Train, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", Break(step=2), evaluation__at_start=True)
    train(tmp_path / "run", evaluation__at_start=True)
    assert [r["step"] for r in records(tmp_path / "run", "evaluation")] == [0, 20]


def test_an_evaluation_at_the_end_that_is_repeated_after_a_break_is_recorded_once(train: Train, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", Break(sample=20), evaluation__sample_tokens=2)
    train(tmp_path / "run", evaluation__sample_tokens=2)
    assert [r["step"] for r in records(tmp_path / "run", "evaluation")] == [20]


def test_resume_never_refuses_a_folder_that_holds_a_run(train: Train, tmp_path):
    train(tmp_path / "run", training__max_steps=2, training__resume="never")
    with pytest.raises(CheckpointError, match=r"already contains a run and training\.resume=never"):
        train(tmp_path / "run", training__max_steps=4, training__resume="never")
    assert steps_of(tmp_path / "run") == [2]


def test_the_newest_checkpoints_and_the_milestones_are_kept(train: Train, tmp_path):
    train(tmp_path / "run", training__save_every=2, training__keep_last=2, training__keep_every=6)
    assert steps_of(tmp_path / "run") == [6, 12, 16, 18, 20]  # the last is not a regular one


def test_the_best_checkpoint_is_kept_and_known(train: Train, tmp_path):
    """The learning rate is far too high towards the end, so an early evaluation is the best one."""
    bad = {"optimizer__name": "adamw", "optimizer__schedule": "constant", "optimizer__learning_rate": 0.01}
    keep = {"training__save_every": 2, "training__keep_every": 0, "training__keep_last": 1, "evaluation__every": 2}
    train(tmp_path / "run", training__max_steps=6, **bad, **keep)
    train(tmp_path / "run", training__max_steps=12, **{**bad, "optimizer__learning_rate": 3.0}, **keep)
    best = min(records(tmp_path / "run", "evaluation"), key=lambda r: r["val_bpb"])["step"]
    assert best < 12 and steps_of(tmp_path / "run") == [best, 10, 12]
    assert progress_of(tmp_path / "run")["best_step"] == best


def test_counters_are_those_of_the_steps_taken(train: Train, tmp_path):
    result = train(tmp_path / "run", StopAt(6))
    p = progress_of(tmp_path / "run")
    assert (p["step"], p["sample"], p["tokens"]) == (7, 28, 448)
    assert (result.total_steps, result.total_tokens) == (7, 448)


def test_a_budget_of_seconds_is_not_given_twice(train: Train, tmp_path, step_clock):
    budget = {"training__max_steps": None, "budget__seconds": 1.5}
    first = train(tmp_path / "run", StopAt(2), **budget)
    assert (first.status, first.total_steps) == ("stopped", 3)
    second = train(tmp_path / "run", **budget)
    assert (second.status, second.total_steps) == ("completed", 12)  # of 1/8 s each, in both sessions together
    spent = [r["elapsed_seconds"] for r in records(tmp_path / "run", "train")]
    rates = [r["learning_rate"] for r in records(tmp_path / "run", "train")]
    assert spent == sorted(spent) and spent[3] >= first.training_seconds
    assert rates == sorted(rates, reverse=True)
    assert train(tmp_path / "run", **budget).total_steps == second.total_steps


POISONED = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, vocab_size, width, bad_call=11, bad_gradient=False):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab_size, width), nn.Linear(width, vocab_size)
        self.calls, self.bad_call, self.bad_gradient = 0, bad_call, bad_gradient

    def forward(self, tokens, targets=None):
        logits = self.head(self.embed(tokens))
        if targets is None:
            return logits
        self.calls += 1
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        if self.calls != self.bad_call:
            return loss
        if self.bad_gradient:  # the root has no slope at zero
            return loss + (self.embed.weight * 0).sum().abs().sqrt() * 0
        return loss * float("nan")
"""


@pytest.mark.parametrize("bad_gradient", [False, True], ids=["loss", "gradient"])
@pytest.mark.parametrize("save_every", [5, 11])
def test_what_is_not_finite_stops_the_run_and_spoils_no_checkpoint(train: Train, tmp_path, bad_gradient, save_every):
    (tmp_path / "poisoned.py").write_text(POISONED)
    own = {"model__file": str(tmp_path / "poisoned.py"), "model__settings__bad_gradient": bad_gradient}
    what = "gradient" if bad_gradient else "loss"
    with pytest.raises(RunError, match=f"the {what} is not finite at step 11 .*lower the learning rate") as raised:
        train(tmp_path / "run", training__save_every=save_every, training__keep_every=5, **own)
    assert "\n" not in str(raised.value)
    state = status_of(tmp_path / "run")
    assert (state["status"], state["step"]) == ("failed", 10) and "not finite" in state["error"]
    assert steps_of(tmp_path / "run") == ([5, 10] if save_every == 5 else [])
    for path in saved_steps(tmp_path / "run" / "checkpoints").values():
        load_checkpoint(path)
    assert [r["step"] for r in records(tmp_path / "run", "train")] == list(range(1, 11))


def test_a_learning_rate_beyond_reason_is_told_as_such(train: Train, tmp_path):
    with pytest.raises(RunError, match=r"is not finite at step \d+ .*lower the learning rate"):
        train(tmp_path / "run", optimizer__name="adamw", optimizer__learning_rate=1e30, training__save_every=1)
    assert status_of(tmp_path / "run")["status"] == "failed"
    for path in saved_steps(tmp_path / "run" / "checkpoints").values():
        tensors = load_checkpoint(path).tensors["model"].values()
        assert all(np.isfinite(np.frombuffer(tensor.data, np.float32)).all() for tensor in tensors)


def test_a_model_file_that_changed_since_is_another_model(train: Train, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(POISONED)
    train(tmp_path / "run", model__file=str(file), training__max_steps=2)
    file.write_text(POISONED.replace("self.head(self.embed(tokens))", "self.head(self.embed(tokens).tanh())"))
    with pytest.raises(CheckpointError, match=r"model\.file"):
        train(tmp_path / "run", model__file=str(file), training__max_steps=4)


def test_a_model_file_that_only_moved_is_the_same_model(train: Train, tmp_path):
    (tmp_path / "mine.py").write_text(POISONED)
    train(tmp_path / "run", model__file=str(tmp_path / "mine.py"), training__max_steps=2)
    (tmp_path / "mine.py").rename(tmp_path / "moved.py")
    assert train(tmp_path / "run", model__file=str(tmp_path / "moved.py"), training__max_steps=4).total_steps == 4


def test_a_stale_state_left_by_a_dead_container_does_not_block(train: Train, tmp_path, unbroken):
    train(tmp_path / "run", StopAt(9))
    state = status_of(tmp_path / "run")
    dead = {**state, "status": "running", "host": "gone", "pid": 1, "boot_id": "another", "heartbeat_seconds": 0.1}
    (tmp_path / "run" / "state.json").write_text(json.dumps(dead))
    reporter = StopAt()
    train(tmp_path / "run", reporter)
    assert [line for line in reporter.lines if "process 1 on gone" in line]
    assert state_of(tmp_path / "run") == unbroken()


def test_the_artifact_holds_the_weights_of_the_last_checkpoint(train: Train, tmp_path):
    result = train(tmp_path / "run")
    exported, _ = read_tensors(result.artifact_path)
    saved = load_checkpoint(result.checkpoint_path).tensors["model"]
    assert {name: bytes(r.data) for name, r in exported.items()} == {name: bytes(r.data) for name, r in saved.items()}
    assert result.artifact_path.stat().st_size == result.artifact_bytes


def test_a_run_without_an_artifact_writes_none(train: Train, tmp_path):
    result = train(tmp_path / "run", training__max_steps=2, artifact__write=False)
    assert (result.artifact_path, list((tmp_path / "run" / "artifact").iterdir())) == (None, [])


def test_a_door_can_bring_an_exporter_of_its_own(data, tmp_path):
    seen = []

    def exporter(trainer, shutdown):
        seen.append(trainer.progress.step)
        return Exported(tmp_path / "mine", 7, 1.5, facts={"colour": "red"})

    values = {**TINY, "data.path": str(data), "training.output_dir": str(tmp_path / "run"), "training.max_steps": 3}
    result = run(load_config(python=values, environment={}), exporter=exporter)
    assert (seen, result.artifact_path, result.artifact_bytes, result.artifact_bpb) == ([3], tmp_path / "mine", 7, 1.5)
    told = Run.open(tmp_path / "run").result()
    assert told is not None and (told["artifact_path"], told["export"]) == (str(tmp_path / "mine"), {"colour": "red"})


def test_the_result_of_the_last_session_is_in_the_run_folder(train: Train, tmp_path):
    looked, taken = Run(tmp_path / "run"), [0]
    for session, stop, status in ((1, StopAt(9), "stopped"), (2, None, "completed")):
        result = train(tmp_path / "run", stop)
        told = looked.result()
        assert told is not None and (told["session"], told["status"], told["total_steps"]) == (
            session,
            status,
            result.total_steps,
        )
        assert {name: told[name] for name in ("final_loss", "val_loss", "val_bpb", "total_tokens", "artifact_bytes")} == {
            name: getattr(result, name) for name in ("final_loss", "val_loss", "val_bpb", "total_tokens", "artifact_bytes")
        }
        assert looked.status().status == status and looked.path / told["checkpoint_path"] == result.checkpoint_path
        taken.append(result.total_steps)
    assert [r["session"] for r in records(tmp_path / "run", "train")] == [1] * taken[1] + [2] * (taken[2] - taken[1])


def test_a_session_that_dies_leaves_no_result_of_the_one_before(train: Train, tmp_path):
    train(tmp_path / "run", training__max_steps=5)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", Break(step=7), training__max_steps=10)
    assert Run(tmp_path / "run").result() is None


def test_a_run_can_begin_with_the_weights_of_another(train: Train, tmp_path):
    first = train(tmp_path / "first", training__max_steps=4, evaluation__at_start=True)
    other = train(
        tmp_path / "other",
        training__max_steps=1,
        training__weights=str(first.run_dir),
        evaluation__at_start=True,
        training__seed=5,
    )
    assert records(other.run_dir, "evaluation")[0]["val_loss"] == first.val_loss
    assert records(first.run_dir, "evaluation")[0]["val_loss"] != first.val_loss


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"model__width": 32}, "set model.width=16"),
        ({"model__layers": 3, "model__bias": False}, "set model.layers=1, model.bias=True"),
        ({"data__seq_len": 32, "training__tokens_per_step": 128}, "set data.seq_len=16"),
        ({"data__seq_len": 8}, "set model.context=16"),
        ({"model__vocab_size": 300}, "set model.vocab_size=260"),
        ({"model__family": "llama"}, "set model.family=gpt2, model.bias=True"),
    ],
)
def test_weights_that_do_not_fit_name_the_settings_that_make_them_fit_and_leave_no_folder(train: Train, tmp_path, changed, named):
    first = train(tmp_path / "first", training__max_steps=1)
    with pytest.raises(CheckpointError, match=f"does not fit this model; {re.escape(named)}$"):
        train(tmp_path / "other", training__weights=str(first.run_dir), **changed)
    assert not (tmp_path / "other").exists()
    fitting = {f"{one.partition('=')[0].replace('.', '__')}": one.partition("=")[2] for one in named[4:].split(", ")}
    again = {**changed, **{name: json.loads(value.lower()) if value != "gpt2" else value for name, value in fitting.items()}}
    assert train(tmp_path / "other", training__weights=str(first.run_dir), training__max_steps=1, **again).total_steps == 1


def test_a_run_that_began_with_weights_goes_on_without_them(train: Train, tmp_path):
    first = train(tmp_path / "first", training__max_steps=2)
    for steps in (2, 4):
        found = train(tmp_path / "other", training__weights=str(first.run_dir), training__max_steps=steps)
        assert found.total_steps == steps
        shutil.rmtree(first.run_dir, ignore_errors=True)


def test_weights_of_another_tokenizer_are_refused_by_its_name(train: Train, tmp_path):
    write_dataset([("train", "ab" * 4000), ("val", "ba" * 400)], tmp_path / "chars", CharTokenizer("abcdef"), source=None)
    first = train(tmp_path / "first", training__max_steps=1, data__path=str(tmp_path / "chars"))
    said = r"trained with a tokenizer of 6 ids \(char\), but the data has a tokenizer of 260 ids \(byte\); prepare the text"
    with pytest.raises(CheckpointError, match=said):
        train(tmp_path / "other", training__weights=str(first.run_dir))


def test_the_training_split_is_scored_beside_the_validation_split_where_asked(train: Train, tmp_path):
    train(tmp_path / "run", training__max_steps=2, evaluation__train_rows=3)
    train(tmp_path / "plain", training__max_steps=2)
    asked, plain = (records(tmp_path / name, "evaluation")[-1] for name in ("run", "plain"))
    assert plain["train_loss"] is None
    assert asked["train_loss"] == pytest.approx(plain["val_loss"], abs=0.2)
    assert asked["train_loss"] != asked["val_loss"]
    assert asked["val_loss"] == plain["val_loss"]


def test_without_an_evaluation_at_the_end_only_those_in_between_are_made(train: Train, tmp_path):
    result = train(tmp_path / "run", training__max_steps=5, evaluation__every=2, evaluation__at_end=False)
    assert [record["step"] for record in records(tmp_path / "run", "evaluation")] == [2, 4]
    assert (result.status, result.total_steps, result.val_step) == ("completed", 5, 4)
    assert read_artifact(result.artifact_path).facts["val_bpb"] is None  # the score is not of these weights


def test_a_mistake_in_the_model_is_told_before_a_folder_is_made(train: Train, tmp_path):
    with pytest.raises(ConfigError, match="vocab_size=5"):
        train(tmp_path / "run", model__vocab_size=5)
    assert not (tmp_path / "run").exists()


def test_a_micro_batch_asked_for_anew_is_the_one_that_is_used(train: Train, tmp_path):
    train(tmp_path / "run", StopAt(9))
    train(tmp_path / "run", training__micro_batch=1)
    assert progress_of(tmp_path / "run")["choices"]["micro_batch"] == 1


def test_a_home_folder_in_the_path_of_a_model_file_is_found(train: Train, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.py").write_text(POISONED)
    train(tmp_path / "run", model__file="~/mine.py", training__max_steps=2)
    assert (tmp_path / "run" / "model.py").read_text() == POISONED


def test_a_run_leaves_the_config_it_was_started_from_as_it_is(train: Train, data: Path, tmp_path: Path) -> None:
    folder, listener = tmp_path / "run", StopAt()
    train(folder, training__max_steps=4)
    text = "# a comment of mine\n" + (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text)
    run(load_config(file=folder / "config.yaml", environment={}), listener)
    assert (folder / "config.yaml").read_text() == text and listener.lines == []
    run(load_config(file=folder / "config.yaml", overrides={"training.max_steps": "8"}, environment={}), listener)
    assert (folder / "config.yaml").read_text() == text and steps_of(folder)[-1] == 8
    assert "training.max_steps" in listener.lines[0] and "is not modified" in listener.lines[0]
    run(load_config(file=folder / "config.yaml", sweep={"training.max_steps": 9}, environment={}), listener)
    assert "training.max_steps" in listener.lines[-1] and "is not modified" in listener.lines[-1]
    train(folder, training__max_steps=9)
    assert "a comment of mine" not in (folder / "config.yaml").read_text()


def test_a_model_of_ones_own_is_copied_neither_onto_itself_nor_through_a_link(train: Train, tmp_path: Path) -> None:
    folder, mine, kept = tmp_path / "run", tmp_path / "mine.py", tmp_path / "kept.py"
    mine.write_text("from ingot.model.gpt2 import GPT2 as Model\n")
    kept.write_text("# not to be changed\n")
    train(folder, model__file=str(mine), training__max_steps=2)
    shutil.rmtree(folder / "checkpoints")
    (folder / "state.json").unlink()
    train(folder, model__file=str(folder / "model.py"), training__max_steps=2)
    assert (folder / "model.py").read_text() == mine.read_text()
    shutil.rmtree(folder / "checkpoints")
    (folder / "state.json").unlink()
    (folder / "model.py").unlink()
    (folder / "model.py").symlink_to(kept)
    train(folder, model__file=str(mine), training__max_steps=2)
    assert not (folder / "model.py").is_symlink() and (folder / "model.py").read_text() == mine.read_text()
    assert kept.read_text() == "# not to be changed\n"


def test_a_run_whose_newest_checkpoint_may_not_be_read_stops_and_does_not_go_back(open_folder, as_nobody):
    with as_nobody():
        data, folder = write_text(open_folder / "data", seed=0), open_folder / "run"
        train_tiny(data, folder, training__max_steps=8)
        (folder / "checkpoints/step-00000008/model.safetensors").chmod(0)
        with pytest.raises(Unreadable, match=r"step-00000008/model.safetensors cannot be read: Permission denied"):
            train_tiny(data, folder, training__max_steps=12)
        assert steps_of(folder) == [4, 8]
        (folder / "checkpoints").chmod(0)
        with pytest.raises(Unreadable, match=r"checkpoints cannot be read: Permission denied"):
            train_tiny(data, folder, training__max_steps=12)
        (folder / "checkpoints").chmod(0o700)


class Removes(Reporter):
    """Takes something away from every checkpoint that was saved."""

    def __init__(self, remove: Callable[[Path], None]) -> None:
        self.remove = remove

    def saved(self, path: Path, kind: str = "regular") -> None:
        self.remove(path)


@pytest.mark.parametrize(
    ("remove", "said"),
    [
        (shutil.rmtree, None),
        (lambda path: shutil.rmtree(path.parent), "cannot save step 8 in .*: No such file or directory"),
        (lambda path: (path / "checkpoint.json").unlink(), "step-00000008 is not a checkpoint: it has no checkpoint.json"),
        (lambda path: path.parent.chmod(0), "checkpoints.*: Permission denied"),
    ],
    ids=["checkpoint", "all", "record", "permission"],
)
def test_a_checkpoint_that_is_taken_away_while_it_is_used_is_one_sentence(open_folder, as_nobody, remove, said):
    with as_nobody():
        data = write_text(open_folder / "data", seed=0)
        try:
            with pytest.raises(CheckpointError, match=said) if said else nullcontext():
                train_tiny(data, open_folder / "run", Removes(remove), training__max_steps=8)
        finally:
            if (open_folder / "run/checkpoints").exists():
                (open_folder / "run/checkpoints").chmod(0o700)


def test_a_run_keeps_the_threads_that_it_began_with(train: Train, tmp_path):
    assert torch.get_num_threads() == 1
    train(tmp_path / "run", training__threads=2, training__max_steps=4)
    train(tmp_path / "run", training__max_steps=6)
    assert (tmp_path / "run" / "log.txt").read_text().count("device cpu, 2 threads") == 2
    assert progress_of(tmp_path / "run")["choices"]["threads"] == 2
    assert torch.get_num_threads() == 1
