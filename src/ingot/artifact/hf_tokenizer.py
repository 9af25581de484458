"""Write a tokenizer in Hugging Face's layout, so that transformers loads it together with the model, and read it back.

GPT-2's tokenizer is recognised by its vocabulary, whatever the file format. Tokenizer types that transformers does not have are
rebuilt from tokenizer.json components, and also saved as ingot-tokenizer.json, from which ingot restores them exactly.
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
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
from ingot.runtime.files import read_json, read_object

# Convert byte, character and SentencePiece tokenizers to a tokenizer.json that transformers reads.

UNIGRAM, NORMAL = 1, 1
SPECIALS = ("<pad>", "<s>", "</s>", "<unk>")  # the tokens 0 to 3 of the byte tokenizer


@dataclass(frozen=True)
class Piece:
    """An entry of a SentencePiece vocabulary; `kind` is its type in the .model file, such as NORMAL, CONTROL or BYTE."""

    text: str
    score: float
    kind: int


class SentencePieceFile:
    """A parsed SentencePiece .model file: its pieces in id order and its text normalisation."""

    def __init__(self, contents: bytes) -> None:
        fields = list(message_fields(contents))
        trainer, normaliser = (dict(message_fields(b"".join(v for key, v in fields if key == part))) for part in (2, 3))
        found = [dict(message_fields(value)) for key, value in fields if key == 1]
        self.pieces = [
            Piece(piece[1].decode(), struct.unpack("<f", piece.get(2, bytes(4)))[0], piece.get(3, NORMAL)) for piece in found
        ]
        self.algorithm = trainer.get(3, UNIGRAM)
        self.rules: bytes = normaliser.get(2, b"")  # compiled normalisation rules; empty if text is not normalised
        self.adds_prefix, self.folds_spaces = bool(normaliser.get(3, 1)), bool(normaliser.get(4, 1))
        self.escapes_spaces = bool(normaliser.get(5, 1))
        kinds = [piece.kind for piece in self.pieces]
        self.has_bytes = BYTE in kinds  # characters outside the vocabulary are encoded as bytes (byte fallback)
        self.unknown = kinds.index(UNKNOWN)


def tokenizer_json(tokenizer: Tokenizer) -> bytes | None:
    """Build a tokenizer.json that encodes text as in training; return None if the tokenizers library cannot express it."""
    from tokenizers import Tokenizer as Built
    from tokenizers import decoders, models, pre_tokenizers

    built: Any = None
    if isinstance(tokenizer, HFTokenizer):
        built = _marked(Built.from_str(tokenizer.contents.decode()), tokenizer, [])
    elif isinstance(tokenizer, ByteTokenizer):
        letters = {byte: letter for letter, byte in byte_alphabet().items()}
        words = [*SPECIALS, *(letters[byte] for byte in range(256))]
        built = Built(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
        built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        built.decoder = decoders.ByteLevel()
        built = _marked(built, tokenizer, SPECIALS)
    elif isinstance(tokenizer, CharTokenizer):
        built = Built(models.BPE(vocab={character: i for i, character in enumerate(tokenizer.characters)}, merges=[]))
        built.decoder = decoders.Fuse()
    elif isinstance(tokenizer, SentencePieceTokenizer):
        built = _sentencepiece(tokenizer)
    return None if built is None else str(built.to_str(pretty=True)).encode()


def _lacks_start(tokenizer: HFTokenizer) -> bool:
    """Return True if a tokenizer has a BOS token but its tokenizer.json has no post-processor to prepend it to texts."""
    return tokenizer.bos is not None and not json.loads(tokenizer.contents).get("post_processor")


def marks_texts(tokenizer: Tokenizer) -> bool:
    """Return True if the exported tokenizer prepends the BOS token to a text."""
    if isinstance(tokenizer, HFTokenizer):
        return tokenizer.marks_texts or _lacks_start(tokenizer)
    return not isinstance(tokenizer, GPT2Tokenizer)


def _sentencepiece(tokenizer: SentencePieceTokenizer) -> Any:
    from tokenizers import Regex, decoders, models, normalizers
    from tokenizers import Tokenizer as Built

    file = SentencePieceFile(tokenizer.contents)
    # The tokenizers library cannot decode capital letters that are encoded as a mark and a lower-case letter.
    if tokenizer.marks_capitals or not file.escapes_spaces or any(piece.kind == USER_DEFINED for piece in file.pieces):
        return None
    if file.algorithm == BPE:
        vocabulary = {piece.text: i for i, piece in enumerate(file.pieces)}
        ids = {piece.text: i for i, piece in enumerate(file.pieces) if piece.kind == NORMAL}
        pairs = []  # all ways to split a piece into two pieces, sorted below by the score of the whole piece
        for i, piece in enumerate(file.pieces):
            if piece.kind == NORMAL:
                text = piece.text
                parts = [(text[:at], text[at:]) for at in range(1, len(text)) if text[:at] in ids and text[at:] in ids]
                pairs += [(-piece.score, i, ids[left], ids[right], (left, right)) for left, right in parts]
        merges, unknown = [pair for *_, pair in sorted(pairs)], file.pieces[file.unknown].text
        model: Any = models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=file.has_bytes)
    elif file.algorithm == UNIGRAM:
        model = models.Unigram([(piece.text, piece.score) for piece in file.pieces], file.unknown, file.has_bytes)
    else:
        return None
    built = Built(model)
    rules: list[Any] = [normalizers.Precompiled(file.rules)] if file.rules else []
    if file.folds_spaces:
        rules += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if file.adds_prefix:
        rules.append(normalizers.Prepend(SPACE))
    built.normalizer = normalizers.Sequence([*rules, normalizers.Replace(" ", SPACE)])
    stripped = [decoders.Strip(" ", 1, 0)] if file.adds_prefix else []
    built.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *stripped])
    marks = [piece.text for piece in file.pieces if piece.kind in (CONTROL, UNKNOWN)]
    return _marked(built, tokenizer, marks)


def _marked(built: Any, tokenizer: Tokenizer, marks: Any) -> Any:
    """Add the special tokens and a post-processor that prepends the BOS token to every text, as in training."""
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
    """Return a tokenizer's files (contents by file name) and the tokenizer itself; `context` is written as model_max_length."""
    tokenizer = from_spec(spec)
    if isinstance(tokenizer, GPT2Tokenizer):
        marks = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
        config = {"tokenizer_class": "GPT2Tokenizer", "model_max_length": context, "add_prefix_space": False, **marks}
        vocabulary, merges = gpt2_files(tokenizer)
        return {VOCABULARY: vocabulary, MERGES: merges, SETTINGS: json.dumps(config, indent=2).encode()}, tokenizer
    if isinstance(tokenizer, HFTokenizer) and not _lacks_start(tokenizer):
        return {THEIRS: tokenizer.contents, SETTINGS: _settings(tokenizer, tokenizer.contents, context)}, tokenizer
    files = {OURS: json.dumps(dict(spec)).encode()}
    if (contents := tokenizer_json(tokenizer)) is not None:
        files |= {THEIRS: contents, SETTINGS: _settings(tokenizer, contents, context)}
    return files, tokenizer


