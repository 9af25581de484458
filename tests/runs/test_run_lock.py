from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from ingot.errors import CheckpointError, RunError
from ingot.runs.state import RunLock, State, read_state, this_process
from ingot.runtime.files import to_json, write_atomically

HOLD = """
import sys
from pathlib import Path
from ingot.runs.state import RunLock
from ingot.runs.state import Heartbeat
with RunLock(Path(sys.argv[1])), Heartbeat(Path(sys.argv[1]), 1000):
    print("held", flush=True)
    sys.stdin.read()
"""
HOLD_AND_FORK = """
import os, sys, time
from pathlib import Path
from ingot.runs.state import RunLock
lock = RunLock(Path(sys.argv[1])).acquire()
forked = os.fork()
if forked:
    print(forked, flush=True)
sys.stdin.read()
"""


def elsewhere(age_seconds: float = 0.0, heartbeat_seconds: float = 0.1, **changes: object) -> State:
    """The state of a run on another host, whose last heartbeat was so many seconds ago."""
    beat = (datetime.now(UTC) - timedelta(seconds=age_seconds)).isoformat()
    state = State("running", "farm-7", 12, "another boot", "2026-11-15T03:20:11.000+00:00", beat, heartbeat_seconds)
    return replace(state, **changes)


def write(folder: Path, state: State) -> None:
    write_atomically(folder / "state.json", to_json(asdict(state)), durable=False)


