"""GPT-2's byte-level BPE, from merge ranks shipped with the package; nothing is downloaded.

The ids are OpenAI's: 50,256 byte sequences and <|endoftext|>, which precedes every document. If <|endoftext|> occurs in a text,
it is encoded as plain text. Vocabulary files are accepted if they contain exactly GPT-2's vocabulary; others are rejected,
because such files do not specify how text is pre-tokenized.
"""

from __future__ import annotations

import json
import lzma
import re
from base64 import b64decode
from functools import cache
from importlib.resources import files
from itertools import pairwise

import numpy as np

from ingot.data.tokenizers.tokenizer_base import IdArray, PieceTokenizer, byte_alphabet, utf8
from ingot.errors import DataError

END_OF_TEXT = "<|endoftext|>"
# GPT-2's pre-tokenization regex with possessive quantifiers: runs of letters, digits and punctuation need no backtracking.
WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
# The regex engine panics on a million spaces before a word, so a long run is cut before its last space, where a word ends anyway.
WHITE = "[\\t-\\r \\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000]"
CUT = re.compile(f"(?<!{WHITE}){WHITE}{{10000,}}+(?=.)", re.S)


class GPT2Tokenizer(PieceTokenizer):
    """GPT-2's byte-level BPE, encoded with tiktoken."""

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
        cuts = [0, *(run.end() - 1 for run in CUT.finditer(text)), len(text)]
        return np.array([i for a, b in pairwise(cuts) for i in self._encoding.encode_ordinary(text[a:b])], np.uint16)


def from_merges(vocabulary: bytes, merges: bytes) -> GPT2Tokenizer:
    """Return GPT-2's tokenizer; raise DataError if the vocabulary and merges files do not match GPT-2's exactly."""
    alphabet = byte_alphabet()
    try:
        ids = {bytes(alphabet[c] for c in token): i for token, i in json.loads(vocabulary).items() if token != END_OF_TEXT}
        lines = [line for line in merges.decode().split("\n") if line and not line.startswith("#version")]
        merged = [bytes(alphabet[c] for c in line.replace(" ", "")) for line in lines]
    except (ValueError, KeyError, AttributeError, TypeError):
        raise DataError("these are not the vocabulary and merges of a byte-level BPE, or they are damaged") from None
    ranks = _ranks()
    if ids != ranks or merged != list(ranks)[256:]:
        problem = f"the {len(ids):,} ids and {len(merged):,} merges are not GPT-2's"
        raise DataError(f"{problem}; give a tokenizer.json, which also says how text is split into words")
    return GPT2Tokenizer()


@cache
def _ranks() -> dict[bytes, int]:
    contents = lzma.decompress((files("ingot.data.tokenizers") / "gpt2.tiktoken.xz").read_bytes())
    return {b64decode(token): int(rank) for token, rank in map(bytes.split, contents.splitlines())}
