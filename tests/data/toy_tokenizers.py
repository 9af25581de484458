"""Tokenizers small enough to know by heart, each built as its library reads it, and the way to data that may be missing."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.data.tokenizers import HFTokenizer, SentencePieceTokenizer, Tokenizer
from ingot.data.tokenizers.hf_json import from_json
from ingot.data.tokenizers.tokenizer_base import IdArray, byte_alphabet, utf8

SPACE = "\u2581"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPECIALS = [("<pad>", CONTROL), ("<s>", CONTROL), ("</s>", CONTROL), ("<unk>", UNKNOWN)]
BYTES = [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
WORDS = [
    f"{SPACE}The",
    f"{SPACE}cat",
    "s",
    f"{SPACE}A",
    SPACE,
    f"{SPACE}{SPACE}x",
    f"a{SPACE}b",
    "é",
    "T",
    "h",
    "e",
    "c",
    "a",
    "t",
]


def shared(name: str) -> Path:
    """A file of real data; the test is skipped where it is missing."""
    path = Path(os.environ.get("INGOT_TEST_DATA", Path(__file__).parents[3] / "shared/data")) / name
    if not path.exists():
        pytest.skip(f"the real data is not at {path}")
    return path


def encode_documents(tokenizer: Tokenizer, texts: Sequence[str]) -> list[IdArray]:
    """The ids of each text from one call of `encode_batch`."""
    ids, counts = tokenizer.encode_batch([utf8(text) for text in texts])
    return np.split(ids, np.cumsum(counts)[:-1]) if texts else []


def sentencepiece_file(
    words: Sequence[str | tuple[str, int]] = WORDS,
    *,
    dummy_prefix: bool = False,
    fold: bool = True,
    start: str = "<s>",
) -> bytes:
    """A SentencePiece model of the four special ids, all bytes and these pieces, in the wire format of its file."""
    specials = [(start if name == "<s>" else name, kind) for name, kind in SPECIALS]
    pieces = [*specials, *BYTES, *(word if isinstance(word, tuple) else (word, NORMAL) for word in words)]
    packed = b"".join(
        _block(1, _block(1, name.encode()) + _tag(2, 5) + struct.pack("<f", -number) + _number(3, kind))
        for number, (name, kind) in enumerate(pieces)
    )
    ids = _number(40, 3) + _number(41, 1) + _number(42, 2) + _number(43, 0)
    trainer = _number(3, 2) + _number(4, len(pieces)) + _number(35, 1) + ids
    normaliser = _block(1, b"identity") + _number(3, dummy_prefix) + _number(4, fold) + _number(5, 1)
    return packed + _block(2, trainer) + _block(3, normaliser)


def toy_sentencepiece(words: Sequence[str | tuple[str, int]] = WORDS, **options: Any) -> SentencePieceTokenizer:
    return SentencePieceTokenizer(sentencepiece_file(words, **options))


def piece_id(tokenizer: SentencePieceTokenizer, piece: str) -> int:
    return int(tokenizer._model.piece_to_id(piece))


def byte_level_config(**changes: Any) -> dict[str, Any]:
    """A tokenizer.json of bytes and three merges, behind a start token."""
    tokens = ["<|endoftext|>", *byte_alphabet(), "he", "Ġt", "Ġthe"]
    model = {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}, "merges": ["h e", "Ġ t", "Ġt he"]}
    return {
        "version": "1.0",
        "added_tokens": [added(0, "<|endoftext|>")],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": model,
        **changes,
    }


def llama_config(**changes: Any) -> dict[str, Any]:
    """A tokenizer.json in Llama's form: a space in front of every text, U+2581 for spaces, unknown characters as bytes."""
    tokens = ["<unk>", "<s>", "</s>", *(name for name, _ in BYTES), SPACE, *"thecat", f"{SPACE}t", "he", f"{SPACE}the", SPACE * 2]
    merges = [f"{SPACE} t", "h e", f"{SPACE}t he", f"{SPACE} {SPACE}"]
    model = {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}, "merges": merges}
    steps = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    front = [{"type": "Prepend", "prepend": SPACE}, {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]
    return {
        "version": "1.0",
        "added_tokens": [added(i, tokens[i]) for i in range(3)],
        "normalizer": {"type": "Sequence", "normalizers": front},
        "pre_tokenizer": None,
        "post_processor": _template("<s>", 1),
        "decoder": {"type": "Sequence", "decoders": steps},
        "model": {**model, "unk_token": "<unk>", "byte_fallback": True, "fuse_unk": True},
        **changes,
    }


def wordpiece_config(**changes: Any) -> dict[str, Any]:
    """A tokenizer.json in BERT's form: lower case, whole words and their parts."""
    tokens = ["[PAD]", "[UNK]", "[CLS]", "the", "cat", "##s", "a", ".", ","]
    model = {"type": "WordPiece", "vocab": {token: i for i, token in enumerate(tokens)}, "unk_token": "[UNK]"}
    return {
        "version": "1.0",
        "added_tokens": [added(i, tokens[i]) for i in range(3)],
        "normalizer": {
            "type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": None,
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {**model, "continuing_subword_prefix": "##", "max_input_chars_per_word": 100},
        **changes,
    }  # fmt: skip


def toy_hf(config: dict[str, Any], bos: str | None = None) -> HFTokenizer:
    return from_json(json.dumps(config).encode(), bos)


def added(token: int, content: str, special: bool = True, **flags: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, **flags}
    return {"id": token, "content": content, "special": special, **flags}


def _template(start: str, token: int) -> dict[str, Any]:
    mark, text = {"SpecialToken": {"id": start, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    specials = {start: {"id": start, "ids": [token], "tokens": [start]}}
    second = {"Sequence": {"id": "B", "type_id": 1}}
    return {"type": "TemplateProcessing", "single": [mark, text], "pair": [mark, text, second], "special_tokens": specials}


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _tag(field: int, wire: int) -> bytes:
    return _varint(field << 3 | wire)


def _number(field: int, value: int) -> bytes:
    return _tag(field, 0) + _varint(value)


def _block(field: int, value: bytes) -> bytes:
    return _tag(field, 2) + _varint(len(value)) + value
