"""`ingot sweep`: its table, its JSON, and what it refuses, in this process."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from experiments_kit import said

from ingot.cli.train import table
from ingot.experiments.sweep import ArmSummary, TrialSummary
from ingot.runs.view import Run

VARY = ["sweep", "--vary", "data.sampling=shuffle,redraw", "--seeds", "1,2"]


@pytest.fixture
def swept(swept_once, tiny_words) -> tuple[str, str]:
    """A copy of the sweep in the current folder, and what it printed."""
    folder, out, err = swept_once
    shutil.copytree(folder / "runs", "runs")
    return out, err


def test_a_sweep_ends_with_one_table_and_goes_on_with_more_seeds(swept, tiny_words, capsys):
    out, err = swept
    lines = [line.split() for line in out.splitlines()]
    assert [line[:2] for line in lines] == [["arm", "n"], ["sampling=shuffle", "2/2"], ["sampling=redraw", "2/2"]]
    assert lines[2][4].startswith(("+", "-")) and out.count("<- best") == 1
    assert [line.split()[:4] for line in err.splitlines()] == [
        [f"{i}/4", f"sampling={arm}", "seed", seed]
        for i, (seed, arm) in enumerate([(s, a) for s in "12" for a in ("shuffle", "redraw")], 1)
    ]
    code, printed, err = said(capsys, *VARY[:-1], "1,2,3", "--json", *tiny_words)
    told = json.loads(printed)
    assert code == 0 and [line.split()[0] for line in err.splitlines()] == ["5/6", "6/6"]
    assert [arm["n"] for arm in told["arms"]] == [3, 3] and told["arms"][0]["p"] is None
    runs = told["arms"][1]["trials"]
    assert [run["status"] for run in runs] == ["completed"] * 3
    assert runs[2]["run"] == "runs/sweep/sampling=redraw/seed-3"
    assert runs[0]["score"] == json.loads(Path(runs[0]["run"], "result.json").read_text())["val_bpb"]


def test_a_run_says_which_of_its_settings_the_sweep_gave_it(swept):
    text = Path("runs/sweep/sampling=redraw/seed-2/config.yaml").read_text()
    assert "  sampling: redraw  # sweep\n" in text and "  seed: 2  # sweep\n" in text and "# python" not in text


def test_the_runs_of_two_arms_are_compared(swept, capsys):
    arms = [sorted(Path("runs/sweep", name).glob("seed-*")) for name in ("sampling=shuffle", "sampling=redraw")]
    out = said(capsys, "compare", *arms[0], "--", *arms[1])[1]
    assert "differ in data.sampling: shuffle and redraw" in out and "(Welch, two-sided)" in out


def test_an_artifact_is_written_only_where_it_or_its_score_is_asked_for(swept, tiny_words, capsys):
    assert not list(Path("runs/sweep/sampling=redraw/seed-2/artifact").iterdir())
    words = [word for word in tiny_words if "artifact" not in word]
    code, out, _ = said(capsys, "sweep", "--vary", "model.layers=1", "--seeds=1", "--score", "artifact_bpb", *words)
    told = json.loads(Path("runs/sweep/layers=1/seed-1/result.json").read_text())
    assert code == 0 and out.splitlines()[1].split()[:3] == ["layers=1", "1/1", f"{told['artifact_bpb']:.4f}"]
    assert len(list(Path("runs/sweep/layers=1/seed-1/artifact").iterdir())) == 1


def test_every_arm_is_scored_on_the_whole_text_unless_rows_are_asked_for(tiny_words, capsys):
    Path("c.yaml").write_text("evaluation: {final_rows: auto}\nbudget: {seconds: 60}\n")
    for more, rows in ([], None), (["--evaluation.final_rows=3"], 3):
        out = Path("runs", str(rows))
        words = ["sweep", "--config=c.yaml", "--vary", "model.layers=1", "--seeds=1", "-o", out, *more, *tiny_words]
        assert said(capsys, *words)[0] == 0
        assert Run.open(out / "layers=1/seed-1").config.evaluation.final_rows == rows


def test_runs_that_were_stopped_are_told_and_can_be_an_exit_code(tiny_words, capsys):
    words = [word for word in tiny_words if "max_steps" not in word]
    more = ["--training.max_steps=100000", "--training.max_runtime_seconds=1", "--seeds=1", "--stop-exit-code=7"]
    code, out, err = said(capsys, "sweep", "--vary", "model.layers=1", *words, *more)
    assert code == 7 and "seed 1: stopped" in out
    assert err.splitlines()[-1].endswith("the same command resumes them")


def test_a_failed_run_is_told_in_the_table_and_by_the_exit_code(tiny_words, capsys):
    words = [word for word in tiny_words if "device" not in word]
    code, out, err = said(capsys, "sweep", "--vary", "training.device=cpu,cuda:7", "--seeds=1", *words)
    assert code == 1 and "device=cpu  " in out and "seed 1: failed" in out
    assert "1 of 2 runs failed (runs/sweep/device=cuda-7/seed-1: training.device=cuda:7" in err.splitlines()[-1]
    assert "the same command tries them again" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "there is nothing to sweep"),
        (["--vary", "model.layers=1", "--seeds", "one"], "--seeds one is not a list of numbers"),
        (["--vary", "model.layers=1", "--training.output_dir", "x"], "give --output instead"),
        (["--vary", "model.layers=1", "--training.seed", "3"], "training.seed cannot be set here; give --seeds instead"),
        (["--vary", "model.layrs=1"], "unknown setting model.layrs"),
        (["--vary", "data.path=sample:shakespeare,nowhere"], "no data at nowhere"),
    ],
)
def test_a_mistake_is_one_line_before_anything_runs(tiny_words, capsys, words, told):
    code, out, err = said(capsys, "sweep", *words, *[word for word in tiny_words if "data.path" not in word])
    assert code in (2, 3) and out == "" and told in err and err.count("\n") == 1
    assert not Path("runs").exists()


def test_nothing_is_loaded_that_computes_where_all_is_complete(swept, tiny_words, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert said(capsys, *VARY, *tiny_words)[0] == 0


def test_the_table_shows_what_arms_do_at_the_moment():
    done = TrialSummary("a/1", 1, "completed", 1.5, 1000.0, 60.0)
    runs = TrialSummary("a/2", 2, "running", None, 1200.0, 61.0)
    dead = TrialSummary("a/3", 3, "crashed", None, None, 5.0)
    rows = table([ArmSummary("a", (done, runs, dead), 1, 1.5, None, None, None), ArmSummary("b", (), 0, None, None, None, None)])
    assert rows[1] == ("a", "1/3", "1.5000", "-", "-", "-", "1,100", "seed 2: 61 s, seed 3: crashed")
    assert rows[2][1:7] == ("0/0", "-", "-", "-", "-", "-")
