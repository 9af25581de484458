"""The reading of runs for the page, without a server."""

import pytest
from ui_kit import make_run


@pytest.fixture
def folder(tmp_path):
    make_run(tmp_path / "runs" / "old", when=1000.0, training__seed=1)
    make_run(tmp_path / "runs" / "group" / "new", when=2000.0, training__seed=2)
    return tmp_path / "runs"


def test_a_run_that_cannot_be_read_is_told_and_the_others_are_read(folder, tmp_path, monkeypatch):
    from ingot.runs.series import Series
    from ingot.ui.watcher import Watcher

    read = Series.read_block

    def fail(series):
        if series.path.parent.name == "new":
            raise ValueError("odd bytes")
        return read(series)

    monkeypatch.setattr(Series, "read_block", fail)
    watcher = Watcher([folder])
    watcher.look()
    new, old = watcher.runs.values()
    assert new.message()["status"] == "unreadable" and new.message()["error"] == "the run cannot be read: ValueError: odd bytes"
    assert new.loaded and old.loaded and old.message()["lines"] == 21
    assert new.update() == []  # nothing is told twice
    monkeypatch.setattr(Series, "read_block", read)
    assert new.update()
    assert (new.message()["status"], new.message()["lines"]) == ("completed", 21)


def test_a_finished_run_longer_than_a_block_is_shown_to_its_last_line(folder, monkeypatch):
    from ingot.ui.watcher import Watcher

    monkeypatch.setattr("ingot.runs.series.BLOCK_BYTES", 1000)
    watcher = Watcher([folder])
    for _ in range(30):
        watcher.look()
    assert {run.message()["lines"] for run in watcher.runs.values()} == {21}


def test_a_run_that_is_reached_by_several_paths_is_one(folder, tmp_path):
    from ingot.runs.view import find_runs
    from ingot.ui.watcher import Watcher

    (folder / "a-link").symlink_to("old")
    (folder / "group" / "link").symlink_to(folder / "old")
    other = tmp_path / "other"
    other.symlink_to(folder)
    paths = [folder / "old", folder / "group" / "new"]
    assert sorted(find_runs([folder, other, folder / "group", other / "old"]).values()) == sorted(paths)
    watcher = Watcher([folder / "a-link"])
    watcher._scan()
    [first] = watcher.runs.values()
    watcher._scan()
    assert list(watcher.runs.values()) == [first]  # nothing is new, so nothing is told again
    (folder / "a-link").unlink()
    (folder / "a-link").symlink_to("group/new")
    watcher._scan()
    assert [run.name for run in watcher.runs.values()] == ["new"]


def test_a_page_with_too_many_messages_waiting_is_ended_once(folder, tmp_path, monkeypatch):
    import asyncio

    from ingot.ui import watcher as module

    monkeypatch.setattr(module, "MAX_QUEUED", -1)

    async def page():
        watcher = module.Watcher([folder])
        watcher._scan()
        queue = watcher.open_page().queue
        watcher._greet()
        watcher._send([{}])
        await asyncio.sleep(0)
        return [queue.get_nowait() for _ in range(queue.qsize())]

    assert asyncio.run(page()) == [None]


def test_a_damaged_result_and_a_looping_link_hide_no_other_run(folder):
    from ingot.ui.watcher import Watcher

    (folder / "old" / "result.json").write_text("[" * 100_000)
    (folder / "loop").symlink_to("loop")
    bad = make_run(folder / "bad", when=3000.0)
    (bad / "config.yaml").unlink()
    (bad / "config.yaml").symlink_to("config.yaml")
    (bad / "result.json").symlink_to("result.json")
    watcher = Watcher([folder])
    watcher.look()
    statuses = {run.name: run.message()["status"] for run in watcher.runs.values()}
    assert statuses == {"bad": "completed", "new": "completed", "old": "completed"}


def test_more_runs_than_a_page_holds_are_paged_through(folder, monkeypatch):
    from ingot.ui import watcher as module

    monkeypatch.setattr(module, "PAGE_RUNS", 1)
    watcher = module.Watcher([folder])
    names = []
    for first in (0, 1):
        watcher.turn(first)
        watcher.look()
        names += [run.name for run in watcher.runs.values()]
        assert watcher._list_message()["total"] == 2
    assert names == ["new", "old"]


def test_the_runs_of_a_sweep_are_found_below_the_folder_of_runs(folder):
    from ingot.runs.view import find_runs

    trial = make_run(folder / "sweep" / "width=64" / "seed-1")
    assert trial in find_runs([folder]).values()
