"""The gpt2, llama, golf and frontier families in MLX, as functions of a dict of weights named as in the torch models.

Each follows the torch implementation in ingot/model. Weights keep their dtype and are cast for each matmul, as autocast does:
matmuls and attention use the precision of the run; the residual stream and the norms use the dtype of the embedding, except in
the frontier family, which uses the precision of the run for them too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import mlx.core as mx

from ingot.model.settings import FrontierSettings, GolfSettings, GPT2Settings, LlamaSettings
from ingot.runtime.tensors import IGNORED

Weights = dict[str, mx.array]
Cached = tuple[mx.array, mx.array]  # cached keys and values (B, K, S, D) of a layer
SUM_WIDTH = 16  # number of values in each group that the function `total` sums
DROPOUTS = 3  # dropout keys per block: inside attention, after attention, after the MLP


@dataclass
class Pass:
    """Arguments of a forward pass besides weights and tokens."""

    dtype: mx.Dtype = mx.float32  # dtype of matmuls
    mask: mx.array | None = None  # (B, 1, T, T); None: causal
    window: int = 0  # sliding window of the S (short) layers of a frontier model; 0: use the setting model.window
    dropout: float = 0.0
    keys: mx.array | None = None  # dropout keys: one for the embedding, then DROPOUTS for each block
    recompute: bool = False  # recompute blocks in the backward pass instead of keeping their activations
    cache: list[Cached] | None = None  # one entry per layer; [] before the first pass; None: no cache
    grown: list[Cached] = field(default_factory=list)  # `cache` extended by the keys and values of this pass

    @property
    def start(self) -> int:
        """Return the position of this pass's first token, which is the number of cached tokens."""
        return int(self.cache[0][0].shape[2]) if self.cache else 0

    def keys_of(self, layer: int) -> list[mx.array | None]:
        """Return the dropout keys of a block."""
        if self.keys is None:
            return [None] * DROPOUTS
        first = 1 + DROPOUTS * layer
        return [self.keys[first + i] for i in range(DROPOUTS)]


