"""Parts that several model families share: the base class, attention and its masks, rotary positions, the key-value cache.

Everything that depends on positions in a row (rotary tables, document masks) is computed once per forward pass and passed to
every block. The models have no buffers, so only parameters have to be moved to a device, saved and loaded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from ingot.model.cross_entropy import IGNORED, head_logits
from ingot.model.kernels.flash import flash_attention
from ingot.model.loss import head_loss, later_loss


class LayerCache:
    """The key-value cache of one attention layer: two buffers that are filled from the left and double in size when full.

    If `position` is set (a tensor (1, T) or (B, T) on the device), `extend` writes T tokens at these positions and returns the
    whole buffers; `attention_mask` hides the unfilled part. This needs no values on the host, so a CUDA graph can capture it.
    """

    position: Tensor | None = None

    def __init__(self, batch: int, heads: int, capacity: int, head_size: int, device: torch.device, dtype: torch.dtype):
        self.capacity, self.length = capacity, 0
        # Zeros instead of uninitialised memory, which may contain NaN: masked values are multiplied by 0, and 0 times NaN is NaN.
        self.keys = torch.zeros(batch, heads, min(capacity, 128), head_size, device=device, dtype=dtype)
        self.values = torch.zeros_like(self.keys)

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append (B, H, T, D) keys and values, and return all keys and values cached so far."""
        if self.position is not None:
            for kept, new in ((self.keys, k), (self.values, v)):
                if len(self.position) == 1:
                    kept.index_copy_(2, self.position[0], new.to(kept.dtype))
                else:
                    kept.scatter_(2, self.position[:, None, :, None].expand_as(new), new.to(kept.dtype))
            return self.keys, self.values
        end = self.length + k.size(2)
        self.reserve(end)
        self.keys[:, :, self.length : end] = k
        self.values[:, :, self.length : end] = v
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def reserve(self, length: int) -> None:
        """Enlarge the buffers, if necessary, to hold at least `length` tokens."""
        if length > self.keys.size(2):
            more = min(max(length, 2 * self.keys.size(2)), self.capacity) - self.keys.size(2)
            self.keys, self.values = (F.pad(kept, (0, 0, 0, more)) for kept in (self.keys, self.values))


class LanguageModel(nn.Module):
    """Base class of all families: `model(tokens)` returns logits (B, T, V), `model(tokens, targets)` the mean loss.

    Targets of -1 are ignored. A family sets the attributes below and `blocks`, and defines `embedding_weight` and `hidden`.
    """

    context: int
    head_size: int
    kv_heads: int
    lm_head: nn.Linear | None  # None: the output head is tied to the token embedding
    softcap: float | None = None
    loss_chunk: int | None = None  # number of tokens whose logits are in memory at the same time; None: all
    fused_loss = False  # compute softcap and loss in one kernel
    fp8_head = False  # compute the matmuls of the output head in fp8 during training
    later_weights: tuple[float, ...] = ()  # loss weights of the tokens after the next token, during training
    later_scale: Tensor  # factor by which `later_weights` are multiplied, on the device

    @property
    def embedding_weight(self) -> Tensor:
        """Return the weight (V, C) of the token embedding."""
        raise NotImplementedError

    @property
    def head(self) -> Tensor:
        """Return the weight (V, C) of the output head."""
        return self.embedding_weight if self.lm_head is None else self.lm_head.weight

    def hidden(self, tokens: Tensor, cache: list[LayerCache] | None = None, documents: Tensor | None = None) -> Tensor:
        """Return the final hidden states (B, T, C) of tokens after those in `cache`; attention stays within `documents`."""
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states."""
        return head_logits(hidden, self.head, self.softcap)

    def head_loss(self, hidden: Tensor, targets: Tensor, later: Sequence[Tensor] = ()) -> Tensor:
        """Return the mean loss over (N) targets, given hidden states (N, C); only its gradient includes `later` targets."""
        loss = head_loss(hidden, self.head, targets, self.softcap, self.loss_chunk, self.fused_loss, self.fp8_head)
        if not later:
            return loss
        more = later_loss(loss, hidden, self.head, targets, later, self.later_weights, self.softcap) * self.later_scale
        return loss + (more - more.detach())

    def forward(self, tokens: Tensor, targets: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        x = self.hidden(tokens, documents=documents)  # (B, T, C); flattened below, so that one loss graph serves all row lengths
        if targets is None:
            return self.logits(x)
        ahead = range(1, 1 + len(self.later_weights)) if torch.is_grad_enabled() else ()
        later = [F.pad(targets[:, k:], (0, k), value=IGNORED).flatten() for k in ahead]
        return self.head_loss(x.flatten(0, 1), targets.flatten(), later)

    def new_cache(self, batch: int) -> list[LayerCache]:
        """Return an empty key-value cache for `batch` rows of up to `context` tokens."""
        weight, layers = self.embedding_weight, len(self.blocks)  # type: ignore[arg-type]
        return [
            LayerCache(batch, self.kv_heads, self.context, self.head_size, weight.device, weight.dtype) for _ in range(layers)
        ]


class LayerNorm(nn.LayerNorm):
    """torch's LayerNorm, but constructed with the same arguments as nanoGPT's LayerNorm."""

    def __init__(self, ndim: int, bias: bool):
        super().__init__(ndim, bias=bias)


class CastedLinear(nn.Linear):
    """A linear layer without bias, whose weights are stored in float32 and cast to the dtype of the input when used."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features, bias=False)

    def scaled(self, scale: Tensor | None) -> Tensor:
        """Return the weights; if `scale` is given, row i is multiplied by scale[i]."""
        return self.weight if scale is None else scale[:, None] * self.weight

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        return F.linear(x, self.scaled(scale).to(x.dtype))


