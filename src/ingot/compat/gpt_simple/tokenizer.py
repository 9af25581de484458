"""SimpleLLMTokenizer: a tokenizer of ours with gpt-simple's methods.

Another tokenizer is never taken in the place of one that cannot be opened, and no id is replaced by another.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ingot.compat.gpt_simple.translate import tokenizer_name
from ingot.data.tokenizers import Tokenizer, open_tokenizer
from ingot.data.tokenizers.hf_json import HFTokenizer
from ingot.errors import ConfigError

if TYPE_CHECKING:
    import torch

PAD = "<|pad|>"


class SimpleLLMTokenizer:
    """The tokenizer of a name, file or folder; where it has no id to pad with, one more than its ids is that."""

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
        """The ids of a text, or of several; `return_tensors="pt"` gives a tensor (rows, ids).

        No mark is put before or after a text: gpt-simple's training adds them itself, whatever `add_special_tokens` says.
        """
        single = isinstance(text, str)
        texts = [text] if isinstance(text, str) else text
        rows = [[int(i) for i in self.tokenizer.encode(one)] for one in texts]
        if truncation and max_length is not None:
            rows = [row[:max_length] for row in rows]
        if padding:
            width = max_length if max_length is not None else max(map(len, rows), default=0)
            rows = [row + [self.pad_token_id] * (width - len(row)) for row in rows]
        if return_tensors is None:
            return rows[0] if single else rows
        if return_tensors != "pt":
            raise ConfigError(f"return_tensors={return_tensors!r} must be 'pt' or None")
        import torch

        return torch.tensor(rows, dtype=torch.long)

    def decode(
        self, token_ids: Any, skip_special_tokens: bool = True, clean_up_tokenization_spaces: bool = True
    ) -> str | list[str]:
        """The text of ids, or of several rows of them; special ids are left out, or shown by their names."""
        ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
        if ids and isinstance(ids[0], list):
            return [self._text(row, skip_special_tokens) for row in ids]
        return self._text(ids or [], skip_special_tokens)

    def tokenize(self, text: str) -> list[str]:
        """The pieces of a text."""
        return self.convert_ids_to_tokens([int(i) for i in self.tokenizer.encode(text)])

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        """What each id stands for."""
        return [self._text([i], False) for i in ids]

    def convert_tokens_to_ids(self, tokens: Sequence[str]) -> list[int]:
        """The id of each piece; ConfigError for a text that is not one."""
        found = []
        for token in tokens:
            if token in self._names():
                found.append(self._names()[token])
                continue
            ids = self.tokenizer.encode(token)
            if len(ids) != 1:
                raise ConfigError(f"{token!r} is not a piece of this tokenizer: it has {len(ids)} ids")
            found.append(int(ids[0]))
        return found

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
