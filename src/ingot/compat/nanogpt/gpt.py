"""nanoGPT's model.py: GPT, GPTConfig and their modules, for notebooks and forks that import them.

The model is Ingot's gpt2 family, whose parameters already have nanoGPT's names. This file adds nanoGPT's signatures and makes the
output head a module, so that the state dict has the same keys as nanoGPT's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ingot.backends.sampling import Sampling
from ingot.backends.torch.generate import generate
from ingot.backends.torch.state import load_model
from ingot.compat.nanogpt.checkpoint import count_parameters, group_lines, read_pretrained, split_by_decay
from ingot.compat.nanogpt.keys import MODEL_ARGS
from ingot.errors import ConfigError
from ingot.model import gpt2
from ingot.model.cross_entropy import IGNORED
from ingot.model.gpt2 import GPT2
from ingot.model.layers import LayerCache, Mask
from ingot.runtime.devices import data_sheet_flops

Gelu = Literal["tanh", "erf"]
A100_FLOPS = 312e12  # bf16 peak of an A100, which nanoGPT assumes for every device; used only if a device's peak is unknown


@dataclass
class GPTConfig:
    """The architecture of a GPT, with nanoGPT's field names and defaults."""

    block_size: int = 1024
    vocab_size: int = 50304  # GPT-2's 50,257 ids, rounded up to a multiple of 64
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True


class CausalSelfAttention(gpt2.GPT2Attention):
    """Causal self-attention built from a GPTConfig."""

    def __init__(self, config: GPTConfig):
        super().__init__(config.n_embd, config.n_head, config.bias, config.dropout)

    def forward(self, x: Tensor, mask: Mask | None = None, cache: LayerCache | None = None) -> Tensor:
        return super().forward(x, mask, cache)


class MLP(gpt2.GPT2MLP):
    """Feed-forward layer built from a GPTConfig."""

    def __init__(self, config: GPTConfig, gelu: Gelu = "erf"):
        super().__init__(config.n_embd, config.bias, config.dropout, gelu)


class Block(gpt2.GPT2Block):
    """Transformer block built from a GPTConfig."""

    def __init__(self, config: GPTConfig, gelu: Gelu = "erf"):
        super().__init__(config.n_embd, config.n_head, config.bias, config.dropout, gelu)
        self.attn.__class__, self.mlp.__class__ = CausalSelfAttention, MLP  # safe: the subclasses add no state


class GPT(GPT2):
    """nanoGPT's GPT: `model(idx)` returns (last position's logits, None), `model(idx, targets)` returns (all logits, loss)."""

    def __init__(self, config: GPTConfig, gelu: Gelu = "erf"):
        if config.n_embd % config.n_head:
            raise ConfigError(f"n_head={config.n_head} does not divide n_embd={config.n_embd}")
        super().__init__(**{ours: getattr(config, theirs) for theirs, ours in MODEL_ARGS.items()}, gelu=gelu)
        self.config = config
        blocks: Any = self.blocks
        for block in blocks:  # use the classes in this file, for isinstance checks and FSDP wrap policies
            block.__class__, block.attn.__class__, block.mlp.__class__ = Block, CausalSelfAttention, MLP
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False, device="meta")  # tied to the embedding
        self.lm_head.weight = self.transformer.wte.weight
        print(f"number of parameters: {self.get_num_params() / 1e6:.2f}M")

    def get_num_params(self, non_embedding: bool = True) -> int:
        """Return the parameter count, by default without position embeddings; the tied token embedding counts once."""
        return count_parameters(self) if non_embedding else sum(p.numel() for p in self.parameters())

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        if idx.size(1) > self.config.block_size:
            raise ConfigError(f"{idx.size(1)} tokens do not fit into block_size={self.config.block_size}; crop the input")
        x = self.hidden(idx)
        if targets is None:
            return self.logits(x[:, -1:]), None
        logits = self.logits(x)
        return logits, F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)

    def generate(self, idx: Tensor, max_new_tokens: int, temperature: float = 1.0, top_k: int | None = None) -> Tensor:
        """Return `idx` (B, T) with `max_new_tokens` generated tokens appended to each row; temperature 0 decodes greedily.

        Sampling is seeded by torch.manual_seed. When the context is full, its first half is dropped and the rest is recomputed.
        """
        if idx.size(1) == 0 or max_new_tokens < 0 or temperature < 0:
            raise ConfigError("generate needs at least one prompt token, max_new_tokens >= 0 and temperature >= 0")
        seed = int(torch.randint(2**62, ()))
        new = generate(self, idx, Sampling(temperature, top_k or 0, seed=seed), keep_half=True, record=True)
        return torch.cat([idx, *(token[:, None] for token in islice(new, max_new_tokens))], dim=1)

    @classmethod
    def from_pretrained(cls, model_type: str, override_args: Mapping[str, Any] | None = None) -> GPT:
        """Load OpenAI's GPT-2 weights by name, such as gpt2-medium, or from a folder; only `dropout` can be overridden."""
        if unknown := sorted((override_args or {}).keys() - {"dropout"}):
            raise ConfigError(f"from_pretrained can override only dropout, not {unknown[0]}")
        print(f"loading weights from pretrained gpt: {model_type}")
        ckpt = read_pretrained(model_type)
        args = {theirs: ckpt.settings[ours] for theirs, ours in MODEL_ARGS.items()} | dict(override_args or {})
        model = cls(GPTConfig(**args), ckpt.settings["gelu"])
        load_model(model, ckpt.weights, model_type)
        return model

    def crop_block_size(self, block_size: int) -> None:
        """Truncate the position embeddings to `block_size`."""
        if not 0 < block_size <= self.config.block_size:
            raise ConfigError(f"block_size={self.config.block_size} cannot be cropped to {block_size}")
        wpe = self.transformer.wpe
        wpe.weight = nn.Parameter(wpe.weight.detach()[:block_size].clone())
        self.config.block_size = self.context = wpe.num_embeddings = block_size

    def configure_optimizers(
        self, weight_decay: float, learning_rate: float, betas: tuple[float, float], device_type: str
    ) -> torch.optim.AdamW:
        """Build AdamW with two groups: weight decay for tensors with two or more dimensions, none for the others."""
        parameters, fused = dict(self.named_parameters()), device_type == "cuda"
        print("\n".join([*group_lines(parameters), f"using fused AdamW: {fused}"]))
        decay, rest = (list(group.values()) for group in split_by_decay(parameters))
        groups = [{"params": decay, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=fused or None)

    def estimate_mfu(self, fwdbwd_per_iter: int, dt: float, peak: float | None = None) -> float:
        """Return the model FLOPs utilisation if a forward and backward pass of `fwdbwd_per_iter` sequences takes `dt` seconds.

        `peak` is in FLOP/s; by default, it is the peak of the device or, if that is unknown, the peak of an A100, as in nanoGPT.
        """
        c, device = self.config, self.transformer.wte.weight.device
        own_peak = data_sheet_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        flops_per_token = 6 * self.get_num_params() + 12 * c.n_layer * c.n_embd * c.block_size
        return flops_per_token * c.block_size * fwdbwd_per_iter / dt / (peak or own_peak or A100_FLOPS)
