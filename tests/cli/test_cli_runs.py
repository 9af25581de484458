"""`ingot status` and `ingot plot`, on run folders with known numbers."""

from __future__ import annotations

import json
import shutil
import sys
from contextlib import redirect_stderr
from pathlib import Path

import pytest
from programs import said, write_run, write_state

Capsys = pytest.CaptureFixture[str]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three runs, one of them a folder further down, two of one text."""
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs/first", [5.0, 4.0, 3.0], [3.5, 3.2])
    write_run(tmp_path / "runs/sweep/second", [5.0, 4.0, 2.0], [2.9, 3.1])
    write_run(tmp_path / "runs/other", [5.0, 4.5], [1.5], data="data/b")
    return tmp_path / "runs"


def test_runs_are_listed_with_status_and_best_score(runs: Path, capsys: Capsys):
    code, out, err = said(capsys, "status")
    header, *lines = out.splitlines()
    assert (code, err) == (0, "") and header.split()[:3] == ["run", "status", "step"] and header.split()[-1] == "data"
    assert [line.split()[:3] for line in lines] == [
        ["runs/first", "completed", "3"], ["runs/other", "completed", "2"], ["runs/sweep/second", "completed", "3"],
    ]  # fmt: skip
    assert "3.2000   3.2000  " in lines[0] and lines[0].endswith("data/a") and lines[1].endswith("data/b")
    assert "3.1000   2.9000 <- best" in lines[2]


def test_the_data_of_a_run_is_listed_with_the_tokenizer_that_was_used(runs: Path, reference: Path, capsys: Capsys):
    run = shutil.copytree(reference, runs / "reference")
    (run / "config.yaml").unlink()  # the newest checkpoint records both and is read ten times as fast
    [line] = [line for line in said(capsys, "status")[1].splitlines() if "runs/reference" in line]
    assert line.endswith(", byte")


def test_the_best_is_marked_among_runs_on_the_same_text_alone(runs: Path, capsys: Capsys):
    records = json.loads(said(capsys, "status", runs, "--json")[1])
    assert {Path(record["run"]).name: record["best"] for record in records} == {"first": False, "other": True, "second": True}
    assert records[0]["best_val_bpb"] == 3.2 and records[0]["best_step"] == 3


def test_a_run_without_metrics_or_with_damaged_ones_is_listed_without_a_score(runs: Path, capsys: Capsys):
    write_state(runs / "new")
    (runs / "first" / "metrics.jsonl").write_text("damaged\n")
    records = json.loads(said(capsys, "status", "--json")[1])
    assert [record["status"] for record in records] == ["completed", "running", "completed", "completed"]
    assert [record["best_val_bpb"] for record in records] == [None, None, 1.5, 2.9] and records[1]["data"] is None


def test_curves_of_several_runs_are_drawn_in_the_terminal(runs: Path, capsys: Capsys):
    code, out, _ = said(capsys, "plot", runs / "first", runs / "sweep/second")
    assert code == 0 and "training loss, nats per token" in out and "validation, bits per byte" in out
    assert out.count("a first") == 2 and "b second  2.0000" in out and "b second  3.1000" in out


def test_runs_of_one_name_are_told_apart_by_their_paths(runs: Path, capsys: Capsys):
    write_run(runs / "sweep/first", [5.0, 1.0])
    out = said(capsys, "plot", runs / "first", runs / "sweep/first")[1]
    assert f"a {runs}/first" in out and f"b {runs}/sweep/first" in out


@pytest.mark.parametrize(("name", "begins"), [("a.svg", b"<?xml"), ("a.png", b"\x89PNG\r\n\x1a\n")])
def test_a_picture_has_every_run_and_is_the_same_each_time(runs: Path, tmp_path: Path, capsys: Capsys, name: str, begins: bytes):
    pytest.importorskip("matplotlib")
    pictures = []
    for _ in range(2):
        assert said(capsys, "plot", runs / "first", runs / "other", "-o", tmp_path / name) == (0, f"{tmp_path / name}\n", "")
        pictures.append((tmp_path / name).read_bytes())
    assert pictures[0].startswith(begins) and pictures[0] == pictures[1]
    if name == "a.svg":
        assert all(words in pictures[0].decode() for words in ("> first<", "> other<", "bits per byte"))


def test_the_last_sample_stands_beside_the_curves(runs: Path, tmp_path: Path, capsys: Capsys):
    pytest.importorskip("matplotlib")
    (runs / "first/samples").mkdir()
    (runs / "first/samples/step-00000002.txt").write_text("an early text")
    (runs / "first/samples/step-00000003.txt").write_text("To be, $or$ not")
    assert said(capsys, "plot", runs / "first", "--sample")[1].endswith("\n\nTo be, $or$ not\n")
    said(capsys, "plot", runs / "first", "--sample", "-o", tmp_path / "a.svg")
    assert "To be, $or$ not" in (tmp_path / "a.svg").read_text()
    code, _, err = said(capsys, "plot", runs / "other", "--sample")
    assert code == 4 and "has no samples" in err


def test_programs_get_the_points(runs: Path, capsys: Capsys):
    found = json.loads(said(capsys, "plot", runs / "first", "--x", "tokens", "--json")[1])
    assert found["x"] == "tokens" and found["runs"]["first"] == {
        "loss": [[100, 5.0], [200, 4.0], [300, 3.0]], "val_bpb": [[200, 3.5], [300, 3.2]], "tasks": {},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "code", "answer"),
    [
        (
            ["runs/first", "-o", "a.jpg"],
            2,
            "--output a.jpg is not a supported plot format; give a name that ends in .png or .svg",
        ),
        (["runs/first", "-o", "gone/a.png"], 2, "the folder gone does not exist; create it first"),
        (["runs/sweep"], 4, "runs/sweep is not a run folder"),
        (["runs/new"], 4, "new has no step to draw yet"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(runs: Path, capsys: Capsys, words: list[str], code: int, answer: str):
    write_state(runs / "new")
    found, out, err = said(capsys, "plot", *words)
    assert (found, out) == (code, "") and answer in err and err.count("\n") == 1


def test_without_matplotlib_a_picture_says_what_to_install_and_the_terminal_needs_nothing(
    runs: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = said(capsys, "plot", runs / "first", "-o", "a.png")
    assert code == 2 and "--output" in err and "pip install 'ingot-lm[plots]'" in err
    assert said(capsys, "plot", runs / "first")[0] == 0


def test_the_error_about_changed_settings_names_the_way_to_continue(reference: Path, tmp_path: Path, capsys: Capsys):
    run = shutil.copytree(reference, tmp_path / "run")
    words = ("--config", run / "config.yaml", "--training.output_dir", run, "--training.seed", 99)
    code, _, err = said(capsys, "train", *words)
    assert code == 4 and "training.seed" in err and "ingot train RUN" in err


def test_a_finished_run_says_so_on_the_last_line(reference: Path, tmp_path: Path, capsys: Capsys):
    run = shutil.copytree(reference, tmp_path / "run")
    with redirect_stderr(sys.stdout):
        code, out, _ = said(capsys, "train", run)
    assert code == 0 and "is complete" in out.splitlines()[-1]
