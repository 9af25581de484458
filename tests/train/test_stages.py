"""Whole runs in stages: killed and resumed at the borders, on any number of ranks, with their saved starts."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_runs import Train, killed_after, records, state_of

from ingot.backends.torch.backend import TorchBackend
from ingot.config.loading import load_config
from ingot.data.loading.data_path import open_dataset
from ingot.data.loading.rows import make_rows
from ingot.errors import CheckpointError, ConfigError
from ingot.runs.checkpoints import load_checkpoint
from ingot.runs.folder import saved_steps
from ingot.runs.reporter import Reporter, StepReport
from ingot.runtime.ranks import Ranks
from ingot.train.reader import read_rank_batch
from ingot.train.start import open_data
from ingot.train.step_plan import Position, plan_step, starts_with

# The batch doubles twice and the rows double once.
STAGES: list[dict[str, Any]] = [
    {"steps": 6, "seq_len": 32},
    {"steps": 6, "tokens_per_step": 256},
    {"steps": 6, "tokens_per_step": 512, "rate": 0.5},
]
STAGED = {
    "data__seq_len": 64, "training__tokens_per_step": 128, "training__max_steps": 18, "training__stages": STAGES,
    "training__save_every": 1, "training__keep_every": 1,
}  # fmt: skip
SHARES = [{"share": 1 / 3, **{k: v for k, v in stage.items() if k != "steps"}} for stage in STAGES]


class StopAt(Reporter):
    def __init__(self, step: int):
        self.stop_at = step

    def step(self, report: StepReport, log: bool) -> None:
        if report.step == self.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)


def progress_at(folder: Path, step: int) -> dict[str, Any]:
    return load_checkpoint(saved_steps(folder / "checkpoints")[step]).progress


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"training__stages": SHARES},
        {"optimizer__name": "adamw", "data__sampling": "random", "model__dropout": 0.2, "optimizer__ema_decay": 0.9},
        {"data__sampling": "pack", "data__document_mask": True, "training__micro_batch": 3, "optimizer__schedule": "cosine"},
        {"training__later_targets": [0.5, 0.25]},
        {"data__sampling": "redraw"},
    ],
    ids=["muon", "shares of the steps", "adamw-random-averaged", "packed", "later targets", "redrawn"],
)
def test_a_run_killed_at_the_borders_of_its_stages_ends_bitwise_as_the_unbroken_one(train: Train, tmp_path, settings):
    unbroken = tmp_path / "unbroken"
    train(unbroken, **{**STAGED, **settings})
    assert [record["step"] for record in records(unbroken, "train")] == list(range(1, 19))
    for step in (5, 6, 12):
        run = killed_after(unbroken, step)
        assert train(run, **{**STAGED, **settings}).status == "completed"
        assert state_of(run) == state_of(unbroken)
        assert progress_at(run, 18)["starts"] == [0, 6, 12]


@pytest.mark.parametrize("step", [5, 6, 11])
def test_a_run_stopped_by_a_signal_at_a_border_goes_on_bitwise(train: Train, tmp_path, unbroken, step):
    assert train(tmp_path / "run", StopAt(step), **STAGED).status == "stopped"
    train(tmp_path / "run", **STAGED)
    assert state_of(tmp_path / "run") == unbroken(**STAGED)


def test_a_continued_run_primes_the_stages_that_it_will_still_have(train: Train, tmp_path, monkeypatch, unbroken):
    primed, step = [], TorchBackend.step

    def noted(backend, batch, targets, plan):
        primed.append((plan.stage, plan.step))
        return step(backend, batch, targets, plan)

    train(tmp_path / "run", StopAt(8), **STAGED)
    monkeypatch.setattr(TorchBackend, "step", noted)
    train(tmp_path / "run", training__priming_steps=1, **STAGED)
    assert primed[:3] == [(1, 0), (2, 0), (1, 8)]
    assert state_of(tmp_path / "run") == unbroken(**STAGED)


def test_the_stages_are_what_the_steps_read(train: Train, tmp_path, monkeypatch):
    shapes, plain = [], TorchBackend.step

    def step(backend: TorchBackend, batch: Any, targets: int, plan: Any) -> Any:
        shapes.append((batch.shape, targets))
        return plain(backend, batch, targets, plan)

    monkeypatch.setattr(TorchBackend, "step", step)
    train(tmp_path / "run", **STAGED)
    assert shapes == [((4, 2, 32), 128)] * 6 + [((4, 2, 64), 256)] * 6 + [((8, 2, 64), 512)] * 6
    found = progress_at(tmp_path / "run", 18)
    assert (found["sample"], found["tokens"]) == (6 * (2 + 4 + 8), 6 * (128 + 256 + 512))
    rates = [record["learning_rate"] for record in records(tmp_path / "run", "train")]
    assert rates[12] == pytest.approx(rates[11] / 2, rel=0.2)  # of a schedule that falls meanwhile


def test_three_stages_end_like_one_where_they_are_all_alike(train: Train, tmp_path, unbroken):
    alike = {**STAGED, "training__stages": [{"share": 0.25}, {"share": 0.25}, {"share": 0.5}]}
    train(tmp_path / "run", **alike)
    assert state_of(tmp_path / "run") == unbroken(**{**STAGED, "training__stages": []})


def plans_of(config: Any) -> list[Any]:
    at, plans = Position(), []
    for _ in range(config.training.max_steps):
        plan = plan_step(config, at)
        plans.append(plan)
        at = Position(at.step + 1, at.sample + plan.samples, starts=starts_with(at, plan))
    return plans


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_token_is_read_once_per_epoch_in_the_order_of_one_rank(data: Path, world_size):
    """As many steps as an epoch has windows; the ranks' rows, put together, are those of one."""
    windows = (open_dataset(str(data)).split("train").tokens - 1) // 64
    given = {name.replace("__", "."): value for name, value in STAGED.items()}
    stages = [{"steps": 3, "seq_len": 32, "tokens_per_step": 192}, {"steps": 2, "tokens_per_step": 256}]
    left = windows - 3 * 3 - 2 * 4
    values = {**given, "training.stages": [*stages, {"steps": left, "tokens_per_step": 64}], "training.max_steps": 5 + left}
    values |= {"data.path": str(data), "training.tokens_per_step": 64}
    config = load_config(python=values, environment={}).config
    source = make_rows(config.data, config.rows_per_step, open_dataset(str(data)))
    starts, read = Counter(), []
    for plan in plans_of(config):
        buffers = [np.empty((plan.samples, 2, 64), np.int32) for _ in range(world_size)]
        portions = [read_rank_batch(source, plan, Ranks(rank, world_size), buffer) for rank, buffer in enumerate(buffers)]
        together = np.concatenate([rank_batch.batch for rank_batch in portions])
        assert together.shape == (plan.rows, 2, plan.seq_len)
        assert np.array_equal(together, read_rank_batch(source, plan, Ranks(), np.empty((plan.samples, 2, 64), np.int32)).batch)
        starts.update(source.order.starts(np.arange(plan.sample, plan.sample + plan.samples, dtype=np.uint64)).tolist())
        read.append(together[:, 0].ravel())
    assert starts == dict.fromkeys(range(0, windows * 64, 64), 1)
    tokens = np.asarray(open_dataset(str(data)).split("train").read(0, windows * 64))
    assert Counter(np.concatenate(read).tolist()) == Counter(tokens.tolist())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"training__stages": STAGES[:2]}, "training.stages was"),
        ({"optimizer__groups": [{"name": "a", "match": "*wte*"}]}, "optimizer.groups was"),
    ],
)
def test_a_run_that_was_begun_keeps_its_stages_and_groups(train: Train, tmp_path, change, named):
    train(tmp_path / "run", StopAt(3), **STAGED)
    with pytest.raises(CheckpointError, match=named):
        train(tmp_path / "run", **{**STAGED, **change})


