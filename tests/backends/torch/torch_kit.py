"""What the tests of the torch backend share: small engines on the CPU, their rows and their state."""

from dataclasses import replace
from itertools import islice
from weakref import WeakKeyDictionary

import numpy as np
import torch

from ingot.backends.open import open_backend
from ingot.backends.sampling import Sampling
from ingot.config.schema import Config
from ingot.runtime.ranks import Ranks
from ingot.train.step_plan import Position, plan_step

torch.set_num_threads(1)

VOCABULARY, SEQ_LEN, ROWS = 40, 16, 7
CONFIGS = WeakKeyDictionary()  # of the backends that were made
SMALL = {"layers": 2, "heads": 2, "width": 32, "bias": False}


def make(model=SMALL, optimizer=None, ranks=None, vocab_size=VOCABULARY, **training):
    training = {"max_steps": 10, "tokens_per_step": ROWS * SEQ_LEN, "device": "cpu", "precision": "fp32", **training}
    optimizer = {"schedule": "constant", "learning_rate": 1e-3, **(optimizer or {})}
    config = Config(model=model, data={"seq_len": SEQ_LEN}, optimizer=optimizer, training=training)
    backend = open_backend(config, vocab_size, ranks or Ranks())
    backend.tune([(plan_step(config, Position()), rows_of(0))], {})
    CONFIGS[backend] = config
    return backend


def plan_of(backend, number=0, scale=1.0, momentum=0.95):
    """The plan of a step whose learning rates are scaled and whose momentum is given."""
    plan = plan_step(CONFIGS[backend], Position(number))
    groups = {
        name: replace(rates, lr=rates.lr * scale, momentum=None if rates.momentum is None else momentum)
        for name, rates in plan.groups.items()
    }
    return replace(plan, groups=groups)


def rows_of(step, rows=ROWS):
    """A batch of random windows: (rows, 2, SEQ_LEN), tokens and targets."""
    windows = np.random.default_rng(step).integers(0, VOCABULARY, (rows, SEQ_LEN + 1), dtype=np.int32)
    return np.stack([windows[:, :-1], windows[:, 1:]], axis=1)


def step(backend, batch, number=0, scale=1.0):
    targets = int(np.count_nonzero(batch[:, 1] != -1))
    return backend.step(batch, targets, plan_of(backend, number, scale)).result()


def take(backend, steps, first=0, scale=1.0):
    return [step(backend, rows_of(number), number, scale) for number in range(first, first + steps)]


def by_name(state):
    return {file: {found.name: found for found in records} for file, records in state.items()}


def raw(backend):
    """Weights and optimizer memory, as bytes."""
    return {
        (file, found.name): (found.dtype, found.shape, bytes(found.data))
        for file, records in backend.snapshot()().items()
        for found in records
    }


def weights(backend):
    return {name: p.detach().clone() for name, p in backend.model.named_parameters()}


def written(backend, prompt, tokens, **sampling):
    return [row[0] for row in islice(backend.generate([prompt], Sampling(**sampling)), tokens)]
