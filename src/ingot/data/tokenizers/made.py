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


def is_made(name: str) -> bool:
    """Whether a tokenizer of this name is made from the text it is for."""
    return name == CHAR or name.startswith(BPE)


def fits(name: str, tokenizer: Tokenizer) -> bool:
    """Whether a tokenizer is what this name may have become, whatever text it was made from."""
    if name == CHAR:
        return tokenizer.kind == CHAR
    return tokenizer.kind == "huggingface" and tokenizer.lossless and tokenizer.vocab_size <= bpe_size(name)


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
            cut = text[:left].rfind(b" ")  # between two words
            yield text[: max(cut, 0)]
            return
        yield text
        left -= len(text)
