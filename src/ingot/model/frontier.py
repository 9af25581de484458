"""The frontier family: the fewest bits per byte within a few minutes on one GPU. docs/frontier.md lists what each part gains.

It differs from the golf family in three ways. First, most layers only attend to a sliding window, which is cheaper and loses
nothing as long as a few layers attend to the whole row. Second, every second layer adds to its attention values a projection of
the embedding, or a separate embedding if the size of the artifact does not matter. Third, only half of a head's dimensions are
rotated; in layers that attend to the whole row, keys take the other half from the previous token, so that one layer can continue
a sequence that occurred before. The last matrix of each branch starts at zero and gates start at one, so a new model predicts
from the embedding alone. Weights are stored in float32 and used in the dtype of the residual stream.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from ingot.model.host import host_norm, host_relu2
from ingot.model.kernels.fused_mlp import fused_mlp
from ingot.model.kernels.rotary import fused_rotation
from ingot.model.layers import (
    Boundaries,
    CastedLinear,
    Form,
    LanguageModel,
    LayerCache,
    Mask,
    RotaryTables,
    Rotation,
    attention_mask,
    causal_attention,
    compiled,
    flex_supported,
    on_host,
    positions,
    rotate,
)
from ingot.model.settings import FRONTIER_CONTROL as CONTROL
from ingot.model.settings import GATE_CHANNELS, VALUE_GATE_CHANNELS, FrontierSettings

EPSILON = 1e-6  # added to the mean square when a vector is normalised
UNIFORM = 0.68  # initial weights: uniform in +-UNIFORM * sqrt(3 / width); with UNIFORM = 1, bits per byte are 0.0006 higher


def norm(x: Tensor) -> Tensor:
    """Normalise the last dimension to a root mean square of 1, without a gain."""
    if on_host(x):
        return host_norm(x, EPSILON)
    return F.rms_norm(x, (x.size(-1),), eps=EPSILON).to(x.dtype)


def visibility(window: int, documents: Tensor | None = None) -> Callable[[Any, Any, Tensor, Tensor], Tensor]:
    """Return the mask function of a sliding window: a token sees the last `window` tokens of its document, including itself."""

    def visible(b: Any, h: Any, query: Tensor, key: Tensor) -> Tensor:
        seen = (query >= key) & (query - key < window)
        return seen if documents is None else seen & (documents[b, query] == documents[b, key])

    return visible


def row_blocks(length: int, window: int, device: torch.device) -> BlockMask:
    """Return the FlexAttention mask of a sliding window for rows of `length` tokens."""
    return create_block_mask(visibility(window), None, None, length, length, device=device)


cached_row_blocks = functools.lru_cache(maxsize=16)(row_blocks)


class Positions(NamedTuple):
    """The values that depend on positions and are the same for all blocks: rotary tables, masks and document boundaries."""

    rows: int
    rotary: RotaryTables  # (T, 1, R / 2), or (B, T, 1, R / 2) if positions differ between rows
    full_mask: Mask | None  # used by layers that attend to the whole row
    window_mask: Mask | None  # used by layers with a sliding window
    window: int | None  # window size, for attention kernels that take it as a number instead of a mask
    starts: Tensor | None  # (B, T, 1, 1): True where a document begins; may be False for the first token of a row


class Gate(nn.Module):
    """A gate: one factor between 0 and 2 per head and token, computed from a few channels of the layer's input; initially 1."""

    def __init__(self, width: int, channels: int, heads: int):
        super().__init__()
        self.channels = min(channels, width)
        self.weight = nn.Parameter(torch.zeros(heads, self.channels))

    def forward(self, x: Tensor) -> Tensor:
        return 2 * torch.sigmoid(F.linear(x[..., : self.channels], self.weight.to(x.dtype)))[..., None]  # (B, T, H, 1)


