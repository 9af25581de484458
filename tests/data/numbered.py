"""A split in memory in which every token is its own place: what was read is known by its value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Numbered:
    """So many tokens, with documents that begin at given places."""

    eos = None

    def __init__(self, tokens: int, *starts: int, repeats: Sequence[int] | None = None):
        self.tokens = tokens
        self._starts = np.array([*(starts or [0]), tokens], np.uint64)
        self._repeats = None if repeats is None else np.array(repeats, np.uint16)

    def document_starts(self) -> NDArray[np.uint64]:
        return self._starts

    def document_repeats(self) -> NDArray[np.uint16] | None:
        return self._repeats

    def read(self, start: int, stop: int, out: NDArray[Any] | None = None) -> NDArray[Any]:
        assert 0 <= start <= stop <= self.tokens
        found = np.arange(start, stop, dtype=np.int32)
        if out is not None:
            out[: len(found)] = found
        return found


@dataclass(frozen=True)
class Reading:
    """What a step reads."""

    sample: int
    samples: int
    seq_len: int
    phase: int = 0
    places: Mapping[str, int] = field(default_factory=dict)

    def following(self, read: Any = None) -> Reading:
        return replace(self, sample=self.sample + self.samples)
