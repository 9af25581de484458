"""What verbs print."""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from ingot.cli.status import _status_lines
from ingot.console.output import print_columns, print_json


@dataclass
class Scores:
    val_bpb: float
    path: Path


def test_printed_json_is_json_whatever_the_numbers_are(capsys):
    print_json({"é": [Scores(math.nan, Path("runs/x"))], "most": math.inf})
    printed = capsys.readouterr().out
    assert json.loads(printed, parse_constant=lambda word: 1 / 0) == {"é": [{"val_bpb": None, "path": "runs/x"}], "most": None}
    assert "é" in printed


def test_long_last_cells_are_wrapped_to_the_terminal_and_left_whole_elsewhere(capsys, monkeypatch):
    rows = [["name", "what it does"], ["demo", " ".join(["one word after the other"] * 4)]]
    print_columns(rows)
    assert len(capsys.readouterr().out.splitlines()) == 2
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    print_columns(rows)
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "name  what it does" and max(map(len, lines)) <= 40
    assert lines[0].startswith("demo  one") and all(line.startswith("      ") for line in lines[1:]) and len(lines) == 3


@pytest.mark.parametrize(("width", "dropped"), [(200, set()), (90, {"data"}), (60, {"data", "last heard", "best"})])
def test_status_of_several_runs_leaves_out_columns_that_do_not_fit_the_terminal(width, dropped, monkeypatch):
    record = {"run": "runs/a", "status": "running", "stop_reason": None, "step": 1200, "steps_left": 800, "loss": 3.25}
    record |= {"budget_seconds_left": None, "val_bpb": 1.5, "best_val_bpb": 1.25, "tokens_per_second": 125_000.0, "pid": None}
    record |= {"checkpoint": "step-00001000", "last_heard_seconds": 3.0, "host": None, "error": None, "data": "data/books"}
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    lines = _status_lines([record, record | {"run": "runs/b"}])
    shown = ["run", "status", "step", "left", "loss", "val_bpb", "best", "tokens/s", "last heard", "data"]
    assert re.split(r"\s{2,}", lines[0]) == [name for name in shown if name not in dropped]
    assert len(lines) == 3
