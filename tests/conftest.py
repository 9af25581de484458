"""Fixtures that tests of several packages share: real second processes, and patience."""

from __future__ import annotations

import os
import random
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
from programs import Ingot, checkpoints, once, train_words

# A shell starts background jobs with SIGINT ignored, nohup with SIGHUP, and programs inherit that; tests that send them need
# them as they usually are.
with suppress(ValueError):  # only the main thread may
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# One thread: it needs no measuring, and another number rounds differently.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Timings of a busy machine are not failures. With new examples in each run a change could fail for what was weak before it:
# `make test-long` looks for that.
hypothesis.settings.register_profile("same", deadline=None, max_examples=40, derandomize=True, database=None)
hypothesis.settings.register_profile("search", deadline=None, max_examples=500)
hypothesis.settings.load_profile("same")


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], None]:
    def wait(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 300
        while not condition():
            assert time.monotonic() < deadline, "it never happened"
            time.sleep(0.01)

    return wait


@pytest.fixture
def step_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every training step take 1/8 s by a clock that stands still otherwise, however fast the machine is."""
    from ingot.backends.torch import state as pending
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


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[Any, str, str]]:
    """The command line in this process: its exit code, stdout and stderr."""
    from ingot.cli.main import run

    def words(*given: object) -> tuple[Any, str, str]:
        with pytest.raises(SystemExit) as ended:
            run([str(word) for word in given])
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err

    return words


@pytest.fixture
def ingot(tmp_path: Path, shared: Path) -> Iterator[Ingot]:
    programs = Ingot(tmp_path / "programs", shared / "cache")
    yield programs
    programs.close()


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all workers of a test session."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def data(shared: Path) -> Path:
    """A prepared folder: 45,000 bytes to train on, 5,000 to be judged by."""

    def make() -> None:
        draw = random.Random(0)
        words = ["".join(draw.choices("abcdefghiklmnoprstuvwy", k=draw.randint(2, 8))) for _ in range(200)]
        (shared / "text.txt").write_text("".join(draw.choice(words) + draw.choice("      \n") for _ in range(8500)))
        programs = Ingot(shared / "prepare", shared / "cache")
        programs("data", "prepare", "--input", shared / "text.txt", "--tokenizer", "byte", "--output", shared / "data")

    return once(shared / "data", make)


@pytest.fixture(scope="session")
def reference(shared: Path, data: Path) -> Path:
    """The small demo trained by one process, started as users do, that nothing happened to; its stdout lies beside it."""

    def make() -> None:
        programs = Ingot(shared / "train", shared / "cache")
        program = programs(*train_words(data, shared / "reference"), "--json", fresh=True)
        (shared / "reference.json").write_text(program.stdout)

    return once(shared / "reference", make)


@pytest.fixture
def until(tmp_path: Path) -> Callable[[Path, int], Path]:
    """A copy of a run folder as a kill after the checkpoint of a step left it."""

    def call(run: Path, step: int) -> Path:
        copy = tmp_path / f"{run.name}-until-{step}"
        shutil.copytree(run, copy)
        shutil.rmtree(copy / "artifact")
        for later in [path for saved, path in checkpoints(copy).items() if saved > step]:
            shutil.rmtree(later)
        return copy

    return call
