"""`ingot train RUN` and `--resume RUN`: a run goes on with all its settings; `--force` begins anew."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from programs import checkpoints, losses, metrics, train_words

from ingot.cli import main
from ingot.errors import RunError
from ingot.runs.view import Run
from ingot.train.resume import saved_config
from ingot.train.trainer import Trainer

Call = Callable[..., tuple[str, str]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], shared: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """`ingot` in this process: what it printed, and what it said besides."""
    monkeypatch.setenv("INGOT_CACHE", str(shared / "cache"))

    def run(*words: object, code: int = 0) -> tuple[str, str]:
        with pytest.raises(SystemExit) as ended:
            main.run([str(word) for word in words])
        found = capsys.readouterr()
        assert ended.value.code == code, found.err
        return found.out, found.err

    return run


@pytest.mark.parametrize("option", [(), ("--resume",)])
def test_a_run_goes_on_with_all_its_settings_and_those_given_on_top(call: Call, data: Path, tmp_path: Path, option) -> None:
    run = tmp_path / "run"
    call(*train_words(data, run, training__max_steps=6, optimizer__learning_rate=0.002))
    call("train", *option, run, "--training.max_steps", 8, "--evaluation.sample_tokens", 0)
    config = Run.open(run).config
    assert (config.training.max_steps, config.optimizer.learning_rate) == (8, 0.002)
    assert config.training.output_dir == str(run) and list(losses(run)) == list(range(1, 9))


def test_what_was_set_besides_a_config_of_ones_own_stays_set(call: Call, data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    call(*train_words(data, run, training__max_steps=4))
    config = run / "config.yaml"
    mine = f"base: demo\ntraining: {{max_steps: 5, output_dir: {run}}}\n"
    config.write_text(mine)
    call("train", "--config", config, *(word for word in train_words(data, run)[3:] if "max_steps" not in word))
    call("train", run, "--training.max_steps=6")
    assert list(losses(run)) == list(range(1, 7)) and config.read_text() == mine


def test_an_edited_config_counts_and_is_told(call: Call, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    call(*train_words(data, run, training__max_steps=4, optimizer__learning_rate=0.002))
    config = run / "config.yaml"
    mine = re.sub(r"max_steps: 4 .*", "max_steps: 6  # mine", config.read_text())
    config.write_text(mine := mine.replace(" learning_rate: 0.002", " learning_rate: 0.001"))
    told = f"{config} has changed since the newest checkpoint: optimizer.learning_rate was 0.002 and is 0.001; "
    with monkeypatch.context() as patched:  # a session that ends before it has saved takes nothing of it away
        patched.setattr(Trainer, "prime", lambda *given: (_ for _ in ()).throw(RunError("the machine is gone")))
        _, said = call("train", run, code=1)
    assert f"{told}training.max_steps was 4 and is 6\n" in said
    _, said = call("train", run)
    assert f"{told}training.max_steps was 4 and is 6\n" in said
    assert list(losses(run)) == list(range(1, 7)) and config.read_text() == mine
    assert saved_config(run).optimizer.learning_rate == 0.001
    _, said = call("train", run, "--training.max_steps=7")
    assert "has changed" not in said and list(losses(run)) == list(range(1, 8)) and config.read_text() == mine


def test_a_record_of_a_session_that_was_killed_is_written_anew(call: Call, data: Path, tmp_path: Path, monkeypatch) -> None:
    run = tmp_path / "run"
    call(*train_words(data, run, training__max_steps=4))
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "prime", lambda *given: (_ for _ in ()).throw(RunError("the machine is gone")))
        call("train", run, "--training.max_steps=8", code=1)
    _, said = call("train", run, "--training.max_steps=6")
    assert "has changed" not in said and Run.open(run).config.training.max_steps == 6


def test_what_a_config_is_based_on_may_be_edited_too(call: Call, data: Path, tmp_path: Path) -> None:
    run, base = tmp_path / "run", tmp_path / "base.yaml"
    call(*train_words(data, run, training__max_steps=4))
    base.write_text((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(mine := "base: ../base.yaml\n")
    base.write_text(re.sub(r"max_steps: 4 .*", "max_steps: 6", base.read_text()))
    _, said = call("train", run)
    assert "has changed since the newest checkpoint: training.max_steps was 4 and is 6\n" in said
    assert list(losses(run)) == list(range(1, 7)) and (run / "config.yaml").read_text() == mine


def test_force_begins_a_run_anew_with_its_own_settings(call: Call, data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    call(*train_words(data, run, training__max_steps=4, optimizer__learning_rate=0.002))
    call("train", run, "--force", "--training.max_steps=2")
    assert list(losses(run)) == [1, 2] and Run.open(run).config.optimizer.learning_rate == 0.002


def test_a_finished_run_given_again_says_so_and_is_not_scored_again(call: Call, data: Path, tmp_path: Path) -> None:
    run, words = tmp_path / "run", train_words(data, tmp_path / "run", training__max_steps=4)
    first, _ = call(*words, "--json")
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    for again in (words, ["train", str(run)], [*words, "--nproc-per-node=2"]):
        told, said = call(*again, "--json")
        assert json.loads(told) == {**json.loads(first), "sample": json.loads(told)["sample"]}
        assert f"{run} is complete: raise training.max_steps" in said
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    call("train", run, "--artifact.dtype", "bf16")  # what differs is done
    assert len(metrics(run, "evaluation")) == 1


def test_force_begins_anew_and_says_what_it_deletes(call: Call, data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = train_words(data, run, training__max_steps=4)
    call(*words)
    (run / "notes.txt").write_text("mine")
    _, said = call(*words, "--force")
    assert f"--force deletes from {run}: " in said and "metrics.jsonl" in said and "notes.txt" not in said
    assert (run / "notes.txt").read_text() == "mine" and list(checkpoints(run)) == [4]
    assert [line["session"] for line in metrics(run)] == [1] * 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["demo"], "demo is not a run folder; did you mean the recipe --recipe demo"),
        (["RUN", "--resume", "RUN"], "both name a run; keep one"),
        (["RUN", "--config", "a.yaml"], "RUN is resumed with the settings in its config.yaml; leave --config out"),
        (["--resume", "RUN", "--training.output_dir", "x"], "training.output_dir cannot be set when RUN is resumed"),
        (["--training.max_steps", "3", "RUN"], "unexpected 'RUN' on the command line"),
    ],
)
def test_what_does_not_go_together_is_told(call: Call, tmp_path: Path, monkeypatch, words: list[str], said: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "RUN").mkdir()
    (tmp_path / "RUN" / "config.yaml").write_text("base: demo\n")
    _, told = call("train", *words, code=2)
    assert said in told and told.count("\n") == 1


def test_a_folder_that_is_no_run_is_told(call: Call, tmp_path: Path) -> None:
    _, told = call("train", "--resume", tmp_path, code=4)
    assert f"{tmp_path} is not a run folder" in told
