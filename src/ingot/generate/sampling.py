"""How text is drawn from a model, as any framework does it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ingot.errors import DataError


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. temperature 0 is greedy; top_k 0 and top_p 1 leave all tokens in. Row i has seed + i."""

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1337
    use_cache: bool = True  # keep keys and values instead of computing them anew


def prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """The ids a continuation starts from: the start of a document and the prompt; where there is neither, a newline or any id."""
    ids = [int(i) for i in tokenizer.encode_document(text)]
    if ids:
        return ids
    try:
        return [int(i) for i in tokenizer.encode("\n")] or [0]
    except DataError:
        return [0]
