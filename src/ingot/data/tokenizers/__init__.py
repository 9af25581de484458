"""Tokenizers: encode text to ids, decode ids, and count the bytes of text that each id represents.

Each kind of tokenizer has its own module. Tokenizer libraries are imported on first use, so the byte tokenizer never loads them.
"""

from __future__ import annotations

from ingot.data.tokenizers.by_name import from_spec, open_tokenizer
from ingot.data.tokenizers.gpt2_bpe import GPT2Tokenizer
from ingot.data.tokenizers.hf_json import HFTokenizer
from ingot.data.tokenizers.plain import ByteTokenizer, CharTokenizer, NumberTokenizer
from ingot.data.tokenizers.sentencepiece import SentencePieceTokenizer
from ingot.data.tokenizers.tokenizer_base import Tokenizer

__all__ = [
    "ByteTokenizer",
    "CharTokenizer",
    "GPT2Tokenizer",
    "HFTokenizer",
    "NumberTokenizer",
    "SentencePieceTokenizer",
    "Tokenizer",
    "from_spec",
    "open_tokenizer",
]