WINDOWED = """
import torch
from torch import nn
import torch.nn.functional as F

class Model(nn.Module):
    def __init__(self, vocab_size: int, width: int):
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.window, self.seen = 0, []

    def set(self, window: int):
        if window < 1:
            raise ValueError("a window has at least one token")
        self.window = window

    def flops(self, seq_len: int) -> float:
        return 7.0 * seq_len

    def forward(self, tokens, targets=None):
        self.seen.append((self.training, self.window))
        x = self.tokens(tokens)
        total = x.cumsum(1)
        mean = (total - F.pad(total, (0, 0, self.window, 0))[:, : -self.window]) / self.window
        logits = self.head(mean)
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
"""


@pytest.fixture
def windowed(tmp_path):
    file = tmp_path / "windowed.py"
    file.write_text(WINDOWED)
    stages = [{**stage, "model": {"window": window}} for stage, window in zip(STAGES, (1, 2, 4), strict=True)]
    return {**STAGED, "model__file": str(file), "training__stages": stages, "optimizer__name": "adamw"}


def test_a_stage_hands_its_numbers_to_the_model_and_evaluation_has_the_last(train: Train, tmp_path, windowed, monkeypatch):
    models: list[Any] = []
    plain = TorchBackend.__init__

    def remember(backend: TorchBackend, *given: Any, **named: Any) -> None:
        plain(backend, *given, **named)
        models.append(backend)

    monkeypatch.setattr(TorchBackend, "__init__", remember)
    train(tmp_path / "run", **windowed, evaluation__every=4)
    seen = models[0].model.seen
    assert [window for training, window in seen if training] == [1] * 6 + [2] * 6 + [4] * 6
    assert {window for training, window in seen if not training} == {4}
    assert models[0].flops_per_token(32) == 7.0 * 32
    for step in (6, 12):
        run = killed_after(tmp_path / "run", step)
        train(run, **windowed, evaluation__every=4)
        assert state_of(run) == state_of(tmp_path / "run")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"model__file": None, "model__family": "gpt2"}, r"training\.stages\.0\.model needs a model with a method `set`"),
        ({"training__stages": [{"share": 1.0, "model": {"width": 3}}]}, r"stages\.0\.model: the model's method `set` rejects"),
        ({"training__stages": [{"share": 1.0, "model": {"window": 0}}]}, r"a window has at least one token"),
    ],
)  # fmt: skip
def test_numbers_that_the_model_does_not_take_are_one_line_before_the_first_step(
    train: Train, tmp_path, windowed, settings, said
):
    given = {name: value for name, value in {**windowed, **settings}.items() if value is not None}
    with pytest.raises(ConfigError, match=said):
        train(tmp_path / "run", **given)