class FrontierAttention(nn.Module):
    form: Form = "repeated"
    fused_rotary = False  # compute normalisation and rotation in one kernel

    def __init__(self, s: FrontierSettings, vocab_size: int, layer: int):
        super().__init__()
        kv_heads, self.head_size = s.kv_heads or s.heads, s.width // s.heads
        inside = kv_heads * self.head_size
        self.rotated, self.long = s.rotated, s.is_long(layer)
        self.offset = s.key_offset and self.long
        self.q = CastedLinear(s.width, s.width)
        self.k = CastedLinear(s.width, inside)
        self.v = CastedLinear(s.width, inside)
        self.o = CastedLinear(s.width, s.width)
        self.head_gate = Gate(s.width, GATE_CHANNELS, s.heads) if s.head_gate else None
        self.value_gate = Gate(s.width, VALUE_GATE_CHANNELS, kv_heads) if s.has_values(layer) else None
        self.value_table = nn.Embedding(vocab_size, inside) if s.has_values(layer) and s.values == "tables" else None
        self.value_projection = CastedLinear(s.width, inside) if s.has_values(layer) and s.values == "projections" else None

    def project(self, x: Tensor, x0: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return queries (N, H, D), keys and values (N, K, D) of N tokens, and the gates (N, H, 1) of the heads' outputs."""
        q, k, v = (layer(x).view(x.size(0), -1, self.head_size) for layer in (self.q, self.k, self.v))
        if self.value_gate is not None:
            table, projection = self.value_table, self.value_projection
            more = projection(x0) if projection is not None else table(tokens).to(x.dtype) if table is not None else x0
            v = v + self.value_gate(x) * more.view_as(v)
        return q, k, v, self.head_gate(x) if self.head_gate is not None else None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, at: Positions, cache: LayerCache | None) -> Tensor:
        """Return the outputs (N, H, D) of the heads."""
        q, k, v = (y.view(at.rows, -1, *y.shape[1:]) for y in (q, k, v))  # q: (B, T, H, D), k and v: (B, T, K, D)
        # Keep the heads of a token together until attention, so that its output has the layout the next matmul needs.
        if self.fused_rotary and cache is None:
            cos, sin = at.rotary
            q, k = (fused_rotation(y, (cos[:, 0], sin[:, 0]), epsilon=EPSILON).transpose(1, 2) for y in (q, k))
        elif on_host(q, k):
            q, k = (host_norm(y, EPSILON, at.rotary) for y in (q, k))
        else:
            q, k = norm(rotate(q, at.rotary)), norm(rotate(k, at.rotary))
        if cache is not None:
            k, v = (y.transpose(1, 2) for y in cache.extend(k.transpose(1, 2), v.transpose(1, 2)))  # (B, S, K, D)
        if self.offset:
            k = self._offset(k, at.starts)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))  # q: (B, H, T, D), k and v: (B, K, S, D)
        mask, window = (at.full_mask, None) if self.long else (at.window_mask, at.window)
        y = causal_attention(q, k, v, mask=mask, form=self.form, window=window)
        return y.transpose(1, 2).flatten(0, 1)

    def _offset(self, k: Tensor, starts: Tensor | None) -> Tensor:
        """Return keys (B, S, K, D) with their unrotated dimensions taken from the previous token, except at document starts."""
        # The cache stores keys as they were before this replacement, so the key of the previous token is always available here.
        still = k[..., self.rotated :]
        before = torch.cat([still[:, :1], still[:, :-1]], dim=1)
        if starts is not None:
            before = torch.where(starts, still, before)
        return torch.cat([k[..., : self.rotated], before], dim=-1)


class FrontierMLP(nn.Module):
    fused_mlp = False  # fuse the activation into the matmuls before and after it

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.fc = CastedLinear(width, inner)
        self.down = CastedLinear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        if self.fused_mlp and torch.is_grad_enabled():
            return fused_mlp(x, self.fc.weight, None, self.down.weight, "relu2")
        inner = self.fc(x)
        return self.down(host_relu2(inner) if on_host(inner) else F.relu(inner).square())


