"""A program that breaks a promise is found out: each of these does, and the first one does not."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from . import promises, running
from .cases import Case
from .commands import Scenario
from .confine import tame
from .promises import broken
from .running import run_case

ROOT = Path(__file__).parents[2]
left: list[subprocess.Popen[bytes] | int] = []  # what a program goes on holding


def fail(code: int, *lines: str) -> int:
    print(*lines, sep="\n", file=sys.stderr)
    return code


def refuse(words: list[str]) -> int:
    return fail(2, "toy: error: there is no such setting; did you mean another?")


def raise_it(words: list[str]) -> int:
    raise RecursionError("too deep")


def use_another_code(words: list[str]) -> int:
    return fail(7, "toy: error: seven")


def say_nothing(words: list[str]) -> int:
    return 3


def say_two(words: list[str]) -> int:
    return fail(3, "toy: error: one", "toy: error: two")


def talk_on(words: list[str]) -> int:
    return fail(3, "toy: error: one", "and more")


def say_too_much(words: list[str]) -> int:
    return fail(3, "toy: error: " + "x" * 5000)


def ring_the_bell(words: list[str]) -> int:
    return fail(3, "toy: error: \x07")


def warn(words: list[str]) -> int:
    warnings.warn("an overflow", RuntimeWarning, stacklevel=1)
    return 0


def never_end(words: list[str]) -> int:
    while True:
        time.sleep(0.01)


def take_memory(words: list[str]) -> int:
    return len(b"x" * (1 << 30)) * 0


def leave_a_temporary(words: list[str]) -> int:
    Path(tempfile.mkdtemp())
    return 0


def leave_half_a_file(words: list[str]) -> int:
    Path(".model.ingot.0123abcd.tmp").touch()
    return 0


def leave_something_after_a_mistake(words: list[str]) -> int:
    Path("logs").mkdir()
    return refuse(words)


def leave_a_process(words: list[str]) -> int:
    left.append(subprocess.Popen(["sleep", "60"]))
    return 0


def leave_a_thread(words: list[str]) -> int:
    threading.Thread(target=time.sleep, args=(3,), daemon=True).start()
    return 0


def leave_a_handler(words: list[str]) -> int:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    return 0


def leave_a_file_open(words: list[str]) -> int:
    left.append(os.open("file.txt", os.O_RDONLY))
    return 0


def write_into_a_file(words: list[str]) -> int:
    Path("file.txt").write_text("ours now")
    return 0


def delete_a_file(words: list[str]) -> int:
    Path("file.txt").unlink()
    return 0


BROKEN = {
    raise_it: "traceback: RecursionError: too deep",
    use_another_code: "exit code 7",
    say_nothing: "exit code 3 without an error",
    say_two: "two errors",
    talk_on: "a line after the error: and more",
    say_too_much: "an error too long to read",
    ring_the_bell: "an error with control characters",
    warn: "warning of Python's: test_promises.py",
    never_end: "hang: ",
    take_memory: "memory: above 2 GB",
    leave_a_temporary: "left over: temporary file",
    leave_half_a_file: "left over: half-written file",
    leave_something_after_a_mistake: "left over: after a mistake: logs",
    leave_a_process: "left over: process",
    leave_a_thread: "left over: thread",
    leave_a_handler: "left over: a handler of SIGUSR1",
    leave_a_file_open: "left over: open file file.txt",
    write_into_a_file: "a file of the user's: file.txt is changed",
    delete_a_file: "a file of the user's: file.txt is gone",
}


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What is broken by a program, in a folder with a file of the user's."""
    monkeypatch.setattr(promises, "MEMORY", 50 << 20)
    (tmp_path / "case").mkdir()
    (tmp_path / "case" / "file.txt").write_text("a file of the user's\n")

    def watch(program: Callable[[list[str]], int]) -> list[str]:
        monkeypatch.setattr(running, "SECONDS", 2.0 if program is never_end else 300.0)  # a busy machine takes long for 1 GiB
        case = Case(0, Scenario("toy", program, (), ()), tmp_path / "case", [], {}, ["made different"])
        return broken(case, run_case(case, tmp_path))

    yield watch
    while left:
        one = left.pop()
        if isinstance(one, subprocess.Popen):
            one.kill()
            one.wait()
        else:
            os.close(one)


def test_an_error_of_one_line_that_leaves_nothing_keeps_every_promise(watched):
    assert watched(refuse) == []


@pytest.mark.parametrize("program", BROKEN, ids=lambda program: program.__name__)
def test_a_broken_promise_is_found(watched, program):
    (said,) = watched(program)
    assert said.startswith(BROKEN[program])


def test_the_environment_of_a_case_is_its_own(watched, monkeypatch):
    monkeypatch.setenv("ITERATIONS", "7")
    seen: list[bool] = []
    assert watched(lambda words: seen.append("ITERATIONS" in os.environ)) == []
    assert seen == [False]


def test_a_confined_process_writes_nowhere_but_in_its_folder(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "out.txt").write_text("a file of the user's\n")
    program = """
import os, sys
from pathlib import Path
from tests.fuzz.confine import confine
folder = Path(sys.argv[1])
if not confine(folder / "in"):
    sys.exit(77)
(folder / "in" / "new.txt").write_text("ours")
for attempt in (
    lambda: (folder / "out.txt").write_text("ours"),
    lambda: (folder / "out.txt").unlink(),
    lambda: (folder / "new.txt").touch(),
    lambda: os.rename(folder / "in" / "new.txt", folder / "out.txt"),
    lambda: os.truncate(folder / "out.txt", 0),
    lambda: os.system(f"echo x >> {folder / 'out.txt'}") and os.rmdir("/refused"),
):
    try:
        attempt()
    except OSError:
        continue
    sys.exit("it was allowed")
"""
    ran = subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    if ran.returncode == 77:
        pytest.skip("this kernel has no Landlock")
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "out.txt").read_text() == "a file of the user's\n"
    assert not (tmp_path / "new.txt").exists()


@pytest.mark.parametrize("word", ["/", "/dev/null", "..", "../../x", "~/x", "--output=/dev/zero", "--data.path=..", "hf:/x"])
def test_where_nothing_confines_it_no_word_leads_out_of_its_folder(word):
    assert ".." not in tame(word) and not re.search(r"(^|[=:])[/~]", tame(word))
