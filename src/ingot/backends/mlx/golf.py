"""The golf family in MLX; see model/golf.py, whose names and order it follows."""

from __future__ import annotations

from functools import partial

import mlx.core as mx

from ingot.backends.mlx.layers import Pass, Weights, attention, heads_of, linear, part, run_block
from ingot.model.settings import GolfSettings

EPSILON = 1.1920929e-07  # float32's, which torch takes where none is given


def norm(x: mx.array) -> mx.array:
    """Bring the last dimension to a root mean square of 1, without a gain."""
    return mx.fast.rms_norm(x, None, EPSILON)


def block(s: GolfSettings, run: Pass, layer: int, w: Weights, x: mx.array, x0: mx.array) -> mx.array:
    """One block, from its own weights."""
    size = s.width // s.heads
    # The way round the challenge's weights are trained is the other one than everybody else's.
    turn = partial(mx.fast.rope, dims=size, traditional=False, base=s.rope_base, scale=-1.0, offset=run.start)
    mix = w["resid_mix"].astype(x.dtype)
    x = mix[0] * x + mix[1] * x0
    inside = norm(x)
    q, k, v = (heads_of(linear(w, f"attn.{name}", inside, run), size) for name in ("c_q", "c_k", "c_v"))
    q, k = turn(norm(q)), turn(norm(k))
    q = q * w["attn.q_gain"].astype(q.dtype)[:, None, None]
    x = x + w["attn_scale"].astype(x.dtype) * linear(w, "attn.proj", attention(q, k, v, run, layer), run)
    y = linear(w, "mlp.proj", mx.square(mx.maximum(linear(w, "mlp.fc", norm(x), run), 0)), run)
    return x + w["mlp_scale"].astype(x.dtype) * y


def hidden(s: GolfSettings, w: Weights, tokens: mx.array, run: Pass) -> mx.array:
    """Final hidden states (B, T, C)."""
    x = x0 = norm(w["tok_emb.weight"][tokens])
    skips = s.layers // 2
    outputs: list[mx.array] = []
    for i in range(s.layers):
        if i >= skips and outputs:
            x = x + w["skip_weights"][i - skips].astype(x.dtype) * outputs.pop()
        x = run_block(partial(block, s, run, i), part(w, f"blocks.{i}."), run, x, x0)
        if i < skips:
            outputs.append(x)
    return norm(x)
