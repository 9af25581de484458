"""Estimates of a model's parameter count and training memory from its settings alone, before any memory is allocated."""

from __future__ import annotations

from dataclasses import dataclass

from ingot.config.schema import Config

FLOAT = 4  # bytes per fp32 value
ACTIVATIONS = {True: 2.0, False: 34.0}  # activations stored per token, channel and block, with (True) or without recomputation
FULL = 0.75  # fraction of device memory to use; the rest is a margin, because the estimate is rough
HELD_STEPS = 4  # steps whose rows are in memory at once: two prefetched, one being copied to the device, one being computed


@dataclass(frozen=True)
class Size:
    """The number of parameters of a model, and how many of them are in the token embedding."""

    total: int
    embedding: int


def model_size(config: Config, vocab_size: int) -> Size | None:
    """Return the parameter count of a built-in model; None for a custom model."""
    model, rows = config.model, config.model.vocab_size or vocab_size
    context = model.context or config.data.seq_len
    rest = model.weights_besides_embedding(rows, context)
    embedding = rows * model.width
    return None if rest is None else Size(embedding + rest, embedding)


def state_bytes(config: Config, size: Size) -> int:
    """Return the bytes that weights, gradients, optimizer state and averaged weights take on one rank."""
    adam = size.total if config.optimizer.name == "adamw" else size.embedding
    moments = 2 * adam + (size.total - adam)
    return FLOAT * (2 * size.total + moments + (size.total if config.optimizer.ema_decay is not None else 0))


def replica_bytes(config: Config, vocab_size: int) -> int | None:
    """Estimate the bytes that an unsharded rank needs: its state, and one row with recomputation; None for a custom model."""
    size = model_size(config, vocab_size)
    return None if size is None else state_bytes(config, size) + row_bytes(config, vocab_size, True)


def step_bytes(config: Config, world_size: int) -> int:
    """Return the bytes of the input rows that one rank holds in memory, which are the rows of HELD_STEPS steps."""
    return HELD_STEPS * 2 * 4 * (config.training.tokens_per_step // max(1, world_size))


def row_bytes(config: Config, vocab_size: int, recomputed: bool) -> int:
    """Estimate the bytes of activations and logits per row; `recomputed` is True if the backward pass recomputes activations."""
    model, seq_len = config.model, config.data.seq_len
    number = FLOAT if config.training.precision == "fp32" else 2
    logits = min(config.training.loss_chunk or seq_len, seq_len) * (model.vocab_size or vocab_size) * 2 * FLOAT
    return int(seq_len * ACTIVATIONS[recomputed] * model.layers * model.width * number + logits)


def recomputed_every(config: Config, vocab_size: int, memory: int | None) -> int:
    """Return k if the backward pass should recompute every k-th block on a device with `memory` bytes; 0 means no blocks."""
    t = config.training
    if t.gradient_checkpointing != "auto":
        return int(t.gradient_checkpointing)
    if memory is None or (size := model_size(config, vocab_size)) is None:
        return 0
    rows = 1 if t.micro_batch == "auto" else t.micro_batch  # with auto, the micro-batch can be as small as one row
    return int(state_bytes(config, size) + rows * row_bytes(config, vocab_size, False) > FULL * memory)
