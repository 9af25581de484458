"""SimpleLLM: gpt-simple's model for notebooks and scripts that import it.

The model is our llama family, whose parameters have gpt-simple's names already; here are only gpt-simple's signatures. Labels are
shifted inside, as there, and -100 is not counted. Nothing is computed here that the family computes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ingot.artifact.gpt_simple import model_settings
from ingot.backends.sampling import GenerationOptions
from ingot.backends.torch.build import checkpoint_blocks
from ingot.backends.torch.generate import generate
from ingot.compat.gpt_simple.config import ModelConfig
from ingot.errors import ConfigError
from ingot.model.layers import LayerCache
from ingot.model.llama import Llama

IGNORED = -100  # a label that is not counted


@dataclass
class CausalLMOutput:
    """What `return_dict=True` gives; its fields can be had by name, too."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: list[LayerCache] | None = None

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def __contains__(self, name: str) -> bool:
        return getattr(self, name, None) is not None


class SimpleLLM(Llama):
    """`model(ids)` gives (logits,), with `labels` (loss, logits), with `return_dict=True` a CausalLMOutput."""

    def __init__(self, config: ModelConfig, gradient_checkpointing: bool = False):
        config.check()
        if config.vocab_size is None:
            raise ConfigError("ModelConfig.vocab_size is not set; a model needs the number of rows of its embedding")
        settings = model_settings(asdict(config), "ModelConfig")
        super().__init__(**{name: value for name, value in settings.items() if name != "family"})
        self.config = config
        if gradient_checkpointing:
            checkpoint_blocks(self)

    def get_num_params(self, non_embedding: bool = True) -> int:
        """How many parameters there are; by default without the token embedding."""
        count = sum(p.numel() for p in self.parameters())
        return count - self.wte.weight.numel() if non_embedding else count

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        doc_ids: Tensor | None = None,
        past_key_values: list[LayerCache] | None = None,
        use_cache: bool | None = None,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
    ) -> CausalLMOutput | tuple[Any, ...]:
        cache = past_key_values or (self.new_cache(input_ids.size(0)) if use_cache else None)
        _check_rows(attention_mask, position_ids, continued=past_key_values is not None)
        documents = doc_ids if self.config.attention_mode != "causal" else None
        logits = self.logits(self.hidden(input_ids, cache, documents))
        loss = None
        if labels is not None:
            shifted = logits[:, :-1].flatten(0, 1).float()
            loss = F.cross_entropy(shifted, labels[:, 1:].flatten(), ignore_index=IGNORED)
        if return_dict:
            return CausalLMOutput(loss, logits, cache)
        return tuple(part for part in (loss, logits, cache) if part is not None)

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int = 100,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        do_sample: bool = True,
        pad_token_id: int | None = None,
        eos_token_id: int | None = None,
        repetition_penalty: float = 1.0,
    ) -> Tensor:
        """The ids and new ones after them, until every row has ended; the draws follow torch.manual_seed.

        A row that has ended with `eos_token_id` goes on with `pad_token_id`, if there is one.
        """
        ids = input_ids if input_ids.dim() == 2 else input_ids[None]  # (B, T)
        options = GenerationOptions(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            greedy=not do_sample,
            repetition_penalty=repetition_penalty,
            seed=int(torch.randint(2**31, ())),
        )
        written: list[Tensor] = []
        ended = torch.zeros(ids.size(0), dtype=torch.bool, device=ids.device)
        for tokens in islice(generate(self, ids, options.sampling(ids.size(0))), max_new_tokens):
            written.append((tokens if pad_token_id is None else tokens.masked_fill(ended, pad_token_id))[:, None])
            if eos_token_id is None:
                continue
            ended |= tokens == eos_token_id
            if bool(ended.all()):
                break
        return torch.cat([ids, *written], dim=1)


def _check_rows(attention_mask: Tensor | None, position_ids: Tensor | None, continued: bool) -> None:
    """Rows begin at their left end: what the model sees there needs neither a mask nor positions."""
    if attention_mask is not None and not bool(attention_mask[:, 0].all()):
        raise ConfigError("attention_mask hides the first tokens of a row; fill rows up at their right end")
    if position_ids is None or continued:
        return
    # Padding has position 0 there, which no token before it sees.
    counted = torch.arange(position_ids.size(-1), device=position_ids.device)
    if not bool(((position_ids == counted) | (position_ids == 0)).all()):
        raise ConfigError("position_ids must count from 0 in every row, or be left out")