@contextmanager
def beating(folder: Path, **changes: object) -> Iterator[None]:
    """Another host's process, as far as a shared disk shows it."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(0.05):
            write(folder, elsewhere(**changes))

    write(folder, elsewhere(**changes))
    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def hold(folder: Path, python):
    process = python(HOLD, folder)
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_process_is_refused_with_who_where_and_since_when(tmp_path: Path, python) -> None:
    holder = hold(tmp_path, python)
    with pytest.raises(RunError) as caught:
        RunLock(tmp_path).acquire()
    message = re.escape(f"{tmp_path} is in use by process {holder.pid} on {socket.gethostname()} since ")
    message += r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d UTC; wait for that process, stop it, or choose another training\.output_dir"
    assert re.fullmatch(message, str(caught.value))


def test_a_second_lock_in_one_process_is_refused(tmp_path: Path) -> None:
    with RunLock(tmp_path), pytest.raises(RunError, match="in use"):
        RunLock(tmp_path).acquire()


def test_a_folder_is_free_after_its_process_was_killed(tmp_path: Path, python) -> None:
    holder = hold(tmp_path, python)
    holder.kill()
    holder.wait()
    assert read_state(tmp_path).status == "running"
    lines: list[str] = []
    with RunLock(tmp_path, lines.append):
        assert [f"process {holder.pid} on" in line for line in lines] == [True]


def test_a_folder_is_free_after_its_release(tmp_path: Path) -> None:
    with RunLock(tmp_path):
        pass
    with RunLock(tmp_path):
        pass


def test_a_forked_child_does_not_keep_the_folder_of_its_dead_parent(tmp_path: Path, python) -> None:
    holder = python(HOLD_AND_FORK, tmp_path)
    forked = int(holder.stdout.readline())
    with pytest.raises(RunError, match="in use"):
        RunLock(tmp_path).acquire()
    holder.kill()
    holder.wait()
    assert Path(f"/proc/{forked}").exists() or not Path("/proc").exists()
    with RunLock(tmp_path):
        pass


def test_a_run_that_beats_on_another_host_is_not_disturbed(tmp_path: Path) -> None:
    lock_file = tmp_path / ".lock"
    lock_file.write_text("what the other host wrote")
    with beating(tmp_path), pytest.raises(RunError) as caught:
        RunLock(tmp_path).acquire()
    assert f"{tmp_path} is in use by process 12 on farm-7 since 2026-11-15 03:20:11 UTC; " in str(caught.value)
    assert lock_file.read_text() == "what the other host wrote"


@pytest.mark.parametrize("minutes", [-90, 4])
def test_a_run_on_a_host_whose_clock_is_wrong_is_not_disturbed(tmp_path: Path, minutes: float) -> None:
    with beating(tmp_path, age_seconds=60 * minutes), pytest.raises(RunError, match="farm-7"):
        RunLock(tmp_path).acquire()


def test_a_fresh_heartbeat_that_stands_still_is_a_dead_container(tmp_path: Path) -> None:
    write(tmp_path, elsewhere(step=30))
    lines: list[str] = []
    with RunLock(tmp_path, lines.append):
        assert lines[-1].startswith("taking over from process 12 on farm-7") and "step 30" in lines[-1]


def test_an_old_heartbeat_is_taken_over_at_once(tmp_path: Path) -> None:
    write(tmp_path, elsewhere(age_seconds=4000, heartbeat_seconds=1000))  # to watch this one would take over half an hour
    lines: list[str] = []
    with RunLock(tmp_path, lines.append):
        assert len(lines) == 1


def test_a_dead_process_of_this_boot_is_taken_over_at_once(tmp_path: Path) -> None:
    write(tmp_path, elsewhere(boot_id=this_process()[2], heartbeat_seconds=1000))
    lines: list[str] = []
    with RunLock(tmp_path, lines.append):
        assert len(lines) == 1


@pytest.mark.parametrize("status", ["stopped", "completed", "failed"])
def test_a_run_that_ended_elsewhere_is_free_without_a_word(tmp_path: Path, status: str) -> None:
    write(tmp_path, elsewhere(status=status, heartbeat_seconds=1000))
    lines: list[str] = []
    with RunLock(tmp_path, lines.append):
        assert lines == []


def test_a_run_that_ends_while_it_is_watched_is_free(tmp_path: Path) -> None:
    write(tmp_path, elsewhere(heartbeat_seconds=1000))
    end = threading.Timer(0.3, write, (tmp_path, elsewhere(status="completed")))
    end.start()
    with RunLock(tmp_path):
        end.join()


@pytest.fixture
def disk_without_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.fixture
def disk_without_flock_of_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    """As NFS is, which locks only what is open for writing."""
    flock = fcntl.flock

    def of_files(descriptor: int, kind: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EBADF, "Bad file descriptor")
        flock(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", of_files)


def test_a_deleted_lock_file_lets_nobody_in_while_its_process_lives(tmp_path: Path, python) -> None:
    holder = hold(tmp_path, python)
    (tmp_path / ".lock").unlink()
    for _ in range(2):
        with pytest.raises(RunError, match=f"in use by process {holder.pid} "):
            RunLock(tmp_path).acquire()
    assert not (tmp_path / ".lock").exists()
    holder.kill()
    holder.wait()
    with RunLock(tmp_path):
        pass


@pytest.mark.usefixtures("disk_without_flock_of_folders")
def test_a_deleted_lock_file_lets_nobody_in_on_a_disk_that_cannot_lock_folders(tmp_path: Path) -> None:
    with beating(tmp_path, boot_id=this_process()[2]):
        for _ in range(2):
            with pytest.raises(RunError, match="in use by process 12 on farm-7"):
                RunLock(tmp_path).acquire()


@pytest.mark.usefixtures("disk_without_flock_of_folders")
def test_a_lock_file_that_names_the_dead_process_is_taken_over_at_once(tmp_path: Path, python) -> None:
    holder = hold(tmp_path, python)  # its heartbeat is one in 1,000 seconds
    holder.kill()
    holder.wait()
    lines: list[str] = []
    with RunLock(tmp_path, lines.append):
        assert len(lines) == 1 and lines[0].startswith("taking over from process")


def test_a_lock_file_that_is_a_link_is_refused_and_its_target_stays(tmp_path: Path) -> None:
    run, target = tmp_path / "run", tmp_path / "thesis.txt"
    run.mkdir()
    target.write_text("years of work")
    (run / ".lock").symlink_to(target)
    with pytest.raises(CheckpointError, match=r"run/\.lock is a symbolic link"):
        RunLock(run).acquire()
    (run / ".lock").unlink()
    (run / ".lock").symlink_to(tmp_path / "new.txt")
    with pytest.raises(CheckpointError, match=r"run/\.lock is a symbolic link"):
        RunLock(run).acquire()
    assert target.read_text() == "years of work" and not (tmp_path / "new.txt").exists()


def test_a_lock_file_with_somebody_elses_text_keeps_it(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("not ours")
    with RunLock(tmp_path), pytest.raises(RunError, match="in use"):
        RunLock(tmp_path).acquire()
    assert (tmp_path / ".lock").read_text() == "not ours"


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_lock_file_that_is_no_file_is_one_line(tmp_path: Path, make) -> None:
    make(tmp_path / ".lock")
    with pytest.raises(CheckpointError, match=r"\.lock"):
        RunLock(tmp_path).acquire()


@pytest.mark.usefixtures("disk_without_flock")
def test_on_a_disk_without_flock_the_heartbeat_decides(tmp_path: Path) -> None:
    boot_id = this_process()[2]
    with beating(tmp_path, boot_id=boot_id), pytest.raises(RunError, match="farm-7"):
        RunLock(tmp_path).acquire()
    with RunLock(tmp_path):
        pass


def test_a_lock_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot write"):
        RunLock(tmp_path / "missing").acquire()
