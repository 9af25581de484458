"""What goes wrong beside a run, and does not end it."""

from __future__ import annotations

import errno
import json
import os
import signal
from pathlib import Path

import pytest
from bucket_files import documents_of, write_buckets, write_pair
from tiny_runs import Train, records, train_tiny

from ingot.artifact import fresh_process
from ingot.backends.torch.inference import TorchInference
from ingot.errors import CannotContinue, CheckpointError, DataError, IngotError
from ingot.preflight.validate import check_before_training
from ingot.runs import folder
from ingot.runs import metrics as lines
from ingot.runs.checkpoints import save_checkpoint
from ingot.runs.folder import PARTIAL, saved_steps
from ingot.runs.reporter import Reporter, StepReport
from ingot.runs.view import Run
from ingot.train import outputs

BUCKETS = {"data__tokenizer": "byte", "data__sampling": "pack", "artifact__write": False}
MEAN_OF_TARGETS = """
from torch import nn

class Model(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.table = nn.Embedding(vocab_size, vocab_size)

    def forward(self, tokens, targets=None):
        logits = self.table(tokens)
        if targets is None:
            return logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
"""


@pytest.fixture
def failing_saves(monkeypatch: pytest.MonkeyPatch):
    """Gives what lets saves of some steps fail, each once; a signal comes just before, where one is asked for."""

    def fail(error: Exception, *steps: int, number: int | None = None) -> None:
        save, left = outputs.save_checkpoint, list(steps)

        def tried(folder, step, *rest):
            if step in left:
                left.remove(step)
                if number is not None:
                    os.kill(os.getpid(), number)
                raise error
            return save(folder, step, *rest)

        monkeypatch.setattr(outputs, "save_checkpoint", tried)

    return fail


def test_a_save_that_fails_for_want_of_memory_is_told_and_is_no_completed_run(train: Train, tmp_path, failing_saves):
    failing_saves(MemoryError(), 8, 20)
    with pytest.raises(CheckpointError, match=r"cannot save step 20 in .*: MemoryError"):
        train(tmp_path / "run")
    assert list(saved_steps(tmp_path / "run" / "checkpoints")) == [4, 12, 16]
    assert "cannot save step 8" in (tmp_path / "run" / "log.txt").read_text()
    assert Run.open(tmp_path / "run").status().status == "failed"


def test_a_run_whose_last_save_failed_is_scored_and_exported_before_it_says_so(train: Train, tmp_path, failing_saves):
    failing_saves(OSError(errno.ENOSPC, "No space left on device"), 20)
    with pytest.raises(CheckpointError, match=r"step 20 .*: No space left on device; make room"):
        train(tmp_path / "run")
    assert records(tmp_path / "run", "evaluation")[-1]["step"] == 20
    assert list((tmp_path / "run" / "artifact").iterdir())


class Blocked(Reporter):
    """Leaves a folder where the artifact is to be written."""

    def __init__(self, folder: Path):
        self._folder = folder

    def step(self, report: StepReport, log: bool) -> None:
        (self._folder / "artifact" / "model.safetensors").mkdir(parents=True, exist_ok=True)


@pytest.mark.parametrize(("fails", "said"), [((20,), "cannot save step 20 in"), ((), r"artifact.model\.safetensors")])
def test_a_run_that_cannot_be_exported_says_so_unless_its_last_step_is_not_saved_either(
    train: Train, tmp_path, failing_saves, fails, said
):
    """Of the two the step is what can be lost: whoever has the checkpoint can export it again."""
    failing_saves(OSError(errno.ENOSPC, "No space left on device"), *fails)
    with pytest.raises(IngotError, match=said) as error:
        train(tmp_path / "run", Blocked(tmp_path / "run"))
    assert ("cannot save" in str(error.value)) == bool(fails)
    assert records(tmp_path / "run", "evaluation")[-1]["step"] == 20
    assert (20 in saved_steps(tmp_path / "run" / "checkpoints")) != bool(fails)


