"""Requests and responses of OpenAI's /v1/completions.

Unsupported fields that would affect the completion are rejected, not ignored, and the error names the field.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ingot.backends.sampling import prompt_ids
from ingot.data.tokenizers import Tokenizer
from ingot.data.tokenizers.tokenizer_base import StreamDecoder
from ingot.errors import IngotError, one_line, shown
from ingot.inference.batching import Chunk, Closed

MAX_TEXTS, MAX_LOGPROBS, MAX_STOPS, MAX_STOP_CHARACTERS = 128, 20, 4, 256
MAX_SEED = 2**62
SHORT_CHARACTERS = 4  # prompts below this many characters per token of context encode fast and need no size check
IGNORED = ("user", "metadata", "store")


class Refused(Exception):
    """A rejected request, with the error message, the field at fault (`param`), the HTTP status and OpenAI's error code."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(one_line(message))
        self.param, self.status, self.code = shown(param) if param is not None else None, status, code

    def record(self) -> dict[str, Any]:
        """Return the JSON body of the error response."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class Prompt:
    """A prompt as token ids."""

    ids: list[int]
    is_new: bool  # True if the prompt is empty, so that the text starts a new document


Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]


class StreamOptions(BaseModel):
    """The `stream_options` of a request; `include_obfuscation` has no effect."""

    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False
    include_obfuscation: bool = False


class CompletionRequest(BaseModel):
    """The fields of a request. Fields from `best_of` on are accepted only with values that have no effect."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    model: str | None = None
    prompt: str | list[str] | list[int] | list[list[int]] = ""
    n: int = Field(1, ge=1, le=MAX_TEXTS)
    max_tokens: int = Field(16, ge=0, le=10**8)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, ge=1e-9, le=1)
    seed: int = Field(default_factory=lambda: secrets.randbits(31), ge=-MAX_SEED, le=MAX_SEED)
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] = []
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    best_of: int | None = None
    suffix: Literal[""] = ""
    presence_penalty: Literal[0] = 0
    frequency_penalty: Literal[0] = 0
    logit_bias: dict[str, float] = Field({}, max_length=0)


def read_request(body: bytes, tokenizer: Tokenizer, context: int | None, name: str) -> tuple[CompletionRequest, list[Prompt]]:
    """Parse the body of a completion request; return the request and its tokenized prompts, or raise Refused."""
    try:
        fields = json.loads(body)
        assert isinstance(fields, dict)
        given = {shown(key): value for key, value in fields.items() if value is not None and key not in IGNORED}
        request = CompletionRequest.model_validate(given)
    except ValidationError as error:
        defect = error.errors(include_url=False)[0]
        param = str(defect["loc"][0])
        if defect["type"] == "extra_forbidden":
            raise Refused(f"unknown field {param!r:.60}; leave it out", param[:60]) from None
        kinds = {
            "prompt": "it must be a string, a list of strings (all UTF-8), a list of token ids or a list of lists of token ids",
            "stop": f"it must be a string or up to {MAX_STOPS} strings, each of 1 to {MAX_STOP_CHARACTERS} characters",
        }
        raise Refused(f"{param} is {given[param]!r:.60}: {kinds.get(param, defect['msg'])}", param) from None
    except (ValueError, RecursionError, AssertionError):
        raise Refused("the body of the request is not a JSON object") from None
    if request.model not in (None, name):
        raise Refused(f"there is no model {request.model!r:.100}; this server has {name!r}", "model", 404, "model_not_found")
    if request.best_of not in (None, request.n):
        raise Refused(f"best_of is not supported here; leave it out and use n={request.n}", "best_of")
    several = isinstance(request.prompt, list) and request.prompt and not isinstance(request.prompt[0], int)
    given_prompts: Sequence[Any] = request.prompt if several else [request.prompt]
    if len(given_prompts) * request.n > MAX_TEXTS:
        texts = f"{len(given_prompts):,} prompts with n={request.n}"
        raise Refused(f"{texts} exceed the limit of {MAX_TEXTS} completions per request", "prompt")
    prompts = [_prompt(prompt, tokenizer, context) for prompt in given_prompts]
    longest = max(len(prompt.ids) for prompt in prompts)
    if context is not None and longest > context:
        why = f"the prompt has {longest:,} tokens, but the model's context has only {context:,}"
        raise Refused(why, "prompt", code="context_length_exceeded")
    if context is not None and longest + request.max_tokens > context and request.logprobs is not None and not request.stream:
        why = f"prompt and completion have {longest + request.max_tokens:,} tokens, but the model's context has only {context:,}"
        raise Refused(f"{why}; set stream to get logprobs", "logprobs", code="context_length_exceeded")
    return request, prompts


