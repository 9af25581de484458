"""The loop with a device that does nothing but let time pass, so that every clock and every stop is exact."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.backends.base import StepPlan, StepResult
from ingot.config.loading import load_config
from ingot.data.loading.data_path import open_dataset
from ingot.data.loading.rows import make_rows
from ingot.errors import NotFinite, RunError
from ingot.optim.schedules import learning_rate_scale
from ingot.runs.reporter import Reporter, StepReport
from ingot.runtime.ranks import Ranks
from ingot.runtime.tensors import TensorRecord
from ingot.train.resume import Progress
from ingot.train.stop import Clock, Shutdown
from ingot.train.trainer import Trainer

PEAK = 0.5  # of the learning rate


@dataclass
class Time:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Meeting:
    """Where ranks that are threads exchange numbers; a rank that stays away breaks it."""

    ranks: int

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.ranks)
        self.said: dict[int, Sequence[float]] = {}

    def maximum(self, rank: int, values: Sequence[float]) -> list[float]:
        self.said[rank] = values
        self.barrier.wait(timeout=300)
        answer = [max(column) for column in zip(*self.said.values(), strict=True)]
        self.barrier.wait(timeout=300)
        return answer


@dataclass
class Device:
    """A backend whose steps take the seconds it is told, over and over, and whose losses are given."""

    time: Time
    seconds: Sequence[float] = (1.0,)
    losses: Sequence[float] = (3.0,)
    ranks: Ranks = field(default_factory=Ranks)
    meeting: Meeting | None = None
    scales: list[float] = field(default_factory=list)
    uses_loss_scaling: bool = False
    writers: int = 1
    precision: str = "fp32"

    def host_buffer(self, shape: tuple[int, int, int]) -> Any:
        return np.empty(shape, np.int32)

    def step(self, batch: Any, targets: int, plan: StepPlan) -> Any:
        self.time.now += self.seconds[len(self.scales) % len(self.seconds)]
        loss = self.losses[len(self.scales) % len(self.losses)]
        self.scales.append(plan.groups["matrix"].lr / PEAK)
        result = StepResult(loss, 0.5, skipped=not math.isfinite(loss))
        return type("Done", (), {"result": lambda self: result})()

    def maximum(self, values: Sequence[float]) -> list[float]:
        return self.meeting.maximum(self.ranks.rank, values) if self.meeting else list(values)

    def snapshot(self) -> Callable[[], dict[str, list[TensorRecord]]]:
        return lambda: {"model": [], "optimizer": []}

    def tuned(self) -> dict[str, Any]:
        return {}

    def flops_per_token(self, seq_len: int) -> float:
        return 1.0

    def wait(self) -> None:
        return None


@dataclass
class Queue(Device):
    """A device that is handed steps and works them off by itself, as a GPU does; each takes the host a moment to hand over."""

    handing_over: float = 0.05
    busy_until: float = 0.0

    def step(self, batch: Any, targets: int, plan: StepPlan) -> Any:
        seconds = self.seconds[len(self.scales) % len(self.seconds)]
        self.scales.append(plan.groups["matrix"].lr / PEAK)
        self.time.now += self.handing_over
        self.busy_until = end = max(self.busy_until, self.time.now) + seconds

        def result(_: Any) -> StepResult:
            self.time.now = max(self.time.now, end)
            return StepResult(3.0, 0.5, skipped=False)

        return type("Pending", (), {"result": result})()

    def wait(self) -> None:
        self.time.now = max(self.time.now, self.busy_until)


@dataclass
class Notes(Reporter):
    steps: list[StepReport] = field(default_factory=list)
    stop_at: int | None = None

    def step(self, report: StepReport, log: bool) -> None:
        self.steps.append(report)
        if report.step == self.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)


def make(data, device: Device, progress: Progress | None = None, reporter: Reporter | None = None, **given: Any) -> Trainer:
    values = {"data.path": str(data), "data.seq_len": 16, "training.tokens_per_step": 64, "optimizer.schedule": "budget"}
    values |= {"optimizer.learning_rate": PEAK, "optimizer.floor": 0.0, "training.save_seconds": 1e9, "training.save_every": 0}
    values |= {name.replace("__", "."): value for name, value in given.items()}
    config = load_config(python=values, environment={}).config
    dataset = open_dataset(config.data.path)
    rows = make_rows(config.data, config.rows_per_step, dataset)
    progress = progress or Progress()
    clock = Clock(progress.elapsed_seconds, device.time)
    return Trainer(config, dataset, rows, device, progress, reporter or Reporter(), None, clock)


def test_a_run_takes_exactly_its_steps(data):
    device = Device(Time())
    trainer = make(data, device, training__max_steps=7)
    assert trainer.run(Shutdown()) == "completed"
    p = trainer.progress
    assert (len(device.scales), p.step, p.sample, p.tokens, p.elapsed_seconds) == (7, 7, 28, 7 * 64, 7.0)


def test_a_budget_is_used_up_to_its_last_whole_step(data):
    trainer = make(data, Device(Time(), [3.0]), budget__seconds=10.0)
    assert trainer.run(Shutdown()) == "completed"
    assert (trainer.progress.step, trainer.progress.elapsed_seconds) == (3, 9.0)


def test_a_budget_that_may_be_overshot_takes_the_step_in_which_it_ends(data):
    trainer = make(data, Device(Time(), [3.0]), budget__seconds=10.0, budget__overshoot=True)
    assert trainer.run(Shutdown()) == "completed"
    assert (trainer.progress.step, trainer.progress.elapsed_seconds) == (4, 12.0)


def test_one_step_that_was_held_up_does_not_end_a_run_before_its_budget(data):
    trainer = make(data, Device(Time(), [*[1.0] * 10, 30.0, *[1.0] * 100]), budget__seconds=60.0)
    assert trainer.run(Shutdown()) == "completed"
    assert trainer.progress.elapsed_seconds == 60.0


@settings(max_examples=40, deadline=None)
@given(seconds=st.lists(st.floats(0.8, 1.2), min_size=2, max_size=5), budget=st.floats(20, 60))
def test_a_budget_is_not_overrun_where_steps_are_uneven(data, seconds, budget):
    """The same few durations over and over: the longest has been seen before it matters."""
    trainer = make(data, Device(Time(), seconds), budget__seconds=budget)
    trainer.run(Shutdown())
    assert trainer.progress.elapsed_seconds <= budget


@settings(max_examples=40, deadline=None)
@given(seconds=st.lists(st.floats(0.8, 1.2), min_size=2, max_size=5), budget=st.floats(20, 60))
def test_a_budget_is_not_overrun_by_what_a_device_has_still_to_do(data, seconds, budget):
    notes, device = Notes(), Queue(Time(), seconds)
    trainer = make(data, device, reporter=notes, budget__seconds=budget)
    trainer.outputs = _Desk()
    trainer.run(Shutdown())
    # A step that finds the device idle takes as much longer as it takes to hand it over, which was hidden before.
    assert budget - 2 * max(seconds) <= trainer.progress.elapsed_seconds <= budget + device.handing_over
    times = [report.elapsed_seconds for report in notes.steps]
    assert times == sorted(times) and len(times) == trainer.progress.step


@pytest.mark.parametrize("budget", [25.3, 28.7, 30.9, 33.2])
def test_evaluations_cost_a_queueing_device_no_step_of_the_budget(data, budget):
    steps = []
    for every in (0, 10):
        device = Queue(Time(), [1.0])
        trainer = make(data, device, budget__seconds=budget, evaluation__every=every)
        trainer.evaluation.evaluate = lambda: False  # type: ignore[method-assign]
        trainer.run(Shutdown())
        steps.append(trainer.progress.step)
    assert steps[0] == steps[1] == math.floor(budget - device.handing_over)


@pytest.mark.parametrize(("held_up", "last"), [(0.0, 8.0), (9.0, 17.0)])
def test_a_report_tells_when_its_step_ended_not_when_it_was_asked(data, held_up, last):
    class Late(Device):
        """Steps end as they are taken; their results are asked for later, and the host is held up after the second's."""

        def step(self, *given: Any) -> Any:
            found = replace(super().step(*given).result(), ended=self.time.now)
            wait = held_up if len(self.scales) == 2 else 0.0

            def result(_: Any) -> StepResult:
                self.time.now += wait
                return found

            return type("Done", (), {"result": result})()

    notes = Notes()
    trainer = make(data, Late(Time(), [2.0]), reporter=notes, training__max_steps=4)
    trainer.outputs = _Desk()
    trainer.run(Shutdown())
    assert [report.elapsed_seconds for report in notes.steps] == [2.0, 4.0, 6.0, last]