def test_a_stop_at_a_step_that_cannot_be_saved_is_a_failure(train: Train, tmp_path, failing_saves):
    failing_saves(OSError(errno.ENOSPC, "No space left on device"), 8, 8, number=signal.SIGTERM)
    with pytest.raises(CheckpointError, match=r"step 8 .*: No space left on device; make room"):
        train(tmp_path / "run", training__save_every=8)
    assert Run.open(tmp_path / "run").status().status == "failed" and not any((tmp_path / "run" / "artifact").iterdir())


def test_a_stop_at_the_step_whose_save_failed_saves_it(train: Train, tmp_path, failing_saves):
    failing_saves(OSError(errno.ENOSPC, "No space left on device"), 8, number=signal.SIGTERM)
    assert train(tmp_path / "run", training__save_every=8).status == "stopped"
    assert 8 in saved_steps(tmp_path / "run" / "checkpoints")


def test_lines_for_which_the_disk_has_no_room_come_later(train: Train, tmp_path, monkeypatch):
    opened, calls = lines.open_to_append, []

    def full_for_a_while(path):
        calls.append(path.name)
        if 5 <= calls.count("metrics.jsonl") < 9:
            raise OSError(errno.ENOSPC, "No space left on device")
        return opened(path)

    monkeypatch.setattr(lines, "open_to_append", full_for_a_while)
    assert train(tmp_path / "run").status == "completed"
    assert [record["step"] for record in records(tmp_path / "run", "train")] == list(range(1, 21))


def test_a_first_score_that_is_no_number_does_not_stay_the_best(train: Train, tmp_path, monkeypatch):
    score, calls = TorchInference.score, []

    def scored(self, batch):
        calls.append(batch)
        return score(self, batch) if len(calls) > 1 else float("nan")

    monkeypatch.setattr(TorchInference, "score", scored)
    train(tmp_path / "run", evaluation__at_start=True, evaluation__every=5)
    best = {record["step"]: record["best"] for record in records(tmp_path / "run", "evaluation")}
    assert best[0] is False and best[5] is True


def test_a_run_is_complete_though_nobody_could_score_its_artifact(train: Train, tmp_path, monkeypatch):
    monkeypatch.setattr(fresh_process, "RUN_INGOT", "sys.stderr.write('out of memory\\n'); sys.exit(1)")
    result = train(tmp_path / "run", artifact__score=True)
    assert result.status == "completed" and result.artifact_bpb is None and result.val_bpb
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "completed"
    said = (tmp_path / "run" / "log.txt").read_text()
    assert "was not scored" in said and "out of memory" in said and "ingot eval --artifact" in said


def test_empty_rows_at_the_end_of_the_epochs_have_no_part_in_the_loss_of_ones_own_model(train: Train, tmp_path):
    (tmp_path / "mine.py").write_text(MEAN_OF_TARGETS)
    settings = {"data__epochs": 1, "training__tokens_per_step": 1024, "training__max_steps": 1000, "training__micro_batch": 1}
    result = train(tmp_path / "run", model__file=str(tmp_path / "mine.py"), optimizer__name="adamw", **settings)
    assert result.status == "completed" and result.stop_reason == "data"


@pytest.fixture
def buckets(tmp_path: Path) -> Path:
    return write_buckets(tmp_path / "buckets", {"a": documents_of("a", 60), "b": documents_of("b", 60)})


def test_dashboards_get_the_scores_of_the_buckets_that_have_one(tmp_path, buckets):
    settings = {"data__mix": {"a": 1, "b": 1}, "evaluation__every": 4, "evaluation__rows": 1, "tracking__tensorboard": True}
    assert train_tiny(buckets, tmp_path / "run", **BUCKETS, **settings).status == "completed"


@pytest.mark.parametrize("sampling", ["pack", "shuffle"])
def test_a_bucket_without_validation_text_is_left_out_of_the_scores(tmp_path, buckets, sampling):
    write_pair(buckets / "val" / "b" / "00000.bin", [])
    settings = {**BUCKETS, "data__sampling": sampling, "data__mix": {"a": 1, "b": 1}, "evaluation__every": 10}
    assert train_tiny(buckets, tmp_path / "run", **settings).status == "completed"
    assert [list(record["buckets"]) for record in records(tmp_path / "run", "evaluation")] == [["a"], ["a"]]


