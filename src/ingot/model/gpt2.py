"""The gpt2 family: GPT-2 as nanoGPT trains it. Learned positions, pre-norm blocks, a head tied to the embedding.

Parameter names follow the layout of OpenAI's and nanoGPT's checkpoints (`transformer.h.0.attn.c_attn.weight`), with weights
stored as torch's Linear has them, so that those files can be read without a translation table.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ingot.model.kernels.flash import packed_flash_attention
from ingot.model.kernels.mlp import fused_mlp
from ingot.model.kernels.products import product_format
from ingot.model.layers import (
    Form,
    LayerCache,
    LayerNorm,
    Mask,
    attention_mask,
    causal_attention,
    positions,
    starts_of,
    takes_flash,
)
from ingot.model.loss import head_logits, head_loss
from ingot.model.settings import GPT2Settings


class Attention(nn.Module):
    form: Form = "repeated"  # of attention

    def __init__(self, width: int, heads: int, bias: bool, dropout: float):
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width, bias=bias)
        self.c_proj = nn.Linear(width, width, bias=bias)
        self.heads = heads
        self.dropout = dropout

    def forward(self, x: Tensor, mask: Mask | None, cache: LayerCache | None) -> Tensor:
        B, T, C = x.shape
        qkv, dropout = self.c_attn(x).view(B, T, 3, self.heads, -1), self.dropout if self.training else 0.0
        if takes_flash(self.form, mask, dropout) and cache is None:
            y = packed_flash_attention(qkv, None, starts_of(mask), self.form != "flash4")  # (B, T, H, D)
        else:
            q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))  # (B, H, T, D)
            if cache is not None:
                k, v = cache.extend(k, v)  # (B, H, S, D)
            y = causal_attention(q, k, v, dropout, mask, self.form).transpose(1, 2)
        y = self.c_proj(y.reshape(B, T, C))
        return F.dropout(y, self.dropout, self.training)


class MLP(nn.Module):
    fused_mlp = False  # whether the activation is a part of the products around it

    def __init__(self, width: int, bias: bool, dropout: float, gelu: Literal["tanh", "erf"]):
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width, bias=bias)
        self.c_proj = nn.Linear(4 * width, width, bias=bias)
        self.dropout = dropout
        self.approximate = "tanh" if gelu == "tanh" else "none"

    def forward(self, x: Tensor) -> Tensor:
        if self.fused_mlp and torch.is_grad_enabled():
            activation = "gelu-tanh" if self.approximate == "tanh" else "gelu-erf"
            y = fused_mlp(x, self.c_fc.weight, self.c_fc.bias, self.c_proj.weight, activation)
            y = y if self.c_proj.bias is None else y + self.c_proj.bias.to(y.dtype)
        else:
            y = self.c_proj(F.gelu(self.c_fc(x), approximate=self.approximate))
        return F.dropout(y, self.dropout, self.training)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, bias: bool, dropout: float, gelu: Literal["tanh", "erf"]):
        super().__init__()
        self.ln_1 = LayerNorm(width, bias)
        self.attn = Attention(width, heads, bias, dropout)
        self.ln_2 = LayerNorm(width, bias)
        self.mlp = MLP(width, bias, dropout, gelu)

    def forward(self, x: Tensor, mask: Mask | None = None, cache: LayerCache | None = None) -> Tensor:
        x = x + self.attn(self.ln_1(x), mask, cache)
        return x + self.mlp(self.ln_2(x))


class Trunk(nn.Module):
    """Embeddings, blocks and the final norm: everything before the head."""

    fused_stream = False  # whether the residual stream has the number format of products while it trains

    def __init__(self, vocab_size: int, context: int, width: int, bias: bool, dropout: float, blocks: list[Block]):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, width)
        self.wpe = nn.Embedding(context, width)
        self.h = nn.ModuleList(blocks)
        self.ln_f = LayerNorm(width, bias)
        self.dropout = dropout
        self.head_size = width // blocks[0].attn.heads

    def forward(self, tokens: Tensor, cache: list[LayerCache] | None, documents: Tensor | None) -> Tensor:
        places = self.wpe(positions(tokens, cache, self.wpe.num_embeddings))  # (T, C)
        mask = attention_mask(documents, cache, self.head_size, self.dropout if self.training else 0.0)
        x = F.dropout(self.wte(tokens) + places, self.dropout, self.training)  # (B, T, C)
        if self.fused_stream and torch.is_grad_enabled():
            x = x.to(product_format(x))
        for i, block in enumerate(self.h):
            x = block(x, mask, cache[i] if cache else None)
        return self.ln_f(x)


@torch.no_grad()
def initialise(model: nn.Module, layers: int) -> None:
    """Give a model GPT-2's first weights; gains stay one."""
    for name, parameter in model.named_parameters():
        if name.endswith(("c_proj.weight", "c_down.weight")):
            # Two branches per layer add to the residual stream; this keeps its variance independent of depth.
            parameter.normal_(std=0.02 / math.sqrt(2 * layers))
        elif parameter.dim() >= 2:
            parameter.normal_(std=0.02)
        elif name.endswith("bias"):
            parameter.zero_()


class GPT2(nn.Module):
    """`model(tokens)` gives logits (B, T, V); `model(tokens, targets)` the mean loss over the targets that are not -1."""

    loss_chunk: int | None = None  # tokens whose logits are held at once; None: all
    fused_loss = False  # whether the loss is a kernel of ours
    fp8_head = False  # whether the head's products have 8 bits while it trains

    Settings = GPT2Settings

    def __init__(self, vocab_size: int, context: int, **settings: Any):
        super().__init__()
        s = GPT2Settings(**settings)
        self.context = context
        self.heads = s.heads
        blocks = [Block(s.width, s.heads, s.bias, s.dropout, s.gelu) for _ in range(s.layers)]
        self.transformer = Trunk(vocab_size, context, s.width, s.bias, s.dropout, blocks)
        initialise(self, s.layers)

    @property
    def blocks(self) -> nn.ModuleList:
        """The repeated part, which a backend may checkpoint, compile or shard block by block."""
        return self.transformer.h

    @property
    def head(self) -> Tensor:
        return self.transformer.wte.weight

    def hidden(self, tokens: Tensor, cache: list[LayerCache] | None = None, documents: Tensor | None = None) -> Tensor:
        """Final hidden states (B, T, C) of `tokens`, which follow what `cache` holds and see only their own document."""
        return self.transformer(tokens, cache, documents)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of every next token, from hidden states; the head is the token embedding."""
        return head_logits(hidden, self.head)

    def head_loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Mean loss of the targets, given the hidden states before the head."""
        return head_loss(hidden, self.head, targets, chunk=self.loss_chunk, fused=self.fused_loss, fp8=self.fp8_head)

    def forward(self, tokens: Tensor, targets: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        x = self.hidden(tokens, documents=documents)
        return self.logits(x) if targets is None else self.head_loss(x, targets)

    def new_cache(self, batch: int) -> list[LayerCache]:
        """An empty key-value cache for `batch` rows, as long as the context."""
        weight = self.transformer.wte.weight
        head_size = weight.size(1) // self.heads
        return [LayerCache(batch, self.heads, self.context, head_size, weight.device, weight.dtype) for _ in self.blocks]
