"""What a run leaves in its folder and takes from another's: kinds of checkpoints, states copied in, what --force deletes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from tiny_runs import TINY, Train, records, state_of

from ingot.config.loading import load_config
from ingot.errors import CheckpointError, ConfigError, RunError
from ingot.runs.checkpoints import read_kind
from ingot.runs.folder import RunFolder, saved_steps
from ingot.runs.reporter import Reporter, StepReport
from ingot.runs.state import utc_now
from ingot.runtime.files import write_atomically
from ingot.train.start import run


class Listener(Reporter):
    """Notes saves and messages, and sends this process SIGTERM at a step."""

    def __init__(self, stop_at: int = -1) -> None:
        self.stop_at, self.saves, self.lines = stop_at, list[tuple[str, str]](), list[str]()

    def step(self, report: StepReport, log: bool) -> None:
        if report.step == self.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)

    def saved(self, path: Path, kind: str = "regular") -> None:
        self.saves.append((path.name.removeprefix("step-0000"), kind))

    def message(self, text: str) -> None:
        self.lines.append(text)


def kinds_of(run: Path) -> dict[int, str]:
    return {step: read_kind(path) for step, path in saved_steps(run / "checkpoints").items()}


def test_a_save_says_whether_it_was_on_the_way_by_a_stop_or_at_the_end(train: Train, tmp_path: Path) -> None:
    heard = Listener(stop_at=6)
    train(tmp_path / "run", heard)
    train(tmp_path / "run", heard, training__max_steps=10)
    assert kinds_of(tmp_path / "run") == {4: "regular", 7: "shutdown", 8: "regular", 10: "final"}
    assert heard.saves == [("0004", "regular"), ("0007", "shutdown"), ("0008", "regular"), ("0010", "final")]


def test_a_stop_at_a_step_that_was_just_saved_makes_its_checkpoint_one_of_a_stop(train: Train, tmp_path: Path) -> None:
    heard = Listener(stop_at=7)
    train(tmp_path / "run", heard)
    assert kinds_of(tmp_path / "run") == {4: "regular", 8: "shutdown"}
    assert heard.saves == [("0004", "regular"), ("0008", "regular"), ("0008", "shutdown")]


def test_a_completed_run_that_is_given_more_steps_goes_on_from_its_newest_checkpoint(train: Train, tmp_path: Path) -> None:
    unjudged = {"evaluation__at_end": False}
    train(tmp_path / "run", training__max_steps=6, **unjudged)
    train(tmp_path / "run", Listener(stop_at=10), **unjudged)
    assert kinds_of(tmp_path / "run") == {4: "regular", 6: "final", 8: "regular", 11: "shutdown"}
    assert train(tmp_path / "run", training__max_steps=14, **unjudged).total_steps == 14
    assert kinds_of(tmp_path / "run") == {4: "regular", 8: "regular", 11: "shutdown", 12: "regular", 14: "final"}


def test_a_run_begins_with_the_state_of_anothers_checkpoint_and_ends_as_that_one_would(train: Train, tmp_path: Path) -> None:
    train(tmp_path / "one")
    source = tmp_path / "one" / "checkpoints" / "step-00000008"
    heard = Listener(stop_at=12)
    train(tmp_path / "two", heard, training__resume=str(source))
    assert f"starting from the state of {source}" in heard.lines and kinds_of(tmp_path / "two")[8] == "regular"
    shutil.rmtree(tmp_path / "one" / "checkpoints" / "step-00000008")  # the copy is all that the same command needs again
    train(tmp_path / "two", training__resume=str(source))
    assert state_of(tmp_path / "two") == state_of(tmp_path / "one")
    assert [record["step"] for record in records(tmp_path / "two", "train")] == list(range(9, 21))


def test_a_run_folder_as_the_state_to_begin_with_means_its_newest_checkpoint(train: Train, tmp_path: Path) -> None:
    train(tmp_path / "one", training__max_steps=6)
    assert train(tmp_path / "two", training__resume=str(tmp_path / "one"), training__max_steps=7).total_steps == 7
    assert 6 in kinds_of(tmp_path / "two")


def test_the_newest_checkpoint_of_the_run_itself_is_gone_on_from_and_an_older_one_is_refused(
    train: Train, tmp_path: Path
) -> None:
    train(tmp_path / "run", training__max_steps=8)
    newest, older = (tmp_path / "run" / "checkpoints" / f"step-{step:08d}" for step in (8, 4))
    assert train(tmp_path / "run", training__resume=str(newest), training__max_steps=9).total_steps == 9
    with pytest.raises(
        CheckpointError, match=r"has newer checkpoints \(newest checkpoint: step 9\); choose another training\.output_dir"
    ):
        train(tmp_path / "run", training__resume=str(older))
    assert 9 in kinds_of(tmp_path / "run")


def test_a_state_is_not_brought_into_a_folder_that_holds_another_run(train: Train, tmp_path: Path) -> None:
    for name in ("one", "two"):
        train(tmp_path / name, training__max_steps=4)
    with pytest.raises(CheckpointError, match=r"two holds another run \(newest checkpoint: step 4\)"):
        train(tmp_path / "two", training__resume=str(tmp_path / "one"))


def test_a_state_of_another_model_is_refused_and_nothing_is_copied(train: Train, tmp_path: Path) -> None:
    train(tmp_path / "one", training__max_steps=4)
    with pytest.raises(CheckpointError, match=r"cannot be continued: model\.width was 16 and is 32"):
        train(tmp_path / "two", training__resume=str(tmp_path / "one"), model__width=32)
    assert kinds_of(tmp_path / "two") == {}


@pytest.mark.parametrize("word", ["nevr", "checkpoints/step-00000004"])
def test_a_state_that_is_not_there_is_told_with_the_words_that_may_be_given(train: Train, tmp_path: Path, word: str) -> None:
    with pytest.raises(CheckpointError, match=rf"training\.resume={word}: there is no {word}; .* or auto or never"):
        train(tmp_path / "run", training__resume=word)


def forced(data: Path, folder: Path, reporter: Reporter | None = None, files: tuple[str, ...] = (), **settings: object) -> None:
    given = {name.replace("__", "."): value for name, value in settings.items()}
    values = {**TINY, "data.path": str(data), "training.output_dir": str(folder), "training.max_steps": 4, **given}
    run(load_config(python=values, environment={}), reporter, force=True, files=files)


def test_force_lists_and_deletes_what_ingot_wrote_and_nothing_else(train: Train, data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(folder, training__resume="never", evaluation__sample_tokens=2, tracking__tensorboard=True)
    mine = ["notes.txt", "model.py", "checkpoints/step-1", "samples/mine.txt", "artifact/figure.png", "extra/theirs.json"]
    for name in mine:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("mine")
    heard = Listener()
    forced(data, folder, heard, files=("extra/*.json",), training__resume="never")
    [line] = [line for line in heard.lines if line.startswith("--force")]
    assert all(word in line for word in ("config.yaml", "metrics.jsonl", "checkpoints/ (5)", "samples/ (1)", "artifact/ (1)"))
    assert "tensorboard/ (1)" in line and "extra/ (1)" in line
    assert not (folder / "extra" / "theirs.json").exists()
    assert all((folder / name).read_text() == "mine" for name in mine[:-1])
    assert kinds_of(folder) == {4: "final"} and not list((folder / "tensorboard").iterdir())


def test_force_deletes_nothing_where_the_run_would_not_begin(train: Train, data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(folder, training__max_steps=4)
    with pytest.raises(ConfigError):
        forced(data, folder, evaluation__sample_prompt="\u2603", model__vocab_size=3)
    with RunFolder(folder).claim(), pytest.raises(RunError, match="is in use by process"):
        forced(data, folder)
    train(tmp_path / "other", training__max_steps=2, model__width=32)
    with pytest.raises(CheckpointError, match=r"model\.width was 32 and is 16"):
        forced(data, folder, training__resume=str(tmp_path / "other"))
    with pytest.raises(CheckpointError, match=r"there is no checkpoint in"):
        forced(data, folder, training__resume=str(tmp_path / "nowhere"))
    for setting in ("training__resume", "training__weights"):
        with pytest.raises(ConfigError, match=r"is in the folder that --force deletes"):
            forced(data, folder, **{setting: str(folder / "checkpoints" / "step-00000004")})
    assert kinds_of(folder) == {4: "final"}


def test_force_leaves_the_config_and_the_model_that_the_run_is_started_from(train: Train, data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    config, model = folder / "config.yaml", folder / "model.py"
    train(folder, training__max_steps=2)
    config.write_text(f"training: {{output_dir: {folder}, max_steps: 2}}\ndata: {{path: {data}}}\n")
    model.write_text("from ingot.model.gpt2 import GPT2 as Model\n")
    before = config.read_text(), model.read_text()
    plain = {name: value for name, value in TINY.items() if name != "training.max_steps"}
    settings = {**plain, "model.family": "file", "model.file": str(model)}
    run(load_config(file=config, python=settings, environment={}), force=True)
    assert (config.read_text(), model.read_text()) == before and kinds_of(folder) == {2: "final"}


def test_a_run_whose_folder_another_host_got_too_ends_with_an_error_and_leaves_it_the_folder(
    train: Train, tmp_path: Path
) -> None:
    class Other(Reporter):
        def step(self, report: StepReport, log: bool) -> None:
            if report.step >= 3:  # its heartbeats
                state = json.loads((tmp_path / "run" / "state.json").read_text())
                self.state = state | {"host": "there", "pid": 7, "updated_at": utc_now()}
                write_atomically(tmp_path / "run" / "state.json", json.dumps(self.state))
            time.sleep(0.05)

    other = Other()
    with pytest.raises(RunError, match="also in use by process 7 on there"):
        train(tmp_path / "run", other, tracking__heartbeat_seconds=0.1, training__max_steps=100)
    assert json.loads((tmp_path / "run" / "state.json").read_text()) == other.state