def run_block(block: Callable[..., mx.array], weights: Weights, prefix: str, run: Pass, *inputs: mx.array) -> mx.array:
    """Run a block with the weights whose names start with `prefix`; with `run.recompute`, recompute it in the backward pass."""
    inside = {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
    return (mx.checkpoint(block) if run.recompute else block)(inside, *inputs)


def linear(weights: Weights, name: str, x: mx.array, run: Pass) -> mx.array:
    """Multiply x by the (out, in) weight called `name` and add the bias, if there is one."""
    y = x.astype(run.dtype) @ weights[f"{name}.weight"].astype(run.dtype).T
    bias = weights.get(f"{name}.bias")
    return y if bias is None else y + bias.astype(run.dtype)


def layer_norm(weights: Weights, name: str, x: mx.array, eps: float = 1e-5) -> mx.array:
    """Apply layer normalisation with an optional bias."""
    return mx.fast.layer_norm(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"), eps)


def heads_of(y: mx.array, head_size: int) -> mx.array:
    """Split the last dimension of (B, T, H * D) into heads: (B, H, T, D)."""
    B, T, _ = y.shape
    return y.reshape(B, T, -1, head_size).transpose(0, 2, 1, 3)


def dropped(x: mx.array, p: float, key: mx.array | None) -> mx.array:
    """Apply dropout with probability p; without a key, return x unchanged."""
    if key is None or not p:
        return x
    return mx.where(mx.random.bernoulli(1 - p, x.shape, key=key), x / (1 - p), mx.array(0, dtype=x.dtype))


def extended(k: mx.array, v: mx.array, run: Pass, layer: int) -> Cached:
    """Return the cached keys and values of a layer, if there is a cache, followed by the new ones."""
    if run.cache is not None:
        if run.cache:
            k, v = (mx.concatenate([held, new], axis=2) for held, new in zip(run.cache[layer], (k, v), strict=True))
        run.grown.append((k, v))
    return k, v


def attention(q: mx.array, k: mx.array, v: mx.array, run: Pass, layer: int, key: mx.array | None = None) -> mx.array:
    """Return the causal attention output (B, T, H * D) for T new positions, which also attend to the cached keys and values."""
    k, v = extended(k, v, run, layer)
    B, H, T, D = q.shape
    q, k, v = (x.astype(run.dtype) for x in (q, k, v))
    scale = D**-0.5
    if key is None or not run.dropout:
        mask = "causal" if run.mask is None else run.mask
        y = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)
    else:  # the fused kernel does not support dropout
        grouped = q.reshape(B, k.shape[1], -1, T, D)
        scores = (grouped * scale) @ k[:, :, None].swapaxes(-1, -2)  # (B, K, H / K, T, S)
        seen = mx.tri(T, k.shape[2], k.shape[2] - T, dtype=mx.bool_) if run.mask is None else run.mask[:, :, None]
        p = mx.softmax(mx.where(seen, scores, mx.array(-mx.inf, dtype=scores.dtype)), axis=-1, precise=True)
        y = (dropped(p, run.dropout, key) @ v[:, :, None]).reshape(B, H, T, D)
    return y.transpose(0, 2, 1, 3).reshape(B, T, H * D)


def head_logits(hidden: mx.array, weight: mx.array, softcap: float | None, dtype: mx.Dtype) -> mx.array:
    """Return the logits (..., V) in float32, squashed by tanh into (-softcap, softcap) if a softcap is set."""
    logits = (hidden.astype(dtype) @ weight.astype(dtype).T).astype(mx.float32)
    return logits if softcap is None else softcap * mx.tanh(logits / softcap)


def head_loss(
    hidden: mx.array, weight: mx.array, targets: mx.array, softcap: float | None, dtype: mx.Dtype, chunk: int | None
) -> mx.array:
    """Return the loss summed over (B, T) targets, given (B, T, C) hidden states; process `chunk` tokens at a time."""

    def loss(y: mx.array, h: mx.array, w: mx.array) -> mx.array:
        logits = head_logits(h, w, softcap, dtype)
        hit = mx.take_along_axis(logits, mx.maximum(y, 0)[..., None], axis=-1)[..., 0]
        return total(mx.where(y == IGNORED, 0.0, mx.logsumexp(logits, axis=-1) - hit))

    if chunk is None:
        return loss(targets, hidden, weight)
    hidden, targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    chunk = min(chunk, len(targets))  # chunk may be huge, but MLX does not support slice bounds above 2^31
    parts = [slice(start, start + chunk) for start in range(0, len(targets), chunk)]
    # The backward pass recomputes the logits, so that only those of one chunk are in memory.
    return total(mx.stack([mx.checkpoint(partial(loss, targets[part]))(hidden[part], weight) for part in parts]))


def total(values: mx.array) -> mx.array:
    """Return the sum of all values, added in groups of SUM_WIDTH so that rounding does not depend on the micro-batch size."""
    sums = values.reshape(-1)
    while len(sums) > 1:
        sums = mx.pad(sums, (0, -len(sums) % SUM_WIDTH)).reshape(-1, SUM_WIDTH).sum(axis=-1)
    return sums[0]


ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "silu": lambda x: x * mx.sigmoid(x),
    "relu": lambda x: mx.maximum(x, 0),
    "gelu": lambda x: 0.5 * x * (1 + mx.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))),  # GELU's tanh approximation
    "gelu-erf": lambda x: 0.5 * x * (1 + mx.erf(x / math.sqrt(2))),  # exact GELU
}


# The gpt2 family.


def gpt2_block(s: GPT2Settings, run: Pass, layer: int, w: Weights, x: mx.array) -> mx.array:
    """Run one block, given its weights."""
    in_attention, after_attention, after_mlp = run.keys_of(layer)
    size = s.width // s.heads
    projected = mx.split(linear(w, "attn.c_attn", layer_norm(w, "ln_1", x), run), 3, axis=-1)
    q, k, v = (heads_of(y, size) for y in projected)
    y = linear(w, "attn.c_proj", attention(q, k, v, run, layer, in_attention), run)
    x = x + dropped(y, s.dropout, after_attention)
    act = ACTIVATIONS["gelu" if s.gelu == "tanh" else "gelu-erf"]
    y = linear(w, "mlp.c_proj", act(linear(w, "mlp.c_fc", layer_norm(w, "ln_2", x), run)), run)
    return x + dropped(y, s.dropout, after_mlp)


