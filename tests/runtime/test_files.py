from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.data.prepare.pipeline import write_dataset
from ingot.data.tokenizers import ByteTokenizer
from ingot.errors import CheckpointError, DataError
from ingot.runtime.files import (
    file_sha256,
    open_to_read,
    read_json,
    replace_folder,
    sweep_temporaries,
    to_json,
    user_path,
    write_atomically,
    writing,
)
from ingot.runtime.tensors import read_tensors

WRITE_TOO_MUCH = """
import resource, sys
from pathlib import Path
from ingot.runtime.files import write_atomically
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    write_atomically(Path(sys.argv[1]), b"x" * 100_000)
except OSError as error:
    print("refused:", error.strerror)
"""


def test_an_atomic_write_replaces_the_content_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_atomically(path, "old, and longer than the new")
    write_atomically(path, "n\u00e9w")
    assert path.read_bytes() == "n\u00e9w".encode()
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_file_is_as_readable_for_others_as_any_file(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    write_atomically(tmp_path / "atomic", "")
    assert stat.S_IMODE((tmp_path / "atomic").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


def test_a_disk_that_refuses_keeps_the_old_content_and_no_temporary(tmp_path: Path, python) -> None:
    path = tmp_path / "a.json"
    write_atomically(path, "old")
    output, errors = python(WRITE_TOO_MUCH, path).communicate(timeout=300)
    assert output.startswith("refused:"), errors
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_failing_sync_keeps_the_old_content_and_no_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    write_atomically(path, "old")

    def fail(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("path", ["/", "."])
def test_a_folder_without_a_name_is_no_file_to_write(path: str) -> None:
    with pytest.raises(IsADirectoryError):
        write_atomically(Path(path), b"")


def test_sweeping_removes_leftovers_and_only_those(tmp_path: Path) -> None:
    for name in (".state.json.0a1b2c3d.tmp", "state.json", ".lock", "notes.tmp"):
        (tmp_path / name).write_text("")
    (tmp_path / ".step.tmp").mkdir()
    sweep_temporaries(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", ".step.tmp", "notes.tmp", "state.json"]


def test_a_refusing_disk_becomes_one_line_that_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught, writing(tmp_path / "gone" / "a"):
        write_atomically(tmp_path / "gone" / "a", "")
    assert str(tmp_path / "gone" / "a") in str(caught.value) and "\n" not in str(caught.value)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@settings(deadline=None)
@given(values)
def test_json_is_strict_and_loses_only_what_json_cannot_say(value: object) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    def without_nan(value: object) -> object:
        if isinstance(value, dict):
            return {key: without_nan(item) for key, item in value.items()}
        if isinstance(value, list):
            return [without_nan(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    assert json.loads(to_json(value), parse_constant=refuse) == without_nan(value)


def fill(path: Path, text: str) -> None:
    with replace_folder(path) as folder:
        assert folder.parent == path.parent and folder.name.startswith(".")
        write_atomically(folder / "a", text)


def test_files_of_the_same_name_are_replaced_and_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "out"
    fill(path, "old")
    (path / "b").write_text("of the user")
    fill(path, "new")
    assert {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*")} == {"out", "out/a", "out/b"}
    assert ((path / "a").read_text(), (path / "b").read_text()) == ("new", "of the user")


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="nothing here tells which file a descriptor is of")
def test_the_new_name_of_a_replaced_folder_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, fresh, synced, fsync = tmp_path / "out", tmp_path / "fresh", list[tuple[Path, str, bool]](), os.fsync
    fill(path, "old")

    def note(descriptor: int) -> None:
        content = (path / "a").read_text() if path.exists() else ""
        synced.append((Path(f"/proc/self/fd/{descriptor}").readlink(), content, fresh.exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    fill(path, "new")
    fill(fresh, "x")
    assert (path, "new", False) in synced and (tmp_path, "new", True) in synced


def test_a_folder_that_could_not_be_filled_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "out"
    fill(path, "old")
    with pytest.raises(RuntimeError), replace_folder(path) as folder:
        (folder / "a").write_text("half")
        raise RuntimeError
    assert (path / "a").read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_folder_that_a_killed_process_left_is_swept(tmp_path: Path) -> None:
    (tmp_path / ".out.0123abcd.tmp").mkdir()
    (tmp_path / ".out.mine").mkdir()
    fill(tmp_path / "out", "new")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".out.mine", "out"]


def test_a_folder_that_another_process_fills_is_not_swept(tmp_path: Path) -> None:
    with replace_folder(tmp_path / "out") as first:
        (first / "a").write_text("first")
        fill(tmp_path / "out", "second")
        assert (first / "a").read_text() == "first"
    assert (tmp_path / "out" / "a").read_text() == "first"


@pytest.fixture
def pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    return tmp_path / "pipe.json"


def test_a_pipe_is_refused_and_not_waited_for(pipe):
    for read in (open_to_read, read_json, read_tensors):
        with pytest.raises(OSError, match="it is a pipe or a device, not a plain file"):
            read(pipe)
    with pytest.raises(DataError, match="it is a pipe or a device"):
        file_sha256(pipe)


def test_nothing_is_put_in_the_place_of_a_pipe_or_a_device(pipe):
    with pytest.raises(OSError, match="it is a pipe or a device, not a plain file"):
        write_atomically(pipe, b"x")
    assert pipe.is_fifo() and list(pipe.parent.iterdir()) == [pipe]


def test_a_device_that_never_ends_is_refused():
    with pytest.raises(OSError, match="it is a pipe or a device, not a plain file"):
        read_json(Path("/dev/zero"))


@pytest.mark.parametrize("content", ["[" * 100_000, "{", "", '{"a": ' * 100_000])
def test_json_that_is_none_is_a_value_error_however_deep_it_is(tmp_path, content):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ValueError):
        read_json(tmp_path / "a.json")


def test_json_that_no_file_of_ours_could_be_is_not_read(tmp_path):
    with (tmp_path / "a.json").open("wb") as file:
        file.truncate(1 << 34)  # of which the disk has nothing
    with pytest.raises(ValueError, match="it is too large"):
        read_json(tmp_path / "a.json")


def test_a_home_that_nobody_has_stays_as_it_is(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_path("~/a") == tmp_path / "a"
    assert user_path("~nosuchuser/a") == Path("~nosuchuser/a")


OPEN_MANY = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 300))
from ingot.data.loading.data_path import open_dataset
split = open_dataset(sys.argv[1]).split("train")
files = [open(sys.argv[1] + "/dataset.json") for _ in range(200)]
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_data_of_more_shards_than_a_shell_lets_a_process_open_can_be_read(tmp_path: Path, python) -> None:
    write_dataset([("train", "abc" * 9)] * 3, tmp_path / "data", ByteTokenizer(), source=None)
    output, errors = python(OPEN_MANY, tmp_path / "data").communicate(timeout=300)
    assert output == "(300, 300)\n", errors
