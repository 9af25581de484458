"""What the whole-program tests share: programs that never outlive their test, a small dataset, and one run left in peace."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ingot as package

# The demo recipe on a small text, with every step in the record and every checkpoint kept. Forty steps take about a second.
DEMO = {
    "budget.seconds": "null", "training.max_steps": 40, "training.tokens_per_step": 256, "training.save_every": 4,
    "training.keep_every": 4, "training.device": "cpu", "data.seq_len": 32, "evaluation.stride": 32, "evaluation.every": 0,
    "evaluation.sample_tokens": 0, "tracking.log_every": 1,
}  # fmt: skip
PATIENCE = 150  # seconds until a program is taken for hung; far more than any needs


class Program:
    """A running `ingot`, in a process group of its own; what it says on stderr can be waited for."""

    def __init__(self, command: list[str], folder: Path, environment: dict[str, str], before: Callable[[], None] | None) -> None:
        self._out, self._err = folder / "stdout", folder / "stderr"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=environment,
                cwd=folder,
                start_new_session=True,
                preexec_fn=before,
            )

    @property
    def stdout(self) -> str:
        return self._out.read_text()

    @property
    def stderr(self) -> str:
        return self._err.read_text()

    def said(self, words: str) -> None:
        """Return when these words stand on stderr."""
        deadline = time.monotonic() + PATIENCE
        while words not in self.stderr:
            assert self.process.poll() is None, f"it ended before it said {words!r}:\n{self.stderr}"
            assert time.monotonic() < deadline, f"it never said {words!r}:\n{self.stderr}"
            time.sleep(0.005)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> int:
        """The exit code, after the end."""
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"it hung:\n{self.stderr}") from None

    def kill(self) -> None:
        """kill -9, together with whatever it started in its group."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Ingot:
    """Starts `ingot` and other programs; all of them end with the test."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self._folder, self._started = folder, []
        source = str(Path(package.__file__).parents[1])
        self.environment = {**os.environ, "PYTHONPATH": source, "INGOT_CACHE": str(cache), "OMP_NUM_THREADS": "1"}

    def start(self, *words: object, command: list[str] | None = None, before: Callable[[], None] | None = None) -> Program:
        folder = self._folder / f"program-{len(self._started)}"
        folder.mkdir(parents=True)
        command = [sys.executable, "-m", "ingot"] if command is None else command
        program = Program([*command, *map(str, words)], folder, self.environment, before)
        self._started.append(program)
        return program

    def __call__(self, *words: object, code: int = 0, **how: Any) -> Program:
        """Run to the end and insist on the exit code."""
        program = self.start(*words, **how)
        assert program.end() == code, f"exit code {program.process.returncode} instead of {code}:\n{program.stderr}"
        return program

    def close(self) -> None:
        for program in self._started:
            program.kill()


def train_words(data: Path, output: Path, **settings: object) -> list[str]:
    """The words of `ingot train` for the small demo; settings by their dotted names with the dots as `__`."""
    given = {name.replace("__", "."): value for name, value in settings.items()}
    values = {**DEMO, "data.path": data, "training.output_dir": output, **given}
    return ["train", "--recipe", "demo", *(f"--{name}={value}" for name, value in values.items())]


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


def once(folder: Path, make: Callable[[], None]) -> Path:
    """Make something that tests only read, by whichever worker comes first."""
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = folder.with_name(f"{folder.name}.done")
        if not done.exists():
            make()
            done.touch()
    return folder


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
    """The small demo trained by one process that nothing happened to; its stdout lies beside it."""

    def make() -> None:
        programs = Ingot(shared / "train", shared / "cache")
        program = programs(*train_words(data, shared / "reference"), "--json")
        (shared / "reference.json").write_text(program.stdout)

    return once(shared / "reference", make)


def checkpoints(run: Path) -> dict[int, Path]:
    found = sorted(path for path in (run / "checkpoints").glob("step-*") if path.name[5:].isdigit())
    return {int(path.name[5:]): path for path in found}


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


def outcome(run: Path) -> dict[str, str]:
    """Checksums of what a finished run computed: last checkpoint and artifact (whose metadata names the folder)."""
    step, last = max(checkpoints(run).items())
    artifact = (run / "artifact" / "model.safetensors").read_bytes()
    found = {name: (last / f"{name}.safetensors").read_bytes() for name in ("model", "optimizer")}
    found["artifact"] = artifact[8 + int.from_bytes(artifact[:8], "little") :]
    return {"step": str(step), **{name: hashlib.sha256(content).hexdigest() for name, content in found.items()}}


def metrics(run: Path, kind: str = "train") -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def losses(run: Path) -> dict[int, float]:
    """The loss of every step; each stands in the record once."""
    found = metrics(run)
    assert [line["step"] for line in found] == list(range(1, len(found) + 1))
    return {line["step"]: line["loss"] for line in found}


def state(run: Path) -> dict[str, Any]:
    return json.loads((run / "state.json").read_text())


def progress(run: Path) -> dict[str, Any]:
    return json.loads((checkpoints(run)[max(checkpoints(run))] / "checkpoint.json").read_text())["progress"]


def one_line(program: Program) -> str:
    """The one line of stderr that an error is."""
    lines = program.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("ingot: error: ") and program.stdout == "", program.stderr + program.stdout
    return lines[0]
