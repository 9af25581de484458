from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ingot.config.schema import TrainingSection
from ingot.errors import CannotContinue, CheckpointError, Unreadable
from ingot.runs import checkpoints
from ingot.runs.checkpoints import (
    Checkpoint,
    _checksum,
    find_checkpoint,
    load_checkpoint,
    newest_valid,
    read_index,
    read_kind,
    retain,
    save_checkpoint,
    sweep,
    update_progress,
)
from ingot.runs.folder import saved_steps
from ingot.runtime.tensors import TensorRecord
from ingot.train import outputs as saving
from ingot.train.outputs import Saver
from ingot.train.resume import Progress, check_fits, read_progress

FILE_OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}
FILES = ("checkpoint.json", "model.safetensors", "optimizer.safetensors")


def tensors(step: int) -> dict[str, list[TensorRecord]]:
    def record(name: str, *values: int) -> TensorRecord:
        return TensorRecord(name, "I32", (len(values),), memoryview(b"".join(v.to_bytes(4, "little") for v in values)))

    return {"model": [record("w", step, step + 1), record("b", step)], "optimizer": [record("w/momentum", 7, step)]}


def save(folder: Path, step: int, **more: Any) -> Path:
    return save_checkpoint(folder, step, tensors(step), {"step": step, "elapsed_seconds": 0.25, **more})


def contents(path: Path) -> tuple[object, ...]:
    found = load_checkpoint(path)
    plain = {file: {n: (r.dtype, r.shape, bytes(r.data)) for n, r in records.items()} for file, records in found.tensors.items()}
    return found.step, found.progress, plain


def refuse(line: str) -> None:
    raise AssertionError(line)


