"""The buckets of a split: stretches of whole documents that follow each other in its stream and keep their names."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.data.store.dataset import BucketRecord, Split


class Bucket:
    """A stretch of whole documents of a split."""

    def __init__(self, split: Split, record: BucketRecord, first_token: int, first_document: int) -> None:
        self.tokens, self.documents, self.eos = record.tokens, record.documents, split.eos
        self.bytes, self.piece_bytes = record.bytes, record.piece_bytes
        self._split, self._first_token = split, first_token
        self._here = slice(first_document, first_document + record.documents)

    def read(self, start: int, stop: int, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Tokens start..stop of the bucket."""
        if not 0 <= start <= stop <= self.tokens:
            raise IndexError(f"tokens {start} to {stop} of a bucket of {self.tokens}")
        return self._split.read(self._first_token + start, self._first_token + stop, out)

    def document_starts(self) -> NDArray[np.uint64]:
        """Where each document begins in the bucket, and after them the end of the last."""
        return self._starts

    @cached_property
    def _starts(self) -> NDArray[np.uint64]:  # every row with a document mask asks for them
        starts = self._split.document_starts()[self._here.start : self._here.stop + 1]
        return np.asarray(starts) - np.uint64(self._first_token)

    def document_repeats(self) -> NDArray[np.uint16] | None:
        """How many tokens each document repeats of the one before; None: none does."""
        repeats = self._split.document_repeats()
        return None if repeats is None else repeats[self._here]


def split_buckets(split: Split, records: Sequence[BucketRecord]) -> dict[str, Bucket]:
    """The buckets of a split by their names."""
    found, tokens, documents = {}, 0, 0
    for record in records:
        found[record.name] = Bucket(split, record, tokens, documents)
        tokens, documents = tokens + record.tokens, documents + record.documents
    return found
