"""The gpt2 family in MLX; see model/gpt2.py, whose names and order it follows."""

from __future__ import annotations

import math
from functools import partial

import mlx.core as mx

from ingot.backends.mlx.layers import Pass, Weights, attention, dropped, heads_of, layer_norm, linear, part, run_block
from ingot.model.settings import GPT2Settings


def gelu_tanh(x: mx.array) -> mx.array:
    """OpenAI's form of the GELU."""
    return 0.5 * x * (1 + mx.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def gelu_erf(x: mx.array) -> mx.array:
    """The exact form of the GELU."""
    return 0.5 * x * (1 + mx.erf(x / math.sqrt(2)))


def block(s: GPT2Settings, run: Pass, layer: int, w: Weights, x: mx.array) -> mx.array:
    """One block, from its own weights."""
    in_attention, after_attention, after_mlp = run.keys_of(layer)
    size = s.width // s.heads
    projected = mx.split(linear(w, "attn.c_attn", layer_norm(w, "ln_1", x), run), 3, axis=-1)
    q, k, v = (heads_of(y, size) for y in projected)
    y = linear(w, "attn.c_proj", attention(q, k, v, run, layer, in_attention), run)
    x = x + dropped(y, s.dropout, after_attention)
    act = gelu_tanh if s.gelu == "tanh" else gelu_erf
    y = linear(w, "mlp.c_proj", act(linear(w, "mlp.c_fc", layer_norm(w, "ln_2", x), run)), run)
    return x + dropped(y, s.dropout, after_mlp)


def hidden(s: GPT2Settings, w: Weights, tokens: mx.array, run: Pass) -> mx.array:
    """Final hidden states (B, T, C)."""
    places = w["transformer.wpe.weight"][run.start : run.start + tokens.shape[1]]
    x = w["transformer.wte.weight"][tokens] + places
    x = dropped(x, s.dropout, None if run.keys is None else run.keys[0])
    for i in range(s.layers):
        x = run_block(partial(block, s, run, i), part(w, f"transformer.h.{i}."), run, x)
    return layer_norm(w, "transformer.ln_f", x)
