from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import ingot
from ingot.train.stopping import Shutdown

TWICE = """
import os, signal, sys
from ingot.train.stopping import Shutdown
with Shutdown() as shutdown:
    os.kill(os.getpid(), signal.SIGINT)
    print("still here", shutdown.requested, end="", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    print("not reached")
"""


def twice(**environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(ingot.__file__).parents[1]), **environment}
    return subprocess.run([sys.executable, "-c", TWICE], env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_wish_and_is_answered_with_what_happens(number, capfd):
    with Shutdown() as shutdown:
        assert not shutdown.requested
        os.kill(os.getpid(), number)
        assert shutdown.requested
    assert capfd.readouterr().err == f"{number.name}: saving and stopping; once more to end at once\n"


def test_only_the_first_rank_answers(capfd):
    with Shutdown(announce=False) as shutdown:
        os.kill(os.getpid(), signal.SIGTERM)
        assert shutdown.requested
    assert capfd.readouterr().err == ""


def test_the_second_signal_ends_the_process_at_once_with_130():
    answer = twice()
    assert answer.returncode == 130
    assert answer.stdout.endswith("still here True")
    assert answer.stderr.startswith("SIGINT: saving and stopping")


def test_under_torchrun_an_echo_of_the_first_signal_is_not_a_second_wish():
    answer = twice(TORCHELASTIC_RUN_ID="x")
    assert answer.returncode == 0
    assert "not reached" in answer.stdout


def test_afterwards_signals_mean_what_they_meant_before():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with Shutdown():
        assert signal.getsignal(signal.SIGTERM) != before[signal.SIGTERM]
    assert {number: signal.getsignal(number) for number in before} == before


def test_a_run_in_another_thread_leaves_signals_alone():
    before, seen = signal.getsignal(signal.SIGTERM), []

    def work() -> None:
        with Shutdown() as shutdown:
            seen.append((signal.getsignal(signal.SIGTERM), shutdown.requested))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(before, False)]
