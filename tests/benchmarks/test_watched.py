"""The bench of watched runs: the speed of a block is that of its own steps, and pairs make the ratio."""

import pytest
import watched

BEGAN = 1_800_000_000


def recorded(*seconds):
    times = [f"2027-01-15T08:{second // 60:02}:{second % 60:02}.000+00:00" for second in seconds]
    return [{"kind": "evaluation", "time": times[0]}] + [{"kind": "train", "time": at, "step": i} for i, at in enumerate(times)]


def test_the_speed_of_a_block_is_that_of_its_steps():
    records = recorded(*range(10), *range(10, 30, 2))
    assert watched.speed(records, BEGAN, BEGAN + 9) == pytest.approx(1.0)
    assert watched.speed(records, BEGAN + 10, BEGAN + 30) == pytest.approx(0.5)
    with pytest.raises(SystemExit, match="fewer than two steps"):
        watched.speed(records, BEGAN + 500, BEGAN + 600)


def test_pairs_are_compared_whatever_their_order(capsys):
    records = recorded(*range(10), *range(10, 30, 2), *range(30, 50, 2), *range(50, 60))
    blocks = [(False, 0, 9, 0.0), (True, 10, 29, 1.9), (True, 30, 49, 1.9), (False, 50, 60, 0.0)]
    watched.show([(kind, BEGAN + began, BEGAN + ended, cpu) for kind, began, ended, cpu in blocks], records)
    told = capsys.readouterr().out
    assert "mean 0.5000 +- 0.0000, median 0.5000 of 2 pairs; it takes 10.0% of a core" in told


def test_a_watcher_is_started_on_a_terminal_and_ended(monkeypatch, tmp_path, eventually):
    (tmp_path / "watcher").write_text("#!/bin/sh\ntest -t 1 && echo yes > $1\nexec sleep 60\n")
    (tmp_path / "watcher").chmod(0o755)
    monkeypatch.setattr(watched.sys, "executable", str(tmp_path / "python"))
    with watched.watching(["watcher", str(tmp_path / "seen")]) as watcher:
        eventually(lambda: (tmp_path / "seen").exists() and (tmp_path / "seen").read_text() == "yes\n")
        assert watcher.poll() is None and watched.cpu_seconds(watcher) >= watched.cpu_seconds(None) == 0.0
    assert watcher.returncode is not None
