"""What only a GPU shows: resuming bit for bit there, its kinds of arithmetic, and the curve of the preset for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from programs import losses
from small_runs import ROOT, Train, shared, words

from ingot.compat.nanogpt.prepare import shakespeare_char

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

KEYS = {"device": "cuda", "dropout": 0.2, "lr_decay_iters": 40, "eval_interval": 3, "n_embd": 64, "mfu_peak": None}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager"])
def test_a_run_that_is_continued_has_the_losses_of_the_unbroken_one_bit_for_bit(train, dtype, compiled):
    keys = {**KEYS, "dtype": dtype, "compile": compiled, "deterministic": True}
    train(words(out_dir="whole", max_iters=11, **keys))
    train(words(max_iters=4, **keys))
    train(words(max_iters=11, init_from="resume", **keys))
    assert losses(Path("out")) == losses(Path("whole"))
    weights = [torch.load(f"{folder}/ckpt.pt", weights_only=True)["model"] for folder in ("out", "whole")]
    assert all(torch.equal(weights[0][name], value) for name, value in weights[1].items())


def test_dtypes_agree_and_the_gpu_names_its_own_peak(train):
    keys = {**KEYS, "dropout": 0.0, "max_iters": 4}  # each number format drops others
    ran = {dtype: train(words(out_dir=dtype, dtype=dtype, **keys)) for dtype in ("float32", "bfloat16", "float16")}
    exact = losses(Path("float32"))
    for dtype in ("bfloat16", "float16"):
        assert losses(Path(dtype)) == {step: pytest.approx(loss, abs=0.02) for step, loss in exact.items()}
        assert "TFLOP/s" in ran[dtype].out + ran[dtype].err


@pytest.mark.long
def test_the_preset_of_characters_reaches_its_loss(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert shakespeare_char(Path("data/shakespeare_char"), ["--input", str(shared("tinyshakespeare/input.txt"))]) == 0
    evaluations = Train(capfd)([str(ROOT / "config/train_shakespeare_char.py")]).evaluations
    with capfd.disabled():
        print(evaluations)
    best = min(evaluations, key=lambda step: float(evaluations[step][1]))
    assert float(evaluations[best][1]) == pytest.approx(1.47, abs=0.02) and 1500 <= best <= 2500
