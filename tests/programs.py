"""Programs that never outlive their test, and how to look at what they left behind."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from forks import Forked, forks, limit_files, rank_variables

import ingot as package
from ingot.cli.main import run
from ingot.runs.state import State, this_process, utc_now

# The demo recipe on a small text, with every step in the record and every checkpoint kept. Forty steps take about a second.
DEMO = {
    "model.family": "gpt2",  # can be exported to every format
    "budget.seconds": "null", "training.max_steps": 40, "training.tokens_per_step": 256, "training.save_every": 4,
    "training.keep_every": 4, "training.device": "cpu", "data.seq_len": 32, "evaluation.stride": 32, "evaluation.every": 0,
    "evaluation.sample_tokens": 0, "tracking.log_every": 1,
    "artifact.quantiser": "none", "artifact.codec": "none", "artifact.score": "false",
}  # fmt: skip
NO_ROOM = 200_000  # bytes of the largest file: enough for metrics and logs, too few for the tensors of a checkpoint
PATIENCE = 300  # seconds until a program is taken for hung; far more than any needs, on a machine with ten other programs too


# A model whose loss is not a number at the sixth step.
POISONED = """
from ingot.model.gpt2 import GPT2

class Model(GPT2):
    def __init__(self, vocab_size, context, layers, heads, width):
        super().__init__(vocab_size, context, layers=layers, heads=heads, width=width)
        self.steps = 0

    def forward(self, tokens, targets=None):
        self.steps += self.training
        return super().forward(tokens, targets) * (float("nan") if self.steps == 6 else 1)
"""


# What a file of the user's that bears the name of a module does when it is imported.
STRAY = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\nraise SystemExit('a file of the user was imported')\n"


def plant_modules(folder: Path) -> None:
    """Put files with the names of modules into a folder; whoever imports one leaves the file `ran` there."""
    for name in ("random", "json", "pickle", "numpy", "torch", "zstandard"):
        (folder / f"{name}.py").write_text(STRAY)


# What lets a process get a signal when it is about to import torch.
AT_TORCH = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Finder())
"""


class Program:
    """A running `ingot`, in a process group of its own; what it says on stderr can be waited for."""

    def __init__(self, process: subprocess.Popen[bytes] | Forked, notes: Path) -> None:
        self.process = process
        self._out, self._err = notes / "stdout", notes / "stderr"

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


class Ranks:
    """The ranks of one run as torchrun starts them: a signal goes to all, and the end of one that failed ends the others."""

    def __init__(self, programs: list[Program]) -> None:
        self._programs = programs
        self.first = programs[0]

    @property
    def stderr(self) -> str:
        return "".join(program.stderr for program in self._programs)

    def signal(self, number: signal.Signals) -> None:
        for program in self._programs:
            program.signal(number)

    def end(self) -> int:
        """The exit code of the first that failed, or 0, after the end of all."""
        running = list(self._programs)
        while running:
            for program in [one for one in running if one.process.poll() is not None]:
                running.remove(program)
                if code := program.process.returncode:
                    for other in running:
                        other.signal(signal.SIGTERM)
                        other.end()
                    return code
            time.sleep(0.005)
        return 0


class Ingot:
    """Starts `ingot` and other programs; all of them end with the test.

    A Python is a fork of one that has loaded everything, unless it shall be fresh.
    """

    python = (sys.executable, "-m", "ingot")

    def __init__(self, folder: Path, cache: Path) -> None:
        self._folder = folder
        self._started: list[Program] = []
        self._source = str(Path(package.__file__).parents[1])
        self.environment = {**os.environ, "PYTHONPATH": self._source, "INGOT_CACHE": str(cache), "OMP_NUM_THREADS": "1"}

    def start(
        self,
        *words: object,
        command: Sequence[str] = python,
        folder: Path | None = None,
        fresh: bool = False,
        largest_file: int | None = None,
        **environment: str,
    ) -> Program:
        notes = self._folder / f"program-{len(self._started)}"
        notes.mkdir(parents=True)
        given, place, streams = [*command, *map(str, words)], folder or notes, (notes / "stdout", notes / "stderr")
        variables = {**self.environment, **environment}
        if command[0] == sys.executable and not fresh and variables["PYTHONPATH"] == self._source:
            ours = forks(self._source).start(given[1:], place, variables, (os.devnull, *streams), largest_file)
            program = Program(ours, notes)
        else:
            before = partial(limit_files, largest_file) if largest_file is not None else None
            program = Program(_start(given, place, variables, streams, before), notes)
        self._started.append(program)
        return program

    def ranks(self, count: int, *words: object, **how: Any) -> Ranks:
        """Start so many ranks, each with the variables that torchrun gives it."""
        return Ranks([self.start(*words, **how, **variables) for variables in rank_variables(count)])

    def __call__(self, *words: object, code: int = 0, **how: Any) -> Program:
        """Run to the end and insist on the exit code."""
        program = self.start(*words, **how)
        assert program.end() == code, f"exit code {program.process.returncode} instead of {code}:\n{program.stderr}"
        return program

    def close(self) -> None:
        for program in self._started:
            program.kill()


