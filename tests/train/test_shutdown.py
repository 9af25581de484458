from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import ingot
from ingot.train.stop import Shutdown

TWICE = """
import os, signal, sys
from ingot.train.stop import Shutdown
with Shutdown() as shutdown:
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    print("still here", shutdown.requested, end="", flush=True)
    os.kill(os.getpid(), getattr(signal, sys.argv[2]))
    print("after the second")
"""


def twice(first: str, second: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(ingot.__file__).parents[1]), **environment}
    command = [sys.executable, "-c", TWICE, first, second]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_the_first_signal_is_a_wish_and_is_answered_with_what_happens(number, capfd):
    with Shutdown() as shutdown:
        assert not shutdown.requested
        os.kill(os.getpid(), number)
        assert shutdown.requested
    end = "send SIGINT again" if number == signal.SIGINT else "send SIGINT"
    assert capfd.readouterr().err == f"{number.name}: saving and stopping; {end} to end at once\n"


def test_a_terminal_that_closes_is_no_reason_to_stop_under_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Shutdown() as shutdown:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not shutdown.requested
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_is_printed_after_the_terminal_was_closed_goes_nowhere():
    code = """
import os, pty, signal, sys
from ingot.train.stop import Shutdown
ours, theirs = pty.openpty()
os.dup2(theirs, 1)
os.dup2(theirs, 2)
with Shutdown() as shutdown:
    os.close(ours)
    os.kill(os.getpid(), signal.SIGHUP)
    print("still to be said", flush=True)
    os._exit(7 if shutdown.requested else 8)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 7


def test_only_the_first_rank_answers(capfd):
    with Shutdown(announce=False) as shutdown:
        os.kill(os.getpid(), signal.SIGTERM)
        assert shutdown.requested
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("first", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_a_sigint_after_any_signal_ends_the_process_at_once_with_130(first):
    answer = twice(first, "SIGINT")
    assert answer.returncode == 130
    assert answer.stdout.endswith("still here True")
    assert answer.stderr.startswith(f"{first}: saving and stopping")


@pytest.mark.parametrize(("first", "second"), [("SIGTERM", "SIGTERM"), ("SIGINT", "SIGTERM"), ("SIGUSR1", "SIGUSR2")])
def test_other_signals_after_the_first_do_not_keep_the_run_from_saving(first, second):
    answer = twice(first, second)
    assert answer.returncode == 0
    assert "after the second" in answer.stdout


def test_under_torchrun_an_echo_of_the_first_signal_is_not_a_second_wish():
    answer = twice("SIGINT", "SIGINT", TORCHELASTIC_RUN_ID="x")
    assert answer.returncode == 0
    assert "after the second" in answer.stdout


def test_afterwards_signals_mean_what_they_meant_before():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
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
