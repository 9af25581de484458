"""Python programs that are forks of one process which has loaded all of Ingot: a start takes 0.1 s instead of three seconds.

A program has words, variables, a folder, streams, a session and an exit code of its own, and ends as every Python does. What it
shares with the others is what was imported, so a test of the start itself takes a process of its own. The process that forks
has computed nothing and has no threads that a child would miss.
"""

from __future__ import annotations

import atexit
import gc
import json
import math
import os
import random
import resource
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any


class Forked:
    """A program that was forked, with as much of subprocess.Popen as tests use."""

    def __init__(self, forks: Forks, pid: int) -> None:
        self._forks, self.pid = forks, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._forks.ask(ended=self.pid)
        return self.returncode

    def wait(self, timeout: float = math.inf) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forks:
    """The process that forks."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        command = [sys.executable, "-P", __file__]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(environment), start_new_session=True
        )

    def start(
        self,
        words: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        streams: Sequence[str | Path],
        largest_file: int | None = None,
    ) -> Forked:
        """`python` with these words, and three files, or a terminal three times, as stdin, stdout and stderr."""
        place = {"folder": str(folder), "environment": dict(environment), "streams": [str(path) for path in streams]}
        return Forked(self, self.ask(words=list(words), largest_file=largest_file, **place))

    def ask(self, **asked: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@cache
def forks(python_path: str) -> Forks:
    """The one of this test process."""
    made = Forks({**os.environ, "PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"})
    atexit.register(made.close)
    return made


def rank_variables(count: int) -> list[dict[str, str]]:
    """What torchrun tells each of so many ranks on one machine."""
    world = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
    world["MASTER_PORT"] = str(random.randrange(20_000, 32_000))  # below those that the system gives to connections of others
    return [{**world, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def limit_files(largest: int) -> None:
    """Let no file of this process grow beyond so many bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))


def serve() -> None:
    """Answer each line of stdin with a line on stdout: a program's process, or the exit code of one that has ended."""
    load()
    gc.freeze()
    for line in sys.stdin:
        asked = json.loads(line)
        answer = ended(asked["ended"]) if "ended" in asked else start(**asked)
        print(json.dumps(answer), flush=True)


def load() -> None:
    """Import what a training run does; torch imports its _dynamo, two seconds long, at the first step of an optimizer."""
    import torch._dynamo  # noqa: F401
    import yaml  # noqa: F401

    import ingot.api
    import ingot.backends.torch.backend
    import ingot.cli.main
    import ingot.compat.gpt_simple.main
    import ingot.compat.nanogpt.train
    import ingot.preflight.validate
    import ingot.train.start  # noqa: F401


def ended(pid: int) -> int | None:
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def start(words: list[str], **place: Any) -> int:
    """The process of a program that has its session and its streams; the program itself does not come back from here."""
    ready, tell = os.pipe()
    if pid := os.fork():
        os.close(tell)
        os.read(ready, 1)
        os.close(ready)
        return pid
    os.close(ready)
    become(**place)
    os.close(tell)
    run(*words)
    sys.exit()


def become(folder: str, environment: dict[str, str], streams: list[str], largest_file: int | None) -> None:
    """Be a process of its own, in a child that has just been forked."""
    os.setsid()
    for number, path in enumerate(streams):  # a terminal that is opened now is the one of this session
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115 (until it ends)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if largest_file is not None:
        limit_files(largest_file)


def run(first: str, *words: str) -> None:
    """What `python` does with these words: -m MODULE, -c PROGRAM or the path of a script."""
    if first == "-m":
        sys.argv = list(words)
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv, sys.modules["__main__"] = ["-c", *words[1:]], ModuleType("__main__")
        exec(words[0], sys.modules["__main__"].__dict__)
    else:
        sys.argv = [first, *words]
        sys.path.insert(0, str(Path(first).absolute().parent))
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    serve()
