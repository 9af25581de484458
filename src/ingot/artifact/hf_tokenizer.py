"""The tokenizer beside a model in Hugging Face's layout: written so that transformers finds it, and found again.

GPT-2's own tokenizer is known by its vocabulary, whatever file it comes in. Kinds that transformers does not have are written in
its parts (tokenizer_json.py), and go along as ingot-tokenizer.json too, from which ingot reads them back as they were.
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ingot.config.schema import GPT2_PADDED_VOCAB_SIZE, GPT2_VOCAB_SIZE
from ingot.data.store.documents import marks_of
from ingot.data.tokenizers import ByteTokenizer, GPT2Tokenizer, HFTokenizer, Tokenizer, from_spec, open_tokenizer
from ingot.data.tokenizers.gpt2_bpe import END_OF_TEXT, from_merges
from ingot.data.tokenizers.plain import CharTokenizer
from ingot.data.tokenizers.sentencepiece import BPE, BYTE, CONTROL, UNKNOWN, USER_DEFINED, SentencePieceTokenizer, message_fields
from ingot.data.tokenizers.tokenizer_base import SPACE, byte_alphabet
from ingot.errors import ConfigError, DataError
from ingot.runtime.files import read_json

# Tokenizers of other kinds as the tokenizer.json that transformers reads: bytes, characters, SentencePiece's vocabularies.

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


OURS, THEIRS, SETTINGS = "ingot-tokenizer.json", "tokenizer.json", "tokenizer_config.json"
VOCABULARY, MERGES, SENTENCEPIECE = "vocab.json", "merges.txt", "tokenizer.model"

log = logging.getLogger(__name__)


def tokenizer_files(spec: Mapping[str, Any], context: int) -> tuple[dict[str, bytes], Tokenizer]:
    """The files of a tokenizer by name, and the tokenizer itself."""
    tokenizer = from_spec(spec)
    if isinstance(tokenizer, GPT2Tokenizer):
        marks = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
        config = {"tokenizer_class": "GPT2Tokenizer", "model_max_length": context, "add_prefix_space": False, **marks}
        vocabulary, merges = gpt2_files(tokenizer)
        files = {VOCABULARY: vocabulary, MERGES: merges, SETTINGS: json.dumps(config, indent=2).encode()}
        return files, tokenizer
    if isinstance(tokenizer, HFTokenizer):
        return {THEIRS: tokenizer.contents, SETTINGS: _settings(tokenizer, tokenizer.contents, context)}, tokenizer
    files = {OURS: json.dumps(dict(spec)).encode()}
    if (contents := tokenizer_json(tokenizer)) is not None:
        files |= {THEIRS: contents, SETTINGS: _settings(tokenizer, contents, context)}
    return files, tokenizer


def check_no_other_tokenizer(folder: Path, names: Collection[str]) -> None:
    """Refuse a folder with tokenizer files that a new model does not replace: readers would take them for its own."""
    for name in (OURS, THEIRS, SETTINGS, VOCABULARY, MERGES, SENTENCEPIECE):
        if name not in names and (folder / name).exists():
            raise ConfigError(f"{folder / name} belongs to the tokenizer of another model; remove it or give another --output")


def _settings(tokenizer: Tokenizer, contents: bytes, context: int) -> bytes:
    """tokenizer_config.json: which tokens are marks, and that any fast tokenizer of transformers reads the file."""
    names = {token["id"]: token["content"] for token in json.loads(contents).get("added_tokens") or ()}
    marks = {"bos_token": tokenizer.bos, "eos_token": marks_of(tokenizer).eos, "pad_token": tokenizer.pad}
    known = {name: names[token] for name, token in marks.items() if token is not None and token in names}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context, **known}
    return json.dumps({**settings, "clean_up_tokenization_spaces": False}, indent=2).encode()


def find_tokenizer(folder: Path, rows: int, name: str | None = None) -> Tokenizer:
    """The tokenizer of a folder with a model of so many embedding rows, or the one that is named."""
    if name is not None:
        tokenizer = open_tokenizer(name)
    elif (folder / OURS).is_file():
        tokenizer = _ours(folder / OURS)
    elif (folder / THEIRS).is_file() or (folder / VOCABULARY).is_file():
        tokenizer = _gpt2_in(folder) or open_tokenizer(str(folder))
    else:
        tokenizer = assumed_tokenizer(folder, rows)
    if tokenizer.vocab_size > rows:
        raise DataError(f"the {tokenizer.kind} tokenizer has {tokenizer.vocab_size:,} ids and the model {rows:,}; give another")
    return tokenizer


def assumed_tokenizer(path: Path, rows: int) -> Tokenizer:
    """GPT-2's, for a model that came without one and has as many embedding rows as GPT-2's have."""
    if not GPT2_VOCAB_SIZE <= rows <= GPT2_PADDED_VOCAB_SIZE:
        raise DataError(f"{path} has no tokenizer, and its {rows:,} ids are not GPT-2's; give one with --tokenizer")
    log.warning(f"{path} has no tokenizer and as many ids as GPT-2: its tokenizer is assumed; --tokenizer names another")
    return GPT2Tokenizer()


def _ours(path: Path) -> Tokenizer:
    try:
        return from_spec(read_json(path))
    except (ValueError, AttributeError, OSError):
        raise DataError(f"{path} is damaged: it is not a tokenizer") from None


def _gpt2_in(folder: Path) -> GPT2Tokenizer | None:
    """GPT-2's own tokenizer, if the folder's files spell it."""
    try:
        if (folder / VOCABULARY).is_file() and (folder / MERGES).is_file():
            return from_merges((folder / VOCABULARY).read_bytes(), (folder / MERGES).read_bytes())
        model = read_json(folder / THEIRS)["model"]
        lines = "\n".join(pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"])
        return from_merges(json.dumps(model["vocab"]).encode(), lines.encode())
    except (DataError, ValueError, KeyError, TypeError, OSError):
        return None  # another tokenizer, which whoever opens it judges


def gpt2_files(tokenizer: GPT2Tokenizer) -> tuple[bytes, bytes]:
    """vocab.json and merges.txt: each token spelled in printable characters, and the two parts it is merged from."""
    spelling = {byte: character for character, byte in byte_alphabet().items()}
    tokens = [tokenizer.decode_bytes([i]) for i in range(GPT2_VOCAB_SIZE - 1)]
    spelled = ["".join(map(spelling.__getitem__, token)) for token in tokens]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    merges = ["#version: 0.2"]
    for rank, token in enumerate(tokens[256:], 256):
        left, right = _parts(token, ranks, rank)
        merges.append(f"{spelled[ranks[left]]} {spelled[ranks[right]]}")
    vocabulary = {word: i for i, word in enumerate([*spelled, END_OF_TEXT])}
    return json.dumps(vocabulary).encode(), ("\n".join(merges) + "\n").encode()


def _parts(token: bytes, ranks: Mapping[bytes, int], rank: int) -> tuple[bytes, bytes]:
    """What a token was merged from: all merges before its own, lowest rank first, leave two parts."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        best = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], rank))
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts[0], parts[1]