def test_a_finished_budget_is_not_opened_again(data):
    first = make(data, Device(Time(), [3.0]), budget__seconds=10.0)
    first.run(Shutdown())
    again = make(data, Device(Time(), [3.0]), progress=Progress(**vars(first.progress)), budget__seconds=10.0)
    assert again.run(Shutdown()) == "completed"
    assert (again.progress.step, again.progress.elapsed_seconds) == (3, 9.0)


def test_the_seconds_of_earlier_sessions_count_and_the_learning_rate_goes_on_where_it_was(data):
    unbroken = Device(Time(), [1.0])
    make(data, unbroken, budget__seconds=20.0).run(Shutdown())
    first, second = Device(Time(), [1.0]), Device(Time(500.0), [1.0])
    stopped = make(data, first, reporter=Notes(stop_at=12), budget__seconds=20.0)
    stopped.outputs = _Desk()
    with Shutdown() as shutdown:
        assert stopped.run(shutdown) == "stopped"
    make(data, second, progress=Progress(**vars(stopped.progress)), budget__seconds=20.0).run(Shutdown())
    assert len(first.scales) == 13
    assert first.scales + second.scales == unbroken.scales
    assert unbroken.scales[-1] < 0.2


def test_the_learning_rate_follows_the_first_ranks_clock_alone(data):
    meeting = Meeting(2)
    devices = [Device(Time(), [seconds], ranks=Ranks(rank, 2), meeting=meeting) for rank, seconds in enumerate([1.0, 5.0])]
    trainers = [make(data, device, budget__seconds=10.5) for device in devices]
    threads = [threading.Thread(target=trainer.run, args=(Shutdown(),)) for trainer in trainers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert devices[0].scales == devices[1].scales
    assert len(devices[0].scales) == 10
    expected = [learning_rate_scale(trainers[0].config, i, float(i)) for i in range(10)]
    assert devices[0].scales == pytest.approx(expected)


@dataclass
class Stages(Device):
    """Notes the stage and the batch of every step."""

    read: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)

    def step(self, batch: Any, targets: int, plan: StepPlan) -> Any:
        self.read.append((plan.stage, batch.shape))
        return super().step(batch, targets, plan)


