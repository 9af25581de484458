"""The tokens of several files as one stream, wherever the files end.

Training copies rows out of it, an audit and a conversion walk along it. A mapped file is an open one, and a large corpus has more
of them than a process may open: only a training split, whose rows come from anywhere, keeps all of its files mapped.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.data.store.shards import open_shard
from ingot.data.tokenizers.base import IdType
from ingot.errors import DataError

CHUNK_TOKENS = 1 << 22  # looked at at once
OPEN_FILES = 8
OpenTokens = Callable[[Path], NDArray[Any]]


class TokenStream:
    """Files one after the other; wider ids than those of `dtype` are checked and narrowed where they are read.

    At most `keep` files stay mapped, None: all. `dtype` is uint16 unless it is given.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        sizes: Sequence[int],
        open_tokens: OpenTokens = open_shard,
        *,
        keep: int | None = OPEN_FILES,
        dtype: IdType | None = None,
    ) -> None:
        self.paths, self.sizes, self._ends = paths, sizes, list(accumulate(sizes))
        self.tokens = self._ends[-1] if self._ends else 0
        self._open, self._keep, self.dtype = open_tokens, keep, dtype or np.dtype(np.uint16)
        self._maps: dict[int, NDArray[Any]] = {}

    def shard(self, number: int) -> NDArray[Any]:
        """The tokens of one file, mapped at the first call."""
        found = self._maps.get(number)
        if found is None:
            found = np.asarray(self._open(self.paths[number]))  # a slice of a memmap takes three times as long
            if len(found) != self.sizes[number]:
                raise DataError(f"{self.paths[number]} was replaced while it was in use; start again with the new data")
            if self._keep is not None and len(self._maps) >= self._keep:
                del self._maps[next(iter(self._maps))]
            self._maps[number] = found
        return found

    @property
    def shards(self) -> list[NDArray[Any]]:
        """The tokens of every file."""
        return [self.shard(number) for number in range(len(self.paths))]

    def read(self, start: int, stop: int, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Tokens start..stop of the stream, copied into `out` (any integer type) where it is given."""
        if not 0 <= start <= stop <= self.tokens:
            raise IndexError(f"tokens {start} to {stop} of a stream of {self.tokens}")
        count = stop - start
        out = np.empty(count, self.dtype) if out is None else out[:count]
        number, filled = bisect_right(self._ends, start), 0
        while filled < count:
            begin = start + filled - (self._ends[number] - self.sizes[number])
            part = self._fitting(number, begin, begin + count - filled)
            out[filled : filled + len(part)] = part
            filled += len(part)
            number += 1
        return out

    def slice(self, start: int, stop: int) -> list[NDArray[Any]]:
        """Tokens start..stop, as views that follow one another."""
        parts = []
        number = bisect_right(self._ends, start)
        while start < stop:
            begin = start - (self._ends[number] - self.sizes[number])
            part = self._fitting(number, begin, begin + min(stop - start, CHUNK_TOKENS)).astype(self.dtype, copy=False)
            parts += [part] if len(part) else []
            start += len(part)
            number += start == self._ends[number]
        return parts

    def token(self, position: int) -> int:
        """The token at one position."""
        return int(self.slice(position, position + 1)[0][0])

    def positions(self, token: int) -> Iterator[int]:
        """Where a token stands."""
        for number, end in enumerate(self._ends):
            tokens = self.shard(number)
            for start in range(0, len(tokens), CHUNK_TOKENS):
                found = np.flatnonzero(tokens[start : start + CHUNK_TOKENS] == token)
                yield from (found + (end - len(tokens) + start)).tolist()

    def place(self, position: int) -> tuple[str, str]:
        """The file of a token, and its place there, in words."""
        number = min(bisect_right(self._ends, position), len(self.paths) - 1)
        return str(self.paths[number]), f"token {position - self._ends[number] + self.sizes[number]:,}"

    def _fitting(self, number: int, begin: int, end: int) -> NDArray[Any]:
        part = self.shard(number)[begin:end]
        if part.dtype.itemsize > self.dtype.itemsize:
            limit = int(np.iinfo(self.dtype).max)
            if (largest := int(part.max(initial=0))) > limit:
                raise DataError(
                    f"{self.paths[number]} holds token {largest:,}: ids above {limit:,} do not fit the "
                    f"{8 * self.dtype.itemsize} bits that the ids of its tokenizer have; give the one that made the tokens"
                )
        return part
