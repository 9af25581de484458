"""GPT-2's byte-level BPE, from merge ranks shipped with the package; nothing is downloaded.

The ids are OpenAI's: 50,256 byte sequences and <|endoftext|>, which precedes every document. Inside a text it is encoded as plain
text. Files of the same vocabulary are accepted and verified; other ranks are rejected, because a rank file does not specify how
text is pre-tokenized.
"""

from __future__ import annotations

import binascii
import json
import lzma
import re
from collections.abc import Iterable, Sequence
from functools import cache, cached_property
from importlib.resources import files
from typing import Any

import numpy as np

from ingot.data.tokenizers.tokenizer_base import IdArray, PieceTokenizer, byte_alphabet, utf8
from ingot.data.tokenizers.word_table import GPT2_RULE, WordTable
from ingot.errors import DataError

END_OF_TEXT = "<|endoftext|>"
# GPT-2's pre-tokenization regex with possessive quantifiers: runs of letters, digits and punctuation need no backtracking.
WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
# The regex engine panics on a million spaces before a word. All but the last are one word anyway, so the text is split there.
WHITE = "[\\t-\\r \\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000]"
CUT = re.compile(f"(?<!{WHITE}){WHITE}{{10000,}}+(?=.)", re.S)
NOT_GPT2 = "; ranks do not say how text is split into words, so only GPT-2's can be read: give a tokenizer.json instead"


class GPT2Tokenizer(PieceTokenizer):
    """GPT-2's tokenizer."""

    kind = "gpt2"

    def __init__(self) -> None:
        import tiktoken

        ranks = _ranks()
        self.bos = self.eos = len(ranks)
        self._encoding = tiktoken.Encoding(
            self.kind, pat_str=WORDS, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: self.bos}
        )
        pieces = [*sorted(ranks, key=ranks.__getitem__), None]
        self._use(pieces, [False] * len(pieces), adds_space=False, counts_first_space=True)

    def encode(self, text: str) -> IdArray:
        utf8(text)
        return np.array(self._ids(text), np.uint16)

    def spec(self) -> dict[str, Any]:
        return {"kind": self.kind}

    def _encode_all(self, texts: Sequence[bytes]) -> Iterable[IdArray]:
        return self._table.encode_all(texts)

    @cached_property
    def _table(self) -> WordTable:
        return WordTable(lambda words, _: [self._ids(word.decode()) for word in words], self.encode, *GPT2_RULE, dtype=self.dtype)

    def _ids(self, text: str) -> list[int]:
        return [i for part in _parts(text) for i in self._encoding.encode_ordinary(part)]


def from_ranks(contents: bytes) -> GPT2Tokenizer:
    """Return GPT-2's tokenizer if a .tiktoken file contains its ranks; raise an error for other ranks."""
    try:
        ranks = _parse(contents)
    except ValueError:
        raise DataError("this is not a file of tiktoken ranks, or it is damaged") from None
    if ranks != _ranks():
        raise DataError(f"{len(ranks):,} ranks that are not GPT-2's{NOT_GPT2}")
    return GPT2Tokenizer()


def from_merges(vocabulary: bytes, merges: bytes) -> GPT2Tokenizer:
    """Return GPT-2's tokenizer if encoder.json and vocab.bpe (or vocab.json and merges.txt) contain its vocabulary."""
    alphabet = byte_alphabet()
    try:
        ids = {bytes(alphabet[c] for c in token): i for token, i in json.loads(vocabulary).items() if token != END_OF_TEXT}
        lines = [line for line in merges.decode().split("\n") if line and not line.startswith("#version")]
        merged = [bytes(alphabet[c] for c in line.replace(" ", "")) for line in lines]
    except (ValueError, KeyError, AttributeError, TypeError):
        raise DataError("these are not the vocabulary and merges of a byte-level BPE, or they are damaged") from None
    ranks = _ranks()
    if ids != ranks or merged != list(ranks)[256:]:
        raise DataError(f"{len(ids):,} ids and {len(merged):,} merges that are not GPT-2's{NOT_GPT2}")
    return GPT2Tokenizer()


@cache
def _ranks() -> dict[bytes, int]:
    return _parse(lzma.decompress((files("ingot.data.tokenizers") / "gpt2.tiktoken.xz").read_bytes()))


def _parse(contents: bytes) -> dict[bytes, int]:
    lines = [line.split() for line in contents.splitlines() if line]
    return {binascii.a2b_base64(token, strict_mode=True): int(rank) for token, rank in lines}


def _parts(text: str) -> Iterable[str]:
    start = 0
    for run in CUT.finditer(text):
        yield text[start : run.end() - 1]
        start = run.end() - 1
    yield text[start:]