def on_host(*tensors: Tensor) -> bool:
    """Return True for tensors of a model that runs eagerly on a CPU in float32, if one of them needs a gradient."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return False
    plain = all(x.device.type == "cpu" and x.dtype == torch.float32 for x in tensors)
    return plain and any(x.requires_grad for x in tensors)


# Rotary positions.

RotaryTables = tuple[Tensor, Tensor]  # cosines and sines, (T, D / 2), or (B, 1, T, D / 2) if positions differ between rows


def positions(tokens: Tensor, cache: list[LayerCache] | None, context: int) -> Tensor:
    """Return the positions (T) of `tokens`, which follow those in `cache`; raise ValueError if they exceed the context.

    If the cache has a `position` on the device, return it: (1, T), or (B, T) for rows of different lengths.
    """
    if cache and cache[0].position is not None:
        return cache[0].position
    start = cache[0].length if cache else 0
    end = start + tokens.size(1)
    if end > context:
        raise ValueError(f"{end} tokens do not fit into a context of {context} tokens")
    return torch.arange(start, end, device=tokens.device)


class Rotation(nn.Module):
    """Cosines and sines for each position and pair of dimensions. Computed in float32: in bf16, position 257 would become 256.

    The tables are precomputed, because a compiled model would recompute the cosines for every query and key. They depend only on
    the settings, so they are neither parameters nor buffers, but are recomputed whenever the model moves to a device.
    """

    def __init__(self, context: int, head_size: int, base: float, stretch: float = 1.0):
        super().__init__()
        self._settings = context, head_size, base, stretch
        self._fill(torch.get_default_device())

    def resized(self, context: int) -> Rotation:
        """Return a copy with tables for `context` positions."""
        with self._cos.device:
            return Rotation(context, *self._settings[1:])

    def _fill(self, device: torch.device) -> None:
        context, head_size, base, stretch = self._settings
        exponents = torch.arange(0, head_size, 2, dtype=torch.float32, device=device) / head_size
        angles = torch.arange(context, dtype=torch.float32, device=device)[:, None] / (base**exponents * stretch)  # (S, D / 2)
        self._cos, self._sin = angles.cos(), angles.sin()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rotation:
        self._fill(fn(torch.empty(0, device=self._cos.device)).device)
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call,no-any-return]

    def forward(self, positions: Tensor) -> RotaryTables:
        index = positions if positions.dim() == 1 else positions[:, None]  # adds an axis for the heads
        return self._cos[index], self._sin[index]  # (T, D / 2) each, or (B, 1, T, D / 2)


@contextmanager
def extended_context(model: Any, tokens: int) -> Iterator[None]:
    """Let a model with rotary positions accept rows of `tokens` tokens within the `with` block, even beyond its context."""
    rotation = getattr(model, "rotation", None)
    if not isinstance(rotation, Rotation) or tokens <= model.context:
        yield
        return
    context, model.rotation = model.context, rotation.resized(tokens)
    model.context = tokens
    try:
        yield
    finally:
        model.context, model.rotation = context, rotation


def rotate(x: Tensor, rotary: RotaryTables) -> Tensor:
    """Rotate the pairs (i, i + R / 2) of the first R dimensions of (B, H, T, D) queries or keys; the tables have width R / 2."""
    cos, sin = (table.to(x.dtype) for table in rotary)
    half = cos.size(-1)
    first, second, rest = x.tensor_split((half, 2 * half), dim=-1)
    parts = [first * cos - second * sin, first * sin + second * cos]
    return torch.cat([*parts, rest] if rest.size(-1) else parts, dim=-1)


# Attention and its masks.

FLEX_HEAD_SIZE = 16  # FlexAttention supports no smaller head size


class Boundaries(NamedTuple):
    """Document boundaries for FlashAttention 4, which takes these instead of a mask over pairs of tokens."""

    starts: Tensor  # (N), offsets of documents, as described in kernels/flash.py


Mask = Tensor | BlockMask | Boundaries
# Implementations of attention: torch's with key and value heads repeated, torch's with grouped heads (enable_gqa),
# FlashAttention 4, and FlashAttention 4 with cuDNN's forward pass where possible.
Form = Literal["repeated", "grouped", "flash4", "cudnn-flash4"]


def attention_mask(
    documents: Tensor | None, cache: list[LayerCache] | None, head_size: int = FLEX_HEAD_SIZE, dropout: float = 0.0
) -> Mask | None:
    """Return the attention mask for documents or for the filled part of a cache; None for plain causal attention.

    `documents` holds each token's document number (B, T). The mask is a BlockMask if FlexAttention supports the device, head size
    and dropout, else a boolean tensor over pairs of tokens. One-dimensional `documents` are document offsets and give Boundaries.
    """
    if cache and cache[0].position is not None:
        size = cache[0].keys.size(2)
        return torch.arange(size, device=cache[0].position.device) <= cache[0].position[:, None, :, None]  # (1 or B, 1, T, S)
    if documents is None:
        return None
    if documents.dim() == 1:
        return Boundaries(documents)
    (B, T), device = documents.shape, documents.device
    if not flex_supported(device, head_size, dropout):
        same = documents[:, None, :, None] == documents[:, None, None, :]
        return same & torch.ones(T, T, dtype=torch.bool, device=device).tril()  # (B, 1, T, T)

    def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents[b, query] == documents[b, key])

    return compiled(create_block_mask)(visible, B, None, T, T, device=device)


def flex_supported(device: torch.device, head_size: int, dropout: float) -> bool:
    """Return True if FlexAttention can be used: on CUDA, without dropout, and for heads of at least FLEX_HEAD_SIZE dimensions."""
    return device.type == "cuda" and head_size >= FLEX_HEAD_SIZE and not dropout


def uses_flash(form: Form, mask: Mask | None, dropout: float = 0.0) -> bool:
    """Return True if attention with this form, mask and dropout uses FlashAttention 4."""
    return form.endswith("flash4") and (mask is None or isinstance(mask, Boundaries)) and not dropout


def document_starts(mask: Mask | None) -> Tensor | None:
    """Return the offsets of the documents if the mask is of type Boundaries, else None."""
    return mask.starts if isinstance(mask, Boundaries) else None


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout: float = 0.0,
    mask: Mask | None = None,
    form: Form = "repeated",
    window: int | None = None,
) -> Tensor:
    """Compute causal attention of (B, H, T, D) queries, at the last T of S positions, over (B, K, S, D) keys and values.

    If k and v have fewer heads than q, each key/value head serves a group of adjacent query heads. `mask` replaces the causal
    mask. `window` and Boundaries require the form `flash4` or `cudnn-flash4`; for other forms, the mask must include the window.
    """
    T, S = q.size(-2), k.size(-2)
    if uses_flash(form, mask, dropout) and T == S:
        return flash_attention(q, k, v, window, document_starts(mask), form != "flash4")
    if isinstance(mask, Boundaries):
        raise ValueError("a Boundaries mask requires form flash4 or cudnn-flash4, no cache and no dropout")
    if mask is not None and T != S and (isinstance(mask, BlockMask) or mask.shape[-2:] != (T, S)):
        raise ValueError("a document mask covers whole rows and cannot be used with a filled cache")
    if isinstance(mask, BlockMask):
        return compiled(flex_attention)(q, k, v, block_mask=mask, enable_gqa=k.size(1) != q.size(1))
    if form == "grouped" and mask is None and T == S and k.size(1) != q.size(1):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout, enable_gqa=True)
    k, v = repeat_kv(k, q.size(1)), repeat_kv(v, q.size(1))
    if mask is None and T == S:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
    if mask is None and T > 1:
        mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)


def repeat_kv(x: Tensor, heads: int) -> Tensor:
    """Repeat each head of the keys or values x (B, K, S, D) for every query head it serves; return (B, heads, S, D)."""
    return x if x.size(1) == heads else x[:, :, None].expand(-1, -1, heads // x.size(1), -1, -1).flatten(1, 2)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function (eager FlexAttention would store all scores), unless torch.compile is already tracing."""
    return function if torch.compiler.is_compiling() else _compiled(function)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)