class FrontierBlock(nn.Module):
    """A block over N flattened tokens. Only attention needs the row length, so the rest is not recompiled for a new length."""

    compiled_parts = ("enter", "attend", "leave")  # if only blocks are compiled, each of these methods is compiled on its own

    def __init__(self, s: FrontierSettings, vocab_size: int, layer: int):
        super().__init__()
        self.attn = FrontierAttention(s, vocab_size, layer)
        self.mlp = FrontierMLP(s.width, s.inner_width)
        self.mix_x = nn.Parameter(torch.ones(()))
        self.mix_x0 = nn.Parameter(torch.full((), 0.05))

    def enter(self, x: Tensor, x0: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Mix the embedding into the residual stream; return the stream and the queries, keys, values and gates of attention."""
        x = self.mix_x * x + self.mix_x0 * x0  # factors are zero-dimensional, so x keeps its dtype
        return x, *self.attn.project(norm(x), x0, tokens)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, at: Positions, cache: LayerCache | None) -> Tensor:
        return self.attn(q, k, v, at, cache)

    def leave(self, x: Tensor, y: Tensor, gate: Tensor | None) -> Tensor:
        """Add the gated and projected attention output `y`, then the output of the MLP, to the residual stream `x`."""
        x = x + self.attn.o((y if gate is None else y * gate).flatten(1))
        return x + self.mlp(norm(x))

    def forward(self, x: Tensor, x0: Tensor, tokens: Tensor, at: Positions, cache: LayerCache | None = None) -> Tensor:
        x, q, k, v, gate = self.enter(x, x0, tokens)
        return self.leave(x, self.attend(q, k, v, at, cache), gate)


class Frontier(LanguageModel):
    """A transformer with sliding windows, tuned for the fewest bits per byte after a few minutes on one GPU."""

    control = CONTROL

    Settings = FrontierSettings

    def __init__(self, vocab_size: int, context: int, **settings: Any):
        super().__init__()
        s = FrontierSettings(**settings)
        self.context, self.window, self.softcap = context, s.window, s.softcap
        self.head_size, self.kv_heads = s.width // s.heads, s.kv_heads or s.heads
        self.windowed = not all(s.is_long(layer) for layer in range(s.layers))
        self.ready_mask: BlockMask | None = None
        self.embedding = nn.Embedding(vocab_size, s.width)
        self.blocks = nn.ModuleList(FrontierBlock(s, vocab_size, layer) for layer in range(s.layers))
        self.lm_head = None if s.tied else CastedLinear(s.width, vocab_size)
        self.rotation = Rotation(context, s.rotated, s.rope_base)
        bound = UNIFORM * math.sqrt(3 / s.width)
        with torch.no_grad():
            usual = 0.02 if self.lm_head is None else 1.0
            self.embedding.weight.normal_(std=usual if s.embedding_std is None else s.embedding_std)
            if self.lm_head is not None:
                self.lm_head.weight.normal_(std=0.001)
            for name, parameter in self.blocks.named_parameters():
                if name.endswith((".o.weight", ".down.weight")):  # the last matrix of each branch
                    parameter.zero_()
                elif not any(part in name for part in CONTROL):  # gates and mixes keep their initial values
                    parameter.uniform_(-bound, bound)

    def set(self, window: int) -> None:
        """Set the window, the only value that a training stage may change."""
        if window < 1 or window != int(window):
            raise ValueError(f"window={window} must be a whole number of tokens, at least 1")
        self.window, self.ready_mask = int(window), None

    def make_ready(self, tokens: Tensor) -> None:
        """Build the mask before a compiled pass starts: inside the graph, building it would take as long as several layers."""
        T, device = tokens.size(1), tokens.device
        if self.windowed and self.window < T and not self.counts_windows and flex_supported(device, self.head_size, 0.0):
            self.ready_mask = cached_row_blocks(T, self.window, device)

    @property
    def counts_windows(self) -> bool:
        """Return True if the attention kernel takes the window size as a number, so that no mask is needed."""
        return self.blocks[0].attn.form.endswith("flash4")  # type: ignore[operator,union-attr]

    @property
    def embedding_weight(self) -> Tensor:
        return self.embedding.weight

    def hidden(self, tokens: Tensor, cache: list[LayerCache] | None = None, documents: Tensor | None = None) -> Tensor:
        at = self._positions(tokens, cache, documents)
        flat = tokens.flatten()  # (N)
        weight, kind = self.embedding.weight, self.embedding.weight.device.type
        autocast = kind != "meta" and torch.is_autocast_enabled(kind)
        x0 = norm(self.embedding(flat).to(torch.get_autocast_dtype(kind) if autocast else weight.dtype))  # (N, C)
        x = x0.view_as(x0)  # a new tensor, because a block whose two inputs are the same tensor would be recompiled
        for i, block in enumerate(self.blocks):
            x = block(x, x0, flat, at, cache[i] if cache else None)
        return norm(x).view(*tokens.shape, -1)

    def _positions(self, tokens: Tensor, cache: list[LayerCache] | None, documents: Tensor | None) -> Positions:
        full = attention_mask(documents, cache, self.head_size)
        starts, counts = None, self.counts_windows and self.window < tokens.size(1) and not cache
        if isinstance(full, Boundaries):
            first = torch.zeros(tokens.numel() + 1, dtype=torch.bool, device=tokens.device)
            starts = first.index_fill(0, full.starts.long(), True)[:-1].view(*tokens.shape, 1, 1)
        elif documents is not None:
            starts, counts = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0))[:, :, None, None], False
        cos, sin = self.rotation(positions(tokens, cache, self.context))  # (T, R / 2), or (B, 1, T, R / 2)
        rotary = (cos[:, None], sin[:, None]) if cos.dim() == 2 else (cos.transpose(1, 2), sin.transpose(1, 2))
        window = self.window if counts else None
        short = self.window_mask(tokens, cache, documents, full) if self.windowed and window is None else full
        return Positions(tokens.size(0), rotary, full, short, window, starts)

    def window_mask(
        self, tokens: Tensor, cache: list[LayerCache] | None, documents: Tensor | None, full: Mask | None
    ) -> Mask | None:
        """Return the mask of layers with a window: a token sees the last `window` tokens of its document, including itself."""
        window, T, device = self.window, tokens.size(1), tokens.device
        if cache and (position := cache[0].position) is not None:
            oldest = position[:, None, :, None] - window
            return full & (torch.arange(cache[0].keys.size(2), device=device) > oldest)  # type: ignore[operator]
        start = cache[0].length if cache else 0
        if start + T <= window:
            return full
        visible = visibility(window, documents)
        if flex_supported(device, self.head_size, 0.0) and not start:
            if documents is None:
                if not torch.compiler.is_compiling():
                    return cached_row_blocks(T, window, device)
                ready = self.ready_mask
                return ready if ready is not None and ready.seq_lengths == (T, T) else row_blocks(T, window, device)
            return compiled(create_block_mask)(visible, tokens.size(0), None, T, T, device=device)
        query, key = torch.arange(start, start + T, device=device)[:, None], torch.arange(start + T, device=device)
        row = torch.arange(tokens.size(0), device=device)[:, None, None, None]
        return visible(row, None, query, key)  # (T, S), or (B, 1, T, T) with documents

    def flops(self, seq_len: int) -> float:
        """Return the training FLOPs per token: 6 per matmul weight, plus 12 per layer, channel and attended token."""
        embeddings = [m.weight.numel() for m in self.modules() if isinstance(m, nn.Embedding)]
        lookups = sum(embeddings) - (embeddings[0] if self.lm_head is None else 0)  # weights that no matmul uses
        seen = sum(seq_len if block.attn.long else min(seq_len, self.window) for block in self.blocks)
        return 6.0 * (sum(p.numel() for p in self.parameters()) - lookups) + 12.0 * self.embedding.embedding_dim * seen
