"""The frontier family: the fewest bits per byte that a few minutes of one GPU buy. docs/frontier.md has what each part bought.

Three things set it apart from the golf family. Most layers see only a window of the last tokens, which costs less and loses
nothing while a few see the whole row. Values have a second source, the embedding itself, in every second layer: a projection of
it, or a table of their own where bytes do not count. Half of a head's dimensions know no place, and in long layers keys carry
there what the token before was, so that one layer continues a sequence it has seen. Branches start at zero and gates at one: a
new model predicts from the embedding alone. Weights are kept in float32 and used in the number format of the residual stream.
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

from ingot.model.kernels.mlp import fused_mlp
from ingot.model.kernels.rotary import fused_rotation
from ingot.model.layers import (
    Boundaries,
    Form,
    LayerCache,
    Mask,
    RotaryTables,
    Rotation,
    attention_mask,
    causal_attention,
    fused,
    is_fused,
    positions,
    rotate,
)
from ingot.model.loss import head_logits, head_loss
from ingot.model.settings import FRONTIER_CONTROL as CONTROL
from ingot.model.settings import GATE_CHANNELS, VALUE_GATE_CHANNELS, FrontierSettings

EPSILON = 1e-6  # of norms
UNIFORM = 0.68  # of sqrt(3 / width): range of the first matrices, 0.0006 bits per byte better than the whole of it


def norm(x: Tensor) -> Tensor:
    """Bring the last dimension to a root mean square of 1, without a gain."""
    return F.rms_norm(x, (x.size(-1),), eps=EPSILON).to(x.dtype)


def visibility(window: int, documents: Tensor | None = None) -> Callable[[Any, Any, Tensor, Tensor], Tensor]:
    """Which keys a query sees, by their places in a row: the last `window`, its own among them, of its document."""

    def visible(b: Any, h: Any, query: Tensor, key: Tensor) -> Tensor:
        seen = (query >= key) & (query - key < window)
        return seen if documents is None else seen & (documents[b, query] == documents[b, key])

    return visible


def row_blocks(length: int, window: int, device: torch.device) -> BlockMask:
    """The mask of a window for rows of this length, as FlexAttention takes it."""
    return create_block_mask(visibility(window), None, None, length, length, device=device)


kept_row_blocks = functools.lru_cache(maxsize=16)(row_blocks)


def first_tokens(documents: Boundaries, tokens: Tensor) -> Tensor:
    """Which tokens (B, T) are the first of their document."""
    first = torch.zeros(tokens.numel() + 1, dtype=torch.bool, device=tokens.device)
    return first.index_fill(0, documents.starts.long(), True)[:-1].view(tokens.shape)


class Linear(nn.Linear):
    """A matrix kept in float32 and used in the number format of what it multiplies."""

    def __init__(self, inside: int, outside: int):
        super().__init__(inside, outside, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Places(NamedTuple):
    """What a pass knows of where its tokens stand: made once and handed to every block."""

    rows: int
    rotary: RotaryTables  # (T, 1, R / 2), or (B, T, 1, R / 2) where rows have places of their own
    whole: Mask | None  # of layers that see the whole row
    window: Mask | None  # of the others
    last: int | None  # tokens that these see, where attention takes their number instead of a mask
    starts: Tensor | None  # (B, T, 1, 1): where a document begins; a row's first token need not count


class Gate(nn.Module):
    """One number between 0 and 2 per head and token, by a few channels of the layer's input; 1 at first."""

    def __init__(self, width: int, channels: int, heads: int):
        super().__init__()
        self.channels = min(channels, width)
        self.weight = nn.Parameter(torch.zeros(heads, self.channels))

    def forward(self, x: Tensor) -> Tensor:
        return 2 * torch.sigmoid(F.linear(x[..., : self.channels], self.weight.to(x.dtype)))[..., None]  # (B, T, H, 1)


