"""The bench's model: one block function, compiled once per kind of block, and weights that are plain dictionaries.

Blocks get their weights as arguments, so the ten blocks of a model, and all arms of equal shape in one process, share a few
compiled graphs: a whole model would be traced and compiled layer by layer, again for every arm. Kinds differ by what is in a
block's dictionary and by whether its attention has a window.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from frontier.arms import Arm

BOS = 1  # in front of every document
GATE_CHANNELS, VALUE_GATE_CHANNELS = 12, 32  # of the normalised input that gates look at
UNIFORM = 0.68  # of sqrt(3 / width): range of the matrices at the beginning

Weights = dict[str, nn.Parameter]
Mask = Tensor | BlockMask
Turn = tuple[Tensor, Tensor]  # cosines and sines, (T, 1, R / 2)
Note = Callable[[Tensor, Tensor], None]
NOTES: list[Note] = []  # who wants to see the input and the matrix of every product, while nothing is compiled


class Kind(NamedTuple):
    """What a block's graph depends on besides its weights and masks."""

    head_size: int
    activation: str
    xsa: bool
    key_offset: bool
    gives_values: bool  # hands its own values to the layers after it


def norm(x: Tensor) -> Tensor:
    """Bring the last dimension to a root mean square of 1."""
    return F.rms_norm(x, (x.size(-1),), eps=1e-6)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """A float32 matrix used in the number format of what it multiplies."""
    for note in NOTES:
        note(x, weight)
    return F.linear(x, weight.to(x.dtype))


def rotate(x: Tensor, turn: Turn) -> Tensor:
    """Turn the pairs (i, i + R / 2) of the first R dimensions of (B, T, H, D); the rest stays."""
    cos, sin = turn
    half = cos.size(-1)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, first * sin + second * cos, rest], dim=-1)


