"""What a client is told: completions in OpenAI's JSON, whole or in parts."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from ingot.data.tokenizers import Tokenizer
from ingot.trained.serving import Piece


class Answer:
    """The answer to one request; `choices` are its texts, each after its prompt, in order."""

    def __init__(self, tokenizer: Tokenizer, name: str, prompt_tokens: Sequence[int], logprobs: int | None, echo: bool) -> None:
        self._tokenizer, self._top, self._echo = tokenizer, logprobs, echo
        self._offsets = [0] * len(prompt_tokens)  # characters of each choice that were told
        self._prompts = prompt_tokens
        self._tokens = [0] * len(prompt_tokens)  # told of each choice
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": name,
        }

    def choice(self, index: int, piece: Piece) -> dict[str, Any]:
        """A piece of a text."""
        found = {"index": index, "text": piece.text, "logprobs": None, "finish_reason": piece.finish}
        if self._top is not None:
            found["logprobs"] = self._logprobs(index, piece)
        self._tokens[index] += len(piece.ids)
        self._offsets[index] += len(piece.text)
        return found

    def record(self, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The JSON of some choices."""
        return {**self._head, "choices": list(choices)}

    def usage(self, prompts: int) -> dict[str, int]:
        """How many tokens there were: of each prompt once, and of what was written."""
        prompt = sum(self._prompts[:: max(1, len(self._prompts) // prompts)])
        written = sum(self._tokens) - (sum(self._prompts) if self._echo else 0)
        return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}

    def _logprobs(self, index: int, piece: Piece) -> dict[str, Any]:
        """The tokens of a piece with their scores; the first token of a row has none."""
        words = [self.word(token) for token in piece.ids]
        scores, missing = piece.scores, 0
        chosen: list[float | None] = [] if scores is None else [float(value) for value in scores.chosen]
        top: list[dict[str, float] | None] = []
        if scores is not None:
            for ids, values in zip(scores.top_ids[:, : self._top], scores.top[:, : self._top], strict=True):
                top.append({self.word(int(token)): float(value) for token, value in zip(ids, values, strict=True)})
        missing = len(words) - len(chosen)
        offsets, at = [], self._offsets[index]
        for token in piece.ids:
            offsets.append(at)
            at += len(self._tokenizer.decode_bytes([token]).decode("utf-8", "ignore"))
        return {
            "tokens": words,
            "token_logprobs": [None] * missing + chosen,
            "top_logprobs": [None] * missing + top if self._top else None,
            "text_offset": offsets,
        }

    def word(self, token: int) -> str:
        """A token as text; parts of characters and special tokens have a spelling of their own, so that no two are the same."""
        piece = self._tokenizer.decode_bytes([token])
        if not piece:
            return f"<|token {token}|>"
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
