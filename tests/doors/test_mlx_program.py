"""Whole programs on MLX: trained, killed, continued on either backend, judged and written with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from programs import Ingot, checkpoints, losses, once, outcome, train_words

from ingot import load

pytest.importorskip("mlx.core", reason="mlx is not installed: pip install 'ingot[mlx]'", exc_type=ImportError)


@pytest.fixture(scope="session")
def unbroken(shared: Path, data: Path) -> Path:
    """The small demo trained on MLX by one process that nothing happened to."""

    def make() -> None:
        Ingot(shared / "train-mlx", shared / "cache")(*train_words(data, shared / "mlx", training__device="mlx"))

    return once(shared / "mlx", make)


def score(path: Path, device: str) -> float:
    return load(path, device=device).evaluate().bits_per_byte


def test_a_run_on_mlx_is_the_run_on_torch(unbroken, reference):
    ours, theirs = losses(unbroken), losses(reference)
    assert ours.keys() == theirs.keys() and max(abs(ours[step] - theirs[step]) for step in theirs) < 1e-3
    told = json.loads((unbroken / "environment.json").read_text())
    assert "mlx" in json.dumps(told) and "mlx" not in (reference / "environment.json").read_text()


def test_a_killed_run_ends_bitwise_as_one_never_killed(ingot: Ingot, data, unbroken, tmp_path, eventually):
    run = tmp_path / "run"
    words = train_words(data, run, training__device="mlx", training__save_every=2, training__keep_every=0)
    program = ingot.start(*words)
    eventually(lambda: (run / "checkpoints").is_dir() and bool(checkpoints(run)))
    assert program.process.poll() is None
    program.kill()
    ingot(*words)
    assert outcome(run) == outcome(unbroken) and losses(run) == losses(unbroken)


def test_a_run_goes_on_on_the_other_backend(ingot: Ingot, data, unbroken, reference, until):
    for run, device in ((until(unbroken, 20), "cpu"), (until(reference, 20), "mlx")):
        ingot(*train_words(data, run, training__device=device))
        ours, theirs = losses(run), losses(reference)
        assert len(ours) == 40 and max(abs(ours[step] - theirs[step]) for step in theirs) < 1e-3


def test_a_model_of_one_backend_scores_on_the_other(unbroken, reference):
    for path in (unbroken / "artifact" / "model.safetensors", reference / "artifact" / "model.safetensors", unbroken):
        assert score(path, "mlx") == pytest.approx(score(path, "cpu"), abs=1e-5)


def test_a_run_is_judged_and_written_with_by_mlx(ingot: Ingot, unbroken):
    judged = ingot("eval", unbroken, "--device", "mlx", "--json")
    assert json.loads(judged.stdout)["val_bpb"] == pytest.approx(score(unbroken, "cpu"), abs=1e-5)
    written = ingot("generate", unbroken, "--prompt", "a", "--tokens", 20, "--greedy", "--device", "mlx")
    assert written.stdout.strip() == load(unbroken, device="cpu").generate("a", tokens=20, temperature=0.0).strip()


def test_the_artifact_of_a_run_on_mlx_is_scored_by_mlx(ingot: Ingot, data, tmp_path):
    settings = {"training__device": "mlx", "training__max_steps": 2, "artifact__score": "true", "artifact__quantiser": "int8"}
    told = json.loads(ingot(*train_words(data, tmp_path / "run", **settings), "--json").stdout)
    (artifact,) = (tmp_path / "run" / "artifact").glob("model.*")
    assert told["artifact_bpb"] == pytest.approx(score(artifact, "cpu"), abs=1e-5)