def offset_keys(k: Tensor, rotated: int) -> Tensor:
    """The dimensions of (B, T, K, D) keys that are not rotated, from the token before; a row's first token keeps its own."""
    still = k[..., rotated:]
    return torch.cat([k[..., :rotated], torch.cat([still[:, :1], still[:, :-1]], dim=1)], dim=-1)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> Tensor:
    """Causal attention of (B, H, T, D) queries over (B, K, T, D) keys; K divides H. No mask: over the whole row."""
    if isinstance(mask, BlockMask):
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=k.size(1) != q.size(1))
    k, v = repeat_heads(k, q.size(1)), repeat_heads(v, q.size(1))  # cuDNN's kernel is not chosen with enable_gqa
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """(B, K, T, D) for every head they serve, (B, H, T, D)."""
    return x if x.size(1) == heads else x[:, :, None].expand(-1, -1, heads // x.size(1), -1, -1).flatten(1, 2)


def exclusive(y: Tensor, v: Tensor) -> Tensor:
    """XSA: (B, H, T, D) outputs without their part along the value (B, K, T, D) of the same position."""
    unit = F.normalize(repeat_heads(v, y.size(1)), dim=-1)
    return y - (y * unit).sum(-1, keepdim=True) * unit


def embed(tokens: Tensor, w: Weights, dtype: torch.dtype) -> Tensor:
    """x0: the normalised embedding, with a part of the token before where there is a smear; none across rows or documents."""
    x = norm(F.embedding(tokens, w["embedding"]).to(dtype))
    if "smear" not in w:
        return x
    gate = w["smear"] * torch.sigmoid(product(x[:, 1:, :GATE_CHANNELS], w["smear_gate"]))  # (B, T - 1, 1)
    gate = gate.to(dtype) * (tokens[:, 1:, None] != BOS)
    return norm(torch.cat([x[:, :1], x[:, 1:] + gate * x[:, :-1]], dim=1))


def attention(
    h: Tensor, x0: Tensor, tokens: Tensor, v0: Tensor | None, w: Weights, turn: Turn, mask: Mask | None, kind: Kind
) -> tuple[Tensor, Tensor]:
    """The attention branch of normalised (B, T, C) inputs, and the values that it hands on."""
    B, T, _ = h.shape
    q, k, v = (product(h, w[name]).view(B, T, -1, kind.head_size) for name in ("q", "k", "v"))  # (B, T, H, D), 2 x (B, T, K, D)
    own = v
    if v0 is not None:
        v = w["value_keep"] * v + w["value_first"] * v0
    if "value_gate" in w:
        table = w.get("value_table")
        more = F.embedding(tokens, table).to(h.dtype) if table is not None else product(x0, w["value_projection"])
        gate = 2 * torch.sigmoid(product(h[..., :VALUE_GATE_CHANNELS], w["value_gate"]))  # (B, T, K)
        v = v + gate[..., None] * more.view_as(v)
    q, k = norm(rotate(q, turn)), norm(rotate(k, turn))
    if kind.key_offset:
        k = offset_keys(k, 2 * turn[0].size(-1))
    if "qk_gain" in w:
        q = q * w["qk_gain"].to(q.dtype)[:, None]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    y = attend(q, k, v, mask)  # (B, H, T, D)
    if kind.xsa:
        y = exclusive(y, v)
    y = y.transpose(1, 2)
    if "head_gate" in w:
        y = y * (2 * torch.sigmoid(product(h[..., :GATE_CHANNELS], w["head_gate"])))[..., None]
    return product(y.reshape(B, T, -1), w["o"]), own


def block(
    x: Tensor,
    x0: Tensor,
    tokens: Tensor,
    skip: Tensor | None,
    v0: Tensor | None,
    w: Weights,
    turn: Turn,
    mask: Mask | None,
    dropout: Tensor | None,
    kind: Kind,
) -> tuple[Tensor, Tensor | None]:
    """One layer: the stream after it, and its values where later layers want them."""
    if skip is not None:
        x = x + w["skip"] * skip
    x = w["mix_x"] * x + w["mix_x0"] * x0
    branch, values = attention(norm(x), x0, tokens, v0, w, turn, mask, kind)
    if dropout is not None:  # a tensor: 0 in evaluation without another graph
        branch = branch * (torch.rand_like(branch, dtype=torch.float32) >= dropout) / (1 - dropout).to(branch.dtype)
    x = x + branch
    h = norm(x)
    hidden = product(h, w["fc"])
    if kind.activation == "swiglu":
        hidden = F.silu(hidden) * product(h, w["up"])
    elif kind.activation == "leaky2":
        hidden = F.leaky_relu(hidden, 0.5).square()
    else:
        hidden = F.relu(hidden).square()
    return x + product(hidden, w["down"]), values if kind.gives_values else None


def logits_of(x: Tensor, middle: Tensor | None, w: Weights, softcap: float) -> Tensor:
    """Scores of every next token (B, T, V), within plus and minus the softcap."""
    if middle is not None:
        x = x - w["backout"] * middle
    scores = product(norm(x), w["head"] if "head" in w else w["embedding"])
    return softcap * torch.tanh(scores.float() / softcap)


def losses_of(x: Tensor, middle: Tensor | None, targets: Tensor, w: Weights, softcap: float) -> Tensor:
    """Nats of each target, (B * T)."""
    return F.cross_entropy(logits_of(x, middle, w, softcap).flatten(0, 1), targets.flatten(), reduction="none")


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled for each shape; a new graph only for a shape or kind that no arm before had."""
    return torch.compile(function, dynamic=False)


@functools.cache
def window_mask(length: int, window: int, device: torch.device) -> Mask:
    """Each token sees the `window` tokens that end with itself."""

    def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query - key < window)

    if device.type == "cuda":
        return create_block_mask(visible, None, None, length, length, device=device)
    place = torch.arange(length, device=device)
    return visible(place, place, place[:, None], place[None, :])  # FlexAttention has no backward on CPUs


@functools.cache
def rotary(length: int, dimensions: int, base: float, device: torch.device, dtype: torch.dtype) -> Turn:
    """Cosines and sines of each place; computed in float32, as bf16 cannot tell 256 from 257."""
    exponents = torch.arange(0, dimensions, 2, dtype=torch.float32, device=device) / dimensions
    angles = torch.arange(length, dtype=torch.float32, device=device)[:, None, None] / base**exponents
    return angles.cos().to(dtype), angles.sin().to(dtype)


class Frontier:
    """A model with its weights in float32; it computes in bf16 on a GPU and in float32 elsewhere."""

    def __init__(self, arm: Arm, vocabulary: int, device: torch.device):
        self.arm, self.device = arm, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.call = compiled if device.type == "cuda" else lambda function: function
        self.rotated = round(arm.head_size * arm.rope_part / 2) * 2
        self.dropout = torch.zeros((), device=device) if arm.dropout else None
        self.top = self._top(vocabulary)
        self.layers = [self._layer(layer, vocabulary) for layer in range(arm.layers)]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every weight by name; the last word says what it is."""
        yield from self.top.items()
        for layer, weights in enumerate(self.layers):
            yield from ((f"{layer}.{name}", p) for name, p in weights.items())

    def _new(self, name: str, *shape: int, std: float = 0.0, bound: float = 0.0, fill: float = 0.0) -> nn.Parameter:
        """A weight that depends on the seed and its name alone: arms share what they have in common."""
        generator = torch.Generator(self.device).manual_seed(1_000_003 * self.arm.seed + zlib.crc32(name.encode()))
        values = torch.full(shape, fill, device=self.device)
        if std:
            values.normal_(0.0, std, generator=generator)
        if bound:
            values.uniform_(-bound, bound, generator=generator)
        return nn.Parameter(values)

    def _top(self, vocabulary: int) -> Weights:
        a = self.arm
        w = {"embedding": self._new("embedding", vocabulary, a.width, std=0.02 if a.tied else 1.0)}
        if not a.tied:
            w["head"] = self._new("head", vocabulary, a.width, std=0.001)
        if a.smear:
            w |= {"smear": self._new("smear"), "smear_gate": self._new("smear_gate", 1, GATE_CHANNELS)}
        if a.backout:
            w["backout"] = self._new("backout", fill=a.backout)
        return w

    def _layer(self, layer: int, vocabulary: int) -> Weights:
        a = self.arm
        bound, inside = UNIFORM * math.sqrt(3 / a.width), a.kv_heads * a.head_size

        def new(name: str, *shape: int, bound: float = 0.0, fill: float = 0.0) -> nn.Parameter:
            return self._new(f"{layer}.{name}", *shape, bound=bound, fill=fill)

        w = {name: new(name, rows, a.width, bound=bound) for name, rows in (("q", a.width), ("k", inside), ("v", inside))}
        w |= {"o": new("o", a.width, a.width), "fc": new("fc", a.hidden, a.width, bound=bound)}
        w |= {"down": new("down", a.width, a.hidden), "mix_x": new("mix_x", fill=a.mix), "mix_x0": new("mix_x0", fill=0.05)}
        if a.activation == "swiglu":
            w["up"] = new("up", a.hidden, a.width, bound=bound)
        if a.head_gate:
            w["head_gate"] = new("head_gate", a.heads, min(GATE_CHANNELS, a.width))
        if a.values != "none" and layer % 2 == (a.layers - 1) % 2:  # every second layer and the last
            w["value_gate"] = new("value_gate", a.kv_heads, min(VALUE_GATE_CHANNELS, a.width))
            if a.values == "tables":
                w["value_table"] = new("value_table", vocabulary, inside, bound=bound)
            else:
                w["value_projection"] = new("value_projection", inside, a.width, bound=bound)
        if a.value_residual and layer:
            w |= {"value_keep": new("value_keep", fill=0.9), "value_first": new("value_first", fill=0.1)}
        if a.qk_gain:
            w["qk_gain"] = new("qk_gain", a.heads, fill=a.qk_gain)
        if a.skips and a.layers // 2 <= layer < a.layers // 2 * 2:
            w["skip"] = new("skip", fill=0.5)
        return w

    def is_long(self, layer: int) -> bool:
        """Whether a layer sees the whole row."""
        return layer == self.arm.layers - 1 or self.arm.pattern[layer % len(self.arm.pattern)] == "L"

    def _stream(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """What the last layer leaves, and the middle one where it is subtracted."""
        a, T = self.arm, tokens.size(1)
        turn = rotary(T, self.rotated, a.rope_base, self.device, self.dtype)
        window = window_mask(T, a.window, self.device) if a.window < T else None
        x0 = self.call(embed)(tokens, self.top, self.dtype)
        # A tensor that is handed over twice makes a graph of its own: a view is another one.
        x = x0.view_as(x0)
        v0: Tensor | None = None
        middle: Tensor | None = None
        kept: list[Tensor] = []
        for layer, w in enumerate(self.layers):
            long = self.is_long(layer)
            first = a.value_residual and layer == 0
            kind = Kind(a.head_size, a.activation, a.xsa, a.key_offset and long, first)
            skip = kept.pop() if "skip" in w else None
            mask = None if long else window
            x, values = self.call(block)(x, x0, tokens, skip, v0, w, turn, mask, self.dropout, kind)
            v0 = values if first else v0
            if a.skips and layer < a.layers // 2:
                kept.append(x.view_as(x))
            if a.backout and layer == a.layers // 2:
                middle = x
        return x, middle

    def losses(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Nats of each target, (B * T)."""
        losses: Tensor = self.call(losses_of)(*self._stream(tokens), targets, self.top, self.arm.softcap)
        return losses

    def logits(self, tokens: Tensor) -> Tensor:
        """Scores of every next token, (B, T, V)."""
        return logits_of(*self._stream(tokens), self.top, self.arm.softcap)
