"""The best-scoring file that fits: found at the end of a run and by `ingot export`, told, and read again by another process."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny_runs import train_tiny

import ingot
from ingot.artifact.container import read_artifact
from ingot.backends.base import Rounding
from ingot.backends.torch.inference import TorchInference
from ingot.cli.main import call
from ingot.data.loading.data_path import open_dataset
from ingot.errors import ConfigError, RunError
from ingot.runs.reporter import Reporter
from ingot.runs.state import TrainingResult
from ingot.runtime.tensors import IGNORED
from ingot.train import fit_artifact as rounding

LARGER: dict[str, Any] = {"model__width": 64, "training__max_steps": 6, "training__threads": 1, "artifact__codec": "rans"}
LIMIT = 48_000
PLAN = re.compile(r"matrices int(\d) with k ([\d.]+), embeddings int(\d) with k ([\d.]+)")


class Told(Reporter):
    def __init__(self) -> None:
        self.messages: list[str] = []

    def message(self, text: str) -> None:
        self.messages.append(text)


def rounded(data: Path, folder: Path, quantiser: str = "gptq", **settings: Any) -> tuple[TrainingResult, list[str]]:
    told = Told()
    result = train_tiny(data, folder, told, **{**LARGER, "artifact__quantiser": quantiser, **settings})
    assert result.status == "completed"
    return result, [message for message in told.messages if PLAN.search(message)]


@pytest.fixture(scope="module")
def fitted(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainingResult, list[str]]:
    folder = tmp_path_factory.mktemp("fitted") / "run"
    return rounded(data, folder, budget__artifact_bytes=LIMIT, evaluation__final_rows=4)


def test_a_run_finds_the_steps_whose_file_lies_just_below_the_limit(fitted: tuple[TrainingResult, list[str]]) -> None:
    result, _ = fitted
    assert result.artifact_path is not None and result.artifact_bytes is not None
    assert 0.98 * LIMIT < result.artifact_bytes == result.artifact_path.stat().st_size <= LIMIT


def test_a_stop_during_the_search_leaves_it_to_the_next_session(data: Path, tmp_path: Path) -> None:
    class Stopped(Reporter):
        def waiting(self, what: str, done: int = 0, total: int = 0) -> None:
            if what == "exporting":
                os.kill(os.getpid(), signal.SIGTERM)

    settings = {**LARGER, "artifact__quantiser": "gptq", "budget__artifact_bytes": LIMIT, "evaluation__final_rows": 4}
    stopped = train_tiny(data, tmp_path / "run", Stopped(), **settings)
    assert (stopped.status, stopped.artifact_path) == ("stopped", None)
    assert stopped.stop_reason == "signal:SIGTERM"
    assert not list(tmp_path.glob("run/artifact/*"))
    again = train_tiny(data, tmp_path / "run", **settings)
    assert again.status == "completed" and again.artifact_bytes is not None
    assert 0.98 * LIMIT < again.artifact_bytes <= LIMIT


def test_it_tells_what_it_tried_and_takes_what_scored_best(fitted: tuple[TrainingResult, list[str]]) -> None:
    *tried, chosen = fitted[1]
    scores = {PLAN.search(line)[4]: float(re.search(r"([\d.]+) bits per byte", line)[1]) for line in tried}  # type: ignore[index]
    assert len(scores) > 2
    best = PLAN.search(chosen)
    assert best is not None and scores[best[4]] == min(scores.values())


def test_the_file_is_the_model_rounded_and_writes(fitted: tuple[TrainingResult, list[str]]) -> None:
    result, _ = fitted
    assert result.artifact_path is not None and result.val_bpb is not None
    assert read_artifact(result.artifact_path).facts["quantiser"] == "gptq"
    model = ingot.load(result.artifact_path, device="cpu")
    assert model.evaluate().bits_per_byte == pytest.approx(result.val_bpb, abs=0.05)
    assert model.generate("a", tokens=3)


def test_export_finds_them_too_and_says_what_it_did(
    fitted: tuple[TrainingResult, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "small.ingot"
    words = ["export", str(fitted[0].run_dir), "--output", str(target), "--limit", "40000", "--no-score", "--device", "cpu"]
    assert call(words) == 0
    assert 39_000 < target.stat().st_size <= 40_000
    assert "of 40,000 bytes" in capsys.readouterr().err


def test_where_nothing_fits_the_quantisers_that_are_fitted_to_a_limit_are_advised(
    fitted: tuple[TrainingResult, list[str]], tmp_path: Path
) -> None:
    words = ["export", str(fitted[0].run_dir), "--limit", "40000", "--no-score", "--device", "cpu", "--output"]
    with pytest.raises(RunError, match=r"40,000.*--quantiser std or gptq"):
        call([*words, str(tmp_path / "int8.ingot"), "--quantiser", "int8"])
    assert call([*words, str(tmp_path / "std.ingot"), "--quantiser", "std", "--codec", "rans"]) == 0


def test_the_steps_are_scored_on_other_training_text_than_the_rounding_is_fitted_to_and_on_no_validation_text(
    fitted: tuple[TrainingResult, list[str]], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: dict[str, set[bytes]] = {"fitted": set(), "scored": set()}
    rounder, score = TorchInference.rounder, TorchInference.score

    def noted(kind: str, batch: Any) -> Any:
        read[kind] |= {row[row != IGNORED].tobytes() for row in batch[:, 1]}
        return batch

    monkeypatch.setattr(TorchInference, "rounder", lambda model, batches: rounder(model, (noted("fitted", b) for b in batches)))
    monkeypatch.setattr(TorchInference, "score", lambda model, batch: score(model, noted("scored", batch)))
    words = ["export", str(fitted[0].run_dir), "--output", str(tmp_path / "small.ingot"), "--limit", "40000", "--no-score"]
    assert call([*words, "--device", "cpu"]) == 0
    rows = {}
    for split in ("train", "val"):
        tokens = open_dataset(str(data)).split(split)
        text = np.asarray(tokens.read(1, tokens.tokens), np.int32)
        rows[split] = {text[first : first + 16].tobytes() for first in range(0, len(text), 16)}
    assert min(map(len, read.values())) > 50 and not rows["val"] & rows["train"]
    assert read["fitted"] | read["scored"] <= rows["train"]
    assert not read["fitted"] & read["scored"]


def test_steps_that_are_given_are_taken(data: Path, tmp_path: Path) -> None:
    given = {"artifact__k": 5.0, "artifact__bits": 5, "artifact__embedding_k": 7.0, "budget__artifact_bytes": LIMIT}
    result, told = rounded(data, tmp_path / "run", "std", **given)
    assert told == ["rounded: matrices int5 with k 5.00, embeddings int8 with k 7.00"]
    assert result.artifact_bytes is not None and result.artifact_bytes < LIMIT


def test_a_limit_that_is_far_away_gives_eight_bits(data: Path, tmp_path: Path) -> None:
    _, told = rounded(data, tmp_path / "run", "std", budget__artifact_bytes=1_000_000, artifact__embedding_k=8.0)
    assert "chosen rounding: matrices int8 with k 6.00" in told[-1]


def test_a_limit_that_cannot_be_met_is_told(data: Path, tmp_path: Path) -> None:
    result, told = rounded(data, tmp_path / "run", "std", budget__artifact_bytes=9_000, artifact__embedding_k=8.0)
    assert result.artifact_bytes is not None and result.artifact_bytes > 9_000
    assert "of 9,000 bytes" in told[-1]


def test_a_device_that_cannot_round_is_refused_before_the_run_begins(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^artifact\.quantiser=gptq .*mlx; choose int8"):
        rounded(data, tmp_path / "run", training__device="mlx")
    assert not (tmp_path / "run").exists()


class _Sizes:
    """A rounder whose file shrinks as steps grow, and stays above the limit."""

    def estimate(self, rounding: Rounding, embeddings: bool) -> float:
        return 0.0 if embeddings else 100 / (1 + rounding.k / rounding.most)

    def round(self, matrices: Rounding, embeddings: Rounding) -> float:
        self.step = matrices.k / matrices.most
        return self.estimate(matrices, False)

    def codes(self) -> dict[str, float]:
        return {"step": self.step}


def test_where_no_file_fits_the_smallest_is_kept() -> None:
    rounder, sizes = _Sizes(), []

    def size(codes: dict[str, float]) -> int:
        sizes.append(int(1000 / (1 + codes["step"])))
        return sizes[-1]

    settings = SimpleNamespace(bits=6, embedding_bits=8, embedding_k=5.0)
    kept = rounding.fit_codes(settings, rounder, 450, size, float, lambda line: None, lambda: False)
    assert len(sizes) > 1 and int(1000 / (1 + kept["step"])) == min(sizes)


class _Tables(_Sizes):
    """A rounder whose tables have finer codes, and more bytes, with a smaller k."""

    def estimate(self, rounding: Rounding, embeddings: bool) -> float:
        return 800 / rounding.k if embeddings else 100 / (1 + rounding.k / rounding.most)

    def round(self, matrices: Rounding, embeddings: Rounding) -> float:
        self.k = embeddings.k
        return self.estimate(matrices, False) + self.estimate(embeddings, True)

    def codes(self) -> dict[str, float]:
        return {"k": self.k}


@pytest.mark.parametrize(("limit", "k"), [(120, 8.0), (400, 4.0)])
def test_the_best_score_decides_only_among_what_can_fit(limit: int, k: float) -> None:
    rounder = _Tables()
    settings = SimpleNamespace(bits=6, embedding_bits=8, embedding_k="auto")
    kept = rounding.fit_codes(
        settings, rounder, limit, lambda codes: int(800 / codes["k"] + 50), lambda: rounder.k, lambda line: None, lambda: False
    )
    assert kept["k"] == k
