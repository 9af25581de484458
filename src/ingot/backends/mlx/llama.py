"""The llama family in MLX; see model/llama.py, whose names and order it follows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import mlx.core as mx

from ingot.backends.mlx.gpt2 import gelu_tanh
from ingot.backends.mlx.layers import Pass, Weights, attention, dropped, heads_of, layer_norm, linear, part, run_block
from ingot.model.settings import LlamaSettings

ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "silu": lambda x: x * mx.sigmoid(x),
    "gelu": gelu_tanh,
    "relu": lambda x: mx.maximum(x, 0),
}


def norm(s: LlamaSettings, w: Weights, name: str, x: mx.array) -> mx.array:
    """The normalisation that the settings name."""
    if s.norm == "rmsnorm":
        return mx.fast.rms_norm(x, w[f"{name}.weight"], s.norm_epsilon)
    return layer_norm(w, name, x, s.norm_epsilon)


def rotary(s: LlamaSettings, start: int) -> Callable[[mx.array], mx.array]:
    """What turns queries and keys by their places."""
    base = s.rope_base * (s.rope_factor if s.rope_scaling == "ntk" else 1.0)
    scale = 1 / s.rope_factor if s.rope_scaling == "linear" else 1.0
    return partial(mx.fast.rope, dims=s.width // s.heads, traditional=False, base=base, scale=scale, offset=start)


def block(s: LlamaSettings, run: Pass, layer: int, w: Weights, x: mx.array) -> mx.array:
    """One block, from its own weights."""
    in_attention, after_attention, after_mlp = run.keys_of(layer)
    turn, inside = rotary(s, run.start), norm(s, w, "ln_1", x)
    projected = (linear(w, f"attn.{name}", inside, run) for name in ("q_proj", "k_proj", "v_proj"))
    q, k, v = (heads_of(y, s.width // s.heads) for y in projected)
    y = linear(w, "attn.c_proj", attention(turn(q), turn(k), v, run, layer, in_attention), run)
    x = x + dropped(y, s.dropout, after_attention)
    inside, act = norm(s, w, "ln_2", x), ACTIVATIONS[s.activation]
    if s.mlp == "gated":
        y = linear(w, "mlp.c_down", linear(w, "mlp.c_up", inside, run) * act(linear(w, "mlp.c_gate", inside, run)), run)
    else:
        y = linear(w, "mlp.c_proj", act(linear(w, "mlp.c_fc", inside, run)), run)
    return x + dropped(y, s.dropout, after_mlp)


def hidden(s: LlamaSettings, w: Weights, tokens: mx.array, run: Pass) -> mx.array:
    """Final hidden states (B, T, C)."""
    x = dropped(w["wte.weight"][tokens], s.dropout, None if run.keys is None else run.keys[0])
    for i in range(s.layers):
        x = run_block(partial(block, s, run, i), part(w, f"h.{i}."), run, x)
    return norm(s, w, "ln_f", x)
