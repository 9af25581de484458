"""What a client is told: completions in OpenAI's JSON, whole or in parts."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from ingot.data.tokenizers import StreamDecoder, Tokenizer
from ingot.doors.serve.requests import Prompt
from ingot.trained.serving import Piece


class Answer:
    """The answer to one request; `choices` are its texts, each after its prompt, in order."""

    def __init__(self, tokenizer: Tokenizer, name: str, prompts: Sequence[Prompt], logprobs: int | None, echo: bool) -> None:
        self._tokenizer, self._top, self._echo = tokenizer, logprobs, echo
        self._places = [Places(tokenizer, prompt, echo) for prompt in prompts]
        self._prompts = [len(prompt.ids) for prompt in prompts]
        self._tokens = [0] * len(prompts)  # told of each choice
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
        return {
            "tokens": words,
            "token_logprobs": [None] * missing + chosen,
            "top_logprobs": [None] * missing + top if self._top else None,
            "text_offset": [self._places[index].next(token) for token in piece.ids],
        }

    def word(self, token: int) -> str:
        """A token as text; parts of characters and special tokens have a spelling of their own, so that no two are the same."""
        piece = self._tokenizer.decode_bytes([token])
        if not piece or self._tokenizer.unfinished([token]):  # with a mark for the capital that follows
            return piece.decode("utf-8", "replace") + f"<|token {token}|>"
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


class Places:
    """Where in a text its tokens begin, as they come; all parts of a character begin where it does."""

    def __init__(self, tokenizer: Tokenizer, prompt: Prompt, echo: bool) -> None:
        self._tokenizer, self._is_new = tokenizer, prompt.is_new
        self._decoder = StreamDecoder(tokenizer, at_start=echo or prompt.is_new)
        self._echoed = len(prompt.ids) if echo else 0  # tokens of the prompt that are yet to come
        self._end = 0

    def next(self, token: int) -> int:
        """The place of the next token, in characters."""
        begin = self._end
        self._end += len(self._decoder.push([token]))
        place = max(begin, self._end - self._length(token))
        self._echoed -= 1
        if self._echoed == 0:  # what is written is decoded by itself
            self._end += len(self._decoder.finish())
            self._decoder = StreamDecoder(self._tokenizer, at_start=self._is_new)
        return place

    def _length(self, token: int) -> int:
        """The characters of a token that has whole ones alone; of another as many as can be."""
        try:
            return len(self._tokenizer.decode_bytes([token]).decode())
        except UnicodeDecodeError:
            return self._end
