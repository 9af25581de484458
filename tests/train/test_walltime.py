from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_trainer import Device, Meeting, Queue, Time, make
from tiny_runs import Train, records, state_of

from ingot.backends.torch.backend import TorchBackend
from ingot.config.schema import TrainingSection
from ingot.errors import ConfigError
from ingot.runs.folder import Kind
from ingot.runs.reporter import Reporter, StepReport
from ingot.runtime.ranks import Ranks
from ingot.train import stop as walltime
from ingot.train.resume import Progress
from ingot.train.stop import Shutdown, Walltime, find_walltime

AHEAD = str(int(time.time()) + 100_000)


def found(environment: dict[str, str], **settings: Any) -> Walltime | None:
    return find_walltime(TrainingSection(**settings), time.time(), environment)


def test_the_setting_goes_before_slurm_and_slurm_before_the_variables():
    environment = {"GPT_SIMPLE_MAX_RUNTIME": "50", "INGOT_MAX_RUNTIME": "40", "SLURM_JOB_END_TIME": AHEAD}
    sources = []
    for name in ("", "SLURM_JOB_END_TIME", "INGOT_MAX_RUNTIME", "GPT_SIMPLE_MAX_RUNTIME"):
        environment.pop(name, "")
        sources.append(getattr(found(environment), "source", None))
    assert sources == ["SLURM_JOB_END_TIME", "INGOT_MAX_RUNTIME", "GPT_SIMPLE_MAX_RUNTIME", None]
    setting = found({"SLURM_JOB_END_TIME": AHEAD}, max_runtime_seconds=30)
    assert setting is not None and (setting.source, setting.seconds) == ("training.max_runtime_seconds", 30)


def test_seconds_count_from_the_start_of_the_program_and_slurm_gives_a_time():
    training = TrainingSection()
    by_seconds = find_walltime(training, 1000.0, {"INGOT_MAX_RUNTIME": "40"})
    by_slurm = find_walltime(training, 1000.0, {"SLURM_JOB_END_TIME": AHEAD})
    assert by_seconds is not None and by_seconds.ends_at == 1040.0
    assert by_slurm is not None and by_slurm.ends_at == float(AHEAD)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("SLURM_JOB_END_TIME", "soon", "SLURM_JOB_END_TIME=soon in the environment is not a number of unix seconds"),
        ("INGOT_MAX_RUNTIME", "1h", "INGOT_MAX_RUNTIME=1h in the environment is not a number of seconds above 0"),
        ("INGOT_MAX_RUNTIME", "-3", "INGOT_MAX_RUNTIME=-3"),
        ("GPT_SIMPLE_MAX_RUNTIME", "nan", "GPT_SIMPLE_MAX_RUNTIME=nan"),
    ],
)
def test_a_variable_that_is_not_a_time_is_passed_over_with_a_warning(name, value, said):
    told: list[str] = []
    assert find_walltime(TrainingSection(), time.time(), {name: value}, told.append) is None
    assert len(told) == 1 and said in told[0]
    assert find_walltime(TrainingSection(max_runtime_seconds=30), time.time(), {name: value}, told.append) is not None
    assert len(told) == 1  # nobody asks it


def test_a_variable_after_one_that_is_not_a_time_counts():
    after = found({"SLURM_JOB_END_TIME": "soon", "GPT_SIMPLE_MAX_RUNTIME": "50"})
    assert after is not None and after.source == "GPT_SIMPLE_MAX_RUNTIME"


def test_a_job_that_has_ended_is_refused():
    environment = {"SLURM_JOB_END_TIME": "1000"}
    with pytest.raises(ConfigError, match=r"s in the past; correct or unset SLURM_JOB_END_TIME, or set training.max_runtime_s"):
        found(environment)
    assert found(environment, max_runtime_seconds=30) is not None


def test_a_reserve_that_leaves_nothing_of_the_session_is_refused():
    with pytest.raises(ConfigError, match="walltime_reserve_seconds=50 leaves no time for training: INGOT_MAX_RUNTIME"):
        found({"INGOT_MAX_RUNTIME": "40"}, walltime_reserve_seconds=50)