def gpt2_hidden(s: GPT2Settings, w: Weights, tokens: mx.array, run: Pass) -> mx.array:
    """Return the final hidden states (B, T, C)."""
    embedded = w["transformer.wpe.weight"][run.start : run.start + tokens.shape[1]]
    x = w["transformer.wte.weight"][tokens] + embedded
    x = dropped(x, s.dropout, None if run.keys is None else run.keys[0])
    for i in range(s.layers):
        x = run_block(partial(gpt2_block, s, run, i), w, f"transformer.h.{i}.", run, x)
    return layer_norm(w, "transformer.ln_f", x)


# The llama family.


def llama_norm(s: LlamaSettings, w: Weights, name: str, x: mx.array) -> mx.array:
    """Apply the norm that the setting `norm` selects: RMSNorm or LayerNorm."""
    if s.norm == "rmsnorm":
        return mx.fast.rms_norm(x, w[f"{name}.weight"], s.norm_epsilon)
    return layer_norm(w, name, x, s.norm_epsilon)


def llama_block(s: LlamaSettings, run: Pass, layer: int, w: Weights, x: mx.array) -> mx.array:
    """Run one block, given its weights."""
    in_attention, after_attention, after_mlp = run.keys_of(layer)
    size = s.width // s.heads
    base = s.rope_base * (s.rope_factor if s.rope_scaling == "ntk" else 1.0)
    scale = 1 / s.rope_factor if s.rope_scaling == "linear" else 1.0
    rotate = partial(mx.fast.rope, dims=size, traditional=False, base=base, scale=scale, offset=run.start)
    inside = llama_norm(s, w, "ln_1", x)
    q, k, v = (heads_of(linear(w, f"attn.{name}", inside, run), size) for name in ("q_proj", "k_proj", "v_proj"))
    y = linear(w, "attn.c_proj", attention(rotate(q), rotate(k), v, run, layer, in_attention), run)
    x = x + dropped(y, s.dropout, after_attention)
    inside, act = llama_norm(s, w, "ln_2", x), ACTIVATIONS[s.activation]
    if s.mlp == "gated":
        y = linear(w, "mlp.c_down", linear(w, "mlp.c_up", inside, run) * act(linear(w, "mlp.c_gate", inside, run)), run)
    else:
        y = linear(w, "mlp.c_proj", act(linear(w, "mlp.c_fc", inside, run)), run)
    return x + dropped(y, s.dropout, after_mlp)


def llama_hidden(s: LlamaSettings, w: Weights, tokens: mx.array, run: Pass) -> mx.array:
    """Return the final hidden states (B, T, C)."""
    x = dropped(w["wte.weight"][tokens], s.dropout, None if run.keys is None else run.keys[0])
    for i in range(s.layers):
        x = run_block(partial(llama_block, s, run, i), w, f"h.{i}.", run, x)
    return llama_norm(s, w, "ln_f", x)


# The golf family.


def golf_norm(x: mx.array) -> mx.array:
    """Normalise the last dimension to a root mean square of 1, without a gain."""
    return mx.fast.rms_norm(x, None, 1.1920929e-07)  # epsilon, as in torch: the machine epsilon of float32


def golf_block(s: GolfSettings, run: Pass, layer: int, w: Weights, x: mx.array, x0: mx.array) -> mx.array:
    """Run one block, given its weights."""
    size = s.width // s.heads
    # The golf challenge's models rotate in the opposite direction to the other families, hence the negative scale.
    rotate = partial(mx.fast.rope, dims=size, traditional=False, base=s.rope_base, scale=-1.0, offset=run.start)
    mix = w["resid_mix"].astype(x.dtype)
    x = mix[0] * x + mix[1] * x0
    inside = golf_norm(x)
    q, k, v = (heads_of(linear(w, f"attn.{name}", inside, run), size) for name in ("c_q", "c_k", "c_v"))
    q, k = rotate(golf_norm(q)), rotate(golf_norm(k))
    q = q * w["attn.q_gain"].astype(q.dtype)[:, None, None]
    x = x + w["attn_scale"].astype(x.dtype) * linear(w, "attn.proj", attention(q, k, v, run, layer), run)
    y = linear(w, "mlp.proj", mx.square(mx.maximum(linear(w, "mlp.fc", golf_norm(x), run), 0)), run)
    return x + w["mlp_scale"].astype(x.dtype) * y


