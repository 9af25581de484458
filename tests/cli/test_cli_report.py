"""`ingot report` and `ingot status --watch`: what they show of runs, by their folders alone."""

import json
import os
import re
import shutil

import pytest
import yaml
from typer.testing import CliRunner

from ingot.cli import status as command
from ingot.cli.main import app
from ingot.console.progress import draw_lines
from ingot.errors import CheckpointError, ConfigError


@pytest.fixture
def call():
    return lambda *words: CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def runs(reference, tmp_path):
    """A run and two copies of it: one of another seed, one of another learning rate with a hostile sample."""
    found = []
    for name, section, setting, value in (
        ("a", "training", "seed", 1),
        ("b", "training", "seed", 2),
        ("c", "optimizer", "floor", 0.3),
    ):
        copy = tmp_path / name
        shutil.copytree(reference, copy)
        text = (copy / "config.yaml").read_text()
        config = yaml.safe_load(text)
        config[section][setting] = value
        (copy / "config.yaml").write_text(yaml.safe_dump(config))
        found.append(copy)
    (found[2] / "samples").mkdir(exist_ok=True)
    (found[2] / "samples" / "step-00009999.txt").write_text("<script>alert(1)</script>")
    return found


def test_the_page_has_everything_inside_and_asks_nothing_of_anybody(call, runs, tmp_path):
    pytest.importorskip("matplotlib")
    told = json.loads(call("report", *runs, "-o", tmp_path / "r.html", "--json").stdout)
    page = (tmp_path / "r.html").read_text()
    assert told["bytes"] == len(page.encode()) < 3_000_000 * len(runs) / 10
    assert not re.search(r'(?:src|href)="(?!data:)', page) and "default-src 'none'" in page
    assert page.count("data:image/png;base64,") == 1
    assert "<td>optimizer.floor</td>" in page and "<td>0.3</td>" in page
    assert "<td>a, b</td><td>2</td>" in page  # one arm of two seeds
    assert "<script>alert(1)" not in page and "&lt;script&gt;alert(1)" in page
    data = json.loads(re.search(r'<script type="application/json" id="ingot-report">(.*?)</script>', page)[1])
    assert set(data) == {"a", "b", "c"} and len(data["a"]["loss"]) > 5 and data["a"]["tokens_per_second"]


def test_tasks_that_were_scored_while_training_have_a_table_and_a_curve(call, runs, tmp_path):
    pytest.importorskip("matplotlib")
    assert "<h2>Tasks" not in (call("report", runs[0], "-o", tmp_path / "r.html"), (tmp_path / "r.html").read_text())[1]
    scored = {"lambada": {"items": 100, "acc": 0.25, "acc_stderr": 0.0435, "perplexity": 30.0}, "piqa": {"items": 1, "acc": 1.0}}
    with (runs[0] / "metrics.jsonl").open("a") as metrics:
        metrics.write(
            json.dumps({"kind": "evaluation", "step": 9, "val_bpb": 2.0, "elapsed_seconds": 1.0, "tasks": scored}) + "\n"
        )
    assert call("report", runs[0], "-o", tmp_path / "s.html").exit_code == 0
    page = (tmp_path / "s.html").read_text()
    assert "<td>9</td><td>lambada</td><td>0.2500</td><td>0.0435</td><td></td><td>100</td>" in page and "<td>piqa</td>" in page
    assert '"tasks":{"lambada":[[9.0,0.25]]' in re.sub(r"\s", "", page)
    assert "tasks, accuracy" in call("status", "--watch", runs[0]).stdout


def test_what_is_damaged_in_a_run_is_left_out_and_the_page_is_written(call, runs, tmp_path):
    pytest.importorskip("matplotlib")
    run = runs[2].rename(runs[2].with_name(os.fsdecode(b"c\xff")))
    odd = [
        {"kind": "train", "step": 10**400, "loss": 10**400, "elapsed_seconds": 10**400, "tokens_per_second": "very fast"},
        {"kind": "evaluation", "step": 1, "val_bpb": "low", "tasks": "all"},
        {"kind": "evaluation", "step": 2, "val_bpb": 2.0, "tasks": {"piqa": {"acc": "high"}, "lambada": 0.5}},
    ]
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write("".join(json.dumps(record) + "\n" for record in odd))
    result = {"tokens_per_second": "very fast", "val_stride": "far", "artifact_bytes": "very few", "artifact_bpb": []}
    (run / "result.json").write_text(json.dumps(result))
    (run / "samples" / "step-00009999.txt").unlink()
    os.mkfifo(run / "samples" / "step-00009999.txt")
    done = call("report", run, "-o", tmp_path / "r.html")
    assert (done.exit_code, done.exception) == (0, None)
    page = (tmp_path / "r.html").read_text()
    assert "cannot be read: it is a pipe" in page and "<td>piqa</td><td></td><td></td><td></td><td></td>" in page
    assert "c\\udcff" in page and "very f" not in page  # with a space, which no picture in the page has


