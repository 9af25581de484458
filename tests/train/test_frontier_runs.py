"""The frontier recipes as toys: killed and continued bit for bit, exported, read again, and let write."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import killed_after, records, state_of

import ingot
from ingot.backends.sampling import GenerationOptions
from ingot.cli.main import call
from ingot.config.loading import load_config
from ingot.errors import ConfigError, RunError
from ingot.runs.state import TrainingResult, read_training_result
from ingot.train.start import run

RECIPES = ("golf/frontier", "frontier", "speedrun/124m")
TOY: dict[str, Any] = {
    "model.layers": 3, "model.heads": 2, "model.kv_heads": 2, "model.width": 16, "model.window": 6, "model.pattern": "SL",
    "model.vocab_size": None, "model.context": None,
    "data.tokenizer": None, "data.seq_len": 32, "training.tokens_per_step": 64, "training.max_steps": 9,
    "training.stages": [{"share": 0.3333, "seq_len": 8}, {"share": 0.3333, "seq_len": 16}, {"share": 0.3334, "seq_len": 32}],
    "training.device": "cpu", "training.threads": 1, "training.save_every": 1, "training.keep_every": 1, "budget.seconds": None,
    "artifact.score": False, "artifact.quantiser": "none", "artifact.dtype": "fp32", "artifact.codec": "none",
}  # fmt: skip

# With the variable SEES: the model is checked before it is trained, too.
SEES_THE_FUTURE = """
import os

from torch import nn
from torch.nn.functional import cross_entropy

class Model(nn.Module):
    def __init__(self, vocab_size, width=8):
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocab_size, width), nn.Linear(width, vocab_size)

    def forward(self, tokens, targets=None):
        x = self.embedding(tokens)
        scores = self.head(x + x.roll(-1, 1) if "SEES" in os.environ else x)
        return scores if targets is None else cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=-1)
