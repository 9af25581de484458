"""A signal that comes before a run listens ends a program that is alone at once, and is remembered by a rank."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import ingot

PROGRAM = """
import os, signal, sys
from ingot.console.entry import explained, stop_exit_code
from ingot.runtime.signals import heard_early, listening_early

number = getattr(signal, sys.argv[1])
with explained("toy", stopped=stop_exit_code(sys.argv)) as outcome, listening_early():
    os.kill(os.getpid(), number)
    from ingot.train.stop import Shutdown
    with Shutdown() as shutdown:
        print("asked", shutdown.requested, "again", heard_early(), flush=True)
    if "RANK" in os.environ:
        os.kill(os.getpid(), number)  # schedulers repeat them
    print("goes on", flush=True)
sys.exit(outcome.code)
"""


def run(*words: str, before=None, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": str(Path(ingot.__file__).parents[1]), **environment}
    command = [sys.executable, "-c", PROGRAM, *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, preexec_fn=before)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGUSR2"])
@pytest.mark.parametrize(("words", "code"), [((), 0), (("--stop-exit-code", "75"), 75), (("--stop-exit-code=9",), 9)])
def test_a_program_that_is_alone_ends_at_once_with_the_code_of_a_stop(name, words, code) -> None:
    done = run(name, *words)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr == f"toy: stopped by {name} before training began\n"


def test_a_rank_remembers_the_signal_until_its_run_listens() -> None:
    done = run("SIGTERM", RANK="1", WORLD_SIZE="2")
    assert (done.returncode, done.stdout) == (0, "asked True again 0\ngoes on\n")


def test_a_signal_that_was_held_back_while_the_program_started_is_heard() -> None:
    def block_and_send() -> None:
        import os
        import signal

        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        os.kill(os.getpid(), signal.SIGTERM)

    done = run("SIGTERM", "--stop-exit-code", "75", before=block_and_send)
    assert (done.returncode, done.stderr) == (75, "toy: stopped by SIGTERM before training began\n")


def test_what_the_caller_ignores_stays_ignored() -> None:
    def ignore() -> None:
        import signal

        signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    done = run("SIGUSR1", before=ignore)
    assert (done.returncode, done.stdout) == (0, "asked False again 0\ngoes on\n")
