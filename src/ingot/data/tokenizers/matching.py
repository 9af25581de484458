"""Whether a tokenizer made some tokens: given the text they stand for, it makes the same again, and another hardly ever does.

Where tokens are cut out of a text, those at the cuts may change, so only the inner half of them has to come back. Tokens that
were drawn at random, or that a tokenizer made which loses text, do not: whoever has such tokens says that they are to be trusted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.data.tokenizers.base import Tokenizer
from ingot.errors import DataError

HEAD, ENOUGH = 96, 16  # tokens that are tried, and without which they say too little
SHARE = 0.75  # of the texts tried that come back; of web text and code all did, with another tokenizer at most 17 of 32


@dataclass
class RoundTrips:
    """How many samples were tried, and the numbers of those that became other tokens."""

    tried: int = 0
    wrong: list[int] = field(default_factory=list)

    @property
    def fit(self) -> bool:
        """Whether the tokenizer made the tokens."""
        return self.tried - len(self.wrong) >= SHARE * self.tried


def round_trips(tokenizer: Tokenizer, samples: Iterable[NDArray[Any]], trust: bool = False) -> RoundTrips:
    """Which samples of tokens become the same again when their text is encoded; `trust`: none is tried."""
    found = RoundTrips()
    if trust:
        return found
    for number, ids in enumerate(samples):
        if (same := _round_trips(tokenizer, ids)) is not None:
            found.tried += 1
            found.wrong += [] if same else [number]
    return found


def _round_trips(tokenizer: Tokenizer, ids: NDArray[Any]) -> bool | None:
    """Whether the first text of `ids` becomes them again; None where they have too little text without a mark in it."""
    empty = np.flatnonzero(tokenizer.target_bytes(ids, ids) == 0)
    marks = [place for place in empty if tokenizer.is_special(int(ids[place]))]
    text = next((part[:HEAD] for part in np.split(ids, marks) if len(part) > ENOUGH), ids[:0])
    if not len(text):
        return None
    quarter = len(text) // 4
    try:
        return text[quarter:-quarter].astype(tokenizer.dtype).tobytes() in tokenizer.encode(tokenizer.decode(text)).tobytes()
    except DataError:
        return False
