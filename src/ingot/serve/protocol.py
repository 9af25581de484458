"""Requests and answers of OpenAI's /v1/completions, read and checked field by field.

An unsupported field is refused by name: otherwise a client would trust a completion that it did not request.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ingot.backends.sampling import prompt_ids
from ingot.data.tokenizers import StreamDecoder, Tokenizer
from ingot.errors import IngotError, one_line, shown
from ingot.inference.engine import Chunk

MOST_TEXTS, MOST_LOGPROBS, MOST_STOPS = 128, 20, 16
MOST_SEED = 2**62
SHORT_CHARACTERS = 4  # per token of the context; a shorter prompt is fast to encode and needs no size check
# Fields that are accepted and ignored, and values of other fields that have no effect.
IGNORED = ("user", "metadata", "store")
NEUTRAL: dict[str, tuple[object, ...]] = {
    "suffix": (None, ""), "presence_penalty": (None, 0), "frequency_penalty": (None, 0), "logit_bias": (None, {}),
}  # fmt: skip


class Refused(Exception):
    """A refused request, in the form of OpenAI's errors: message, field, status and code."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(one_line(message))
        self.param, self.status, self.code = shown(param) if param is not None else None, status, code

    def record(self) -> dict[str, Any]:
        """Return the JSON body of the error."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class Prompt:
    """The prompt of a completion as token ids."""

    ids: list[int]
    is_new: bool


@dataclass(frozen=True)
class Asked:
    """A valid request."""

    prompts: list[Prompt]
    n: int
    tokens: int
    temperature: float
    top_p: float
    seed: int
    stop: tuple[str, ...]
    logprobs: int | None
    echo: bool
    stream: bool
    with_usage: bool


class Fields:
    """The fields of a request, taken one by one; what is left over is unknown and refused."""

    def __init__(self, body: bytes) -> None:
        try:
            found = json.loads(body)
        except (ValueError, RecursionError):
            raise Refused("the body of the request is not JSON") from None
        if not isinstance(found, dict):
            raise Refused("the body of the request is not a JSON object")
        self._left: dict[str, Any] = {name: value for name, value in found.items() if name not in IGNORED}

    def take(self, name: str, default: Any = None) -> Any:
        """Return and remove a field; the default if it is missing or null."""
        value = self._left.pop(name, None)
        return default if value is None else value

    def number(self, name: str, default: float | None, low: float, high: float, whole: bool = False) -> Any:
        """Return a number within bounds, or the default."""
        if (value := self.take(name, default)) is None:
            return None
        fits = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
        if not fits or math.isnan(value) or (whole and not isinstance(value, int)):
            what = "a whole number" if whole else "a number"
            raise Refused(f"{name} is {value!r:.60}, and must be {what} from {low:,} to {high:,}", name)
        return value

    def flag(self, name: str) -> bool:
        """Return a boolean field, False by default."""
        if not isinstance(value := self.take(name, False), bool):
            raise Refused(f"{name} is {value!r:.60}, and must be true or false", name)
        return value

    def refuse_rest(self) -> None:
        """Refuse the fields that nobody took."""
        for name, values in NEUTRAL.items():
            if name in self._left and self._left.pop(name) not in values:
                raise Refused(f"{name} is not supported here; leave it out", name)
        if self._left:
            name = next(iter(self._left))
            raise Refused(f"there is no field {name!r:.60} here; leave it out", name[:60])


def read_request(body: bytes, tokenizer: Tokenizer, context: int | None, name: str) -> Asked:
    """Parse and check the body of a request."""
    fields = Fields(body)
    _check_model(fields.take("model"), name)
    n = fields.number("n", 1, 1, MOST_TEXTS, whole=True)
    if fields.number("best_of", n, 1, MOST_TEXTS, whole=True) != n:
        raise Refused(f"best_of is not supported here; leave it out and ask for n={n} texts", "best_of")
    asked = Asked(
        prompts=_prompts(fields.take("prompt", ""), tokenizer, context),
        n=n,
        tokens=fields.number("max_tokens", 16, 0, 10**8, whole=True),
        temperature=float(fields.number("temperature", 1.0, 0, 100)),
        top_p=float(fields.number("top_p", 1.0, 1e-9, 1)),
        seed=fields.number("seed", secrets.randbits(31), -MOST_SEED, MOST_SEED, whole=True) % MOST_SEED,
        stop=_stops(fields.take("stop", [])),
        logprobs=fields.number("logprobs", None, 0, MOST_LOGPROBS, whole=True),
        echo=fields.flag("echo"),
        stream=fields.flag("stream"),
        with_usage=_with_usage(fields.take("stream_options", {})),
    )
    fields.refuse_rest()
    _check_lengths(asked, tokenizer, context)
    return asked


def _check_model(asked: object, name: str) -> None:
    if asked not in (None, name):
        raise Refused(f"there is no model {asked!r:.100}; this server has {name!r}", "model", 404, "model_not_found")


def _prompts(given: Any, tokenizer: Tokenizer, context: int | None) -> list[Prompt]:
    """Return the prompts of a request: a string, several, token ids, or several lists of them."""
    several = isinstance(given, list) and not all(type(one) is int for one in given)
    listed = given if several else [given]
    if len(listed) > MOST_TEXTS:
        raise Refused(f"there are {len(listed):,} prompts, and {MOST_TEXTS} is the most of one request", "prompt")
    return [_prompt(one, tokenizer, context) for one in listed]


def _prompt(one: Any, tokenizer: Tokenizer, context: int | None) -> Prompt:
    if isinstance(one, str):
        check_size(one, tokenizer, context)
        try:
            return Prompt(prompt_ids(tokenizer, one), is_new=not one)
        except (IngotError, UnicodeError) as error:
            raise Refused(f"the prompt cannot be encoded: {error}", "prompt") from None
    if not isinstance(one, list) or not all(type(token) is int for token in one):
        raise Refused("prompt must be a text, a list of texts, a list of token ids, or a list of such lists", "prompt")
    if wrong := [token for token in one if not 0 <= token < tokenizer.vocab_size]:
        raise Refused(f"token {wrong[0]} is outside the vocabulary of {tokenizer.vocab_size:,} ids", "prompt")
    return Prompt(one or prompt_ids(tokenizer, ""), is_new=not one)


def check_size(text: str, tokenizer: Tokenizer, context: int | None) -> None:
    """Refuse a prompt that must have too many tokens before encoding it, which may take quadratic time."""
    if context is None or len(text) <= SHORT_CHARACTERS * context:
        return
    if len(text) > context * (longest := int(tokenizer.token_bytes().max())):
        raise Refused(
            f"the prompt has {len(text):,} characters, and the model sees {context:,} tokens of at most {longest} bytes",
            "prompt",
            code="context_length_exceeded",
        )


def _stops(given: Any) -> tuple[str, ...]:
    listed = [given] if isinstance(given, str) else given
    if not isinstance(listed, list) or not all(isinstance(one, str) and one for one in listed) or len(listed) > MOST_STOPS:
        raise Refused(f"stop must be a text or a list of at most {MOST_STOPS} texts, none of them empty", "stop")
    return tuple(listed)


def _with_usage(given: Any) -> bool:
    if not isinstance(given, Mapping) or not set(given) <= {"include_usage", "include_obfuscation"}:
        raise Refused("stream_options may say include_usage alone", "stream_options")
    return bool(given.get("include_usage"))


def _check_lengths(asked: Asked, tokenizer: Tokenizer, context: int | None) -> None:
    for prompt in asked.prompts:
        needed = len(prompt.ids) + asked.tokens
        if context is not None and needed > context:
            raise Refused(
                f"the prompt has {len(prompt.ids):,} tokens and {asked.tokens:,} are asked for, {needed:,} in all, and the model "
                f"sees {context:,} at most",
                "prompt",
                code="context_length_exceeded",
            )


class Answer:
    """The answer to one request in OpenAI's JSON, whole or streamed; each choice is a completion of one prompt."""

    def __init__(self, tokenizer: Tokenizer, name: str, prompts: Sequence[Prompt], logprobs: int | None, echo: bool) -> None:
        self._tokenizer, self._top, self._echo = tokenizer, logprobs, echo
        self._places = [Places(tokenizer, prompt, echo) for prompt in prompts]
        self._prompts = [len(prompt.ids) for prompt in prompts]
        self._tokens = [0] * len(prompts)  # sent so far, per choice
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": name,
        }

    def choice(self, index: int, piece: Chunk) -> dict[str, Any]:
        """Return the JSON of a piece of a completion."""
        found = {"index": index, "text": piece.text, "logprobs": None, "finish_reason": piece.finish}
        if self._top is not None:
            found["logprobs"] = self._logprobs(index, piece)
        self._tokens[index] += len(piece.ids)
        return found

    def record(self, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the JSON of some choices."""
        return {**self._head, "choices": list(choices)}

    def usage(self, prompts: int) -> dict[str, int]:
        """Return token counts: each prompt once, and what was generated."""
        prompt = sum(self._prompts[:: max(1, len(self._prompts) // prompts)])
        written = sum(self._tokens) - (sum(self._prompts) if self._echo else 0)
        return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}

    def _logprobs(self, index: int, piece: Chunk) -> dict[str, Any]:
        """Return the tokens of a piece with their log-probabilities; the first token of a row has none."""
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
        """Return a token as text; partial characters and special tokens get a unique spelling."""
        piece = self._tokenizer.decode_bytes([token])
        if not piece or self._tokenizer.unfinished([token]):  # unfinished tokens mark the next letter as a capital
            return piece.decode("utf-8", "replace") + f"<|token {token}|>"
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


class Places:
    """Computes text offsets of streamed tokens; all parts of a character start where it does."""

    def __init__(self, tokenizer: Tokenizer, prompt: Prompt, echo: bool) -> None:
        self._tokenizer, self._is_new = tokenizer, prompt.is_new
        self._decoder = StreamDecoder(tokenizer, at_start=echo or prompt.is_new)
        self._echoed = len(prompt.ids) if echo else 0  # tokens of the prompt that are yet to come
        self._end = 0

    def next(self, token: int) -> int:
        """Return the offset of the next token, in characters."""
        begin = self._end
        self._end += len(self._decoder.push([token]))
        place = max(begin, self._end - self._length(token))
        self._echoed -= 1
        if self._echoed == 0:  # the completion is decoded separately from the prompt
            self._end += len(self._decoder.finish())
            self._decoder = StreamDecoder(self._tokenizer, at_start=self._is_new)
        return place

    def _length(self, token: int) -> int:
        """Return the number of characters of a token; of a partial character, as many as possible."""
        try:
            return len(self._tokenizer.decode_bytes([token]).decode())
        except UnicodeDecodeError:
            return self._end
