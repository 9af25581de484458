"""gpt-simple's files beside ours: what they say, which are kept, and that the original works with them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from ingot.api import load
from ingot.artifact.gpt_simple import Saved, saved_checkpoints
from ingot.compat.gpt_simple.config import read_config
from ingot.compat.gpt_simple.main import main
from ingot.compat.gpt_simple.training import GptSimpleReporter
from ingot.compat.gpt_simple.translate import translate
from ingot.inference.model import open_weights
from ingot.runs.checkpoints import to_keep
from ingot.runs.reporter import BeginReport

RUN_STATE = (
    "config_path", "error", "global_step", "latest_checkpoint", "learning_rate", "loss", "max_steps", "pid", "started_at",
    "status", "tokens_per_sec", "tokens_trained", "updated_at",
)  # fmt: skip


def refuse(constant: str) -> NoReturn:
    raise AssertionError(f"{constant} is not JSON")


def strict(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(), parse_constant=refuse)


def test_its_files_lie_beside_ours_and_say_what_it_would_say(our_run: Path) -> None:
    out = our_run / "out"
    names = {saved.path.name: saved.step for saved in saved_checkpoints(out)}
    assert names == {"checkpoint-4": 4, "checkpoint-8": 8, "checkpoint-12": 12, "final": 12}
    state = strict(out / ".run_state.json")
    assert tuple(sorted(state)) == RUN_STATE
    assert (state["status"], state["global_step"], state["max_steps"]) == ("completed", 12, 12)
    assert state["latest_checkpoint"] == str(out / "checkpoints/final") and 0 < state["loss"] < 7
    keys = strict(out / "config.json")
    assert [len(keys[name]) for name in ("model", "data", "optimizer", "training")] == [21, 10, 9, 19]
    assert keys["model"]["vocab_size"] is None and keys["optimizer"]["beta2"] == 0.95
    for name in names:
        told = strict(out / "checkpoints" / name / "trainer_state.json")
        assert told["tokens_trained"] > 0 and told["metrics"]["loss"] < 7 and told["lineage"]["is_shutdown_checkpoint"] is False
        assert strict(out / "checkpoints" / name / "model/config.json")["vocab_size"] == 384


# What the original computes with our run.
LOOK = """
import torch
from gpt_simple import load_for_inference, generate
model, tokenizer, config = load_for_inference("out", device="cpu")
with torch.no_grad():
    said.append(model(torch.arange(24).reshape(2, 12) * 7)[0].tolist())