def golf_hidden(s: GolfSettings, w: Weights, tokens: mx.array, run: Pass) -> mx.array:
    """Return the final hidden states (B, T, C)."""
    x = x0 = golf_norm(w["tok_emb.weight"][tokens])
    skips = s.layers // 2
    outputs: list[mx.array] = []
    for i in range(s.layers):
        if i >= skips and outputs:
            x = x + w["skip_weights"][i - skips].astype(x.dtype) * outputs.pop()
        x = run_block(partial(golf_block, s, run, i), w, f"blocks.{i}.", run, x, x0)
        if i < skips:
            outputs.append(x)
    return golf_norm(x)


# The frontier family.


def frontier_norm(x: mx.array) -> mx.array:
    """Normalise the last dimension to a root mean square of 1, without a gain."""
    return mx.fast.rms_norm(x, None, 1e-6)


def frontier_gate(weights: Weights, name: str, x: mx.array, run: Pass) -> mx.array:
    """Return one factor between 0 and 2 per head and token, (B, T, H, 1), computed from the first channels of x (B, T, C)."""
    return 2 * mx.sigmoid(linear(weights, name, x[..., : weights[f"{name}.weight"].shape[1]], run))[..., None]


def offset_keys(k: mx.array, rotated: int, mask: mx.array | None) -> mx.array:
    """Return keys (B, K, S, D) with their unrotated dimensions taken from the previous token, except at document starts."""
    still = k[..., rotated:]
    before = mx.concatenate([still[:, :, :1], still[:, :, :-1]], axis=2)
    if mask is not None:  # a token that does not see the previous one begins a document
        follows = mx.pad(mx.diagonal(mask, -1, 2, 3), [(0, 0), (0, 0), (1, 0)])  # (B, 1, T)
        before = mx.where(follows[..., None], before, still)
    return mx.concatenate([k[..., :rotated], before], axis=-1)


def frontier_block(
    s: FrontierSettings, run: Pass, short: mx.array | None, tokens: mx.array, layer: int, w: Weights, x: mx.array, x0: mx.array
) -> mx.array:
    """Run one block, given its weights; `short` is the attention mask of layers with a sliding window."""
    size = s.width // s.heads
    rotate = partial(mx.fast.rope, dims=s.rotated, traditional=False, base=s.rope_base, scale=1.0, offset=run.start)
    x = w["mix_x"].astype(x.dtype) * x + w["mix_x0"].astype(x.dtype) * x0
    inside = frontier_norm(x)
    q, k, v = (heads_of(linear(w, f"attn.{name}", inside, run), size) for name in "qkv")
    if s.has_values(layer):
        table = w.get("attn.value_table.weight")
        more = linear(w, "attn.value_projection", x0, run) if table is None else table[tokens].astype(x.dtype)
        v = v + frontier_gate(w, "attn.value_gate", inside, run).swapaxes(1, 2) * heads_of(more, size)
    # The cache stores keys as they are before `offset_keys`, so the key of the previous token is always available.
    k, v = extended(frontier_norm(rotate(k)), v, run, layer)
    long = s.is_long(layer)
    if long and s.key_offset:
        k = offset_keys(k, s.rotated, run.mask)
    y = attention(frontier_norm(rotate(q)), k, v, replace(run, cache=None, mask=run.mask if long else short), layer)
    if s.head_gate:
        y = (y.reshape(*y.shape[:2], -1, size) * frontier_gate(w, "attn.head_gate", inside, run)).reshape(y.shape)
    x = x + linear(w, "attn.o", y, run)
    return x + linear(w, "mlp.down", mx.square(mx.maximum(linear(w, "mlp.fc", frontier_norm(x), run), 0)), run)


def frontier_hidden(s: FrontierSettings, w: Weights, tokens: mx.array, run: Pass) -> mx.array:
    """Return the final hidden states (B, T, C)."""
    x = x0 = frontier_norm(w["embedding.weight"][tokens].astype(run.dtype))
    window, T, S, short = run.window or s.window, tokens.shape[1], run.start + tokens.shape[1], run.mask
    if window < S:  # a token sees the last `window` tokens, including itself
        near = mx.tri(T, S, S - T, dtype=mx.bool_) & ~mx.tri(T, S, S - T - window, dtype=mx.bool_)
        short = near if short is None else short & near
    for i in range(s.layers):
        x = run_block(partial(frontier_block, s, run, short, tokens, i), w, f"blocks.{i}.", run, x, x0)
    return frontier_norm(x)