def check_no_other_tokenizer(folder: Path, names: Collection[str]) -> None:
    """Raise ConfigError if a folder has tokenizer files besides `names`: other programs could load those instead of ours."""
    for name in (OURS, THEIRS, SETTINGS, VOCABULARY, MERGES, SENTENCEPIECE):
        if name not in names and (folder / name).exists():
            raise ConfigError(f"{folder / name} belongs to another model's tokenizer; remove the file or give another --output")


def _settings(tokenizer: Tokenizer, contents: bytes, context: int) -> bytes:
    """Build tokenizer_config.json, which names the special tokens and sets the generic fast tokenizer class."""
    names = {token["id"]: token["content"] for token in json.loads(contents).get("added_tokens") or ()}
    marks = {"bos_token": tokenizer.bos, "eos_token": marks_of(tokenizer).eos, "pad_token": tokenizer.pad}
    known = {name: names[token] for name, token in marks.items() if token is not None and token in names}
    inputs = {"model_input_names": ["input_ids", "attention_mask"]}  # without this key, transformers 4 would add token_type_ids
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context, **inputs, **known}
    return json.dumps({**settings, "clean_up_tokenization_spaces": False}, indent=2).encode()


def find_tokenizer(folder: Path, rows: int, name: str | None = None) -> Tokenizer:
    """Return the tokenizer `name` (default: the folder's); raise DataError if it has more ids than the embedding has `rows`."""
    if name is not None:
        tokenizer = open_tokenizer(name)
    elif (folder / OURS).is_file():
        tokenizer = from_spec(read_object(folder / OURS))
    elif (folder / THEIRS).is_file() or (folder / VOCABULARY).is_file():
        tokenizer = _gpt2_in(folder) or open_tokenizer(str(folder))
    else:
        tokenizer = assumed_tokenizer(folder, rows)
    if tokenizer.vocab_size > rows:
        raise DataError(f"the {tokenizer.kind} tokenizer has {tokenizer.vocab_size:,} ids, but the model has only {rows:,}")
    return tokenizer


def assumed_tokenizer(path: Path, rows: int) -> Tokenizer:
    """Return GPT-2's tokenizer for a model without one; raise DataError unless its vocabulary size is GPT-2's, padded or not."""
    if not GPT2_VOCAB_SIZE <= rows <= GPT2_PADDED_VOCAB_SIZE:
        raise DataError(f"{path} has no tokenizer, and its {rows:,} ids are not GPT-2's; give one with --tokenizer")
    log.warning(f"{path} has no tokenizer; using GPT-2's because the vocabulary sizes match; --tokenizer selects another")
    return GPT2Tokenizer()


def _gpt2_in(folder: Path) -> GPT2Tokenizer | None:
    try:
        if (folder / VOCABULARY).is_file() and (folder / MERGES).is_file():
            return from_merges((folder / VOCABULARY).read_bytes(), (folder / MERGES).read_bytes())
        model = read_json(folder / THEIRS)["model"]
        lines = "\n".join(pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"])
        return from_merges(json.dumps(model["vocab"]).encode(), lines.encode())
    except (DataError, ValueError, KeyError, TypeError, OSError):
        return None  # the folder has a tokenizer that is not GPT-2's


def gpt2_files(tokenizer: GPT2Tokenizer) -> tuple[bytes, bytes]:
    """Return the contents of vocab.json and merges.txt: tokens in printable characters, and merges derived from token ranks."""
    spelling = {byte: character for character, byte in byte_alphabet().items()}
    tokens = [tokenizer.decode_bytes([i]) for i in range(GPT2_VOCAB_SIZE - 1)]
    spelled = ["".join(map(spelling.__getitem__, token)) for token in tokens]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    merges = ["#version: 0.2"]
    for rank, token in enumerate(tokens[256:], 256):
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:  # apply all merges of lower rank, until two parts are left
            best = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], rank))
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
        merges.append(" ".join(spelled[ranks[part]] for part in parts))
    vocabulary = {word: i for i, word in enumerate([*spelled, END_OF_TEXT])}
    return json.dumps(vocabulary).encode(), ("\n".join(merges) + "\n").encode()
