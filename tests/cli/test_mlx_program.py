"""Whole programs on MLX: trained, killed, continued on either backend, judged and written with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from programs import DEMO, Ingot, checkpoints, losses, once, outcome, train_words
from typer.testing import CliRunner

from ingot import load
from ingot.cli.main import app
from ingot.config.loading import load_config
from ingot.runs.state import TrainingResult
from ingot.train.start import run as run_config

pytest.importorskip("mlx.core", reason="mlx is not installed: pip install 'ingot-lm[mlx]'", exc_type=ImportError)
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def unbroken(shared: Path, data: Path) -> Path:
    """The small demo trained on MLX by one process that nothing happened to."""

    def make() -> None:
        Ingot(shared / "train-mlx", shared / "cache")(*train_words(data, shared / "mlx", training__device="mlx"))

    return once(shared / "mlx", make)


def train(data: Path, folder: Path, **settings: object) -> TrainingResult:
    """The small demo in this process."""
    given = {name.replace("__", "."): value for name, value in settings.items()}
    values = {**DEMO, "budget.seconds": None, "artifact.score": False, "data.path": str(data), "training.output_dir": str(folder)}
    return run_config(load_config(recipe="demo", python={**values, **given}, environment={}))


def score(path: Path, device: str) -> float:
    return load(path, device=device).evaluate().bits_per_byte


def test_a_run_on_mlx_is_the_run_on_torch(unbroken, reference):
    ours, theirs = losses(unbroken), losses(reference)
    assert ours.keys() == theirs.keys() and max(abs(ours[step] - theirs[step]) for step in theirs) < 1e-3
    told = json.loads((unbroken / "environment.json").read_text())
    assert "mlx" in json.dumps(told) and "mlx" not in (reference / "environment.json").read_text()


@pytest.mark.long
def test_a_killed_run_ends_bitwise_as_one_never_killed(ingot: Ingot, data, unbroken, tmp_path, eventually):
    run = tmp_path / "run"
    words = train_words(data, run, training__device="mlx", training__save_every=2, training__keep_every=0)
    program = ingot.start(*words)
    eventually(lambda: (run / "checkpoints").is_dir() and bool(checkpoints(run)))
    assert program.process.poll() is None
    program.kill()
    ingot(*words)
    assert outcome(run) == outcome(unbroken) and losses(run) == losses(unbroken)


def test_a_run_goes_on_on_the_other_backend(data, unbroken, reference, until):
    for run, device in ((until(unbroken, 28), "cpu"), (until(reference, 28), "mlx")):
        train(data, run, training__device=device)
        ours, theirs = losses(run), losses(reference)
        assert len(ours) == 40 and max(abs(ours[step] - theirs[step]) for step in theirs) < 1e-3


def test_a_model_of_one_backend_scores_on_the_other(unbroken, reference):
    for path in (unbroken / "artifact" / "model.safetensors", reference / "artifact" / "model.safetensors", unbroken):
        assert score(path, "mlx") == pytest.approx(score(path, "cpu"), abs=1e-5)


@pytest.mark.long
def test_a_run_is_judged_and_written_with_by_mlx(unbroken):
    judged = CliRunner().invoke(app, ["eval", str(unbroken), "--device", "mlx", "--json"])
    assert json.loads(judged.stdout)["val_bpb"] == pytest.approx(score(unbroken, "cpu"), abs=1e-5)
    words = ["generate", str(unbroken), "--prompt", "a", "--tokens", "20", "--greedy", "--device", "mlx"]
    written = CliRunner().invoke(app, words).stdout
    assert written.strip() == load(unbroken, device="cpu").generate("a", tokens=20, temperature=0.0).strip()


@pytest.mark.long
def test_the_artifact_of_a_run_on_mlx_is_scored_by_mlx(data, tmp_path):
    settings = {"training__device": "mlx", "training__max_steps": 2, "artifact__score": True, "artifact__codec": "zlib"}
    told = train(data, tmp_path / "run", artifact__quantiser="int8", **settings)
    assert told.artifact_path is not None and told.artifact_path.name == "model.ingot"
    assert told.artifact_bpb == pytest.approx(score(told.artifact_path, "cpu"), abs=1e-5)