def _prompt(given: str | list[int], tokenizer: Tokenizer, context: int | None) -> Prompt:
    if isinstance(given, list):
        if wrong := [token for token in given if not 0 <= token < tokenizer.vocab_size]:
            raise Refused(f"the prompt has token {wrong[0]}, outside the vocabulary of {tokenizer.vocab_size:,} ids", "prompt")
        return Prompt(given or prompt_ids(tokenizer, ""), is_new=not given)
    # A prompt that is certainly too long is rejected before it is encoded, because encoding can take quadratic time.
    size, is_long = len(given), context is not None and len(given) > SHORT_CHARACTERS * context
    if context is not None and is_long and size > context * (longest := int(tokenizer.token_bytes().max())):
        why = f"the prompt has {size:,} characters, but the model's context has {context:,} tokens of at most {longest} bytes"
        raise Refused(why, "prompt", code="context_length_exceeded")
    try:
        return Prompt(prompt_ids(tokenizer, given), is_new=not given)
    except (IngotError, UnicodeError) as error:
        raise Refused(f"the prompt cannot be encoded: {error}", "prompt") from None


class Answer:
    """The JSON of the response to one request, complete or streamed. Each choice is one completion of a prompt."""

    def __init__(self, tokenizer: Tokenizer, name: str, prompts: Sequence[Prompt], logprobs: int | None, echo: bool) -> None:
        self._tokenizer, self._top, self._echo = tokenizer, logprobs, echo
        self._places = [Places(tokenizer, prompt, echo) for prompt in prompts]
        self._prompts = [len(prompt.ids) for prompt in prompts]
        self._tokens = [0] * len(prompts)  # tokens sent so far, per choice
        now = int(time.time())
        self._head = {"id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion", "created": now, "model": name}

    def choice(self, index: int, piece: Chunk) -> dict[str, Any]:
        """Return the JSON of choice `index` for a chunk of its completion; raise Refused if the completion failed."""
        if piece.error is not None:  # status 409 means that the model was closed and can be opened again
            raise Refused(str(piece.error), status=409 if isinstance(piece.error, Closed) else 500)
        self._tokens[index] += len(piece.ids)
        logprobs = None
        if self._top is not None:
            words, scores = [self._word(token) for token in piece.ids], piece.scores
            chosen = [] if scores is None else [float(value) for value in scores.chosen]
            likeliest = [] if scores is None else zip(scores.top_ids[:, : self._top], scores.top[:, : self._top], strict=True)
            top = [{self._word(int(token)): float(value) for token, value in zip(*both, strict=True)} for both in likeliest]
            missing = len(words) - len(chosen)  # the first token of a row has no log-probability
            logprobs = {
                "tokens": words,
                "token_logprobs": [None] * missing + chosen,
                "top_logprobs": [None] * missing + top if self._top else None,
                "text_offset": [self._places[index].next(token) for token in piece.ids],
            }
        return {"index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish}

    def record(self, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the JSON of a response with these choices."""
        return {**self._head, "choices": list(choices)}

    def usage(self, prompts: int) -> dict[str, int]:
        """Return the token counts of a request with `prompts` prompts; a prompt with several completions counts once."""
        prompt = sum(self._prompts[:: max(1, len(self._prompts) // prompts)])
        written = sum(self._tokens) - (sum(self._prompts) if self._echo else 0)
        return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}

    def _word(self, token: int) -> str:
        """Return a token as text; partial characters and special tokens get a unique representation."""
        piece = self._tokenizer.decode_bytes([token])
        if not piece or self._tokenizer.unfinished([token]):  # such as a token that only capitalises what follows
            return piece.decode("utf-8", "replace") + f"<|token {token}|>"
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


class Places:
    """The text offsets of a choice's tokens, computed in order; tokens that are parts of one character share its offset."""

    def __init__(self, tokenizer: Tokenizer, prompt: Prompt, echo: bool) -> None:
        self._tokenizer, self._is_new = tokenizer, prompt.is_new
        self._decoder = StreamDecoder(tokenizer, at_start=echo or prompt.is_new)
        self._echoed = len(prompt.ids) if echo else 0  # number of prompt tokens still to be echoed
        self._end = 0

    def next(self, token: int) -> int:
        """Return the offset of `token`, the next token, in characters."""
        begin = self._end
        self._end += len(self._decoder.push([token]))
        with suppress(UnicodeDecodeError):  # a partial character starts where the previous token ended
            begin = max(begin, self._end - len(self._tokenizer.decode_bytes([token]).decode()))
        self._echoed -= 1
        if self._echoed == 0:  # the completion is decoded separately from the prompt
            self._end += len(self._decoder.finish())
            self._decoder = StreamDecoder(self._tokenizer, at_start=self._is_new)
        return begin
