"""Tokenizers of other kinds as the tokenizer.json that transformers reads: bytes, characters, SentencePiece's vocabularies.

Each is spelled in parts that the library `tokenizers` has, so that a text has the same ids there and here.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ingot.data.tokenizers import ByteTokenizer, Tokenizer
from ingot.data.tokenizers.fast.proof import BPE, BYTE, CONTROL, UNKNOWN, USER_DEFINED, message_fields
from ingot.data.tokenizers.pieces import SPACE, byte_alphabet
from ingot.data.tokenizers.plain import CharTokenizer
from ingot.data.tokenizers.sentencepiece import SentencePieceTokenizer

UNIGRAM, NORMAL = 1, 1
SPECIALS = ("<pad>", "<s>", "</s>", "<unk>")  # the first four ids of the byte tokenizer


@dataclass(frozen=True)
class Piece:
    """An entry of a SentencePiece vocabulary."""

    text: str
    score: float
    kind: int


class SentencePieceFile:
    """What a .model file says: its pieces in the order of their ids, and how it treats text."""

    def __init__(self, contents: bytes) -> None:
        fields = list(message_fields(contents))
        trainer, normaliser = (dict(message_fields(b"".join(v for key, v in fields if key == part))) for part in (2, 3))
        found = [dict(message_fields(value)) for key, value in fields if key == 1]
        self.pieces = [
            Piece(piece[1].decode(), struct.unpack("<f", piece.get(2, bytes(4)))[0], piece.get(3, NORMAL)) for piece in found
        ]
        self.algorithm = trainer.get(3, UNIGRAM)
        self.rules: bytes = normaliser.get(2, b"")  # compiled; empty: text is not rewritten
        self.adds_prefix, self.folds_spaces = bool(normaliser.get(3, 1)), bool(normaliser.get(4, 1))
        self.escapes_spaces = bool(normaliser.get(5, 1))

    @property
    def has_bytes(self) -> bool:
        """Whether what is not in the vocabulary is spelled in bytes."""
        return any(piece.kind == BYTE for piece in self.pieces)

    @property
    def unknown(self) -> int:
        return next(i for i, piece in enumerate(self.pieces) if piece.kind == UNKNOWN)

    @cached_property
    def merges(self) -> list[tuple[str, str]]:
        """The pairs that make a piece, the piece of the best score first."""
        ids = {piece.text: i for i, piece in enumerate(self.pieces) if piece.kind in (NORMAL, USER_DEFINED)}
        pairs = []
        for i, piece in enumerate(self.pieces):
            if piece.kind == NORMAL:
                text = piece.text
                parts = [(text[:at], text[at:]) for at in range(1, len(text)) if text[:at] in ids and text[at:] in ids]
                pairs += [(-piece.score, i, ids[left], ids[right], (left, right)) for left, right in parts]
        return [pair for *_, pair in sorted(pairs)]


def tokenizer_json(tokenizer: Tokenizer) -> bytes | None:
    """The tokenizer.json of a tokenizer that has none; None where the library has no parts for its kind."""
    built: Any = None
    if isinstance(tokenizer, ByteTokenizer):
        built = _bytes(tokenizer)
    elif isinstance(tokenizer, CharTokenizer):
        built = _characters(tokenizer)
    elif isinstance(tokenizer, SentencePieceTokenizer):
        built = _sentencepiece(tokenizer)
    return None if built is None else str(built.to_str(pretty=True)).encode()


def _bytes(tokenizer: ByteTokenizer) -> Any:
    from tokenizers import Tokenizer as Built
    from tokenizers import decoders, models, pre_tokenizers

    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    words = [*SPECIALS, *(letters[byte] for byte in range(256))]
    built = Built(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    built.decoder = decoders.ByteLevel()
    return _marked(built, tokenizer, SPECIALS)


def _characters(tokenizer: CharTokenizer) -> Any:
    from tokenizers import Tokenizer as Built
    from tokenizers import decoders, models

    built = Built(models.BPE(vocab={character: i for i, character in enumerate(tokenizer.characters)}, merges=[]))
    built.decoder = decoders.Fuse()
    return built


def _sentencepiece(tokenizer: SentencePieceTokenizer) -> Any:
    from tokenizers import Tokenizer as Built
    from tokenizers import decoders, models

    file = SentencePieceFile(tokenizer.contents)
    if tokenizer.marks_capitals:  # nothing there makes letters large again
        return None
    if any(piece.kind == USER_DEFINED for piece in file.pieces) or not file.escapes_spaces:
        return None
    if file.algorithm == BPE:
        vocabulary = {piece.text: i for i, piece in enumerate(file.pieces)}
        unknown = file.pieces[file.unknown].text
        model: Any = models.BPE(vocabulary, file.merges, unk_token=unknown, fuse_unk=True, byte_fallback=file.has_bytes)
    elif file.algorithm == UNIGRAM:
        model = models.Unigram([(piece.text, piece.score) for piece in file.pieces], file.unknown, file.has_bytes)
    else:
        return None
    built = Built(model)
    built.normalizer = _normaliser(file)
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    built.decoder = decoders.Sequence([*parts, *([decoders.Strip(" ", 1, 0)] if file.adds_prefix else [])])
    marks = [piece.text for piece in file.pieces if piece.kind in (CONTROL, UNKNOWN)]
    return _marked(built, tokenizer, marks)


def _normaliser(file: SentencePieceFile) -> Any:
    from tokenizers import Regex, normalizers

    parts: list[Any] = [normalizers.Precompiled(file.rules)] if file.rules else []
    if file.folds_spaces:
        parts += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if file.adds_prefix:
        parts.append(normalizers.Prepend(SPACE))
    return normalizers.Sequence([*parts, normalizers.Replace(" ", SPACE)])


def _marked(built: Any, tokenizer: Tokenizer, marks: Any) -> Any:
    """The tokenizer with its special tokens, and the start of a document in front of a text, as the model has seen it."""
    from tokenizers import processors

    built.add_special_tokens(list(marks))
    if tokenizer.bos is not None:
        start = built.id_to_token(tokenizer.bos)
        built.post_processor = processors.TemplateProcessing(
            single=f"{start} $A", pair=f"{start} $A {start} $B", special_tokens=[(start, tokenizer.bos)]
        )
    return built
