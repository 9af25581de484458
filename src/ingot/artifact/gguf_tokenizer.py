"""The vocabulary of a GGUF file: tokens, their kinds, and what llama.cpp cuts text with.

llama.cpp knows byte-level BPE by the name of its rule for words, of which GPT-2's is the one used here, and SentencePiece's BPE,
whose text it does not normalise. What it cannot cut as we do is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ingot.artifact.hf_tokenizer import THEIRS, gpt2_files
from ingot.artifact.tokenizer_json import NORMAL, SPECIALS, SentencePieceFile
from ingot.data.formats.base import ends_of
from ingot.data.tokenizers import ByteTokenizer, GPT2Tokenizer, HFTokenizer, from_spec
from ingot.data.tokenizers.fast.proof import BPE, CONTROL, UNKNOWN
from ingot.data.tokenizers.gpt2 import END_OF_TEXT
from ingot.data.tokenizers.pieces import byte_alphabet
from ingot.data.tokenizers.sentencepiece import SentencePieceTokenizer
from ingot.errors import ConfigError

UNUSED = 5  # the kind of a token that stands for an embedding row without an id
GPT2_RULE = "gpt-2"


@dataclass
class Vocabulary:
    """What goes into the keys `tokenizer.ggml.*`."""

    model: str  # gpt2: byte-level BPE; llama: SentencePiece's
    tokens: list[str]
    kinds: list[int]
    bos: int | None
    ends: list[int]  # the ids after which a text is over
    merges: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    unknown: int | None = None
    adds_space: bool | None = None

    def fill(self, rows: int) -> None:
        """Name the rows of the embedding that no id has: llama.cpp wants as many tokens as rows."""
        more = range(len(self.tokens), rows)
        self.tokens += [f"[unused {row}]" for row in more]
        self.kinds += [UNUSED for _ in more]
        self.scores += [0.0 for _ in more] if self.scores else []

    def write(self, writer: Any) -> None:
        """Put the keys into a file."""
        writer.add_tokenizer_model(self.model)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.kinds)
        if self.model == "gpt2":
            writer.add_tokenizer_pre(GPT2_RULE)
            writer.add_token_merges(self.merges)
        else:
            writer.add_token_scores(self.scores)
            writer.add_add_space_prefix(bool(self.adds_space))
        if self.bos is not None:
            writer.add_bos_token_id(self.bos)
        # llama.cpp has a key for each of two: texts end at either.
        for add, token in zip((writer.add_eos_token_id, writer.add_eot_token_id), self.ends, strict=False):
            add(token)
        if self.unknown is not None:
            writer.add_unk_token_id(self.unknown)
        writer.add_add_bos_token(self.bos is not None)  # as `ingot generate` begins a text
        writer.add_add_eos_token(False)


def vocabulary_of(spec: Mapping[str, Any], rows: int) -> Vocabulary:
    """The vocabulary of a tokenizer's spec, for an embedding of so many rows; ConfigError where llama.cpp has none like it."""
    tokenizer = from_spec(spec)
    if isinstance(tokenizer, GPT2Tokenizer):
        found = _gpt2(tokenizer)
    elif isinstance(tokenizer, ByteTokenizer):
        found = _bytes(tokenizer)
    elif isinstance(tokenizer, SentencePieceTokenizer):
        found = _sentencepiece(tokenizer)
    elif isinstance(tokenizer, HFTokenizer):
        found = _huggingface(tokenizer)
    else:
        raise ConfigError(
            f"a {tokenizer.kind} tokenizer has no place in GGUF",
            advice="byte, gpt2, SentencePiece's BPE and byte-level BPE have one; --format huggingface takes characters too",
        )
    found.fill(rows)
    return found


def is_normalised(spec: Mapping[str, Any]) -> bool:
    """Whether a tokenizer rewrites text before it cuts it, which llama.cpp does not do for it."""
    tokenizer = from_spec(spec)
    if not isinstance(tokenizer, SentencePieceTokenizer):
        return False
    file = SentencePieceFile(tokenizer.contents)
    return bool(file.rules) or file.folds_spaces


def _gpt2(tokenizer: GPT2Tokenizer) -> Vocabulary:
    vocabulary, merges = gpt2_files(tokenizer)
    tokens = list(json.loads(vocabulary))
    kinds = [CONTROL if token == END_OF_TEXT else NORMAL for token in tokens]
    return Vocabulary("gpt2", tokens, kinds, tokenizer.bos, ends_of(tokenizer), merges.decode().splitlines()[1:])


def _bytes(tokenizer: ByteTokenizer) -> Vocabulary:
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    tokens = [*SPECIALS, *(letters[byte] for byte in range(256))]
    kinds = [CONTROL] * len(SPECIALS) + [NORMAL] * 256
    # llama.cpp insists on a merge: this one is of two bytes that no text in UTF-8 has.
    merge = f"{letters[0xFF]} {letters[0xFF]}"
    return Vocabulary("gpt2", tokens, kinds, tokenizer.bos, ends_of(tokenizer), [merge])


def _sentencepiece(tokenizer: SentencePieceTokenizer) -> Vocabulary:
    file = SentencePieceFile(tokenizer.contents)
    if tokenizer.marks_capitals:
        raise ConfigError("this SentencePiece model writes capitals as marks, which nothing in GGUF makes letters again")
    if file.algorithm != BPE or not file.has_bytes:
        raise ConfigError(
            "this SentencePiece model has no place in GGUF: only BPE with byte fallback has",
            advice="--format huggingface takes it",
        )
    texts, kinds = [piece.text for piece in file.pieces], [piece.kind for piece in file.pieces]
    scores = [piece.score for piece in file.pieces]
    return Vocabulary(
        "llama",
        texts,
        kinds,
        tokenizer.bos,
        ends_of(tokenizer),
        scores=scores,
        unknown=kinds.index(UNKNOWN),
        adds_space=file.adds_prefix,
    )


def _huggingface(tokenizer: HFTokenizer) -> Vocabulary:
    config = json.loads(tokenizer.contents)
    splits, model = config.get("pre_tokenizer") or {}, config["model"]
    by_rule = splits.get("type") == "ByteLevel" and splits.get("use_regex", True) and not splits.get("add_prefix_space")
    if model.get("type") != "BPE" or not by_rule or config.get("normalizer") or not tokenizer.lossless:
        raise ConfigError(
            f"the {THEIRS} of this model cuts text in a way that GGUF has no name for",
            advice="byte-level BPE that splits words by GPT-2's rule has one; --format huggingface takes any",
        )
    ids = {**model["vocab"], **{token["content"]: token["id"] for token in config.get("added_tokens") or ()}}
    special = {token["id"] for token in config.get("added_tokens") or () if token.get("special")}
    names = {i: name for name, i in ids.items()}
    tokens = [names.get(i, f"[unused {i}]") for i in range(tokenizer.vocab_size)]
    kinds = [CONTROL if i in special else NORMAL if i in names else UNUSED for i in range(tokenizer.vocab_size)]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    return Vocabulary("gpt2", tokens, kinds, tokenizer.bos, ends_of(tokenizer), merges)
