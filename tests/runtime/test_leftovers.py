"""What killed writes of a user's file left is removed by the next, and nothing else is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ingot.runtime.files import replace_users_file


def put(path: Path, age: float = 3600.0) -> Path:
    path.write_bytes(b"half")
    os.utime(path, (path.stat().st_atime, path.stat().st_mtime - age))
    return path


def write(path: Path) -> None:
    with replace_users_file(path) as file:
        file.write(b"whole")


def test_what_a_killed_write_left_is_removed_by_the_next(tmp_path):
    put(tmp_path / ".a[1].ingot.0123abcd.tmp")
    write(tmp_path / "a[1].ingot")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a[1].ingot": b"whole"}


@pytest.mark.parametrize("name", [".a.0123abcd.tmp.mine", ".b.0123abcd.tmp", ".a.mine.tmp", "a.0123abcd.tmp"])
def test_other_files_stay(tmp_path, name):
    put(tmp_path / name)
    write(tmp_path / "a")
    assert (tmp_path / name).exists()


def test_a_file_that_another_process_writes_stays(tmp_path):
    with replace_users_file(tmp_path / "a") as file:
        [beside] = tmp_path.iterdir()
        file.write(b"first")
        file.flush()
        put(beside)
        write(tmp_path / "a")
        assert beside.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_file_that_was_just_made_stays(tmp_path):
    left = put(tmp_path / ".a.0123abcd.tmp", age=1)
    write(tmp_path / "a")
    assert left.exists()


def test_a_link_with_such_a_name_and_what_it_leads_to_stay(tmp_path):
    target = put(tmp_path / "mine")
    (tmp_path / ".a.0123abcd.tmp").symlink_to(target)
    write(tmp_path / "a")
    assert target.exists() and (tmp_path / ".a.0123abcd.tmp").is_symlink()
