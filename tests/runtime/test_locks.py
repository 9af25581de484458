from __future__ import annotations

import errno
import fcntl
import threading
from pathlib import Path

import pytest

from ingot.runtime.locks import FolderLock

HOLD = """
import sys
from pathlib import Path
from ingot.runtime.locks import FolderLock
lock = FolderLock(Path(sys.argv[1]), sys.argv[2] or None)
assert lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("file", [None, ".lock"])
def test_a_folder_is_held_by_one_process_until_its_death(tmp_path: Path, python, file: str | None) -> None:
    holder = python(HOLD, tmp_path, file or "")
    assert holder.stdout.readline() == "held\n"
    lock = FolderLock(tmp_path, file)
    assert not lock.acquire() and lock.held is False
    holder.kill()
    holder.wait()
    assert lock.acquire() and lock.held is True and lock.folder_held
    lock.release()
    assert lock.held is False and FolderLock(tmp_path, file).acquire()


def test_whoever_waits_is_told_once_and_gets_the_folder(tmp_path: Path) -> None:
    first, second, told = FolderLock(tmp_path, ".lock"), FolderLock(tmp_path, ".lock"), []
    first.acquire()

    def notify() -> None:
        told.append("waiting")
        threading.Timer(0.2, first.release).start()

    assert second.acquire(None, notify) and told == ["waiting"]


def test_a_lock_without_a_file_leaves_none(tmp_path: Path) -> None:
    with FolderLock(tmp_path) as lock:
        assert lock.acquire() and not list(tmp_path.iterdir())


def test_a_file_that_another_program_locked_is_taken(tmp_path: Path) -> None:
    with (tmp_path / ".lock").open("w") as file:  # as an Ingot does that locks the file alone
        fcntl.flock(file, fcntl.LOCK_EX)
        assert not FolderLock(tmp_path, ".lock").acquire()


def test_a_folder_that_is_gone_or_renamed_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    flock = fcntl.flock

    def rename_first(descriptor: int, kind: int) -> None:
        (tmp_path / "a").rename(tmp_path / "b")
        flock(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", rename_first)
    assert not FolderLock(tmp_path / "a").acquire()
    with pytest.raises(FileNotFoundError):
        FolderLock(tmp_path / "a").acquire()


def test_a_disk_without_locks_is_known_and_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    lock = FolderLock(tmp_path, ".lock")
    assert lock.acquire() and lock.held is None and not lock.folder_held


def test_what_the_file_says_is_read_by_others_and_replaced_by_the_holder(tmp_path: Path) -> None:
    lock, other = FolderLock(tmp_path, ".lock"), FolderLock(tmp_path, ".lock")
    assert other.read() == b""
    lock.acquire()
    lock.write(b"a long name")
    lock.write(b"me")
    assert other.read() == b"me"


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="nothing here lists the descriptors of a process")
def test_a_refused_lock_keeps_no_file_open(tmp_path: Path) -> None:
    with FolderLock(tmp_path, ".lock") as held:
        held.acquire()
        before = len(list(Path("/proc/self/fd").iterdir()))
        refused = [FolderLock(tmp_path, ".lock") for _ in range(5)]
        assert not any(lock.acquire() for lock in refused)
        assert len(list(Path("/proc/self/fd").iterdir())) == before