def test_of_one_run_the_settings_that_are_not_the_defaults_are_shown(call, runs, tmp_path):
    pytest.importorskip("matplotlib")
    assert call("report", runs[0], "-o", tmp_path / "r.html").exit_code == 0
    page = (tmp_path / "r.html").read_text()
    assert "Settings that differ from the defaults" in page and "<td>training.seed</td><td>1</td>" in page
    assert "Over seeds" not in page


def test_a_page_that_cannot_be_written_is_told_at_once(call, runs, tmp_path):
    (tmp_path / "r.html").write_text("mine")
    assert "exists; --force replaces it" in str(call("report", runs[0], "-o", tmp_path / "r.html").exception)
    assert "give one that ends in .html" in str(call("report", runs[0], "-o", tmp_path / "r.pdf").exception)
    (runs[0] / "metrics.jsonl").write_text("")
    result = call("report", runs[0], "-o", tmp_path / "s.html")
    assert isinstance(result.exception, CheckpointError) and "has no step to report yet" in str(result.exception)
    assert (tmp_path / "r.html").read_text() == "mine" and not (tmp_path / "s.html").exists()


def test_watching_shows_status_curves_and_the_time_of_a_step(call, runs):
    shown = call("status", "--watch", *runs[:2]).stdout
    assert "completed" in shown and "training loss, nats per token" in shown and "validation, bits per byte" in shown
    assert re.search(r"a: a step takes p50 \d+\.\d{4} s, p95", shown)


def test_watching_has_colours_on_a_terminal_unless_they_are_not_wanted(call, runs, monkeypatch):
    monkeypatch.setattr(command, "is_terminal", lambda stream: True)
    monkeypatch.setattr(command, "draw_lines", lambda lines, drawn: print("\n".join(lines)))
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[36m" in call("status", "--watch", runs[0]).stdout
    monkeypatch.setenv("NO_COLOR", "1")
    shown = call("status", "--watch", runs[0]).stdout
    assert "training loss" in shown and "\x1b" not in shown


@pytest.mark.parametrize(("size", "columns", "rows"), [((30, 4), 29, 3), ((0, 0), 79, 23)])
def test_lines_are_cut_to_the_terminal_by_what_is_seen_of_them(size, columns, rows, monkeypatch, capfd):
    monkeypatch.setattr("os.get_terminal_size", lambda descriptor: size)
    assert draw_lines(["\x1b[36ma\x1b[0m" * 100] * 30, 0) == rows
    shown = [line.replace("\x1b[36m", "").replace("\x1b[0m", "") for line in capfd.readouterr().out.splitlines() if line.strip()]
    assert [line.removeprefix("\x1b[K") for line in shown] == ["a" * columns] * rows


def test_without_matplotlib_it_is_said_what_to_install(call, runs, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = call("report", runs[0], "-o", tmp_path / "r.html")
    assert isinstance(result.exception, ConfigError) and "pip install 'ingot-lm[plots]'" in str(result.exception)


def test_a_sample_that_is_a_link_out_of_the_run_stays_out_of_the_page(call, runs, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "secret").write_text("the private text")
    (runs[2] / "samples" / "step-00009999.txt").unlink()
    (runs[2] / "samples" / "step-00009999.txt").symlink_to(tmp_path / "secret")
    assert call("report", runs[2], "-o", tmp_path / "r.html").exit_code == 0
    page = (tmp_path / "r.html").read_text()
    assert "private" not in page and "link to a file outside the run folder" in page


def test_a_report_without_a_name_is_written_to_the_current_folder(call, runs, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    assert call("report", runs[0]).exit_code == 0 and (tmp_path / "report.html").is_file()
