"""How large a model is, by its settings alone, and what its training takes at least: known before memory is taken."""

from __future__ import annotations

from dataclasses import dataclass

from ingot.config.schema import Config

FLOAT = 4  # bytes of a number that is not rounded
KEPT = {True: 2.0, False: 34.0}  # numbers per token and unit of width that a block keeps, recomputed and not
FULL = 0.75  # of a device's memory: the estimate is a rough one
HELD_STEPS = 4  # whose rows are in memory at once: two that are read ahead, one that is computed, one that is uploaded


@dataclass(frozen=True)
class Size:
    """Parameters of a model."""

    embedding: int
    rest: int

    @property
    def total(self) -> int:
        return self.embedding + self.rest


def model_size(config: Config, vocab_size: int) -> Size | None:
    """The parameters of a model of ours; None for one of one's own."""
    model, rows = config.model, config.model.vocab_size or vocab_size
    context = model.context or config.data.seq_len
    rest = model.weights_besides_embedding(rows, context)
    return None if rest is None else Size(rows * model.width, rest)


def state_bytes(config: Config, size: Size) -> int:
    """Weights, gradients, what the optimizer remembers, and the average of the weights, of one rank."""
    adam = size.total if config.optimizer.name == "adamw" else size.embedding
    remembered = 2 * adam + (size.total - adam)
    return FLOAT * (2 * size.total + remembered + (size.total if config.optimizer.ema_decay is not None else 0))


def step_bytes(config: Config, world_size: int) -> int:
    """The rows of the steps that a rank holds: tokens and targets of four bytes each."""
    return HELD_STEPS * 2 * 4 * (config.training.tokens_per_step // max(1, world_size))


def row_bytes(config: Config, vocab_size: int, recomputed: bool) -> int:
    """What a forward pass keeps of one row for its backward pass, about: attention never holds all pairs."""
    model, seq_len = config.model, config.data.seq_len
    number = FLOAT if config.training.precision == "fp32" else 2
    logits = min(config.training.loss_chunk or seq_len, seq_len) * (model.vocab_size or vocab_size) * 2 * FLOAT
    return int(seq_len * KEPT[recomputed] * model.layers * model.width * number + logits)


def recomputed_every(config: Config, vocab_size: int, memory: int | None) -> int:
    """Every how many-th block a device of so many bytes recomputes in the backward pass; 0: none."""
    t = config.training
    if t.gradient_checkpointing != "auto":
        return int(t.gradient_checkpointing)
    if memory is None or (size := model_size(config, vocab_size)) is None:
        return 0
    rows = 1 if t.micro_batch == "auto" else t.micro_batch  # auto: rows are as many as fit
    return int(state_bytes(config, size) + rows * row_bytes(config, vocab_size, False) > FULL * memory)
