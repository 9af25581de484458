"""Parts that more than one model family is built from.

Whatever depends on places in the row (rotary angles, document masks) is made once per forward pass and handed to every block: the
models keep no buffers, so nothing has to be moved, saved or made anew with them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from ingot.model.kernels.flash import flash_attention

# What a layer of attention keeps of the tokens before, so that a text is written a token at a time.


class LayerCache:
    """The keys and values one attention layer has seen: two buffers, filled from the left, twice as long when they are full.

    With a `place` (1), or one per row (B), on the device, one token is put there and the whole buffers are given back: nothing
    about such a step depends on the host, so it can be recorded once and replayed. `attention_mask` then tells the filled part
    from the rest.
    """

    place: Tensor | None = None

    def __init__(self, batch: int, heads: int, capacity: int, head_size: int, device: torch.device, dtype: torch.dtype):
        self.capacity, self.length = capacity, 0
        # Not empty: a masked value is multiplied by 0, and 0 times a nan that the memory held by chance is nan.
        self.keys = torch.zeros(batch, heads, min(capacity, 128), head_size, device=device, dtype=dtype)
        self.values = torch.zeros_like(self.keys)

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append (B, H, T, D) keys and values and return all that are held so far."""
        if self.place is not None:
            for kept, new in ((self.keys, k), (self.values, v)):
                if len(self.place) == 1:
                    kept.index_copy_(2, self.place, new.to(kept.dtype))
                else:
                    kept.scatter_(2, self.place[:, None, None, None].expand_as(new), new.to(kept.dtype))
            return self.keys, self.values
        end = self.length + k.size(2)
        self.reserve(end)
        self.keys[:, :, self.length : end] = k
        self.values[:, :, self.length : end] = v
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def reserve(self, length: int) -> None:
        """Make room for so many tokens."""
        if length > self.keys.size(2):
            more = min(max(length, 2 * self.keys.size(2)), self.capacity) - self.keys.size(2)
            self.keys, self.values = (F.pad(kept, (0, 0, 0, more)) for kept in (self.keys, self.values))


FUSED_HEAD_SIZE = 16  # the least that FlexAttention takes
IGNORED = -1  # a target with this value is not predicted: it adds neither loss nor gradient


class Boundaries(NamedTuple):
    """Where documents begin, for FlashAttention 4, which needs no mask of pairs."""

    starts: Tensor  # (N), as kernels.flash has it


Mask = Tensor | BlockMask | Boundaries
# How heads of keys and values are given to torch's kernel; FlashAttention 4, and with cuDNN's forward pass where that can be.
Form = Literal["repeated", "grouped", "flash4", "cudnn-flash4"]
RotaryTables = tuple[Tensor, Tensor]  # cosines and sines, (T, D / 2), or (B, 1, T, D / 2) where rows have places of their own


class LayerNorm(nn.LayerNorm):
    """torch's, with the arguments of nanoGPT's."""

    def __init__(self, width: int, bias: bool):
        super().__init__(width, bias=bias)


def positions(tokens: Tensor, cache: list[LayerCache] | None, context: int) -> Tensor:
    """The places (T) of `tokens` in their row, after what `cache` holds; they must fit into the context.

    Where the cache has places of its own, those: (1, 1), or (B, 1) for rows that are not equally long.
    """
    if cache and cache[0].place is not None:
        return cache[0].place[:, None]
    start = cache[0].length if cache else 0
    end = start + tokens.size(1)
    if end > context:
        raise ValueError(f"{end} tokens do not fit into a context of {context}")
    return torch.arange(start, end, device=tokens.device)


class Rotation(nn.Module):
    """Rotary positions: how far each pair of a head's numbers is turned at each place. float32: bf16 cannot tell 256 from 257.

    Tables, because a compiled model would compute the cosines again for every query and key. They follow from the settings, so
    they are neither parameters nor buffers, and are computed anew wherever the model goes.
    """

    def __init__(self, context: int, head_size: int, base: float, stretch: float = 1.0):
        super().__init__()
        self._settings = context, head_size, base, stretch
        self._fill(torch.get_default_device())

    def resized(self, context: int) -> Rotation:
        """The same for rows of another length."""
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
        places = positions if positions.dim() == 1 else positions[:, None]  # all heads of a row are turned alike
        return self._cos[places], self._sin[places]  # (T, D / 2) each, or (B, 1, T, D / 2)


