"""Which documents are validation: always the same ones, whoever prepares them and in however many steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from ingot.data.prepare.blocks import Block, texts_of

Piece = tuple[str, str | bytes]  # the split of a document, and its text or the UTF-8 of it
PART_BYTES = 1 << 20  # looked at at once
Rule = Callable[[int], str]  # the split of the document with this number, from 0


def always(split: str) -> Rule:
    """All documents are of one split."""
    return lambda number: split


@dataclass(frozen=True)
class InBucket:
    """All documents are of one split, and of one bucket of it."""

    split: str
    bucket: str

    def __call__(self, number: int) -> str:
        return self.split


def first_documents(count: int) -> Rule:
    """The first `count` documents are validation."""
    return lambda number: "val" if number < count else "train"


def spread_documents(fraction: float) -> Rule:
    """Document i is validation where ceil(i * fraction) goes up: evenly spread, the first always among them."""
    part = Fraction(str(fraction))  # exact, so that 0.1 is every tenth document however many there are
    above, below = part.numerator, part.denominator
    return lambda number: "val" if -(-(number + 1) * above // below) > -(-number * above // below) else "train"


def hold_out_ends(texts: Iterable[str | bytes], fraction: float) -> Iterator[Piece]:
    """The last `fraction` of the characters of every document is validation, rounded as nanoGPT does."""
    for text in texts:
        cut = int(len(text) * (1 - fraction)) if isinstance(text, str) else _cut(text, fraction)
        if cut or not text:
            yield "train", text[:cut]
        if cut < len(text):
            yield "val", text[cut:]


def training_texts(blocks: Iterable[tuple[Rule, Block]]) -> Iterator[bytes]:
    """The documents of blocks that are not held out."""
    count = 0
    for rule, block in blocks:
        documents, _ = texts_of(block)
        yield from (text for number, text in enumerate(documents, count) if rule(number) == "train")
        count += len(documents)


def _cut(text: bytes, fraction: float) -> int:
    """Where in UTF-8 the character is at which validation begins."""
    starts = range(0, len(text), PART_BYTES)
    counts = [int(np.count_nonzero(_begins(text[start : start + PART_BYTES]))) for start in starts]
    left = int(sum(counts) * (1 - fraction))
    for start, count in zip(starts, counts, strict=True):
        if left < count:
            return start + int(np.flatnonzero(_begins(text[start : start + PART_BYTES]))[left])
        left -= count
    return len(text)


def _begins(text: bytes) -> NDArray[np.bool_]:
    """The bytes with which characters begin."""
    return (np.frombuffer(text, np.uint8) & 0xC0) != 0x80