def test_the_reserve_is_the_setting_or_grows_with_the_time_a_save_takes():
    hour, short = Walltime(0.0, 3600.0, ""), Walltime(0.0, 10.0, "")
    assert [hour.reserve_seconds(seconds) for seconds in (0.0, 10.0, 60.0)] == [30.0, 30.0, 120.0]
    assert short.reserve_seconds(0.0) == 1.0  # or no step would be taken
    assert Walltime(0.0, 3600.0, "", reserve=0.0).reserve_seconds(60.0) == 0.0


def test_a_step_that_would_not_leave_the_reserve_is_not_begun():
    shutdown = Shutdown(announce=False)
    shutdown.watch(Path("none"), Walltime(time.time() + 1000, 3600.0, "", reserve=400.0), lambda: 0.0)
    assert shutdown.reason_before(500.0) == 0
    assert shutdown.reason_before(700.0) and shutdown.requested


def test_the_first_ranks_wall_clock_stops_all_at_the_same_step(data):
    meeting = Meeting(2)
    trainers = [make(data, Device(Time(), ranks=Ranks(rank, 2), meeting=meeting), training__max_steps=50) for rank in range(2)]
    wishes = [Shutdown(announce=False), Shutdown(announce=False)]
    wishes[0].watch(Path("none"), Walltime(0.0, 10.0, ""), lambda: 0.0)
    threads = [threading.Thread(target=trainer.run, args=(wish,)) for trainer, wish in zip(trainers, wishes, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [trainer.progress.step for trainer in trainers] == [0, 0]


def wall(monkeypatch, now: Time, ends_at: float) -> Shutdown:
    """What stops a session that ends at a time of the device's clock, ten seconds before that."""
    monkeypatch.setattr(walltime, "time", SimpleNamespace(time=now, monotonic=time.monotonic))
    shutdown = Shutdown(announce=False)
    shutdown.watch(Path("none"), Walltime(ends_at, ends_at, "", reserve=10.0), lambda: 0.0)
    return shutdown


def test_the_longest_of_the_last_steps_would_end_before_the_reserve(data, monkeypatch):
    """Unlike for a budget, which one step that was held up does not cut: after the walltime nothing is saved."""
    trainer = make(data, Device(now := Time(), [*[1.0] * 5, 30.0, *[1.0] * 100]), training__max_steps=1000)
    assert trainer.run(wall(monkeypatch, now, 80.0)) == "stopped"
    assert trainer.progress.elapsed_seconds == 40.0


def test_a_checkpoint_knows_how_long_its_steps_took_so_that_the_next_session_begins_none_that_does_not_fit(data, monkeypatch):
    first, saved = make(data, Device(Time(), [5.0]), training__max_steps=2, training__save_every=1), []
    first.save = lambda *kind, **how: saved.append(json.loads(json.dumps(asdict(first.progress))))  # type: ignore[method-assign]
    first.run(Shutdown(announce=False))
    assert [progress["step"] for progress in saved] == [1, 2]
    for ends_at, steps in ((14.0, 0), (16.0, 1)):
        device = Device(now := Time(), [5.0])
        assert (
            make(data, device, Progress(**saved[0]), training__max_steps=1000).run(wall(monkeypatch, now, ends_at)) == "stopped"
        )
        assert len(device.scales) == steps


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seconds=st.lists(st.floats(8.0, 12.0), min_size=2, max_size=5), ends_at=st.floats(100, 300))
def test_a_walltime_is_not_overrun_by_what_a_device_has_still_to_do(data, monkeypatch, seconds, ends_at):
    device = Queue(now := Time(), seconds)
    trainer = make(data, device, training__max_steps=1000)
    assert trainer.run(wall(monkeypatch, now, ends_at)) == "stopped"
    left = ends_at - 10.0 - max(now.now, device.busy_until)
    assert -device.handing_over <= left <= 2 * max(seconds)


class WallClock:
    """A clock that an hour can pass on at once, so that no test waits for the end of a job or is too slow for it."""

    def __init__(self) -> None:
        self._passed = 0.0

    def time(self) -> float:
        return time.time() + self._passed

    def monotonic(self) -> float:
        return time.monotonic()

    def pass_an_hour(self) -> None:
        self._passed += 3600


class Dawdle(Reporter):
    """Takes its time at a step, until the session's is over."""

    def __init__(self, clock: WallClock):
        self._clock = clock

    def step(self, report: StepReport, log: bool) -> None:
        if report.step == 5:
            self._clock.pass_an_hour()


@pytest.fixture
def clock(monkeypatch) -> WallClock:
    """The clock of a job that ends in an hour."""
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 3600))
    monkeypatch.setattr(walltime, "time", clock := WallClock())
    return clock


