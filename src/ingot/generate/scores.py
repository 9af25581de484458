"""What a model thinks of tokens that are there already."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class RowScores:
    """Logs of probabilities (nats) of the tokens of a row from the place `first` on, each given all tokens before it.

    `top_ids` and `top` are the likeliest tokens at each of these places, the likeliest first.
    """

    first: int
    chosen: NDArray[np.float32]  # (N)
    top_ids: NDArray[np.int64]  # (N, K)
    top: NDArray[np.float32]  # (N, K)

    @property
    def total(self) -> float:
        """The log-probability of all of them."""
        return float(self.chosen.astype(np.float64).sum())

    def is_greedy(self, tokens: Any) -> bool:
        """Whether these tokens, which it scored, are the likeliest at every place."""
        return bool((self.top_ids[:, 0] == np.asarray(tokens)).all())
