"""The plan of a step: what it reads and at which rates, from the config and the position alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.backends.base import GroupRates, StepPlan
from ingot.config.loading import load_config
from ingot.config.schema import Config
from ingot.errors import ConfigError
from ingot.optim.schedules import learning_rate_scale
from ingot.train.reader import RankBatch
from ingot.train.step_plan import Position, following, plan_step, shapes, starts_with

STAGES = [
    {"steps": 10, "tokens_per_step": 128, "seq_len": 32},
    {"steps": 5, "tokens_per_step": 256},
    {"steps": 5, "tokens_per_step": 512},
]
SHARES = [{"share": share} for share in (0.25, 0.25, 0.5)]

TARGETS = 256


def read(plan: StepPlan) -> RankBatch:
    return RankBatch(np.empty((0, 2, 64), np.int32), TARGETS, epoch=0, next_sample=plan.sample + plan.samples)


def config_of(**given: Any) -> Config:
    values = {"data.seq_len": 64, "training.tokens_per_step": 256, "training.max_steps": 20}
    values |= {name.replace("__", "."): value for name, value in given.items()}
    return load_config(python=values, environment={}).config


def walk(config: Config, steps: int, seconds: float = 0.0) -> list[Any]:
    """The plans of a run from its start, each step taking some seconds."""
    plans, at = [], Position()
    for _ in range(steps):
        plan = plan_step(config, at)
        plans.append(plan)
        sample, starts = plan.sample + plan.samples, starts_with(at, plan)
        at = Position(at.step + 1, sample, at.tokens + TARGETS, at.seconds + seconds, starts)
    return plans


@given(st.integers(0, 30), st.sampled_from(["constant", "cosine", "wsd", "budget"]), st.sampled_from(["adamw", "muon"]))
def test_without_stages_every_step_is_alike_and_follows_the_schedule(step, schedule, name):
    config = config_of(optimizer__schedule=schedule, optimizer__name=name, optimizer__embedding_learning_rate=0.3)
    plan = plan_step(config, Position(step, sample=4 * step))
    assert (plan.stage, plan.sample, plan.samples, plan.rows, plan.seq_len, plan.model) == (0, 4 * step, 4, 4, 64, {})
    scale, o = learning_rate_scale(config, step, 0.0), config.optimizer
    peak, momentum, decay = (
        (o.muon_learning_rate, o.muon_momentum, o.muon_weight_decay)
        if name == "muon"
        else (o.learning_rate, None, o.weight_decay)
    )
    assert plan.groups["matrix"] == GroupRates(peak * scale, momentum, decay)
    assert plan.groups["embedding"] == GroupRates(0.3 * scale, None, o.weight_decay)
    assert plan.groups["scalar"] == GroupRates(o.learning_rate * scale, None, 0.0)
    assert set(plan.groups) == set(o.kinds)


def test_stages_by_steps_begin_at_their_steps_and_the_last_goes_on():
    plans = walk(config_of(training__stages=STAGES, training__max_steps=25), 25)
    assert [plan.stage for plan in plans] == [0] * 10 + [1] * 5 + [2] * 10
    assert {plan.stage: (plan.samples, plan.rows, plan.seq_len) for plan in plans} == {
        0: (2, 4, 32),
        1: (4, 4, 64),
        2: (8, 8, 64),
    }
    assert [plan.sample for plan in plans] == [0, *(sum(p.samples for p in plans[:i]) for i in range(1, 25))]


@pytest.mark.parametrize("count", [3, 5, 7, 9, 10])
def test_equal_shares_are_equal_numbers_of_steps(count):
    config = config_of(training__max_steps=count * 4, training__stages=[{"share": 1 / count}] * count)
    assert [plan.stage for plan in walk(config, count * 4)] == [i // 4 for i in range(count * 4)]


def test_stages_by_share_follow_the_clock_where_there_is_one():
    config = config_of(training__stages=SHARES, training__max_steps=None, budget__seconds=40.0, optimizer__schedule="budget")
    assert [plan.stage for plan in walk(config, 10, seconds=4.0)] == [0, 0, 0, 1, 1, 2, 2, 2, 2, 2]


def test_a_stage_that_has_begun_is_not_taken_back_when_the_budget_grows():
    short, long = (
        config_of(training__stages=SHARES, training__max_steps=None, budget__seconds=seconds, optimizer__schedule="constant")
        for seconds in (40.0, 400.0)
    )
    at = Position(3, 12, seconds=12.0, starts=(0, 3))
    assert plan_step(short, at).stage == plan_step(long, at).stage == 1
    assert plan_step(long, replace(at, starts=())).stage == 0


@pytest.mark.parametrize("later", [(6000, 256, 1), (6000, 1)], ids=["longer", "longer and one fewer"])
def test_a_phase_that_has_begun_is_not_taken_back_when_others_are_made_longer(later):
    before, after = (
        config_of(data__phases=[{"tokens": tokens, "mix": {"web": 1}} for tokens in phases]) for phases in ((512, 256, 1), later)
    )
    at = Position(3, 12, tokens=768)
    assert plan_step(before, at).phase == 2 and plan_step(after, at).phase == 0
    for begun in (1, 2, 3):
        plan = plan_step(after, replace(at, phases=begun))
        assert plan.phase == min(begun, len(later)) - 1
        assert following(after, plan, read(plan)).phase == plan.phase


def test_a_stage_shorter_than_a_step_has_begun_with_the_one_after():
    config = config_of(training__stages=SHARES, training__max_steps=None, budget__seconds=1.0, optimizer__schedule="constant")
    at = Position(1, 4, seconds=0.9, starts=(0,))
    assert starts_with(at, plan_step(config, at)) == (0, 1, 1)
    assert starts_with(replace(at, starts=(0, 1, 1)), plan_step(config, at)) == (0, 1, 1)


def test_a_stage_scales_all_rates_and_those_of_single_groups():
    stages = [
        {"steps": 2, "model": {"window": 3}},
        {"steps": 18, "rate": 0.5, "rates": {"head": 4.0, "gates": 0.0}, "model": {"window": 7}},
    ]
    groups = [{"name": "gates", "match": "*gate*", "learning_rate": 0.2, "weight_decay": 0.3}]
    config = config_of(
        training__stages=stages, optimizer__groups=groups, optimizer__schedule="constant", optimizer__learning_rate=0.1
    )
    before, after = plan_step(config, Position(1)), plan_step(config, Position(2))
    assert [before.groups[name].lr for name in ("head", "gates", "matrix")] == [0.1, 0.2, 0.1]
    assert [after.groups[name].lr for name in ("head", "gates", "matrix")] == [0.2, 0.0, 0.05]
    assert (before.model, after.model, after.groups["gates"].weight_decay) == ({"window": 3}, {"window": 7}, 0.3)


def test_a_group_of_muon_warms_up_to_its_own_momentum():
    groups = [{"name": "heads", "match": "*head*", "optimizer": "muon", "momentum": 0.6}]
    config = config_of(optimizer__groups=groups, optimizer__muon_momentum_start=0.2, optimizer__muon_momentum_warmup_steps=4)
    assert [plan_step(config, Position(step)).groups["heads"].momentum for step in (0, 2, 4, 9)] == pytest.approx(
        [0.2, 0.4, 0.6, 0.6]
    )
    assert plan_step(config, Position(0)).groups["matrix"].momentum is None


def test_the_average_forgets_faster_at_first():
    config = config_of(optimizer__ema_decay=0.5)
    assert [plan_step(config, Position(step)).ema_decay for step in (0, 1, 5, 9)] == [0.1, 2 / 11, 6 / 15, 0.5]
    assert plan_step(config_of(), Position(3)).ema_decay is None


@pytest.mark.parametrize("stages", [[], STAGES, SHARES], ids=["one", "by steps", "by share of the steps"])
def test_without_a_clock_the_next_plan_is_known(stages):
    plans = walk(config_of(training__stages=stages), 20)
    assert [following(config_of(training__stages=stages), plan, read(plan)) for plan in plans[:-1]] == plans[1:]


def test_with_a_clock_the_next_step_is_taken_to_be_in_the_same_stage():
    config = config_of(training__stages=SHARES, training__max_steps=None, budget__seconds=40.0, optimizer__schedule="budget")
    for plan in walk(config, 10, seconds=4.0):
        expected = following(config, plan, read(plan))
        assert (expected.stage, expected.sample, expected.samples) == (plan.stage, plan.sample + plan.samples, plan.samples)


def test_there_is_a_shape_for_every_stage_at_its_peak():
    found = shapes(config_of(training__stages=STAGES, optimizer__warmup_steps=5))
    assert [(plan.stage, plan.samples, plan.rows, plan.seq_len) for plan in found] == [
        (0, 2, 4, 32),
        (1, 4, 4, 64),
        (2, 8, 8, 64),
    ]
    assert {plan.groups["matrix"].lr for plan in found} == {6e-4}
    (only,) = shapes(config_of())
    assert (only.samples, only.rows, only.seq_len) == (4, 4, 64)


@pytest.mark.parametrize("stages", [STAGES, SHARES])
def test_weights_of_later_targets_fall_to_zero_at_the_beginning_of_the_last_stage(stages):
    config = config_of(training__stages=stages, training__later_targets=[0.5], training__max_steps=20)
    last = next(plan.step for plan in (plan_step(config, Position(step)) for step in range(20)) if plan.stage == 2)
    expected = [max(0.0, 1 - step / last) for step in range(20)]
    assert [plan_step(config, Position(step)).later for step in range(20)] == pytest.approx(expected)
    assert [plan.later for plan in shapes(config)] == [1.0, 1.0, 0.0]
    assert plan_step(config_of(training__stages=stages), Position(0)).later == 0.0


@pytest.mark.parametrize("given", [{}, {"training__stages": [{"share": 1.0}]}])
def test_later_targets_need_stages(given):
    with pytest.raises(ConfigError, match=r"training\.later_targets needs at least two training\.stages"):
        config_of(training__later_targets=[0.5], **given)
