"""What the tests of the MLX backend share: one small model on both backends, their rows and their steps."""

import numpy as np
import pytest
import torch

from ingot.backends.open import open_backend
from ingot.config.schema import Config
from ingot.runtime.ranks import Ranks
from ingot.runtime.tensors import to_array, to_record
from ingot.train.step_plan import Position, plan_step

__all__ = ["MODELS", "ROWS", "SEQ_LEN", "SHAPE", "VOCABULARY", "Position", "Pupil", "both", "far", "plan_step", "to_record"]

pytest.importorskip("mlx.core", reason="mlx is not installed: pip install 'ingot-lm[mlx]'", exc_type=ImportError)
torch.set_num_threads(1)

VOCABULARY, SEQ_LEN, ROWS = 40, 16, 7
SHAPE = {"layers": 3, "heads": 4, "width": 32}
MODELS = {
    "golf": {**SHAPE, "family": "golf", "kv_heads": 2},
    "golf, untied": {**SHAPE, "family": "golf", "kv_heads": 2, "tied": False},
    "gpt2": {**SHAPE, "family": "gpt2"},
    "llama": {**SHAPE, "family": "llama", "kv_heads": 2, "inner_width": 64},
    "frontier": {**SHAPE, "family": "frontier", "kv_heads": 2, "pattern": "SL", "window": 5, "value_layers": [0, 1]},
}


class Pupil:
    """A backend with the config it was made of."""

    def __init__(self, device, model, optimizer=None, data=None, **training):
        training = {"max_steps": 60, "tokens_per_step": ROWS * SEQ_LEN, "device": device, "precision": "fp32", **training}
        optimizer = {"schedule": "constant", "learning_rate": 1e-3, **(optimizer or {})}
        data = {"seq_len": SEQ_LEN, **(data or {})}
        self.config = Config(
            model=MODELS[model] if isinstance(model, str) else model, data=data, optimizer=optimizer, training=training
        )
        self.backend = open_backend(self.config, VOCABULARY, Ranks())
        self.masked = self.config.data.document_mask
        self.backend.tune([(plan_step(self.config, Position()), self.rows(0))], {})

    def rows(self, number):
        """Random windows, some of whose targets do not count."""
        windows = np.random.default_rng(number).integers(0, VOCABULARY, (ROWS, SEQ_LEN + 1), dtype=np.int32)
        tokens, targets = windows[:, :-1], windows[:, 1:].copy()
        targets[0, :3] = -1
        documents = [np.cumsum(tokens < 8, axis=1, dtype=np.int32)] if self.masked else []
        return np.stack([tokens, targets, *documents], axis=1)

    def step(self, number, rows=None):
        batch = self.rows(number if rows is None else rows)
        targets = int(np.count_nonzero(batch[:, 1] != -1))
        return self.backend.step(batch, targets, plan_step(self.config, Position(number))).result()

    def losses(self, steps, first=0):
        return [self.step(number).loss for number in range(first, first + steps)]

    def mean(self):
        """The loss per target of rows that no step reads."""
        batch = self.rows(1000)
        return self.backend.score(batch) / np.count_nonzero(batch[:, 1] != -1)

    def state(self):
        return {file: {found.name: found for found in records} for file, records in self.backend.snapshot()().items()}

    def raw(self):
        return {(file, n): (r.dtype, r.shape, bytes(r.data)) for file, found in self.state().items() for n, r in found.items()}

    def weights(self):
        return {found.name: to_array(found) for found in self.backend.weights()}


def both(model, optimizer=None, data=None, **training):
    return (Pupil(device, model, optimizer, data, **training) for device in ("cpu", "mlx"))


def far(ours, theirs):
    """The largest distance of two lists of losses."""
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
