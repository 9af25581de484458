"""The trials of a sweep, one after the other, each in a process of its own that ends as `ingot train` would have.

On Linux the processes are forks of one that has loaded the framework and computed nothing: a trial begins without its seconds of
imports, and neither a crash nor anything left on the device reaches the next. Compiled kernels come from the framework's cache on
the disk. A trial whose sweep is gone saves and stops, and the same sweep goes on with it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from ingot.backends.open import fork_can_use, modules
from ingot.config.loading import ResolvedConfig
from ingot.errors import IngotError
from ingot.experiments.arms import Trial
from ingot.runtime.files import writing_output
from ingot.train.finished import completed

LOOK_SECONDS = 1.0  # between two looks at a trial, for whoever draws it
PRELOADED = ("ingot.experiments.running", "ingot.plan.validate", "ingot.train.start")
OUTPUT = "output-{}.txt"  # beside a run folder, with what its process printed; seed-* is runs alone

Tell = Callable[[Trial, str | None], None]  # a trial is over; why it failed, None: it did not


def run_trials(trials: Sequence[Trial], tick: Callable[[Trial], None], tell: Tell) -> dict[Path, str]:
    """Run what is not complete yet; gives the errors of those that failed, by their folders. `tick` is called every second."""
    errors = {}
    for trial in trials:
        if completed(trial.config, kept=False) is not None:  # its score is all that is asked for
            continue
        tick(trial)
        error = train_apart(trial, tick)
        if error is not None:
            errors[trial.folder] = error
        tell(trial, error)
    return errors


def train_apart(trial: Trial, tick: Callable[[Trial], None] = lambda trial: None) -> str | None:
    """Train in another process; why it failed, or None."""
    context = _processes(trial.config.training.device)
    receive, send = context.Pipe(duplex=False)
    output = trial.folder.with_name(OUTPUT.format(trial.folder.name))
    with writing_output(output.parent):
        output.parent.mkdir(parents=True, exist_ok=True)
    earlier = output.stat().st_size if output.exists() else 0
    process = context.Process(target=_train, args=(trial.resolved, output, send), name=str(trial.folder))
    process.start()
    send.close()
    try:
        while process.is_alive():
            wait([process.sentinel], timeout=LOOK_SECONDS)
            tick(trial)
    except BaseException:
        process.terminate()  # it saves and stops
        process.join()
        raise
    process.join()
    try:
        return str(error) if (error := receive.recv()) is not None else None
    except EOFError:  # it had no time to say why
        why = _last_line(output, earlier) if process.exitcode > 0 else ""  # below: by a signal, whatever it printed before
        return f"its process ended with exit code {process.exitcode}{why and f': {why}'}; {output} has what it printed"


@cache
def _processes(device: str) -> Any:
    """How trials begin: as forks of a process that has loaded the framework, unless what it loaded keeps them off the device."""
    if sys.platform == "linux":
        forks = multiprocessing.get_context("forkserver")
        forks.set_forkserver_preload([*PRELOADED, *modules(device)])
        first = forks.Process(target=_ask, args=(device,))
        with suppress(OSError, EOFError):  # what it loads ended it
            first.start()
            first.join()
        if first.exitcode == 0:
            return forks
    return multiprocessing.get_context("spawn")


def _ask(device: str) -> None:
    sys.exit(not fork_can_use(device))


def _train(resolved: ResolvedConfig, output: Path, send: Connection) -> None:
    """What the process of a trial does."""
    _print_into(output)
    _stop_with_parent()
    from ingot.plan.validate import check_before_training
    from ingot.runs.report import LineReporter
    from ingot.train.start import run

    try:
        dataset = check_before_training(resolved.config, 1, lambda line: print(line, flush=True))
        run(resolved, LineReporter(lambda line: print(line, flush=True)), dataset=dataset)
        _answer(send, None)
    except IngotError as error:
        _answer(send, str(error))
        sys.exit(error.exit_code)


def _answer(send: Connection, error: str | None) -> None:
    with suppress(OSError):  # the sweep is gone
        send.send(error)


def _last_line(path: Path, begin: int) -> str:
    """The last thing a process printed, which is why it ended where Python ended it; what lies before `begin` is another's."""
    text = path.read_bytes()[begin:].decode(errors="replace") if path.exists() else ""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def _print_into(path: Path) -> None:
    """Let everything this process and its children print go into a file."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def _stop_with_parent() -> None:
    """Save and stop when the sweep is gone, by whatever signal."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="sweep", daemon=True).start()