def test_a_validation_split_that_does_not_fill_a_row_is_told_before_anything_is_made(train: Train, tmp_path):
    with pytest.raises(DataError, match="does not fill a row of 1,024"):
        train(tmp_path / "run", data__seq_len=1024, training__tokens_per_step=1024, evaluation__whole_rows=True)
    assert not (tmp_path / "run").exists()


def test_a_run_is_not_continued_with_other_documents_left_out(tmp_path, buckets):
    left_out = {"documents": 60, "read": [[0, 30]]}
    record = {"format": "ingot-already-read", "version": 1, "buckets": {"a": left_out, "b": left_out}}
    (tmp_path / "read.json").write_text(json.dumps(record))
    settings = {**BUCKETS, "evaluation__every": 0, "data__already_read": str(tmp_path / "read.json")}
    train_tiny(buckets, tmp_path / "run", training__max_steps=4, **settings)
    (tmp_path / "read.json").rename(tmp_path / "moved.json")
    settings["data__already_read"] = str(tmp_path / "moved.json")
    assert train_tiny(buckets, tmp_path / "run", training__max_steps=6, **settings).total_steps == 6
    left_out["read"] = [[0, 20]]
    (tmp_path / "other.json").write_text(json.dumps(record))
    for other in (str(tmp_path / "other.json"), None):
        with pytest.raises(CannotContinue, match=r"data\.already_read"):
            train_tiny(buckets, tmp_path / "run", training__max_steps=8, **{**settings, "data__already_read": other})


def test_a_full_disk_has_no_sample_of_the_text_and_the_run_goes_on(train: Train, tmp_path, monkeypatch):
    def full(path, content, *rest, **options):
        if path.parent.name == "samples":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, content, *rest, **options)

    write = folder.write_atomically
    monkeypatch.setattr(folder, "write_atomically", full)
    assert train(tmp_path / "run", evaluation__every=10, evaluation__sample_tokens=4).status == "completed"


def test_a_save_after_which_old_ones_could_not_be_deleted_is_a_save(train: Train, tmp_path, monkeypatch):
    def fail(*what):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(outputs, "retain", fail)
    assert train(tmp_path / "run", training__save_every=20).status == "completed"
    assert f"cannot delete an old checkpoint in {tmp_path / 'run'}/checkpoints" in (tmp_path / "run/log.txt").read_text()
    assert list(saved_steps(tmp_path / "run" / "checkpoints")) == [20]


def test_a_run_whose_checkpoints_are_gone_does_not_begin_again(train: Train, tmp_path: Path) -> None:
    """They may be on a disk that is not mounted."""
    run = tmp_path / "run"
    train(run, training__max_steps=4)
    before = (run / "metrics.jsonl").read_bytes()
    (run / "checkpoints").rename(tmp_path / "elsewhere")
    (run / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match=r"step-00000004, .*; restore the checkpoints"):
        train(run, training__max_steps=8)
    with pytest.raises(CheckpointError, match="has saved step-00000004"):
        check_before_training(Run.open(run).config, 1, lambda line: None)
    assert (run / "metrics.jsonl").read_bytes() == before and (run / "result.json").is_file()
    assert train(run, training__max_steps=8, training__resume=str(tmp_path / "elsewhere")).total_steps == 8


def test_an_old_checkpoint_that_cannot_be_deleted_keeps_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (2, 4, 6):
        save_checkpoint(tmp_path, step, {}, {})
    plain = Path.rename

    def rename(path: Path, target: Path) -> Path:
        if path.name == "step-00000002":
            raise OSError(errno.EBUSY, "Device or resource busy")
        return plain(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(OSError, match="busy"):
        outputs.retain(tmp_path, 1, 0, None)
    assert list(saved_steps(tmp_path)) == [2, 6]
    monkeypatch.undo()
    (tmp_path / f"step-00000002{PARTIAL}").mkdir()
    (tmp_path / f"step-00000002{PARTIAL}" / "left").touch()
    outputs.retain(tmp_path, 1, 0, None)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000006"]
