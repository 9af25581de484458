"""Tokenizers that are made from the text they are for, and known by a name only until then: `char` and `bpe:N`.

`bpe:N` learns at most N ids of byte-level BPE from the training text, so that text comes back unchanged and bytes are counted
exactly. Nothing is learned from what a model is judged by.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ingot.data.tokenizers.base import NARROW, Tokenizer
from ingot.data.tokenizers.gpt2 import END_OF_TEXT
from ingot.errors import ConfigError, DataError

CHAR, BPE = "char", "bpe:"
LEARNED_BYTES = 1 << 24  # of the text that is learned from: 2,048 ids of 5 MB take 2.4 s of a core
SEAM_BYTES = 1 << 16  # where the end of a word is looked for: Chinese may have its last space long before


def is_made(name: str) -> bool:
    """Whether a tokenizer of this name is made from the text it is for."""
    return name == CHAR or name.startswith(BPE)


def fits(name: str, tokenizer: Tokenizer, asked: str | None) -> bool:
    """Whether a tokenizer is what this name became, whatever text it was made from; `asked` is the name it had, where known.

    A text may have pieces for less than N ids, so only where the name is unknown does the size of the vocabulary have to be N.
    """
    if name == CHAR:
        return tokenizer.kind == CHAR
    size = bpe_size(asked) if asked is not None and asked.startswith(BPE) else tokenizer.vocab_size
    return tokenizer.kind == "huggingface" and tokenizer.lossless and size == bpe_size(name)


def bpe_size(name: str) -> int:
    """The N of `bpe:N`."""
    size = name.removeprefix(BPE)
    if not (size.isascii() and size.isdigit() and 257 <= int(size) <= NARROW):
        raise ConfigError(f"{name} does not say how many ids to learn; give {BPE}N, with N from 257 to {NARROW:,}")
    return int(size)


def learn_bpe(name: str, documents: Iterable[bytes]) -> Tokenizer:
    """Learn `bpe:N` from the first of the documents of a training text."""
    from ingot.data.tokenizers.huggingface import from_json
    from ingot.data.tokenizers.training import learn

    contents = learn("bpe", (text.decode() for text in _first(documents)), bpe_size(name))
    if contents is None:
        raise DataError(f"there is no text to learn {name} from; give documents with text")
    return from_json(contents, END_OF_TEXT)


def _first(documents: Iterable[bytes]) -> Iterator[bytes]:
    left = LEARNED_BYTES
    for text in documents:
        if len(text) > left:
            yield text[: _seam(text, left)]
            return
        yield text
        left -= len(text)


def _seam(text: bytes, end: int) -> int:
    """Where to cut a longer text: between two words near the end, or else between two characters."""
    cut = max(text.rfind(space, max(end - SEAM_BYTES, 0), end) for space in (b" ", b"\n", b"\r"))
    if cut >= 0:
        return cut
    while text[end] & 0xC0 == 0x80:  # inside a character of UTF-8
        end -= 1
    return end
