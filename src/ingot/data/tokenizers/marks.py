"""Marks that stand for capitals in the pieces of some SentencePiece models (capitals.py), and the letters that they mean."""

from __future__ import annotations

import re

MARKED = re.compile(rb"\xee\x80(?:\x80( ?[a-z]?)|\x81( ?[a-z]{0,2}))")
# What golf's rules fold into one space, and what they drop, with marks of the text itself.
SPACES = re.compile("[\t\n\f\r \xa0\u1680\u2000-\u200c\u200e\u200f\u2028\u2029\u202f\u205f\u2581\u3000\ufeff\ufffd]+")
DROPPED = re.compile("[\x01-\x08\x0b\x0e-\x1f\x7f\x8f\x9f\ue000\ue001]+")
UNFINISHED = re.compile(rb"\xee\x80(?:\x80 ?|\x81 ?[a-z]?)\Z")


def folded(text: str) -> str:
    """A text with single spaces, as SentencePiece makes it by itself, but for those in front of a mark."""
    return SPACES.sub(" ", DROPPED.sub("", text)).strip(" ")


def unmarked(data: bytes) -> bytes:
    """A text with its capitals; a mark that no letter follows stands for nothing."""
    return MARKED.sub(lambda found: (found[1] or found[2] or b"").upper(), data)
