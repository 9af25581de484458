"""What tests of several rooms share: real second processes, and patience."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest

# A shell starts background jobs with SIGINT ignored, nohup with SIGHUP, and programs inherit that; tests that send them need
# them as they usually are.
with suppress(ValueError):  # only the main thread may
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# One thread: it needs no measuring, and another number rounds differently.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Timings of a busy machine are not failures. With new examples in each run a change could fail for what was weak before it:
# `make test-long` looks for that.
hypothesis.settings.register_profile("same", deadline=None, derandomize=True, database=None)
hypothesis.settings.register_profile("search", deadline=None, max_examples=500)
hypothesis.settings.load_profile("same")


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], None]:
    def wait(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, "it never happened"
            time.sleep(0.01)

    return wait


@pytest.fixture
def step_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every training step take 1/8 s by a clock that stands still otherwise, however fast the machine is."""
    from ingot.backends.torch import pending
    from ingot.backends.torch.backend import TorchBackend
    from ingot.train import trainer

    taken, step, clock = [0], TorchBackend.step, trainer.Clock

    def timed_step(backend: TorchBackend, *given: Any) -> Any:
        taken[0] += 1
        return step(backend, *given)

    def now() -> float:
        return taken[0] / 8

    monkeypatch.setattr(TorchBackend, "step", timed_step)
    monkeypatch.setattr(pending, "time", SimpleNamespace(perf_counter=now))
    monkeypatch.setattr(trainer, "Clock", lambda spent: clock(spent, now))


@pytest.fixture
def alive() -> Callable[[int], bool]:
    """Whether a process is there; one that nobody has waited for is not."""

    def call(pid: int) -> bool:
        found = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
        return bool(found) and not found.startswith("Z")

    return call


@pytest.fixture
def python() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a Python program in a process of its own; it ends with the test."""
    started: list[subprocess.Popen[str]] = []

    def start(program: str, *arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", program, *map(str, arguments)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user reaches and may write to, as pytest's own are not."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def as_nobody() -> Callable[[], AbstractContextManager[None]]:
    """Be a user without rights for a while: root reads and writes whatever the permissions say."""
    with _without_rights():
        sees = all(os.path.isfile(path) for path in (__file__, sys.modules["pytest"].__file__ or ""))  # noqa: PTH113 (never raises)
    if not sees:
        pytest.skip("another user does not see this checkout or its packages, so nothing would work for them")
    return _without_rights


@contextmanager
def _without_rights() -> Iterator[None]:
    if os.geteuid():
        yield
        return
    os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


@pytest.fixture(autouse=True)
def same_arithmetic() -> Iterator[None]:
    """Let every test compute with the same library: torch gives up oneDNN for good where a CPU lacks bf16 products."""
    yield
    if (torch := sys.modules.get("torch")) is not None:
        torch.backends.mkldnn.set_flags(True)
