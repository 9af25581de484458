"""The golf family: the baseline of the parameter golf challenge, small models that learn fast under Muon.

What sets it apart: every block begins by mixing the embedding back in, the first half of the blocks feeds the second half through
skips, queries and keys are normalised, and every branch starts at zero, so that a new model predicts from the embedding alone.
Parameter names are those of the challenge's own files. Numbers that steer rather than multiply (`control`) stay float32 and are
no matrices to Muon, even where they have two dimensions.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ingot.model.kernels.mlp import fused_mlp
from ingot.model.kernels.qkv import projected_attention
from ingot.model.kernels.rotary import fused_rotation
from ingot.model.layers import (
    Form,
    LayerCache,
    Mask,
    RotaryTables,
    Rotation,
    attention_mask,
    causal_attention,
    positions,
    rotate,
    starts_of,
    takes_flash,
)
from ingot.model.loss import head_logits, head_loss
from ingot.model.settings import GolfSettings


def norm(x: Tensor) -> Tensor:
    """Bring the last dimension to a root mean square of 1, without a gain."""
    return F.rms_norm(x, (x.size(-1),))


class Linear(nn.Linear):
    """A matrix kept in float32 and used in the number format of what it multiplies."""

    def __init__(self, inside: int, outside: int):
        super().__init__(inside, outside, bias=False)

    def scaled(self, scale: Tensor | None) -> Tensor:
        """The weights, each row times its number of the scale, where there is one."""
        return self.weight if scale is None else scale[:, None] * self.weight

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        return F.linear(x, self.scaled(scale).to(x.dtype))


class Attention(nn.Module):
    fused_qkv = False  # whether queries, keys and values are one product, for FlashAttention 4
    form: Form = "repeated"  # of attention
    fused_rotary = False  # whether norm, rotation and gain are one kernel of ours

    def __init__(self, width: int, heads: int, kv_heads: int, qk_gain: float):
        super().__init__()
        self.head_size = width // heads
        self.c_q = Linear(width, width)
        self.c_k = Linear(width, kv_heads * self.head_size)
        self.c_v = Linear(width, kv_heads * self.head_size)
        self.proj = Linear(width, width)
        self.q_gain = nn.Parameter(torch.full((heads,), qk_gain))

    def forward(
        self, x: Tensor, rotary: RotaryTables, mask: Mask | None, cache: LayerCache | None, scale: Tensor | None = None
    ) -> Tensor:
        B, T, C = x.shape
        layers = self.c_q, self.c_k, self.c_v
        if self.fused_qkv and torch.is_grad_enabled() and takes_flash(self.form, mask) and cache is None:
            y = projected_attention(x, layers, self.head_size, rotary, starts_of(mask), self.q_gain)
            return self.proj(y.flatten(2), scale)
        q, k, v = (layer(x).view(B, T, -1, self.head_size) for layer in layers)  # (B, T, H, D), twice (B, T, K, D)
        v = v.transpose(1, 2)  # (B, K, T, D), as k is from here on; q is (B, H, T, D)
        if self.fused_rotary and cache is None:
            q, k = fused_rotation(q, rotary, self.q_gain), fused_rotation(k, rotary)
        else:
            q, k = rotate(norm(q.transpose(1, 2)), rotary), rotate(norm(k.transpose(1, 2)), rotary)
            q = q * self.q_gain.to(q.dtype)[:, None, None]
        if cache is not None:
            k, v = cache.extend(k, v)  # (B, K, S, D)
        y = causal_attention(q, k, v, mask=mask, form=self.form)
        return self.proj(y.transpose(1, 2).reshape(B, T, C), scale)


class MLP(nn.Module):
    fused_mlp = False  # whether the activation is a part of the products around it

    def __init__(self, width: int, multiple: int):
        super().__init__()
        self.fc = Linear(width, multiple * width)
        self.proj = Linear(multiple * width, width)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        if self.fused_mlp and torch.is_grad_enabled():
            return fused_mlp(x, self.fc.weight, None, self.proj.scaled(scale), "relu2")
        return self.proj(F.relu(self.fc(x)).square(), scale)


class Block(nn.Module):
    fused_scales = False  # whether the scales of the branches multiply the last weights of these instead of their outputs

    def __init__(self, width: int, heads: int, kv_heads: int, mlp_multiple: int, qk_gain: float):
        super().__init__()
        self.attn = Attention(width, heads, kv_heads, qk_gain)
        self.mlp = MLP(width, mlp_multiple)
        self.attn_scale = nn.Parameter(torch.ones(width))
        self.mlp_scale = nn.Parameter(torch.ones(width))
        self.resid_mix = nn.Parameter(torch.stack([torch.ones(width), torch.zeros(width)]))

    def forward(
        self, x: Tensor, x0: Tensor, rotary: RotaryTables, mask: Mask | None = None, cache: LayerCache | None = None
    ) -> Tensor:
        mix = self.resid_mix.to(x.dtype)
        x = mix[0] * x + mix[1] * x0
        if self.fused_scales and torch.is_grad_enabled():  # then no gradient needs the outputs, nor is one scaled by itself
            x = x + self.attn(norm(x), rotary, mask, cache, self.attn_scale)
            return x + self.mlp(norm(x), self.mlp_scale)
        x = x + self.attn_scale.to(x.dtype) * self.attn(norm(x), rotary, mask, cache)
        return x + self.mlp_scale.to(x.dtype) * self.mlp(norm(x))


class Golf(nn.Module):
    """`model(tokens)` gives logits (B, T, V); `model(tokens, targets)` the mean loss over the targets that are not -1."""

    loss_chunk: int | None = None  # tokens whose logits are held at once; None: all
    fused_loss = False  # whether softcap and loss are a kernel of ours
    fp8_head = False  # whether the head's products have 8 bits while it trains

    Settings = GolfSettings

    def __init__(self, vocab_size: int, context: int, **settings: Any):
        super().__init__()
        s = GolfSettings(**settings)
        self.context = context
        self.control = tuple(part for part in s.control.split(",") if part)
        self.head_size, self.kv_heads = s.width // s.heads, s.kv_heads or s.heads
        self.softcap = s.softcap
        self.skips = s.layers // 2
        self.tok_emb = nn.Embedding(vocab_size, s.width)
        self.blocks = nn.ModuleList(Block(s.width, s.heads, self.kv_heads, s.mlp_multiple, s.qk_gain) for _ in range(s.layers))
        self.skip_weights = nn.Parameter(torch.ones(self.skips, s.width), requires_grad=self.skips > 0)  # one layer has none
        self.lm_head = None if s.tied else Linear(s.width, vocab_size)
        self.rotation = Rotation(context, self.head_size, s.rope_base)
        self._initialise(s.embedding_std)
        if s.embedding_dtype == "bf16":
            self.tok_emb.to(torch.bfloat16)  # after the draw, which is then the same for both

    @torch.no_grad()
    def _initialise(self, embedding_std: float) -> None:
        """Matrices keep torch's uniform draw, but what ends a branch is zero; so is a head of its own."""
        for name, parameter in self.named_parameters():
            if name.endswith("proj.weight") or name == "lm_head.weight":
                parameter.zero_()
        if self.lm_head is None:
            self.tok_emb.weight.normal_(std=embedding_std)

    @property
    def head(self) -> Tensor:
        return self.tok_emb.weight if self.lm_head is None else self.lm_head.weight

    def hidden(self, tokens: Tensor, cache: list[LayerCache] | None = None, documents: Tensor | None = None) -> Tensor:
        """Final hidden states (B, T, C) of `tokens`, which follow what `cache` holds and see only their own document."""
        cos, sin = self.rotation(positions(tokens, cache, self.context))
        backwards = cos, -sin  # the way round the challenge's weights are trained
        mask = attention_mask(documents, cache, self.head_size)
        x = x0 = norm(self.tok_emb(tokens))  # (B, T, C)
        outputs: list[Tensor] = []
        for i, block in enumerate(self.blocks):
            if i >= self.skips and outputs:  # the nearest first: block 4 of 9 is fed by block 3, block 7 by block 0
                x = x + self.skip_weights[i - self.skips].to(x.dtype) * outputs.pop()
            x = block(x, x0, backwards, mask, cache[i] if cache else None)
            if i < self.skips:
                outputs.append(x)
        return norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of every next token, from hidden states; always between plus and minus the softcap."""
        return head_logits(hidden, self.head, self.softcap)

    def head_loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Mean loss of the targets, given the hidden states before the head."""
        return head_loss(hidden, self.head, targets, self.softcap, self.loss_chunk, self.fused_loss, self.fp8_head)

    def forward(self, tokens: Tensor, targets: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        x = self.hidden(tokens, documents=documents)
        return self.logits(x) if targets is None else self.head_loss(x, targets)

    def new_cache(self, batch: int) -> list[LayerCache]:
        """An empty key-value cache for `batch` rows, as long as the context."""
        weight = self.tok_emb.weight
        return [LayerCache(batch, self.kv_heads, self.context, self.head_size, weight.device, weight.dtype) for _ in self.blocks]
