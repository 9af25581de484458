"""What the model writes at an evaluation. Every rank writes it, and all of them break off at the same token."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from ingot.backends.base import Backend
from ingot.config.schema import Config
from ingot.data.tokenizers import Tokenizer
from ingot.errors import Interrupted
from ingot.generate.sampling import Sampling, prompt_ids


def write_sample(config: Config, backend: Backend, tokenizer: Tokenizer, stop: Callable[[int], bool]) -> str:
    """The text after evaluation.sample_prompt; Interrupted where `stop`, which is asked before each token, says so."""
    e = config.evaluation
    sampling = Sampling(e.temperature, e.top_k, seed=config.training.seed)
    written: list[int] = []
    for row in islice(backend.generate([prompt_ids(tokenizer, e.sample_prompt)], sampling), e.sample_tokens):
        if stop(len(written)):
            raise Interrupted
        written.append(row[0])
    return e.sample_prompt + tokenizer.decode_bytes(written, at_start=not e.sample_prompt).decode("utf-8", "replace")
