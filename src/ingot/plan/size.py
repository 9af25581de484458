"""How large a model is, by its settings alone: no framework is loaded and nothing is built.

Memory is an estimate: weights, gradients and the optimizer's state are exact, what a forward pass keeps is about right for the
kernels that are used (attention never holds all pairs).
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass

from ingot.config.schema import Config
from ingot.model.golf_settings import GolfSettings
from ingot.model.gpt2_settings import GPT2Settings
from ingot.model.llama_settings import LlamaSettings

FLOAT = 4  # bytes of a number that is not rounded
KEPT = {True: 2.0, False: 34.0}  # numbers per token and unit of width that a block keeps, with and without checkpointing


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


def state_bytes(config: Config, size: Size) -> int:
    """Weights, gradients, what the optimizer remembers, and the average of the weights, of one rank."""
    adam = size.total if config.optimizer.name == "adamw" else size.embedding
    remembered = 2 * adam + (size.total - adam)
    return FLOAT * (2 * size.total + remembered + (size.total if config.optimizer.ema_decay is not None else 0))


def row_bytes(config: Config, vocab_size: int) -> int:
    """What a forward pass keeps of one row for its backward pass, at least."""
    model, seq_len = config.model, config.data.seq_len
    number = FLOAT if config.training.precision == "fp32" else 2
    kept = KEPT[bool(config.training.gradient_checkpointing)] * model.layers * model.width * number
    logits = min(config.training.loss_chunk or seq_len, seq_len) * (model.vocab_size or vocab_size) * 2 * FLOAT
    return int(seq_len * kept + logits)


def needed_bytes(config: Config, size: Size, vocab_size: int, world_size: int) -> int:
    """About the least memory that a rank needs: its state, and the rows that it computes at once."""
    rows = config.training.micro_batch
    if rows == "auto":
        rows = 1
    return state_bytes(config, size) + min(rows, max(1, config.rows_per_step // world_size)) * row_bytes(config, vocab_size)


def host_bytes() -> int | None:
    """The memory of this machine, or of the container it is; None where nobody says."""
    found = []
    with suppress(OSError, ValueError, AttributeError):
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with suppress(OSError, ValueError), open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:  # noqa: PTH123
        found.append(int(file.read()))
    return min(found) if found else None


def gpu_bytes() -> int | None:
    """The memory of the smallest GPU here by the vendor's own tool; None where there is none."""
    if shutil.which("nvidia-smi") is None:
        return None
    words = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        out = subprocess.run(words, capture_output=True, text=True, timeout=10, check=True).stdout
        return min(int(line) for line in out.split()) << 20
    return None