def test_ranks_that_a_stage_has_no_rows_for_are_refused(data: Path):
    given = {name.replace("__", "."): value for name, value in STAGED.items()}
    config = load_config(python={**given, "data.path": str(data)}, environment={}).config
    open_data(config, 2)
    with pytest.raises(ConfigError, match="3 ranks cannot share the 2 rows of a step"):
        open_data(config, 3)
    small = {"training.stages": [{"share": 0.5}, {"share": 0.5, "tokens_per_step": 64}], "data.path": str(data)}
    with pytest.raises(ConfigError, match=r"share the 1 rows .* raise training\.stages\.1\.tokens_per_step"):
        open_data(load_config(python={**given, **small}, environment={}).config, 2)


def test_every_stage_has_its_own_micro_batch_and_keeps_it(train: Train, tmp_path):
    train(tmp_path / "run", StopAt(3), **STAGED, training__micro_batch=6)
    found = progress_at(tmp_path / "run", max(saved_steps(tmp_path / "run" / "checkpoints")))["choices"]
    assert found["micro_batch"] == 4
    assert [stage["micro_batch"] for stage in found["stages"]] == [4, 4, 6]


def test_later_targets_change_the_weights_but_not_the_loss_that_is_reported(train: Train, tmp_path: Path):
    train(tmp_path / "plain", **STAGED)
    train(tmp_path / "later", **STAGED, training__later_targets=[0.5])
    plain, later = ([record["loss"] for record in records(tmp_path / run, "train")] for run in ("plain", "later"))
    assert later[0] == plain[0] and later[2] != plain[2]
