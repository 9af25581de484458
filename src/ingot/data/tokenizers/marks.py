"""Marks that stand for capitals in the pieces of some SentencePiece models (capitals.py), and the letters that they mean."""

from __future__ import annotations

import re

MARKED = re.compile(rb"\xee\x80(?:\x80( ?[a-z]?)|\x81( ?[a-z]{0,2}))")
UNFINISHED = re.compile(rb"\xee\x80(?:\x80 ?|\x81 ?[a-z]?)\Z")


def unmarked(data: bytes) -> bytes:
    """A text with its capitals; a mark that no letter follows stands for nothing."""
    return MARKED.sub(lambda found: (found[1] or found[2] or b"").upper(), data)
