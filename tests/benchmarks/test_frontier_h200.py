"""The bench of both columns: what is finished is not run again, and the table says what the runs came to."""

import json
import sys

import frontier_h200
import pytest
from frontier_h200 import case_of, table

RUN = {
    "steps": 3500, "tokens_per_second": 1_540_000, "training_seconds": 300.0, "wall_seconds": 420.0, "passes": 5.1,
    "train_nats": 2.53, "val_nats": 2.78, "at": "2026-11-17T21:35:14+00:00",
}  # fmt: skip


def line(column, seed, bpb, size=15_900_000, seconds=300.0):
    case = case_of(column, seed, seconds, ())
    return {**RUN, "name": case.name, "column": column, "seed": seed, "val_bpb": bpb - 0.01, "artifact_bpb": bpb, "bytes": size}


def test_what_the_results_have_is_told_and_not_run_again(tmp_path, monkeypatch, capsys):
    results = tmp_path / "results.jsonl"
    lines = [line(column, seed, 1.14 + seed / 1000, seconds=2.0) for column in (1, 2) for seed in (1, 2)]
    results.write_text("".join(json.dumps(one) + "\n" for one in [*lines, line(1, 1, 0.9, seconds=60.0)]))
    words = ["--toy", "--seconds", "2", "--seeds", "1", "2", "--results", str(results), "--runs", str(tmp_path / "runs")]
    monkeypatch.setattr(sys, "argv", ["frontier_h200.py", *words])
    frontier_h200.main()
    told = capsys.readouterr().out
    assert told.count("| column1-2s-seed") == told.count("| column2-2s-seed") == 2 and "60s" not in told
    assert f"column2-2s-seed1 | already in {results}, finished 2026-11-17T21:35:14+00:00" in told
    assert "artifact_bpb: mean 1.1415" in told and "val_bpb: mean 1.1315" in told and "nothing is left" in told
    assert not (tmp_path / "runs").exists()


def test_what_does_not_fit_into_the_time_is_left_for_later(tmp_path, monkeypatch, capsys):
    words = ["--toy", "--seeds", "1", "--columns", "1", "--limit", "-1", "--results", str(tmp_path / "r.jsonl")]
    monkeypatch.setattr(sys, "argv", ["frontier_h200.py", *words])
    frontier_h200.main()
    assert "not begun" in (told := capsys.readouterr().out) and "some runs are left" in told


def test_the_table_says_what_is_reached_and_what_is_too_large():
    fine = table([line(1, seed, 1.134 + seed / 1000) for seed in (1, 2, 3)], 1)
    assert "mean 1.1360, std 0.0010, n 3" in fine and "reached" not in fine.split("moonshot 1.12: ")[1]
    assert fine.endswith(": must")
    large = table([line(1, 1, 1.2, size=16_000_001)], 1)
    assert "above 16,000,000 bytes with the code: column1-300s-seed1" in large and "not reached" in large


def test_settings_make_another_case():
    changes = ((), ("optimizer.ema_decay=0.99",), ("model.layers=9",))
    assert len({case_of(1, 1, 300.0, settings).name for settings in changes}) == 3


def test_without_a_text_it_asks_for_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["frontier_h200.py", "--data", str(tmp_path / "none")])
    with pytest.raises(SystemExit):
        frontier_h200.main()
    assert "pass --corpus with --tokenizer" in capsys.readouterr().err
