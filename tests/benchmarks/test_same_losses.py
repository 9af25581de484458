"""Losses of a fast run against the plain path: the toy runs through the engine, and what differs is told."""

import sys

import pytest
import same_losses


def test_every_step_of_a_run_is_recorded(tmp_path):
    found = same_losses.losses([*same_losses.TOY, *same_losses.PLAIN], 12, tmp_path / "run")
    assert len(found) == 12 and all(5 < loss < 6 for loss in found)


def test_what_is_apart_is_told(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["same_losses.py", "--toy", "--steps", "3"])
    monkeypatch.setattr(
        same_losses, "losses", lambda settings, *_: [3.0, 2.0, 1.0] if "training.kernels=off" in settings else [3.0, 2.5, 1.0]
    )
    same_losses.main()
    said = capsys.readouterr().out
    assert "plain: 3 steps" in said and "| 1 | 3.00000 | 3.00000 |" in said
    assert "fast: at most 5.0e-01 from plain, at step 2; mean 1.7e-01" in said


def test_a_run_that_fails_ends_it(tmp_path):
    with pytest.raises(SystemExit, match=r"model\.width"):
        same_losses.losses(["model.width=none"], 1, tmp_path / "run")