def killed_at(operation: int, work: Callable[[], object]) -> bool:
    """Do the work in another process that is killed before its nth file operation; False: there were fewer."""
    child = os.fork()
    if child == 0:
        count = 0

        def hook(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal count
            if event in FILE_OPERATIONS:
                count += 1
                if count > operation:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the work itself failed"
    return os.WIFSIGNALED(status)


def test_what_was_saved_is_what_is_loaded(tmp_path):
    path = save(tmp_path, 5, tokens=10)
    step, progress, plain = contents(path)
    assert (path.name, step, progress) == ("step-00000005", 5, {"step": 5, "elapsed_seconds": 0.25, "tokens": 10})
    assert plain["model"] == {"w": ("I32", (2,), b"\5\0\0\0\6\0\0\0"), "b": ("I32", (1,), b"\5\0\0\0")}
    assert plain["optimizer"] == {"w/momentum": ("I32", (2,), b"\7\0\0\0\5\0\0\0")}


def test_a_save_killed_before_any_of_its_file_operations_leaves_the_checkpoint_before_or_the_new_one(tmp_path):
    save(tmp_path, 4)
    operation = 0
    while killed_at(operation, lambda: save(tmp_path, 8)):
        assert newest_valid(tmp_path, refuse).step in (4, 8), f"operation {operation}"
        shutil.rmtree(tmp_path / "step-00000008", ignore_errors=True)
        operation += 1
    assert operation > 5
    assert newest_valid(tmp_path, refuse).step == 8


def test_a_note_in_the_only_checkpoint_killed_before_any_of_its_file_operations_never_loses_it_and_leaves_nothing(tmp_path):
    path = save(tmp_path, 4)
    operation = 0
    while killed_at(operation, lambda: update_progress(path, {"best_step": 4})):
        assert newest_valid(tmp_path, refuse).progress in ({"step": 4, "elapsed_seconds": 0.25}, {"best_step": 4})
        sweep(tmp_path)
        assert sorted(found.name for found in path.iterdir()) == sorted(FILES)
        operation += 1
    assert operation > 1
    assert newest_valid(tmp_path, refuse).progress == {"best_step": 4}


def test_a_retention_killed_before_any_of_its_file_operations_leaves_only_whole_checkpoints(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    operation = 0
    while killed_at(operation, lambda: retain(tmp_path, keep_last=1, keep_every=0, best=None)):
        for path in saved_steps(tmp_path).values():
            load_checkpoint(path)
        operation += 1
    assert list(saved_steps(tmp_path)) == [3]


def test_what_killed_saves_leave_is_swept_away_and_nothing_else(tmp_path):
    save(tmp_path, 4)
    (tmp_path / "step-00000008.partial").mkdir()
    (tmp_path / "step-00000008.partial" / "model.safetensors").write_bytes(b"half")
    sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]


@pytest.mark.parametrize("file", FILES)
@given(place=st.floats(0, 1, exclude_max=True), mask=st.integers(1, 255))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_flipped_byte_is_found_and_its_file_named(tmp_path, file, place, mask):
    path = tmp_path / "step-00000004"
    if not path.exists():
        save(tmp_path, 4)
    sound = (path / file).read_bytes()
    before = contents(path)
    damaged = bytearray(sound)
    damaged[int(place * len(damaged))] ^= mask
    (path / file).write_bytes(damaged)
    try:
        assert contents(path) == before  # white space in JSON that became other white space
        assert file == "checkpoint.json"
    except CheckpointError as error:
        assert file in str(error)
    finally:
        (path / file).write_bytes(sound)


@pytest.mark.parametrize("file", FILES)
def test_a_file_cut_short_anywhere_is_found_and_named(tmp_path, file):
    path = save(tmp_path, 4)
    sound = (path / file).read_bytes()
    for length in range(0, len(sound), 7):
        (path / file).write_bytes(sound[:length])
        with pytest.raises(CheckpointError, match=file):
            load_checkpoint(path)


@pytest.mark.parametrize("file", FILES)
def test_a_missing_file_is_named(tmp_path, file):
    path = save(tmp_path, 4)
    (path / file).unlink()
    with pytest.raises(CheckpointError, match=file):
        load_checkpoint(path)


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(tmp_path):
    save(tmp_path, 4)
    damaged = save(tmp_path, 8) / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    said: list[str] = []
    assert newest_valid(tmp_path, said.append).step == 4
    assert len(said) == 1 and str(damaged) in said[0]


def test_a_damaged_checkpoint_is_kept_aside_and_its_step_can_be_saved_again(tmp_path):
    save(tmp_path, 4)
    (save(tmp_path, 8) / "optimizer.safetensors").unlink()
    newest_valid(tmp_path, lambda line: None)
    save(tmp_path, 8)
    assert newest_valid(tmp_path, refuse).step == 8
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000004", "step-00000008", "step-00000008.damaged"}


def test_when_every_checkpoint_is_damaged_none_is_used_and_none_is_moved(tmp_path):
    for step in (4, 8):
        (save(tmp_path, step) / "checkpoint.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"step-00000008.checkpoint\.json is damaged.*restore a checkpoint"):
        newest_valid(tmp_path, refuse)
    assert list(saved_steps(tmp_path)) == [4, 8]


def test_a_folder_without_checkpoints_has_no_newest_one(tmp_path):
    (tmp_path / "step-00000001.partial").mkdir()
    (tmp_path / "step-notes").mkdir()
    assert newest_valid(tmp_path, refuse) is None


def test_a_checkpoint_of_a_newer_ingot_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("ingot.runs.checkpoints.UNSHARDED", 3)
    path = save(tmp_path, 4)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"version 3, .* upgrade Ingot"):
        load_checkpoint(path)


def test_the_newest_the_best_and_the_milestones_are_kept(tmp_path):
    for step in range(1, 13):
        save(tmp_path, step)
    retain(tmp_path, keep_last=2, keep_every=5, best=3)
    assert list(saved_steps(tmp_path)) == [3, 5, 10, 11, 12]
    assert len(list(tmp_path.iterdir())) == 5


def test_the_newest_of_a_stop_and_of_a_completed_run_are_kept_besides_the_newest_regular_ones(tmp_path):
    kinds = dict.fromkeys(range(100, 1000, 100), "regular") | {350: "shutdown", 950: "shutdown", 300: "final", 1000: "final"}
    for step, kind in kinds.items():
        save_checkpoint(tmp_path, step, tensors(step), {}, kind)
    retain(tmp_path, keep_last=3, keep_every=200, best=None)
    assert list(saved_steps(tmp_path)) == [200, 400, 600, 700, 800, 900, 950, 1000]
    assert load_checkpoint(tmp_path / "step-00000950").kind == "shutdown"


def test_without_a_limit_every_checkpoint_is_kept(tmp_path):
    for step in range(1, 13):
        save(tmp_path, step)
    retain(tmp_path, keep_last=None, keep_every=5, best=3)
    assert len(saved_steps(tmp_path)) == 12


def test_a_checkpoint_of_a_version_without_kinds_is_a_regular_one(tmp_path):
    path = save(tmp_path, 4)
    record = read_index(path)
    del record["kind"]
    (path / "checkpoint.json").write_text(json.dumps({**record, "sha256": _checksum(record)}))
    assert (load_checkpoint(path).kind, read_kind(path)) == ("regular", "regular")


@pytest.mark.parametrize("kind", [0, None, [], "another"])
def test_a_checkpoint_of_a_kind_that_there_is_not_is_kept_and_deleted_as_a_regular_one(tmp_path, kind):
    for step in range(1, 5):
        path = save(tmp_path, step)
        record = {**read_index(path), "kind": kind}
        (path / "checkpoint.json").write_text(json.dumps({**record, "sha256": _checksum(record)}))
    retain(tmp_path, keep_last=2, keep_every=0, best=None)
    assert list(saved_steps(tmp_path)) == [3, 4]


def test_steps_with_more_digits_than_usual_are_still_in_order(tmp_path):
    for step in (99_999_999, 100_000_000, 5):
        save(tmp_path, step)
    assert list(saved_steps(tmp_path)) == [5, 99_999_999, 100_000_000]


def test_a_run_folder_means_its_latest_checkpoint_or_its_best(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    save(tmp_path / "checkpoints", 4)
    save(tmp_path / "checkpoints", 8, best_step=4)
    assert find_checkpoint(tmp_path).step == 8
    assert find_checkpoint(tmp_path, "best").step == 4
    assert find_checkpoint(tmp_path / "checkpoints" / "step-00000004").step == 4


def test_asking_for_a_best_checkpoint_before_there_is_one_says_what_to_do(tmp_path):
    save(tmp_path, 4, best_step=None)
    with pytest.raises(CheckpointError, match="the run was not evaluated; use the latest checkpoint"):
        find_checkpoint(tmp_path, "best")
    save(tmp_path, 8, best_step=0)
    with pytest.raises(CheckpointError, match="the checkpoint of step 0, with the best score, was not kept; use the latest"):
        find_checkpoint(tmp_path, "best")


def test_a_save_that_fails_is_reported_and_the_next_one_that_succeeds_clears_it(tmp_path):
    folder, said, done = tmp_path / "not-there", [], []
    saver = Saver(folder, TrainingSection(keep_last=2), lambda path, kind: done.append((path, kind)), said.append)
    saver.save(4, partial(tensors, 4), {}, None)
    saver.wait()
    assert isinstance(saver.error, CheckpointError) and str(folder) in said[0] and "step 4" in said[0]
    folder.mkdir()
    saver.save(8, partial(tensors, 8), {}, None)
    saver.wait()
    assert saver.error is None and done == [(folder / "step-00000008", "regular")]


def test_a_save_begins_when_the_one_before_has_ended(tmp_path):
    done: list[str] = []
    saver = Saver(tmp_path, TrainingSection(keep_last=5), lambda path, kind: done.append(path.name), refuse)

    def state(step: int) -> dict[str, list[TensorRecord]]:
        done.append(f"copied {step}")
        time.sleep(0.02 if step == 4 else 0.0)
        return tensors(step)

    for step in (4, 8):
        saver.save(step, partial(state, step), {}, None)
    saver.wait()
    assert done == ["copied 4", "step-00000004", "copied 8", "step-00000008"]


def test_a_save_is_expected_to_take_as_long_as_the_longest_so_far(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(saving, "time", SimpleNamespace(monotonic=lambda: now[0]))
    saver = Saver(tmp_path, TrainingSection(keep_last=5), lambda path, kind: None, lambda line: None)

    def state(seconds: float) -> dict[str, list[TensorRecord]]:
        now[0] += seconds
        if seconds > 100:
            raise MemoryError
        return tensors(1)

    expected = [saver.expected_seconds(100_000_000)]
    for step, seconds in enumerate((5.0, 200.0, 2.0, 7.0)):
        saver.save(step, partial(state, seconds), {}, None)
        saver.wait()
        expected.append(saver.expected_seconds(100_000_000))
    assert expected == [6.0, 5.0, 5.0, 5.0, 7.0]  # before the first by its bytes; one that failed tells nothing


def test_a_save_is_not_lost_because_nobody_could_be_told_of_it(tmp_path):
    def cannot(*what: object) -> None:
        raise CheckpointError("cannot write log.txt: No space left on device")

    saver = Saver(tmp_path, TrainingSection(keep_last=2), cannot, cannot)
    saver.save(4, partial(tensors, 4), {}, None)
    saver.wait()
    assert newest_valid(tmp_path, refuse).step == 4


@pytest.mark.parametrize("name", ["", "checkpoint.json", "model.safetensors"])
@pytest.mark.parametrize("read_only", [True, False])
def test_a_checkpoint_without_read_permission_is_told_as_such_and_nothing_is_renamed(open_folder, as_nobody, name, read_only):
    save(open_folder, 4), save(open_folder, 8)
    locked = open_folder / "step-00000008" / name
    locked.chmod(0)
    with as_nobody(), pytest.raises(Unreadable, match=f"{locked}.* cannot be read: Permission denied; .*read permission"):
        newest_valid(open_folder, refuse, read_only)
    assert sorted(path.name for path in open_folder.iterdir()) == ["step-00000004", "step-00000008"]


def test_a_folder_of_checkpoints_that_may_not_be_listed_is_not_an_empty_one(open_folder, as_nobody):
    save(open_folder, 4)
    open_folder.chmod(0)
    with as_nobody(), pytest.raises(Unreadable, match=f"{open_folder} cannot be read: Permission denied"):
        saved_steps(open_folder)


WRONG = (None, "x", -1, [], {}, [[]], 0.5, 10**30, [{}], {"a": 1})
PLACES = [
    (), ("step",), ("progress",), ("files",), ("files", "model.safetensors"), ("files", "model.safetensors", "sha256"),
    ("tensors",), ("tensors", "model"), ("tensors", "model", "w"),
    *(("tensors", "model", "w", key) for key in ("dtype", "shape", "parts")), ("tensors", "model", "w", "parts", 0),
    ("tensors", "model", "w", "parts", 0, "file"),
]  # fmt: skip


def seal(path: Path, place: tuple[Any, ...], value: Any) -> None:
    """Write something else into checkpoint.json, with the checksum that belongs to it."""
    record = json.loads((path / "checkpoint.json").read_text())
    del record["sha256"]
    part = record
    for key in place[:-1]:
        part = part[key]
    if place:
        part[place[-1]] = value
    else:
        record = value
    sealed = {**record, "sha256": _checksum(record)} if isinstance(record, dict) else record
    (path / "checkpoint.json").write_text(json.dumps(sealed))


@pytest.mark.parametrize("place", PLACES, ids=lambda place: ".".join(map(str, place)) or "all")
def test_a_record_with_a_right_checksum_and_wrong_types_is_refused(tmp_path, place):
    for value in WRONG:
        path = save(tmp_path, 4)
        seal(path, place, value)
        if (place == ("progress",) and isinstance(value, dict)) or (place == ("step",) and value == 10**30):
            load_checkpoint(path)  # it says nothing of the run, or anything
        else:
            with pytest.raises(CheckpointError, match="step-00000004"):
                load_checkpoint(path)
        shutil.rmtree(path)


@pytest.mark.parametrize("name", [field.name for field in fields(Progress)])
def test_where_a_run_stood_is_checked_before_it_goes_on(tmp_path, name):
    sound = asdict(Progress(step=4, sample=8, tokens=16, loss=1.0, val_step=4, best_step=4))
    assert asdict(read_progress(Checkpoint(tmp_path, 4, {**sound, "other": 1}, {}))) == sound
    for value in ([[]], {"a": []}, -1 if name in ("step", "sample", "tokens", "elapsed_seconds") else [[1, 2, "x"]]):
        with pytest.raises(CheckpointError, match="its progress record is invalid"):
            read_progress(Checkpoint(tmp_path, 4, {**sound, name: value}, {}))


@pytest.mark.parametrize("progress", [{}, {"config": 1}, {"config": {}}, {"config": {"model": []}}, {"config": None}])
def test_a_checkpoint_that_does_not_say_what_run_it_is_of_is_not_continued(tmp_path, progress):
    with pytest.raises(CheckpointError, match="it lacks the metadata of its run"):
        check_fits(Checkpoint(tmp_path, 4, progress, {}), {"config": {"model": {}, "data": {}, "optimizer": {}, "training": {}}})


def test_a_checkpoint_from_before_a_setting_existed_is_refused(tmp_path):
    def facts(**data):
        config = {"model": {}, "data": {"path": "data", "seq_len": 16, **data}, "optimizer": {}, "training": {}}
        return {"config": config, "model_file_sha256": None, "data_fingerprint": "a"}

    check_fits(Checkpoint(tmp_path, 4, facts(overlap=4), {}), facts(overlap=4))
    with pytest.raises(CannotContinue) as refused:
        check_fits(Checkpoint(tmp_path, 4, facts(), {}), facts(overlap=4))
    assert "data.overlap" in str(refused.value)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="nothing here tells which file a descriptor is of")
def test_a_checkpoint_has_its_name_after_all_of_it_is_on_the_disk(tmp_path, monkeypatch):
    happened = []

    def noted(descriptor, fsync=os.fsync):
        happened.append(Path(f"/proc/self/fd/{descriptor}").readlink().name.lstrip(".").partition(".")[0])
        fsync(descriptor)

    def renamed(path, target, rename=Path.rename):
        happened.append(f"{path.name} is named")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(Path, "rename", renamed)
    saved = save_checkpoint(tmp_path, 3, tensors(3), {})
    named = happened.index(f"{saved.name}.partial is named")
    assert {path.stem for path in saved.iterdir()} <= set(happened[:named])  # every file
    assert saved.name in happened[:named]  # the folder in which they lie
    assert happened[named + 1 :] == [tmp_path.name]


def test_the_first_rank_does_not_wait_for_a_part_when_the_disk_has_no_room_even_for_the_reason(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    partial = checkpoints.begin_checkpoint(tmp_path, 3)
    monkeypatch.setattr(checkpoints, "PART_WAIT_SECONDS", 0.0)
    for name in ("write_tensors", "write_atomically"):
        monkeypatch.setattr(checkpoints, name, full)
    with pytest.raises(OSError, match="No space"):
        checkpoints.save_part(tmp_path, 3, lambda: tensors(3), 1)
    with pytest.raises(CheckpointError, match="cannot write its part"):
        checkpoints._wait_for_part(partial / checkpoints.PART_INDEX.format(1))