BY_SHARE = {
    "training__stages": [{"share": 0.5, "seq_len": 8}, {"share": 0.5, "tokens_per_step": 128}],
    "optimizer__schedule": "constant",
}


def test_stages_by_share_follow_the_clock_and_save_their_starts(data):
    device = Stages(Time(), [1.0])
    trainer = make(data, device, budget__seconds=10.0, **BY_SHARE)
    trainer.run(Shutdown())
    assert device.read == [(0, (8, 2, 8))] * 5 + [(1, (8, 2, 16))] * 5
    assert (trainer.progress.starts, trainer.progress.sample) == ([0, 5], 5 * 4 + 5 * 8)


def test_a_stage_that_has_begun_goes_on_with_a_larger_budget(data):
    first = make(data, Stages(Time(), [1.0]), budget__seconds=10.0, **BY_SHARE)
    first.run(Shutdown())
    device = Stages(Time(), [1.0])
    saved = json.loads(json.dumps(asdict(first.progress)))
    again = make(data, device, Progress(**saved), budget__seconds=30.0, training__max_steps=13, **BY_SHARE)
    again.run(Shutdown())
    assert device.read == [(1, (8, 2, 16))] * 3
    assert again.progress.starts == [0, 5]


def test_ranks_change_stages_together_by_the_first_ranks_clock(data):
    meeting = Meeting(2)
    devices = [Stages(Time(), [seconds], ranks=Ranks(rank, 2), meeting=meeting) for rank, seconds in enumerate([1.0, 5.0])]
    trainers = [make(data, device, budget__seconds=10.0, **BY_SHARE) for device in devices]
    threads = [threading.Thread(target=trainer.run, args=(Shutdown(),)) for trainer in trainers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert devices[0].read == devices[1].read == [(0, (4, 2, 8))] * 5 + [(1, (4, 2, 16))] * 5


def test_a_signal_to_any_rank_stops_all_at_the_same_step(data):
    meeting = Meeting(2)
    devices = [Device(Time(), ranks=Ranks(rank, 2), meeting=meeting) for rank in range(2)]
    trainers = [make(data, device, training__max_steps=50) for device in devices]
    wishes = [Shutdown(), Shutdown()]
    wishes[1].reason = signal.SIGTERM
    found: dict[int, str] = {}
    threads = [
        threading.Thread(target=lambda rank=rank: found.__setitem__(rank, trainers[rank].run(wishes[rank]))) for rank in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: "stopped", 1: "stopped"}
    assert [trainer.progress.step for trainer in trainers] == [0, 0]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_end_together_when_the_epochs_are_over(data, world_size):
    meeting = Meeting(world_size)
    devices = [Stages(Time(), ranks=Ranks(rank, world_size), meeting=meeting) for rank in range(world_size)]
    trainers = [make(data, device, training__max_steps=500, data__epochs=1) for device in devices]
    found: dict[int, str] = {}
    threads = [
        threading.Thread(target=lambda rank=rank: found.__setitem__(rank, trainers[rank].run(Shutdown())))
        for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    windows = (trainers[0].dataset.split("train").tokens - 1) // 16
    assert set(found.values()) == {"completed"} and {trainer.end_reason for trainer in trainers} == {"data"}
    assert {(trainer.progress.step, trainer.progress.sample) for trainer in trainers} == {(-(-windows // 4), windows)}
    assert {trainer.progress.tokens for trainer in trainers} == {16 * windows}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_ends_the_run_and_names_the_step(data, bad):
    device = Device(Time(), losses=[3.0, 3.0, bad, 3.0])
    trainer = make(data, device, training__max_steps=10)
    with pytest.raises(RunError, match=r"the loss is not finite at step 3 .*lower the learning rate"):
        trainer.run(Shutdown())
    assert trainer.progress.loss == 3.0


def test_what_every_rank_finds_not_finite_is_said_by_the_first(data):
    meeting, found = Meeting(2), {}

    def run(rank: int) -> None:
        trainer = make(data, Device(Time(), losses=[3.0, math.nan], ranks=Ranks(rank, 2), meeting=meeting), training__max_steps=9)
        with pytest.raises(RunError) as error:
            trainer.run(Shutdown())
        found[rank] = type(error.value)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: NotFinite, 1: NotFinite}  # which only the first rank prints


@pytest.mark.parametrize(("in_a_row", "ends"), [(100, False), (101, True)])
def test_a_loss_scale_that_is_not_found_in_a_hundred_steps_ends_the_run(data, in_a_row, ends):
    device = Device(Time(), uses_loss_scaling=True)
    trainer, taken = make(data, device, training__max_steps=300), []

    def step(*given: Any) -> Any:
        taken.append(given)
        skipped = len(taken) % (in_a_row + 1) != 0  # a good one comes after so many
        return type("Done", (), {"result": lambda self: StepResult(3.0, math.inf if skipped else 0.5, skipped)})()

    device.step = step  # type: ignore[method-assign]
    if ends:
        with pytest.raises(RunError, match="the gradient is not finite at step 101 "):
            trainer.run(Shutdown())
    else:
        assert trainer.run(Shutdown()) == "completed"


def test_steps_skipped_to_find_a_loss_scale_are_no_failure(data):
    device = Device(Time(), uses_loss_scaling=True)
    device.losses = [3.0]
    trainer = make(data, device, training__max_steps=5)
    skipped = StepResult(3.0, math.inf, skipped=True)
    device.step = lambda *arguments: type("Done", (), {"result": lambda self: skipped})()  # type: ignore[method-assign]
    assert trainer.run(Shutdown()) == "completed"


def test_copying_the_state_takes_nothing_from_the_budget(data):
    time = Time()

    class Slow(Device):
        def snapshot(self) -> Any:
            time.now += 100
            return super().snapshot()

    trainer = make(data, Slow(time, [1.0]), budget__seconds=6.5, training__save_every=2)
    trainer.run(Shutdown())
    assert (trainer.progress.step, trainer.progress.elapsed_seconds, time.now) == (6, 6.0, 306.0)


def test_saves_by_the_clock_are_so_far_apart_and_count_from_where_a_run_goes_on(data):
    def saved(spent: float) -> list[float]:
        progress = Progress(elapsed_seconds=spent)
        trainer, found = make(data, Device(Time()), progress, training__max_steps=13, training__save_seconds=4.0), []
        trainer.save = lambda *kind, **how: found.append(trainer.clock.elapsed)  # type: ignore[method-assign]
        trainer.run(Shutdown())
        return found

    assert saved(0.0) == [5.0, 9.0, 13.0]  # at the time with which a step began, and the end
    assert saved(100.0) == [105.0, 109.0, 113.0]


def test_a_run_that_is_already_further_than_max_steps_takes_no_step(data):
    device = Device(Time())
    trainer = make(data, device, progress=Progress(step=12, sample=48, tokens=768), training__max_steps=8)
    device.step = None  # type: ignore[method-assign, assignment]
    assert trainer.run(Shutdown()) == "completed"
    assert trainer.progress.step == 12


class _Desk:
    """A desk that forgets everything."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *args: Any, **known: Any) -> None:
        return None

    error = None
