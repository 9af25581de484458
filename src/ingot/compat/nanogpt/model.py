"""nanoGPT's model.py: GPT, GPTConfig and their parts, for the notebooks and forks that import them.

The model is our gpt2 family, whose parameters have nanoGPT's names already; here are only nanoGPT's signatures, and the head as a
module of its own, so that a state dict has the same keys. Nothing is computed here that the family computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ingot.backends.sampling import Sampling
from ingot.backends.torch.generate import generate
from ingot.backends.torch.state import load_model
from ingot.compat.nanogpt.checkpoint import read_pretrained, split_by_decay
from ingot.compat.nanogpt.translate import args_of
from ingot.errors import ConfigError
from ingot.model import gpt2
from ingot.model.cross_entropy import IGNORED
from ingot.model.gpt2 import GPT2
from ingot.model.layers import LayerCache, Mask
from ingot.runtime.devices import data_sheet_flops

Gelu = Literal["tanh", "erf"]
A100_FLOPS = 312e12  # what nanoGPT measures every device by; here only those whose own rate is not known


@dataclass
class GPTConfig:
    """The shape of a GPT."""

    block_size: int = 1024
    vocab_size: int = 50304  # GPT-2's 50,257 ids, rounded up to a multiple of 64
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True


class CausalSelfAttention(gpt2.GPT2Attention):
    """The attention of a GPTConfig."""

    def __init__(self, config: GPTConfig):
        super().__init__(config.n_embd, config.n_head, config.bias, config.dropout)

    def forward(self, x: Tensor, mask: Mask | None = None, cache: LayerCache | None = None) -> Tensor:
        return super().forward(x, mask, cache)


class MLP(gpt2.GPT2MLP):
    """The feed-forward part of a GPTConfig."""

    def __init__(self, config: GPTConfig, gelu: Gelu = "erf"):
        super().__init__(config.n_embd, config.bias, config.dropout, gelu)


class Block(gpt2.GPT2Block):
    """The block of a GPTConfig."""

    def __init__(self, config: GPTConfig, gelu: Gelu = "erf"):
        super().__init__(config.n_embd, config.n_head, config.bias, config.dropout, gelu)
        _name_as_theirs(self)


def _name_as_theirs(block: Any) -> None:
    """Make a block of the family one of the classes here, which add no state: isinstance and FSDP's policies then find it."""
    block.__class__, block.attn.__class__, block.mlp.__class__ = Block, CausalSelfAttention, MLP


class GPT(GPT2):
    """`model(idx)` gives the logits (B, 1, V) after the last token and None; `model(idx, targets)` all logits and the loss."""

    def __init__(self, config: GPTConfig, gelu: Gelu = "erf"):
        if config.n_embd % config.n_head:
            raise ConfigError(f"n_head={config.n_head} does not divide n_embd={config.n_embd}")
        super().__init__(
            vocab_size=config.vocab_size,
            context=config.block_size,
            layers=config.n_layer,
            heads=config.n_head,
            width=config.n_embd,
            dropout=config.dropout,
            bias=config.bias,
            gelu=gelu,
        )
        self.config = config
        for block in self.blocks:
            _name_as_theirs(block)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False, device="meta")  # its weight is the embedding's
        self.lm_head.weight = self.transformer.wte.weight
        print(f"number of parameters: {self.get_num_params() / 1e6:.2f}M")

    def get_num_params(self, non_embedding: bool = True) -> int:
        """How many parameters there are; by default without those of positions. The token embedding is the head and counts."""
        count = sum(p.numel() for p in self.parameters())
        return count - self.transformer.wpe.weight.numel() if non_embedding else count

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        if idx.size(1) > self.config.block_size:
            raise ConfigError(f"a row of {idx.size(1)} tokens does not fit into block_size={self.config.block_size}; crop it")
        x = self.hidden(idx)
        if targets is None:
            return self.logits(x[:, -1:]), None
        logits = self.logits(x)
        return logits, F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)

    def generate(self, idx: Tensor, max_new_tokens: int, temperature: float = 1.0, top_k: int | None = None) -> Tensor:
        """(B, T) tokens and as many new ones after them; temperature 0 takes the likeliest each time.

        The draws follow torch.manual_seed. After block_size tokens, half of what is there is kept and read again.
        """
        if idx.size(1) == 0 or max_new_tokens < 0 or temperature < 0:
            raise ConfigError("generate needs a token to begin with, and neither max_new_tokens nor temperature below 0")
        seed = int(torch.randint(2**62, ()))
        new = generate(self, idx, Sampling(temperature, top_k or 0, seed=seed), keep_half=True, record=True)
        return torch.cat([idx, *(token[:, None] for token in islice(new, max_new_tokens))], dim=1)

    @classmethod
    def from_pretrained(cls, model_type: str, override_args: Mapping[str, Any] | None = None) -> GPT:
        """GPT-2 with OpenAI's weights: gpt2, -medium, -large or -xl, or a folder of such; only `dropout` can be overridden."""
        if unknown := sorted((override_args or {}).keys() - {"dropout"}):
            raise ConfigError(f"from_pretrained cannot override {unknown[0]}; only dropout")
        print(f"loading weights from pretrained gpt: {model_type}")
        records, settings = read_pretrained(model_type)
        args = args_of(settings | dict(override_args or {}))
        model = cls(GPTConfig(**asdict(args)), settings["gelu"])
        load_model(model, records, model_type)
        return model

    def crop_block_size(self, block_size: int) -> None:
        """Forget the positions from `block_size` on."""
        if not 0 < block_size <= self.config.block_size:
            raise ConfigError(f"block_size={self.config.block_size} cannot be cropped to {block_size}")
        wpe = self.transformer.wpe
        wpe.weight = nn.Parameter(wpe.weight.detach()[:block_size].clone())
        self.config.block_size = self.context = wpe.num_embeddings = block_size

    def configure_optimizers(
        self, weight_decay: float, learning_rate: float, betas: tuple[float, float], device_type: str
    ) -> torch.optim.AdamW:
        """AdamW in two groups: tensors of two or more dimensions decay, the others do not."""
        decay, rest = split_by_decay(dict(self.named_parameters()))
        for words, group in (("decayed", decay), ("non-decayed", rest)):
            print(f"num {words} parameter tensors: {len(group)}, with {sum(p.numel() for p in group.values()):,} parameters")
        fused = device_type == "cuda"
        print(f"using fused AdamW: {fused}")
        groups = [
            {"params": list(decay.values()), "weight_decay": weight_decay},
            {"params": list(rest.values()), "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=fused or None)

    def estimate_mfu(self, fwdbwd_per_iter: int, dt: float, peak: float | None = None) -> float:
        """The part of a device's FLOP/s that `fwdbwd_per_iter` rows in `dt` seconds make use of.

        Without a `peak` it is the GPU's own; where that is not known, an A100's, as in nanoGPT.
        """
        c = self.config
        per_token = 6 * self.get_num_params() + 12 * c.n_layer * c.n_embd * c.block_size
        device = self.transformer.wte.weight.device
        known = data_sheet_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        return per_token * c.block_size * fwdbwd_per_iter / dt / (peak or known or A100_FLOPS)
