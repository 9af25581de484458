"""Which documents are validation: always the same ones, whoever prepares them and in however many steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction

Piece = tuple[str, str]  # the split and the text of a document
Rule = Callable[[int], str]  # the split of the document with this number, from 0


def always(split: str) -> Rule:
    """All documents are of one split."""
    return lambda number: split


def first_documents(count: int) -> Rule:
    """The first `count` documents are validation."""
    return lambda number: "val" if number < count else "train"


def spread_documents(fraction: float) -> Rule:
    """Document i is validation where ceil(i * fraction) goes up: evenly spread, the first always among them."""
    part = Fraction(str(fraction))  # exact, so that 0.1 is every tenth document however many there are
    above, below = part.numerator, part.denominator
    return lambda number: "val" if -(-(number + 1) * above // below) > -(-number * above // below) else "train"


def hold_out_ends(texts: Iterable[str], fraction: float) -> Iterator[Piece]:
    """The last `fraction` of the characters of every document is validation, rounded as nanoGPT does."""
    for text in texts:
        cut = int(len(text) * (1 - fraction))
        if cut or not text:
            yield "train", text[:cut]
        if cut < len(text):
            yield "val", text[cut:]
