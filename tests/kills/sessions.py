"""One session of a case: a process per rank, forked from this one, and the kill.

A process that is to die at a moment kills itself there: it counts what the run reports and, by Python's audit events, what it
does with files, so the kill is exactly between two of them.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch._dynamo  # noqa: F401  torch imports it at the first step of an optimizer, which takes two seconds

import ingot.backends.torch.backend  # noqa: F401  torch, once for all children
from ingot.config.loading import ResolvedConfig, load_config
from ingot.errors import PeerLost
from ingot.runs.reporter import Reporter
from ingot.train.start import run

from .cases import Case, Moment

PATIENCE = 600.0  # seconds until a session is taken for hung; one takes less than a second alone
GRACE = 10.0  # what the launcher gives ranks to end after another was lost
FILE_EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.listdir", "os.scandir", "os.truncate", "os.utime"}
LOST = 3  # exit code of a rank that found another one gone


class Hung(Exception):
    """A session did not end."""


class Dies(Reporter):
    """Ends this process when the run has said and done what a moment says."""

    def __init__(self, moment: Moment) -> None:
        self._moment, self._left, self._operations = moment, moment.times, moment.operations
        self._armed = moment.words is None
        sys.addaudithook(self._look)

    def waiting(self, what: str, done: int = 0, total: int = 0) -> None:
        self._hear(what)

    def step(self, report: Any, log: bool) -> None:
        self._hear("step")

    def saved(self, path: Path, kind: Any = "regular") -> None:
        self._hear("saved")

    def _hear(self, words: str) -> None:
        if not self._armed and words == self._moment.words:
            self._left -= 1
            if not self._left:
                self._armed = True
                if not self._operations:
                    self._end()

    def _look(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._armed and event in FILE_EVENTS and str(arguments[0] if arguments else "").startswith("run"):
            self._operations -= 1
            if self._operations == 0:
                self._end()

    def _end(self) -> None:
        os.kill(os.getpid(), self._moment.signal)
        if self._moment.signal == signal.SIGKILL:
            time.sleep(PATIENCE)


def session(case: Case, folder: Path, moment: Moment | None = None) -> bool:
    """Run a session in a folder; whether it was ended by the moment. An end of another kind than that is an AssertionError."""
    port = str(random.randrange(20000, 32000))
    resolved = _resolved(case.name, case.ranks, case.parallel)
    ranks = [_fork(case, resolved, folder, rank, port, moment) for rank in range(case.ranks)]
    if moment is not None and moment.seconds is not None:
        threading.Timer(moment.seconds, _send, (ranks[moment.rank], moment.signal)).start()
    try:
        codes = _wait(ranks, moment)
    except KeyboardInterrupt:
        for rank in ranks:
            _send(rank, signal.SIGKILL)
        raise
    for rank in ranks:
        _nothing_left(rank)
    killed = -signal.SIGKILL in codes.values() or -signal.SIGTERM in codes.values()
    if moment is None or not killed:
        assert set(codes.values()) == {0}, f"ended with {sorted(codes.values())}:\n{(folder / 'printed').read_text()[-3000:]}"
    if moment is not None and moment.signal == signal.SIGTERM and not killed:
        return bool(json.loads((folder / "run" / "result.json").read_text())["status"] == "stopped")
    return killed


@cache
def _resolved(name: str, ranks: int, parallel: str) -> ResolvedConfig:
    return load_config(python=dict(Case(0, name, ranks, parallel).settings), environment={})


def _fork(case: Case, resolved: ResolvedConfig, folder: Path, rank: int, port: str, moment: Moment | None) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setsid()
        os.chdir(folder)
        printed = os.open("printed", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        if case.ranks > 1:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(case.ranks)}
            per_node = case.ranks // 2 if case.parallel == "hsdp" else case.ranks
            os.environ |= {"LOCAL_WORLD_SIZE": str(per_node), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        dies = moment is not None and moment.seconds is None and moment.rank == rank
        reporter = Dies(moment) if dies and moment is not None else None
        run(resolved, reporter)
        code = 0
    except PeerLost:
        code = LOST
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _wait(ranks: list[int], moment: Moment | None) -> dict[int, int]:
    """The exit codes of all ranks by their processes; after the first that failed the others are ended."""
    codes: dict[int, int] = {}
    deadline, ending = time.monotonic() + PATIENCE, False
    while len(codes) < len(ranks):
        for rank in ranks:
            if rank not in codes and (found := os.waitpid(rank, os.WNOHANG))[0]:
                codes[rank] = os.waitstatus_to_exitcode(found[1])
        if not ending and any(codes.values()):
            ending, deadline = True, time.monotonic() + GRACE
            for rank in (rank for rank in ranks if rank not in codes):
                _send(rank, signal.SIGKILL if moment is not None and moment.all_at_once else signal.SIGTERM)
        if time.monotonic() > deadline:
            for rank in (rank for rank in ranks if rank not in codes):
                _send(rank, signal.SIGKILL)
            if not ending:
                raise Hung(f"a session took more than {PATIENCE:.0f} s")
            deadline += PATIENCE
        time.sleep(0.002)
    return codes


def _send(process: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, number)


def _nothing_left(leader: int) -> None:
    """Insist that no process of a session, which had a process group of its own, outlives its leader by more than a moment."""
    deadline = time.monotonic() + 300
    while True:
        with suppress(ProcessLookupError):
            os.killpg(leader, 0)
            states = subprocess.run(["ps", "-o", "stat=", "-g", str(leader)], capture_output=True, text=True).stdout.split()
            if any(not state.startswith("Z") for state in states):
                assert time.monotonic() < deadline, f"processes of a killed session are left: {states}"
                time.sleep(0.02)
                continue
        return