said.append(generate(model, tokenizer, ["00001 ab", "00002"], max_new_tokens=12, do_sample=False))
"""


def test_the_original_generates_from_shows_and_trains_on_in_our_folder(our_copy: Path, original: Any) -> None:
    shutil.rmtree(our_copy / "out/checkpoints/step-00000004")  # whatever it makes of what it does not know
    train = ["train", "--config", "config.yaml", "--training.max_steps", "16", "--skip-runtime-probe"]
    logits, texts, status, trained = original([LOOK, ["status", "--output_dir", "out"], train], our_copy)
    ours = load("out/checkpoints/step-00000012", device="cpu")
    with torch.no_grad():
        found = ours.backend.model(torch.arange(24).reshape(2, 12) * 7)  # type: ignore[attr-defined]
    torch.testing.assert_close(found, torch.tensor(logits), atol=1e-5, rtol=0)
    assert [ours.generate_batch([prompt], greedy(12))[0] for prompt in ("00001 ab", "00002")] == texts
    assert "COMPLETED" in status["out"] and "12 / 12 steps" in status["out"] and "final@12" in status["out"]
    assert trained["code"] == 0, trained["out"]
    assert saved_checkpoints(our_copy / "out")[-1].step == 16
    assert open_weights(Path("out")).path.name == "final"  # the original's is the newer one now
    # and back again
    assert main(["-q", "train", "--config", "config.yaml", "--training.max_steps", "18"]) == 0
    assert {saved.path.name: saved.step for saved in saved_checkpoints(our_copy / "out")}["final"] == 18
    assert open_weights(Path("out")).path.name == "step-00000018"


def greedy(tokens: int) -> Any:
    from ingot.backends.sampling import GenerationOptions

    return GenerationOptions(max_new_tokens=tokens, greedy=True, start_mark=False)


def test_a_finished_run_that_goes_on_is_newest_at_its_newest_step(our_copy: Path) -> None:
    assert main(["-q", "train", "--config", "config.yaml", "--training.max_steps", "14"]) == 0
    found = {saved.path.name: saved.step for saved in saved_checkpoints(our_copy / "out")}
    assert found == {"checkpoint-4": 4, "checkpoint-8": 8, "checkpoint-12": 12, "final": 14}
    assert strict(Path("out/checkpoints/final/trainer_state.json"))["lineage"]["resumed_from"] == "out/checkpoints/final"


@pytest.mark.parametrize("regular", [True, False])
def test_final_of_a_run_that_went_on_is_not_taken_for_the_newest_for_ever(our_copy: Path, regular: bool) -> None:
    """The original takes `final` whatever its step is."""
    shutil.rmtree(our_copy / "out/checkpoints/checkpoint-12")
    files = reporter_of(our_copy)
    files.begin(begin(8))
    files.saved(Path("out/checkpoints/step-00000008"), "final")
    if not regular:
        shutil.rmtree(our_copy / "out/checkpoints/checkpoint-8")
    files.saved(Path("out/checkpoints/step-00000012"), "shutdown")
    found = {saved.path.name: saved.step for saved in saved_checkpoints(Path("out"))}
    assert found == {"checkpoint-4": 4, "checkpoint-8": 8, "checkpoint-12-shutdown": 12}


def kept_of(names: list[str], keep_last: int | None, keep_every: int) -> list[str]:
    saved = [Saved(Path("checkpoints") / name, int(name.split("-")[1]) if "-" in name else 1000, {}) for name in names]
    kept = to_keep([(one.step, one.kind) for one in saved], keep_last, keep_every)
    return [one.path.name for one in saved if (one.step, one.kind) in kept]


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "kept"),
    [
        (3, 200, ["checkpoint-200", "checkpoint-400", "checkpoint-600", "checkpoint-800", "checkpoint-900", "checkpoint-950"]),
        (1, 0, ["checkpoint-950"]),
        (2, 0, ["checkpoint-900", "checkpoint-950"]),
    ],
)
def test_the_newest_the_milestones_final_and_the_newest_of_a_stop_are_kept(
    keep_last: int, keep_every: int, kept: list[str]
) -> None:
    regular = [f"checkpoint-{step}" for step in (*range(100, 1000, 100), 950)]
    saved = [*regular, "checkpoint-350-shutdown", "checkpoint-620-shutdown", "final"]
    assert kept_of(saved, keep_last, keep_every) == [*kept, "checkpoint-620-shutdown", "final"]


def test_null_keeps_all_with_milestones_too() -> None:
    names = ["checkpoint-100", "checkpoint-150", "checkpoint-200"]
    assert kept_of(names, None, 200) == names


def reporter_of(folder: Path) -> GptSimpleReporter:
    config = read_config(folder / "out/config.json", {"training.output_dir": "out"})
    return GptSimpleReporter(config, translate(config).config, None, say=lambda line: None)


def begin(resumed_at: int) -> BeginReport:
    return BeginReport("out", "cpu", "fp32", 1, 1, 1, 256, 8, "default", resumed_at)


def test_a_stop_has_a_name_of_its_own_and_the_newest_is_kept(our_copy: Path) -> None:
    files = reporter_of(our_copy)
    files.begin(begin(8))
    files.saved(Path("out/checkpoints/step-00000008"), "shutdown")
    assert strict(Path("out/checkpoints/checkpoint-8-shutdown/trainer_state.json"))["lineage"]["is_shutdown_checkpoint"] is True
    assert strict(Path("out/.run_state.json"))["latest_checkpoint"] == "out/checkpoints/checkpoint-8-shutdown"
    files.saved(Path("out/checkpoints/step-00000012"), "shutdown")
    assert [s.path.name for s in saved_checkpoints(Path("out")) if s.kind == "shutdown"] == ["checkpoint-12-shutdown"]


def test_a_save_that_becomes_the_last_one_is_written_once(our_copy: Path) -> None:
    files, kept = reporter_of(our_copy), Path("out/checkpoints/checkpoint-12/trainer_state.json")
    files.begin(begin(12))
    before = kept.stat().st_ino
    files.saved(Path("out/checkpoints/step-00000012"), "final")
    assert kept.stat().st_ino == before


def test_what_a_kill_kept_from_being_written_is_written_by_the_next_session(our_copy: Path) -> None:
    for name in ("final", "checkpoint-12"):
        shutil.rmtree(our_copy / "out/checkpoints" / name)
    left = our_copy / "out/checkpoints/.final.0a1b2c3d.tmp"
    left.mkdir()
    reporter_of(our_copy).begin(begin(12))
    found = {saved.path.name: saved.step for saved in saved_checkpoints(Path("out"))}
    assert found == {"checkpoint-4": 4, "checkpoint-8": 8, "checkpoint-12": 12, "final": 12} and not left.exists()


def test_a_checkpoint_that_cannot_be_written_is_told_and_training_goes_on(
    our_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = reporter_of(our_copy)
    files.begin(begin(12))
    path = Path("out/checkpoints/step-00000012")
    (path / "model.safetensors").write_bytes(b"damaged")
    files.saved(path, "final")
    warning = capsys.readouterr().err
    assert files.failure is not None and "step-00000012" in warning and "training continues" in warning
    files.saved(Path("out/checkpoints/step-00000008"), "shutdown")
    assert files.failure is None


def test_an_error_stands_in_its_run_state_with_the_traceback(our_copy: Path) -> None:
    files = reporter_of(our_copy)
    files.begin(begin(12))
    try:
        raise ValueError("the loss is not finite")
    except ValueError as error:
        files.failed(error)
    state = strict(Path("out/.run_state.json"))
    assert state["status"] == "error" and "Traceback" in state["error"] and "ValueError: the loss is not finite" in state["error"]
