"""Rules that hold out documents for validation: the same documents for any number of workers and after a resume."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

Piece = tuple[str, str]  # (split, text)
Rule = Callable[[int], str]  # maps the index of a document to its split


@dataclass(frozen=True)
class Into:
    """A rule that assigns all documents to one split and, optionally, to one of its buckets."""

    split: str
    bucket: str | None = None

    def __call__(self, number: int) -> str:
        return self.split


def first_documents(count: int) -> Rule:
    """Return a rule that holds out the first `count` documents."""
    return lambda number: "val" if number < count else "train"


def spread_documents(fraction: float) -> Rule:
    """Return a rule that holds out document i where ceil(i * fraction) increases: evenly spaced, starting with the first."""
    part = Fraction(str(fraction))  # exact: 0.1 is every tenth document, however many there are
    above, below = part.numerator, part.denominator
    return lambda number: "val" if -(-(number + 1) * above // below) > -(-number * above // below) else "train"


def hold_out_ends(texts: Iterable[str], fraction: float) -> Iterator[Piece]:
    """Hold out the last `fraction` of the characters of every document, rounded as nanoGPT does."""
    for text in texts:
        cut = int(len(text) * (1 - fraction))
        if cut or not text:
            yield "train", text[:cut]
        if cut < len(text):
            yield "val", text[cut:]