class Attention(nn.Module):
    form: Form = "repeated"  # of attention
    fused_rotary = False  # whether norm and rotation are one kernel of ours

    def __init__(self, s: FrontierSettings, vocab_size: int, layer: int):
        super().__init__()
        kv_heads, self.head_size = s.kv_heads or s.heads, s.width // s.heads
        inside = kv_heads * self.head_size
        self.rotated, self.long = s.rotated, s.is_long(layer)
        self.offset = s.key_offset and self.long
        self.q = Linear(s.width, s.width)
        self.k = Linear(s.width, inside)
        self.v = Linear(s.width, inside)
        self.o = Linear(s.width, s.width)
        self.head_gate = Gate(s.width, GATE_CHANNELS, s.heads) if s.head_gate else None
        self.value_gate = Gate(s.width, VALUE_GATE_CHANNELS, kv_heads) if s.has_values(layer) else None
        self.value_table = nn.Embedding(vocab_size, inside) if s.has_values(layer) and s.values == "tables" else None
        self.value_projection = Linear(s.width, inside) if s.has_values(layer) and s.values == "projections" else None

    def project(self, x: Tensor, x0: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries (N, H, D), keys and values (N, K, D) of tokens (N), and the gates (N, H, 1) of what becomes of them."""
        q, k, v = (layer(x).view(len(x), -1, self.head_size) for layer in (self.q, self.k, self.v))
        if self.value_gate is not None:
            table, projection = self.value_table, self.value_projection
            more = projection(x0) if projection is not None else table(tokens).to(x.dtype) if table is not None else x0
            v = v + self.value_gate(x) * more.view_as(v)
        return q, k, v, self.head_gate(x) if self.head_gate is not None else None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, at: Places, cache: LayerCache | None) -> Tensor:
        """What each head (N, H, D) finds."""
        q, k, v = (y.view(at.rows, -1, *y.shape[1:]) for y in (q, k, v))  # (B, T, H, D), 2 x (B, T, K, D)
        # Heads stay beside each other in memory until attention, whose output is then laid out as the next product wants it.
        if self.fused_rotary and cache is None:
            cos, sin = at.rotary
            q, k = (fused_rotation(y, (cos[:, 0], sin[:, 0]), epsilon=EPSILON).transpose(1, 2) for y in (q, k))
        else:
            q, k = norm(rotate(q, at.rotary)), norm(rotate(k, at.rotary))
        if cache is not None:
            k, v = (y.transpose(1, 2) for y in cache.extend(k.transpose(1, 2), v.transpose(1, 2)))  # (B, S, K, D)
        if self.offset:
            k = self._offset(k, at.starts)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))  # (B, H, T, D), 2 x (B, K, S, D)
        mask, last = (at.whole, None) if self.long else (at.window, at.last)
        y = causal_attention(q, k, v, mask=mask, form=self.form, window=last)
        return y.transpose(1, 2).flatten(0, 1)

    def _offset(self, k: Tensor, starts: Tensor | None) -> Tensor:
        """Keys (B, S, K, D) whose still dimensions are those of the token before; a row's or document's first keeps its own."""
        # After the cache, which holds keys as they are: the token before is then there, whatever was read at once.
        still = k[..., self.rotated :]
        before = torch.cat([still[:, :1], still[:, :-1]], dim=1)
        if starts is not None:
            before = torch.where(starts, still, before)
        return torch.cat([k[..., : self.rotated], before], dim=-1)


class MLP(nn.Module):
    fused_mlp = False  # whether the activation is a part of the products around it

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.fc = Linear(width, inner)
        self.down = Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        if self.fused_mlp and torch.is_grad_enabled():
            return fused_mlp(x, self.fc.weight, None, self.down.weight, "relu2")
        return self.down(F.relu(self.fc(x)).square())


class Block(nn.Module):
    """Tokens are a plain list (N) here: only attention knows of rows, so a compiler need not see the rest for every length."""

    compiled_parts = ("enter", "attend", "leave")  # where blocks are compiled by themselves

    def __init__(self, s: FrontierSettings, vocab_size: int, layer: int):
        super().__init__()
        self.attn = Attention(s, vocab_size, layer)
        self.mlp = MLP(s.width, s.inner_width)
        self.mix_x = nn.Parameter(torch.ones(()))
        self.mix_x0 = nn.Parameter(torch.full((), 0.05))

    def enter(self, x: Tensor, x0: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """The stream that the block adds to, and what its attention is given."""
        x = self.mix_x * x + self.mix_x0 * x0  # numbers without a dimension leave the stream its number format
        return x, *self.attn.project(norm(x), x0, tokens)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, at: Places, cache: LayerCache | None) -> Tensor:
        return self.attn(q, k, v, at, cache)

    def leave(self, x: Tensor, y: Tensor, gate: Tensor | None) -> Tensor:
        """The stream with what heads found and the MLP made of it."""
        x = x + self.attn.o((y if gate is None else y * gate).flatten(1))
        return x + self.mlp(norm(x))

    def forward(self, x: Tensor, x0: Tensor, tokens: Tensor, at: Places, cache: LayerCache | None = None) -> Tensor:
        x, q, k, v, gate = self.enter(x, x0, tokens)
        return self.leave(x, self.attend(q, k, v, at, cache), gate)


class Frontier(nn.Module):
    """`model(tokens)` gives logits (B, T, V); `model(tokens, targets)` the mean loss over the targets that are not -1."""

    loss_chunk: int | None = None  # tokens whose logits are held at once; None: all
    fused_loss = False  # whether softcap and loss are a kernel of ours
    fp8_head = False  # whether the head's products have 8 bits while it trains
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
        self.blocks = nn.ModuleList(Block(s, vocab_size, layer) for layer in range(s.layers))
        self.lm_head = None if s.tied else Linear(s.width, vocab_size)
        self.rotation = Rotation(context, s.rotated, s.rope_base)
        self._initialise(UNIFORM * math.sqrt(3 / s.width))

    @torch.no_grad()
    def _initialise(self, bound: float) -> None:
        """Matrices and tables are drawn evenly, but what ends a branch is zero; gates and mixes are as they were made."""
        self.embedding.weight.normal_(std=0.02 if self.lm_head is None else 1.0)
        if self.lm_head is not None:
            self.lm_head.weight.normal_(std=0.001)
        for name, parameter in self.blocks.named_parameters():
            if name.endswith((".o.weight", ".down.weight")):
                parameter.zero_()
            elif not any(part in name for part in CONTROL):
                parameter.uniform_(-bound, bound)

    def set(self, window: int) -> None:
        """What a stage of training may change."""
        if window < 1 or window != int(window):
            raise ValueError(f"window={window} is not a number of tokens")
        self.window, self.ready_mask = int(window), None

    def make_ready(self, tokens: Tensor) -> None:
        """Make the mask that a compiled pass over such rows needs; as a part of its graph it takes as long to trace as layers."""
        T, device = tokens.size(1), tokens.device
        if self.windowed and self.window < T and not self.counts_windows and is_fused(device, self.head_size, 0.0):
            self.ready_mask = kept_row_blocks(T, self.window, device)

    @property
    def counts_windows(self) -> bool:
        """Whether attention needs no mask to see the last tokens alone."""
        return self.blocks[0].attn.form.endswith("flash4")  # type: ignore[operator,union-attr]

    @property
    def head(self) -> Tensor:
        return self.embedding.weight if self.lm_head is None else self.lm_head.weight

    def hidden(self, tokens: Tensor, cache: list[LayerCache] | None = None, documents: Tensor | None = None) -> Tensor:
        """Final hidden states (B, T, C) of `tokens`, which follow what `cache` holds and see only their own document."""
        at = self._places(tokens, cache, documents)
        flat = tokens.flatten()  # (N)
        x0 = norm(self.embedding(flat).to(self._stream_dtype()))  # (N, C)
        x = x0.view_as(x0)  # a block that is given one tensor twice, as such, would be a graph of its own
        for i, block in enumerate(self.blocks):
            x = block(x, x0, flat, at, cache[i] if cache else None)
        return norm(x).view(*tokens.shape, -1)

    def _stream_dtype(self) -> torch.dtype:
        """The number format of the residual stream: that of matrix products, where a backend has set one for them."""
        weight = self.embedding.weight
        kind = weight.device.type
        chosen = kind != "meta" and torch.is_autocast_enabled(kind)
        return torch.get_autocast_dtype(kind) if chosen else weight.dtype

    def _places(self, tokens: Tensor, cache: list[LayerCache] | None, documents: Tensor | None) -> Places:
        whole = attention_mask(documents, cache, self.head_size)
        starts, counts = None, self.counts_windows and self.window < tokens.size(1) and not cache
        if isinstance(whole, Boundaries):
            starts = first_tokens(whole, tokens)[:, :, None, None]
        elif documents is not None:
            starts, counts = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0))[:, :, None, None], False
        cos, sin = self.rotation(positions(tokens, cache, self.context))  # (T, R / 2), or (B, 1, T, R / 2)
        rotary = (cos[:, None], sin[:, None]) if cos.dim() == 2 else (cos.transpose(1, 2), sin.transpose(1, 2))
        last = self.window if counts else None
        short = self.window_mask(tokens, cache, documents, whole) if self.windowed and last is None else whole
        return Places(len(tokens), rotary, whole, short, last, starts)

    def window_mask(
        self, tokens: Tensor, cache: list[LayerCache] | None, documents: Tensor | None, whole: Mask | None
    ) -> Mask | None:
        """What tokens see in layers with a window: the last `window` tokens, themselves among them, of their own document."""
        window, T, device = self.window, tokens.size(1), tokens.device
        if cache and (place := cache[0].place) is not None:
            oldest = place[:, None, None, None] - window
            return whole & (torch.arange(cache[0].keys.size(2), device=device) > oldest)  # type: ignore[operator]
        start = cache[0].length if cache else 0
        if start + T <= window:
            return whole
        visible = visibility(window, documents)
        if is_fused(device, self.head_size, 0.0) and not start:
            if documents is None:
                return self._row_mask(T, device)
            return fused(create_block_mask)(visible, tokens.size(0), None, T, T, device=device)
        query, key = torch.arange(start, start + T, device=device)[:, None], torch.arange(start + T, device=device)
        row = torch.arange(tokens.size(0), device=device)[:, None, None, None]
        return visible(row, None, query, key)  # (T, S), or (B, 1, T, T) with documents

    def _row_mask(self, length: int, device: torch.device) -> BlockMask:
        if not torch.compiler.is_compiling():
            return kept_row_blocks(length, self.window, device)
        mask = self.ready_mask
        return mask if mask is not None and mask.seq_lengths == (length, length) else row_blocks(length, self.window, device)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of every next token, from hidden states; always between plus and minus the softcap."""
        return head_logits(hidden, self.head, self.softcap)

    def head_loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Mean loss of the targets, given the hidden states before the head."""
        return head_loss(hidden, self.head, targets, self.softcap, self.loss_chunk, self.fused_loss, self.fp8_head)

    def forward(self, tokens: Tensor, targets: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        x = self.hidden(tokens, documents=documents)
        return self.logits(x) if targets is None else self.head_loss(x.flatten(0, 1), targets.flatten())

    def flops(self, seq_len: int) -> float:
        """FLOPs of training, per token: six per weight that multiplies, twelve per channel of a layer and token that it sees."""
        embeddings = [m.weight.numel() for m in self.modules() if isinstance(m, nn.Embedding)]
        idle = sum(embeddings) - (embeddings[0] if self.lm_head is None else 0)  # looked up, not multiplied
        seen = sum(seq_len if block.attn.long else min(seq_len, self.window) for block in self.blocks)
        return 6.0 * (sum(p.numel() for p in self.parameters()) - idle) + 12.0 * self.embedding.embedding_dim * seen

    def new_cache(self, batch: int) -> list[LayerCache]:
        """An empty key-value cache for `batch` rows, as long as the context."""
        weight = self.embedding.weight
        return [LayerCache(batch, self.kv_heads, self.context, self.head_size, weight.device, weight.dtype) for _ in self.blocks]