def test_a_run_saves_and_stops_at_the_wall_clock_and_goes_on_bitwise(train: Train, tmp_path, unbroken, monkeypatch, clock):
    stopped = train(tmp_path / "run", Dawdle(clock), training__save_every=1000, training__walltime_reserve_seconds=0)
    assert (stopped.status, stopped.stop_reason) == ("stopped", "walltime") and 0 < stopped.total_steps < 20
    told = [json.loads((tmp_path / "run" / name).read_text()) for name in ("state.json", "result.json")]
    assert [(one["status"], one["stop_reason"]) for one in told] == [("stopped", "walltime")] * 2
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "SLURM_JOB_END_TIME ends this session" in log and f"stopped at step {stopped.total_steps} (walltime)" in log
    monkeypatch.delenv("SLURM_JOB_END_TIME")
    assert train(tmp_path / "run").stop_reason is None
    assert json.loads((tmp_path / "run" / "state.json").read_text())["stop_reason"] is None
    assert state_of(tmp_path / "run") == unbroken()


def test_an_evaluation_that_does_not_fit_is_broken_off(train: Train, tmp_path, monkeypatch, clock):
    batches, plain = [], TorchBackend.score

    def score(backend: TorchBackend, batch: Any) -> float:
        batches.append(batch)
        if len(batches) == 3:
            clock.pass_an_hour()
        return plain(backend, batch)

    monkeypatch.setattr(TorchBackend, "score", score)
    settings = {"evaluation__every": 4, "evaluation__micro_batch": 4, "training__walltime_reserve_seconds": 0}
    stopped = train(tmp_path / "run", **settings)
    assert (stopped.status, stopped.stop_reason, stopped.total_steps) == ("stopped", "walltime", 4) and len(batches) == 3
    assert records(tmp_path / "run", "evaluation") == []


class AskAt(Reporter):
    """Leaves the stop file at a step."""

    def __init__(self, folder: Path):
        self._folder = folder

    def step(self, report: StepReport, log: bool) -> None:
        if report.step == 5:
            (self._folder / "stop").touch()


def test_a_stop_file_stops_the_run_and_is_removed_by_it(train: Train, tmp_path):
    stopped = train(tmp_path / "run", AskAt(tmp_path / "run"), training__max_steps=1_000_000, training__save_every=0)
    assert (stopped.status, stopped.stop_reason) == ("stopped", "stop_file") and stopped.checkpoint_path is not None
    assert not (tmp_path / "run" / "stop").exists()


class AskWhileSaving(Reporter):
    """Leaves the stop file when a run that something else stops has saved."""

    def __init__(self, folder: Path):
        self._folder = folder

    def step(self, report: StepReport, log: bool) -> None:
        if report.step == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    def saved(self, path: Path, kind: Kind = "regular") -> None:
        (self._folder / "stop").touch()


def test_a_stop_file_that_comes_while_a_run_stops_is_why_it_stopped(train: Train, tmp_path):
    """Or a job that is begun again after every other reason would go on."""
    stopped = train(tmp_path / "run", AskWhileSaving(tmp_path / "run"), training__max_steps=1_000_000, training__save_every=0)
    assert (stopped.status, stopped.stop_reason) == ("stopped", "stop_file")
    assert not (tmp_path / "run" / "stop").exists()


def test_a_stop_file_of_an_earlier_session_is_removed_and_stops_nothing(train: Train, tmp_path):
    train(tmp_path / "run", training__max_steps=4)
    (tmp_path / "run" / "stop").touch()
    os.utime(tmp_path / "run" / "stop", times=(time.time() - 10,) * 2)
    assert train(tmp_path / "run").status == "completed"
    assert not os.path.lexists(tmp_path / "run" / "stop")
