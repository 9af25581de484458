"""SimpleLLM and SimpleLLMTokenizer: gpt-simple's model and tokenizer, for notebooks and scripts that import them.

The model is our llama family, whose parameters already have gpt-simple's names; this file only adds gpt-simple's signatures. As
in the original, labels are shifted inside the model and -100 is ignored. A tokenizer that cannot be opened is an error; it is
never replaced by another one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
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
from ingot.compat.gpt_simple.translate import tokenizer_name
from ingot.data.tokenizers import Tokenizer, open_tokenizer
from ingot.data.tokenizers.hf_json import HFTokenizer
from ingot.errors import ConfigError
from ingot.model.layers import LayerCache
from ingot.model.llama import Llama

IGNORED = -100  # labels with this value do not count in the loss
PAD = "<|pad|>"


@dataclass
class CausalLMOutput:
    """The result with `return_dict=True`; its fields can also be indexed by name."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: list[LayerCache] | None = None

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def __contains__(self, name: str) -> bool:
        return getattr(self, name, None) is not None


class SimpleLLM(Llama):
    """`model(ids)` returns (logits,), with `labels` (loss, logits), with `return_dict=True` a CausalLMOutput."""

    def __init__(self, config: ModelConfig, gradient_checkpointing: bool = False):
        config.check()
        if config.vocab_size is None:
            raise ConfigError("ModelConfig.vocab_size is not set; set it to the rows of the embedding")
        settings = model_settings(asdict(config), "ModelConfig")
        super().__init__(**{name: value for name, value in settings.items() if name != "family"})
        self.config = config
        if gradient_checkpointing:
            checkpoint_blocks(self)

    def get_num_params(self, non_embedding: bool = True) -> int:
        """Return the number of parameters, by default without the token embedding."""
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
        """Return the tokens with a completion of each row, until every row has ended; sampling follows torch.manual_seed.

        A row that has ended with `eos_token_id` is filled up with `pad_token_id`, if there is one.
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
        completion: list[Tensor] = []
        ended = torch.zeros(ids.size(0), dtype=torch.bool, device=ids.device)
        for tokens in islice(generate(self, ids, options.sampling(ids.size(0))), max_new_tokens):
            completion.append((tokens if pad_token_id is None else tokens.masked_fill(ended, pad_token_id))[:, None])
            if eos_token_id is None:
                continue
            ended |= tokens == eos_token_id
            if bool(ended.all()):
                break
        return torch.cat([ids, *completion], dim=1)


def _check_rows(attention_mask: Tensor | None, position_ids: Tensor | None, continued: bool) -> None:
    """Raise ConfigError for left padding and unusual positions: rows must begin at position 0."""
    if attention_mask is not None and not bool(attention_mask[:, 0].all()):
        raise ConfigError("attention_mask hides the first tokens of a row; pad rows on the right")
    if position_ids is None or continued:
        return
    # The original gives padding position 0; no token before it attends to it.
    expected = torch.arange(position_ids.size(-1), device=position_ids.device)
    if not bool(((position_ids == expected) | (position_ids == 0)).all()):
        raise ConfigError("position_ids must count from 0 in every row, or be left out")


class SimpleLLMTokenizer:
    """The tokenizer of a name, file or folder; if it has no pad token, the id after its last one is used."""

    def __init__(self, model_name: str = "gpt2", tokenizer: Tokenizer | None = None) -> None:
        self.tokenizer = tokenizer if tokenizer is not None else open_tokenizer(tokenizer_name(model_name))
        pad = self.tokenizer.pad
        self.eos_token_id = self.eod_token_id = self.tokenizer.eos
        self.bos_token_id = self.tokenizer.bos if self.tokenizer.bos is not None else self.eos_token_id
        self.pad_token_id: int = self.tokenizer.vocab_size if pad is None else pad
        self.vocab_size = self.tokenizer.vocab_size + (pad is None)

    def encode(
        self,
        text: str | Sequence[str],
        add_special_tokens: bool = True,
        max_length: int | None = None,
        padding: bool = False,
        truncation: bool = False,
        return_tensors: str | None = None,
    ) -> list[int] | list[list[int]] | torch.Tensor:
        """Return the tokens of one or several texts; `return_tensors="pt"` gives a tensor (rows, tokens).

        Special tokens are never added, whatever `add_special_tokens` says: gpt-simple's training adds them itself.
        """
        single = isinstance(text, str)
        texts = [text] if isinstance(text, str) else text
        rows = [[int(i) for i in self.tokenizer.encode(part)] for part in texts]
        if truncation and max_length is not None:
            rows = [row[:max_length] for row in rows]
        if padding:
            width = max_length if max_length is not None else max(map(len, rows), default=0)
            rows = [row + [self.pad_token_id] * (width - len(row)) for row in rows]
        if return_tensors is None:
            return rows[0] if single else rows
        if return_tensors != "pt":
            raise ConfigError(f"return_tensors={return_tensors!r} must be 'pt' or None")
        return torch.tensor(rows, dtype=torch.long)

    def decode(
        self, token_ids: Any, skip_special_tokens: bool = True, clean_up_tokenization_spaces: bool = True
    ) -> str | list[str]:
        """Return the text of one or several rows of tokens; special tokens are left out, or shown by their names."""
        ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
        if ids and isinstance(ids[0], list):
            return [self._text(row, skip_special_tokens) for row in ids]
        return self._text(ids or [], skip_special_tokens)

    def tokenize(self, text: str) -> list[str]:
        """Return the tokens of a text as text."""
        return self.convert_ids_to_tokens([int(i) for i in self.tokenizer.encode(text)])

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token."""
        return [self._text([i], False) for i in ids]

    def convert_tokens_to_ids(self, tokens: Sequence[str]) -> list[int]:
        """Return the id of each token; ConfigError for a text that is not one token."""
        ids = []
        for token in tokens:
            if token in self._names():
                ids.append(self._names()[token])
                continue
            encoded = self.tokenizer.encode(token)
            if len(encoded) != 1:
                raise ConfigError(f"{token!r} is not a token of this tokenizer: it is encoded as {len(encoded)} tokens")
            ids.append(int(encoded[0]))
        return ids

    def _names(self) -> dict[str, int]:
        named = {PAD: self.pad_token_id}
        if self.eos_token_id is not None:
            named[self._end_name()] = self.eos_token_id
        return named

    def _end_name(self) -> str:
        if isinstance(self.tokenizer, HFTokenizer):
            for added in json.loads(self.tokenizer.contents).get("added_tokens", []):
                if added.get("id") == self.eos_token_id:
                    return str(added["content"])
        return "<|endoftext|>" if self.tokenizer.kind == "gpt2" else "</s>"

    def _text(self, ids: Sequence[int], skip_special: bool) -> str:
        if skip_special:
            return self.tokenizer.decode([i for i in ids if i < self.tokenizer.vocab_size])
        names = {number: name for name, number in self._names().items()}
        parts: list[str] = []
        run: list[int] = []
        for i in ids:
            if i in names:
                parts += [self.tokenizer.decode(run) if run else "", names[i]]
                run = []
            else:
                run.append(i)
        return "".join([*parts, self.tokenizer.decode(run) if run else ""])