@contextmanager
def seeing(model: Any, tokens: int) -> Iterator[None]:
    """A block in which a model with rotary positions takes rows of so many tokens, also more than its context."""
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
    """Turn the pairs (i, i + R / 2) of the first R dimensions of (B, H, T, D) queries or keys; tables of D / 2 turn all."""
    cos, sin = (table.to(x.dtype) for table in rotary)
    half = cos.size(-1)
    first, second, rest = x.tensor_split((half, 2 * half), dim=-1)
    parts = [first * cos - second * sin, first * sin + second * cos]
    return torch.cat([*parts, rest] if rest.size(-1) else parts, dim=-1)


def attention_mask(
    documents: Tensor | None, cache: list[LayerCache] | None, head_size: int = FUSED_HEAD_SIZE, dropout: float = 0.0
) -> Mask | None:
    """What tokens may see where that is not simply all before them: their own document, or the filled part of a buffer."""
    if cache and cache[0].place is not None:
        size = cache[0].keys.size(2)
        return torch.arange(size, device=cache[0].place.device) <= cache[0].place[:, None, None, None]  # (1 or B, 1, 1, S)
    return document_mask(documents, head_size, dropout)


def is_fused(device: torch.device, head_size: int, dropout: float) -> bool:
    """Whether FlexAttention takes document masks: not on CPUs, where it has no backward, nor with dropout or small heads."""
    return device.type == "cuda" and head_size >= FUSED_HEAD_SIZE and not dropout


def document_mask(documents: Tensor | None, head_size: int = FUSED_HEAD_SIZE, dropout: float = 0.0) -> Mask | None:
    """What each token of a row may see, from the number (B, T) of its document: that document, up to its own place.

    It is for heads of this size and this dropout: where FlexAttention does not take them, torch's own kernels get all pairs.
    Documents of one dimension are where they begin, for the form `flash4`.
    """
    if documents is None:
        return None
    if documents.dim() == 1:
        return Boundaries(documents)
    (B, T), device = documents.shape, documents.device
    if not is_fused(device, head_size, dropout):
        same = documents[:, None, :, None] == documents[:, None, None, :]
        return same & torch.ones(T, T, dtype=torch.bool, device=device).tril()  # (B, 1, T, T)

    def attention_mask(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents[b, query] == documents[b, key])

    return fused(create_block_mask)(attention_mask, B, None, T, T, device=device)


def takes_flash(form: Form, mask: Mask | None, dropout: float = 0.0) -> bool:
    """Whether attention of whole rows is FlashAttention 4's."""
    return form.endswith("flash4") and (mask is None or isinstance(mask, Boundaries)) and not dropout


def starts_of(mask: Mask | None) -> Tensor | None:
    """Where documents begin, where a mask says so."""
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
    """Attention of T queries that stand at the end of S keys; query i sees the keys up to its own place, or what `mask` says.

    k and v may have fewer heads than q; each then serves a group of neighbouring ones. Only the form `flash4` takes a `window`
    without a mask, and boundaries in place of one, or `cudnn-flash4`, which is the same but for whole rows.
    """
    T, S = q.size(-2), k.size(-2)
    if takes_flash(form, mask, dropout) and T == S:
        return flash_attention(q, k, v, window, starts_of(mask), form != "flash4")
    if isinstance(mask, Boundaries):
        raise ValueError("boundaries are for the form flash4, without a cache or dropout")
    if mask is not None and T != S and (isinstance(mask, BlockMask) or mask.shape[-2:] != (T, S)):
        raise ValueError("a document mask covers whole rows; it does not go together with a filled cache")
    if isinstance(mask, BlockMask):
        if dropout:
            raise ValueError("this mask knows no dropout; make it with document_mask(documents, head_size, dropout)")
        return fused(flex_attention)(q, k, v, block_mask=mask, enable_gqa=k.size(1) != q.size(1))
    if form == "grouped" and mask is None and T == S and k.size(1) != q.size(1):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout, enable_gqa=True)
    k, v = repeat_kv(k, q.size(1)), repeat_kv(v, q.size(1))
    if mask is None and T == S:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
    if mask is None and T > 1:
        mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)


def repeat_kv(x: Tensor, heads: int) -> Tensor:
    """Repeat (B, K, S, D) keys or values for every head they serve."""
    return x if x.size(1) == heads else x[:, :, None].expand(-1, -1, heads // x.size(1), -1, -1).flatten(1, 2)


def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled: eagerly FlexAttention would hold the scores of all pairs. A model that is compiled compiles it as its part."""
    return function if torch.compiler.is_compiling() else _compiled(function)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)
