"""The bench of the speed-run: arms are told apart, and the table says which of them reach the goal."""

import json
import sys

import pytest
import speedrun
from recipe_runs import Case
from speedrun import GOAL, RECIPE, table

RUN = {
    "steps": 800, "tokens": 52_428_800, "tokens_per_second": 1_310_720, "training_seconds": 39.9, "wall_seconds": 120.0,
    "train_nats": 3.8, "val_bpb": 1.29, "memory_gib": 41.2, "mfu": 0.43,
    "at": "2026-11-17T21:55:14+00:00",
}  # fmt: skip


def line(arm, seed, loss, seconds=40.0):
    settings = tuple(arm.split())
    case = Case("speedrun", RECIPE, seed, seconds, settings)
    return {**RUN, "name": case.name, "arm": arm, "seed": seed, "seconds": seconds, "val_nats": loss}


def test_arms_that_the_results_have_are_told_and_not_run_again(tmp_path, monkeypatch, capsys):
    results = tmp_path / "results.jsonl"
    arms = ["", "model.layers=10"]
    lines = [line(arm, seed, GOAL + 0.01 * (bool(arm) + seed - 2)) for arm in arms for seed in (1, 2)]
    results.write_text("".join(json.dumps(one) + "\n" for one in [*lines, line("", 1, 3.0, seconds=75.0)]))
    words = ["--toy", "--seeds", "1", "2", "--arm", "", "--arm", "model.layers=10", "--results", str(results)]
    monkeypatch.setattr(sys, "argv", ["speedrun.py", *words, "--runs", str(tmp_path / "runs")])
    speedrun.main()
    told = capsys.readouterr().out
    assert f"{RECIPE}, 40 s: mean 3.8959, std 0.0071, n 2; 2 of 2 runs reach 3.9009" in told
    assert "model.layers=10, 40 s: mean 3.9059, std 0.0071, n 2; 1 of 2 runs reach 3.9009" in told
    assert "75 s:" not in told and "nothing is left" in told and not (tmp_path / "runs").exists()


def test_a_row_has_what_is_needed_to_decide():
    row = "| 39.9 | 1 | 800 | 52.4 | 1.311 | 43.0% | 41.2 | 3.8000 | 3.9209 | 1.2900 | +0.0200 |"
    assert row in table([line("", 1, GOAL + 0.02)])


def test_without_a_text_it_asks_for_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["speedrun.py", "--data", str(tmp_path / "none")])
    with pytest.raises(SystemExit):
        speedrun.main()
    assert "pass --corpus" in capsys.readouterr().err
