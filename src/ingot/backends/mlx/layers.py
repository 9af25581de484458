"""Parts that the families share, as functions over a dict of arrays; the names in it are those of the torch models.

Weights stay as they are stored and are cast where they multiply, as autocast does: products and attention are computed in the
run's number format, the residual stream and the norms in that of the embedding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import mlx.core as mx

from ingot.runtime.tensors import IGNORED

Weights = dict[str, mx.array]
Cached = tuple[mx.array, mx.array]  # the keys and values (B, K, S, D) that a layer has seen
AT_A_TIME = 16  # numbers that are added one after another
DROPOUTS = 3  # keys that a block is given: of attention, after it, and after the MLP


@dataclass
class Pass:
    """What one forward pass has besides weights and tokens."""

    dtype: mx.Dtype = mx.float32  # of products
    mask: mx.array | None = None  # (B, 1, T, T), what tokens see where that is not simply all before them
    dropout: float = 0.0
    keys: mx.array | None = None  # of dropout: one for the embedding, then DROPOUTS for each block
    recompute: bool = False  # blocks in the backward pass, instead of keeping what is inside them
    cache: list[Cached] | None = None  # of each layer, [] before the first token
    grown: list[Cached] = field(default_factory=list)  # the cache with this pass's tokens

    @property
    def start(self) -> int:
        """The place of the first token."""
        return int(self.cache[0][0].shape[2]) if self.cache else 0

    def keys_of(self, layer: int) -> list[mx.array | None]:
        """The dropout keys of a block."""
        if self.keys is None:
            return [None] * DROPOUTS
        first = 1 + DROPOUTS * layer
        return [self.keys[first + i] for i in range(DROPOUTS)]


def part(weights: Weights, prefix: str) -> Weights:
    """The weights of a part of the model, by their names inside it."""
    return {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}


def run_block(block: Callable[..., mx.array], weights: Weights, run: Pass, *inputs: mx.array) -> mx.array:
    """A block's output. mx.checkpoint keeps what a function is given and computes the rest again in the backward pass."""
    return (mx.checkpoint(block) if run.recompute else block)(weights, *inputs)


def linear(weights: Weights, name: str, x: mx.array, run: Pass) -> mx.array:
    """A product with a stored (out, in) matrix, and its bias where there is one."""
    y = x.astype(run.dtype) @ weights[f"{name}.weight"].astype(run.dtype).T
    bias = weights.get(f"{name}.bias")
    return y if bias is None else y + bias.astype(run.dtype)


def layer_norm(weights: Weights, name: str, x: mx.array, eps: float = 1e-5) -> mx.array:
    """Layer normalisation whose bias is optional."""
    return mx.fast.layer_norm(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"), eps)


def heads_of(y: mx.array, head_size: int) -> mx.array:
    """(B, T, H * D) as (B, H, T, D)."""
    B, T, _ = y.shape
    return y.reshape(B, T, -1, head_size).transpose(0, 2, 1, 3)


def dropped(x: mx.array, p: float, key: mx.array | None) -> mx.array:
    """Drop numbers with probability p; without a key none is."""
    if key is None or not p:
        return x
    return mx.where(mx.random.bernoulli(1 - p, x.shape, key=key), x / (1 - p), mx.array(0, dtype=x.dtype))


def attention(q: mx.array, k: mx.array, v: mx.array, run: Pass, layer: int, key: mx.array | None = None) -> mx.array:
    """Attention of T queries (B, H, T, D) that stand at the end of S keys (B, K, S, D), as (B, T, H * D)."""
    if run.cache is not None:
        if run.cache:
            k, v = (mx.concatenate([held, new], axis=2) for held, new in zip(run.cache[layer], (k, v), strict=True))
        run.grown.append((k, v))
    B, H, T, D = q.shape
    q, k, v = (x.astype(run.dtype) for x in (q, k, v))
    scale = D**-0.5
    if key is None or not run.dropout:
        mask = "causal" if run.mask is None else run.mask
        y = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)
    else:  # the fused kernel has no dropout
        grouped = q.reshape(B, k.shape[1], -1, T, D)
        scores = (grouped * scale) @ k[:, :, None].swapaxes(-1, -2)  # (B, K, H / K, T, S)
        seen = mx.tri(T, k.shape[2], k.shape[2] - T, dtype=mx.bool_) if run.mask is None else run.mask[:, :, None]
        p = mx.softmax(mx.where(seen, scores, mx.array(-mx.inf, dtype=scores.dtype)), axis=-1, precise=True)
        y = (dropped(p, run.dropout, key) @ v[:, :, None]).reshape(B, H, T, D)
    return y.transpose(0, 2, 1, 3).reshape(B, T, H * D)


def document_mask(documents: mx.array) -> mx.array:
    """What each token of a row may see, from the number (B, T) of its document: that document, up to its own place."""
    T = documents.shape[1]
    return (documents[:, None, :, None] == documents[:, None, None, :]) & mx.tri(T, T, 0, dtype=mx.bool_)


def head_logits(hidden: mx.array, weight: mx.array, softcap: float | None, dtype: mx.Dtype) -> mx.array:
    """Scores of every next token (..., V) in float32; a softcap bends them into plus or minus itself."""
    logits = (hidden.astype(dtype) @ weight.astype(dtype).T).astype(mx.float32)
    return logits if softcap is None else softcap * mx.tanh(logits / softcap)


def head_loss(
    hidden: mx.array, weight: mx.array, targets: mx.array, softcap: float | None, dtype: mx.Dtype, chunk: int | None
) -> mx.array:
    """Summed loss of (B, T) targets after (B, T, C) hidden states; with `chunk`, of so many tokens at a time."""

    def loss(y: mx.array, h: mx.array, w: mx.array) -> mx.array:
        logits = head_logits(h, w, softcap, dtype)
        hit = mx.take_along_axis(logits, mx.maximum(y, 0)[..., None], axis=-1)[..., 0]
        each = mx.where(y == IGNORED, 0.0, mx.logsumexp(logits, axis=-1) - hit)
        return total(each)

    if chunk is None:
        return loss(targets, hidden, weight)
    hidden, targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    losses, chunk = [], min(chunk, len(targets))  # MLX takes no slice beyond 2^31
    for start in range(0, len(targets), chunk):
        piece = mx.checkpoint(partial(loss, targets[start : start + chunk]))  # its logits are computed again in the backward pass
        losses.append(piece(hidden[start : start + chunk], weight))
    return total(mx.stack(losses))


def total(values: mx.array) -> mx.array:
    """The sum of all numbers, a few at a time: in one long sum the last digits depend on how the numbers were cut."""
    sums = values.reshape(-1)
    while len(sums) > 1:
        sums = mx.pad(sums, (0, -len(sums) % AT_A_TIME)).reshape(-1, AT_A_TIME).sum(axis=-1)
    return sums[0]
