"""A model that the machine cannot hold is refused by its size, before any of it is made."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ingot.backends.open import open_backend
from ingot.config.loading import load_config
from ingot.errors import ConfigError
from ingot.runtime.machine import host_bytes
from ingot.runtime.ranks import Ranks
from ingot.runtime.tensors import IGNORED

TINY = {
    "model.layers": 1, "model.heads": 1, "model.width": 16, "data.seq_len": 16, "training.tokens_per_step": 64,
    "training.max_steps": 1, "training.device": "cpu",
}  # fmt: skip


@pytest.mark.parametrize("family", ["gpt2", "llama", "golf"])
@pytest.mark.parametrize(
    "given",
    [
        {"model.width": 2_000_000_000},
        {"model.vocab_size": 2_000_000_000, "model.width": 64},
        {"model.width": 100_000, "model.layers": 1000},
        {"training.tokens_per_step": 2**50},
    ],
    ids=str,
)
def test_what_the_machine_cannot_hold_is_refused_before_memory_is_taken(family, given):
    more = {"model.kv_heads": 1} if family == "golf" else {}
    config = load_config(python={**TINY, **more, "model.family": family, **given}, environment={}).config
    with pytest.raises(ConfigError, match=r"parameters takes at least [\d,.]+ GiB, but this machine has .* GiB; use a"):
        open_backend(config, 300, Ranks())


def test_a_model_just_too_large_is_refused_and_one_that_fits_is_not():
    there = host_bytes()
    assert there is not None
    rows = there // 64 // 16  # of an embedding of width 64, whose AdamW takes 16 bytes for each number
    for factor, fits in ((2.0, False), (0.001, True)):
        given = {**TINY, "model.width": 64, "model.vocab_size": min(int(factor * rows), 2**31 - 1)}
        config = load_config(python=given, environment={}).config
        if fits:
            assert isinstance(open_backend(config, 300, Ranks()).model, torch.nn.Module)
        else:
            with pytest.raises(ConfigError, match="use a smaller model"):
                open_backend(config, 300, Ranks())


def test_rows_that_the_memory_does_not_hold_at_once_are_scored_in_halves(monkeypatch):
    backend = open_backend(load_config(python=TINY, environment={}).config, 300, Ranks())
    rows = np.random.default_rng(0).integers(0, 300, (11, 2, 16)).astype(np.int32)
    rows[3, 1, 5:] = IGNORED
    whole, upload, held = backend.score(rows), backend._upload, []

    def small_gpu(batch):
        if len(batch) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        held.append(len(batch))
        return upload(batch)

    monkeypatch.setattr(backend, "_upload", small_gpu)
    assert backend.score(rows) == pytest.approx(whole, rel=1e-6)
    assert sum(held) == 11
    monkeypatch.setattr(backend, "_upload", lambda batch: small_gpu(np.concatenate([batch] * 3)))
    with pytest.raises(torch.OutOfMemoryError):  # a single row is as small as it gets
        backend.score(rows)
