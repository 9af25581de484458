"""How large a model is, by its settings alone, and what its training takes at least: known before memory is taken."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ingot.config.schema import Config
from ingot.model.frontier_settings import GATE_CHANNELS, VALUE_GATE_CHANNELS, FrontierSettings
from ingot.model.golf_settings import GolfSettings
from ingot.model.gpt2_settings import GPT2Settings
from ingot.model.llama_settings import LlamaSettings

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
    match model:
        case GPT2Settings():
            bias, width = int(model.bias), model.width
            block = 12 * width * width + bias * 9 * width + 2 * width * (1 + bias)
            return Size(rows * width, context * width + model.layers * block + width * (1 + bias))
        case LlamaSettings():
            return Size(rows * model.width, _llama(model, rows))
        case GolfSettings():
            return Size(rows * model.width, _golf(model, rows))
        case FrontierSettings():
            return Size(rows * model.width, _frontier(model, rows))
    return None


def _llama(s: LlamaSettings, rows: int) -> int:
    width, kv = s.width, (s.kv_heads or s.heads) * (s.width // s.heads)
    qkv_bias, out_bias, mlp_bias = (s.bias if b is None else b for b in (s.qkv_bias, s.attention_out_bias, s.mlp_bias))
    gated = s.mlp == "gated"
    inner = s.inner_width or (math.ceil(8 * width // 3 / 256) * 256 if gated else 4 * width)
    attention = 2 * width * width + 2 * width * kv + qkv_bias * (width + 2 * kv) + out_bias * width
    mlp = (3 if gated else 2) * width * inner + mlp_bias * ((2 if gated else 1) * inner + width)
    norm = width if s.norm == "rmsnorm" else 2 * width
    return s.layers * (attention + mlp + 2 * norm) + norm + (0 if s.tied else rows * width)


def _golf(s: GolfSettings, rows: int) -> int:
    width, kv = s.width, (s.kv_heads or s.heads) * (s.width // s.heads)
    block = 2 * width * width + 2 * width * kv + s.heads + 2 * s.mlp_multiple * width * width + 4 * width
    return s.layers * block + s.layers // 2 * width + (0 if s.tied else rows * width)


def _frontier(s: FrontierSettings, rows: int) -> int:
    width, kv_heads = s.width, s.kv_heads or s.heads
    kv = kv_heads * (width // s.heads)
    block = 2 * width * width + 2 * width * kv + 2 * s.inner_width * width + 2
    gates = s.head_gate * s.heads * min(GATE_CHANNELS, width)
    with_values = sum(s.has_values(layer) for layer in range(s.layers))
    values = kv * (rows if s.values == "tables" else width) + kv_heads * min(VALUE_GATE_CHANNELS, width)
    skips = sum(s.has_skip(layer) for layer in range(s.layers))
    return s.layers * (block + gates) + with_values * values + skips + (0 if s.tied else rows * width)


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