"""


def train(recipe: str, data: Path, folder: Path, **settings: Any) -> TrainingResult:
    given = {name.replace("__", "."): value for name, value in settings.items()}
    values = {**TOY, "data.path": str(data), "training.output_dir": str(folder), **given}
    return run(load_config(recipe, python=values, environment={}))


def scored(folder: Path) -> float:
    result = read_training_result(folder)
    assert result is not None and result.val_bpb is not None
    return result.val_bpb


@pytest.fixture(scope="module", params=RECIPES)
def unbroken(request: pytest.FixtureRequest, data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("frontier") / "unbroken"
    assert train(request.param, data, folder).status == "completed"
    return request.param, folder


def test_a_recipe_learns_with_rows_that_grow(unbroken: tuple[str, Path]) -> None:
    found = records(unbroken[1], "train")
    assert [record["step"] for record in found] == list(range(1, 10))
    assert found[-1]["loss"] < found[0]["loss"] - 0.5


@pytest.mark.parametrize("step", [2, 3, 7])
def test_a_recipe_killed_in_any_stage_ends_bitwise_as_the_unbroken_run(unbroken: tuple[str, Path], data: Path, step: int) -> None:
    recipe, folder = unbroken
    killed = killed_after(folder, step)
    assert train(recipe, data, killed).status == "completed"
    assert state_of(killed) == state_of(folder)


def test_the_exported_model_scores_as_the_run_did_and_writes(unbroken: tuple[str, Path], tmp_path: Path) -> None:
    _, folder = unbroken
    trained = scored(folder)
    whole = ingot.load(folder / "artifact" / "model.safetensors", device="cpu")
    assert whole.evaluate().bits_per_byte == pytest.approx(trained, abs=1e-6)
    assert call(["export", str(folder), "--quantiser", "int8", "--codec", "lzma", "--output", str(tmp_path / "small.ingot")]) == 0
    small = ingot.load(tmp_path / "small.ingot", device="cpu")
    assert small.evaluate().bits_per_byte == pytest.approx(trained, abs=0.05)
    prompts = ["a", "abc de", "ab"]
    texts = small.generate_batch(prompts, GenerationOptions(max_new_tokens=40, temperature=0))
    assert texts == [small.generate(prompt, tokens=40, temperature=0, use_cache=False).removeprefix(prompt) for prompt in prompts]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_on_mlx_is_the_run_on_torch_resumes_bitwise_and_moves_between_both(recipe: str, data: Path, tmp_path: Path) -> None:
    pytest.importorskip("mlx.core", reason="mlx is not installed: pip install 'ingot-lm[mlx]'", exc_type=ImportError)
    # The first gradients of mixes are rounding noise around 0, which the recipes' epsilon and learning rates would amplify.
    on_torch: dict[str, Any] = {"optimizer__epsilon": 1e-4, "optimizer__muon_learning_rate": 0.01}
    on_mlx = {**on_torch, "training__device": "mlx", "training__threads": "auto"}
    theirs, ours = tmp_path / "torch", tmp_path / "mlx"
    train(recipe, data, theirs, **on_torch)
    train(recipe, data, ours, **on_mlx)
    resumed, back, moved = killed_after(ours, 5), killed_after(ours, 6), killed_after(theirs, 4)
    for folder, settings in ((resumed, on_mlx), (back, on_torch), (moved, on_mlx)):
        assert train(recipe, data, folder, **settings).status == "completed"
    assert state_of(resumed) == state_of(ours)
    expected = [record["loss"] for record in records(theirs, "train")]
    for folder in (ours, back, moved):
        assert [record["loss"] for record in records(folder, "train")] == pytest.approx(expected, abs=1e-3)
    for folder in (theirs, ours):
        here, there = (ingot.load(folder / "artifact" / "model.safetensors", device=device) for device in ("mlx", "cpu"))
        assert here.evaluate().bits_per_byte == pytest.approx(there.evaluate().bits_per_byte, abs=1e-5)
        assert here.evaluate().bits_per_byte == pytest.approx(scored(folder), abs=1e-5)
        assert here.generate("abc", tokens=40, temperature=0) == there.generate("abc", tokens=40, temperature=0)


@pytest.mark.parametrize("stride", ["32", "5"])
def test_the_self_test_passes_with_rows_that_overlap_or_not(
    unbroken: tuple[str, Path], stride: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["eval", str(unbroken[1]), "--self-test", "--stride", stride, "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("passed") == 4 and f"{stride} apart" in shown and "FAILED" not in shown


def test_a_model_that_sees_the_future_fails_the_self_test(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(SEES_THE_FUTURE)
    own = {"model.file": str(tmp_path / "mine.py"), "training.max_steps": 1, "data.seq_len": 16, "training.tokens_per_step": 64}
    own |= {
        "training.device": "cpu",
        "artifact.score": False,
        "data.path": str(data),
        "training.output_dir": str(tmp_path / "run"),
    }
    run(load_config(python=own, environment={}))
    monkeypatch.setenv("SEES", "it")
    with pytest.raises(RunError, match=r'"predictions depend only on earlier tokens" failed'):
        call(["eval", str(tmp_path / "run"), "--self-test", "--device", "cpu"])
    assert re.search("predictions depend only on earlier tokens +FAILED", capsys.readouterr().out)


def test_a_sliding_score_is_named_as_one_wherever_it_stands(
    unbroken: tuple[str, Path], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, folder = unbroken
    plain = read_training_result(folder)
    assert plain is not None and plain.val_stride is None and "sliding" not in (folder / "log.txt").read_text()
    killed = killed_after(folder, 8)
    slid = train(recipe, data, killed, evaluation__stride=8)
    assert slid.val_stride == 8 and records(killed, "evaluation")[-1]["stride"] == 8
    assert "  sliding by 8  " in (killed / "log.txt").read_text()
    assert call(["eval", str(killed), "--device", "cpu"]) == 0
    assert capsys.readouterr().out.count("  sliding by 8\n") == 2


def test_the_table_at_the_end_does_not_say_sliding_and_json_does(
    unbroken: tuple[str, Path], data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from ingot.cli.train import _print_result

    slid = train(unbroken[0], data, killed_after(unbroken[1], 6), evaluation__stride=8)
    capsys.readouterr()
    _print_result(slid, None)
    assert call(["status", str(slid.run_dir)]) == 0
    shown = capsys.readouterr().out
    assert "val_bpb" in shown and "sliding" not in shown
    assert call(["eval", str(slid.run_dir), "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sliding"] is True


@pytest.mark.parametrize("layout", ["gguf", "nanogpt", "gpt-simple"])
def test_a_model_that_others_cannot_read_is_refused_by_name(unbroken: tuple[str, Path], layout: str) -> None:
    with pytest.raises(ConfigError, match="--format ingot"):
        call(["export", str(unbroken[1]), "--format", layout])


def test_a_stage_may_change_the_window_and_the_last_one_is_what_is_scored(data: Path, tmp_path: Path) -> None:
    stages = [{"share": 0.5, "seq_len": 16, "model": {"window": 4}}, {"share": 0.5, "model": {"window": 32}}]
    train("golf/frontier", data, tmp_path / "run", training__stages=stages, training__max_steps=4)
    loaded = ingot.load(tmp_path / "run" / "artifact" / "model.safetensors", device="cpu")
    assert loaded.evaluate().bits_per_byte == pytest.approx(scored(tmp_path / "run"), abs=1e-6)
    assert loaded.backend.model.window == 32
    with pytest.raises(ConfigError, match=r"training\.stages\.0\.model: the model's method `set` rejects .*window=0 must be"):
        train("golf/frontier", data, tmp_path / "bad", training__stages=[{"share": 1.0, "model": {"window": 0}}])