def _start(
    command: list[str], folder: Path, environment: dict[str, str], streams: tuple[Path, Path], before: Callable[[], None] | None
) -> subprocess.Popen[bytes]:
    """A process of its own."""
    with streams[0].open("wb") as out, streams[1].open("wb") as err:
        where: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err, "env": environment, "cwd": folder}
        return subprocess.Popen(command, start_new_session=True, preexec_fn=before, **where)


def plant(ingot: Ingot, folder: Path, code: str) -> Ingot:
    """Let every Python of these programs, which is then a fresh one, run some code before anything else."""
    (folder / "sitecustomize.py").write_text(code)
    ingot.environment["PYTHONPATH"] = os.pathsep.join([str(folder), ingot.environment["PYTHONPATH"]])
    return ingot


def train_words(data: Path, output: Path, **settings: object) -> list[str]:
    """The words of `ingot train` for the small demo; settings by their dotted names with the dots as `__`."""
    given = {name.replace("__", "."): value for name, value in settings.items()}
    values = {**DEMO, "data.path": data, "training.output_dir": output, **given}
    if "model.file" in given:
        del values["model.family"]
    return ["train", "--recipe", "demo", *(f"--{name}={value}" for name, value in values.items())]


def once(folder: Path, make: Callable[[], None]) -> Path:
    """Make something that tests only read, by whichever worker comes first."""
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = folder.with_name(f"{folder.name}.done")
        if not done.exists():
            make()
            done.touch()
    return folder


def checkpoints(run: Path) -> dict[int, Path]:
    found = sorted(path for path in (run / "checkpoints").glob("step-*") if path.name[5:].isdigit())
    return {int(path.name[5:]): path for path in found}


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


def said(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """What `ingot` says in this process: its exit code, stdout and stderr."""
    with pytest.raises(SystemExit) as ended:
        run([str(word) for word in words])
    return (int(ended.value.code or 0), *capsys.readouterr())


def write_state(folder: Path, **known: Any) -> Path:
    """A run folder of which another program would say what is given."""
    folder.mkdir(parents=True, exist_ok=True)
    host, pid, boot_id = this_process()
    told = {"status": "running", "host": host, "pid": pid, "boot_id": boot_id, "started_at": utc_now(), "updated_at": utc_now()}
    (folder / "state.json").write_text(json.dumps(asdict(State(**{**told, **known}))))
    return folder


def write_run(folder: Path, losses: Sequence[float | None], scores: Sequence[float | None] = (), data: str = "data/a") -> Path:
    """A run folder with the numbers of a run that evaluated at its last steps."""
    write_state(folder, status="completed", step=len(losses), val_bpb=scores[-1] if scores else None)
    (folder / "config.yaml").write_text(f"base: demo\ndata:\n  path: {data}\n")
    records: list[dict[str, Any]] = [
        {"kind": "train", "step": step, "loss": loss, "tokens": 100 * step, "elapsed_seconds": step / 2}
        for step, loss in enumerate(losses, 1)
    ]
    for step, score in enumerate(scores, len(losses) - len(scores) + 1):
        best = score is not None and score == min(one for one in scores if one is not None)
        judged = {"step": step, "val_bpb": score, "best": best, "tokens": 7, "elapsed_seconds": step / 2}
        records.append({"kind": "evaluation", **judged})
    records.sort(key=lambda record: record["step"])
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder
