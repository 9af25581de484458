"""Sampling options and token scores, shared by all frameworks."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.errors import ConfigError, DataError

COLDEST = 1e-30  # lower temperatures are treated as 0: dividing float32 logits by such a value could overflow
MOST_TOKENS = 10**8  # maximum tokens per completion: more than a day at 1,000 tokens per second
DTYPES = {  # accepted dtype names
    **dict.fromkeys(("fp32", "float32", "f32"), "fp32"),
    **dict.fromkeys(("fp16", "float16", "half"), "fp16"),
    **dict.fromkeys(("bf16", "bfloat16"), "bf16"),
}


@dataclass(frozen=True)
class Sampling:
    """Sampling settings. A temperature of 0 means greedy decoding; top_k = 0 and top_p = 1 keep all tokens."""

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1337  # row i is sampled with seed + i, unless `seeds` is given
    use_cache: bool = True  # cache the keys and values of earlier tokens instead of recomputing them
    repetition_penalty: float = 1.0  # above 1: already generated tokens become less likely
    seeds: tuple[int, ...] = ()  # one seed per row; (): row i uses seed + i

    @property
    def greedy(self) -> bool:
        """Return True if the likeliest token is always chosen."""
        return self.temperature < COLDEST

    def row_seeds(self, rows: int) -> tuple[int, ...]:
        """Return the seed of every row."""
        return self.seeds or tuple(self.seed + row for row in range(rows))


@dataclass(frozen=True)
class GenerationOptions:
    """Options for generating one or more completions; completion i (zero-based) uses seed + i."""

    max_new_tokens: int = 100
    temperature: float = 0.8  # 0 means greedy
    top_k: int | None = None  # None or 0: no limit
    top_p: float | None = None  # None: no limit
    greedy: bool = False  # always choose the likeliest token, ignoring temperature, top_k and top_p
    repetition_penalty: float = 1.0  # applies to generated tokens only, not to those of the prompt
    seed: int | None = None  # None: a random seed for each call
    stop_at_end: bool = True  # stop when the model generates an end-of-document token
    return_full_text: bool = False  # return the prompt followed by the completion
    start_mark: bool = True  # put the tokenizer's start-of-document token, if it has one, before the prompt
    use_cache: bool = True

    def problems(self) -> list[str]:
        """Return one error message per invalid option."""
        k, p, seed, new = self.top_k, self.top_p, self.seed, self.max_new_tokens
        temperature, penalty = self.temperature, self.repetition_penalty
        checks = {
            "max_new_tokens": (is_whole(new) and 1 <= new <= MOST_TOKENS, f"a whole number from 1 to {MOST_TOKENS:,}"),
            "temperature": (_number(temperature) and 0 <= temperature < math.inf, "a number of 0 or more"),
            "top_k": (k is None or (is_whole(k) and k >= 0), "a whole number of 0 or more, or null"),
            "top_p": (p is None or (_number(p) and 0 < p <= 1), "a number above 0 and at most 1, or null"),
            "repetition_penalty": (_number(penalty) and 0 < penalty < math.inf, "a number above 0"),
            "seed": (seed is None or (is_whole(seed) and 0 <= seed <= 2**62), "a whole number from 0 to 2**62, or null"),
        }
        for name in ("greedy", "stop_at_end", "return_full_text", "start_mark", "use_cache"):
            checks[name] = isinstance(getattr(self, name), bool), "true or false"
        return [f"{name} must be {what}, not {getattr(self, name)!r}" for name, (valid, what) in checks.items() if not valid]

    def sampling(self, rows: int) -> Sampling:
        """Return the Sampling for `rows` completions; raise ConfigError for invalid values."""
        if problems := self.problems():
            raise ConfigError("; ".join(problems))
        seed = secrets.randbits(31) if self.seed is None else self.seed
        return Sampling(
            temperature=0.0 if self.greedy else float(self.temperature),
            top_k=self.top_k or 0,
            top_p=1.0 if self.top_p is None else float(self.top_p),
            use_cache=self.use_cache,
            repetition_penalty=float(self.repetition_penalty),
            seeds=tuple(seed + row for row in range(rows)),
        )

    def alone(self, number: int) -> GenerationOptions:
        """Return options with which a single completion reproduces completion `number` (zero-based) of several."""
        return self if self.seed is None else replace(self, seed=self.seed + number)

    def record(self) -> dict[str, Any]:
        """Return the sampling options under gpt-simple's field names, as they are written to each line of output."""
        drawn = not self.greedy and self.temperature >= COLDEST
        return {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature if drawn else 1.0,
            "top_k": self.top_k if drawn else None,
            "top_p": self.top_p if drawn else None,
            "do_sample": drawn,
            "repetition_penalty": self.repetition_penalty,
            "seed": self.seed,
        }


def prompt_ids(tokenizer: Any, text: str, start_mark: bool = True) -> list[int]:
    """Return the token ids (at least one) of a prompt, by default with the start-of-document token prepended."""
    ids = [int(i) for i in (tokenizer.encode_document(text) if start_mark else tokenizer.encode(text))]
    if ids:
        return ids
    if not start_mark:  # generation needs a token to start from, so an empty prompt gets the start-of-document token
        return prompt_ids(tokenizer, text)
    try:
        return [int(i) for i in tokenizer.encode("\n")] or [0]
    except DataError:
        return [0]


def is_whole(value: object) -> bool:
    """Return True if a value is an int but not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True)
class RowScores:
    """Log-probabilities, in nats, of a row's tokens from position `first` on, each given all preceding tokens of the row."""

    first: int
    chosen: NDArray[np.float32]  # (N), log-probabilities of the row's tokens
    top_ids: NDArray[np.int64]  # (N, K), ids of the K likeliest tokens at each position, the likeliest first
    top: NDArray[np.float32]  # (N, K), log-probabilities of the tokens in `top_ids`

    @property
    def total(self) -> float:
        """Return the sum of the log-probabilities of the row's scored tokens."""
        return float(self.chosen.astype(np.float64).sum())

    def is_greedy(self, tokens: Any) -> bool:
        """Return True if each of the scored `tokens` is the likeliest token at its position."""
        return bool((self.top_ids[:, 0] == np.asarray(tokens)).all())
