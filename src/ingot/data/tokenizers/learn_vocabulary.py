"""Vocabularies learned from text: SentencePiece BPE as golf trains it, or byte-level BPE as GPT-2 has it.

The same text gives the same file. Text is read in portions; SentencePiece itself keeps in memory what it was given.
"""

from __future__ import annotations

import io
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain, islice, product
from pathlib import Path
from string import ascii_uppercase
from typing import Any, Literal

from ingot.data.text.text_files import WHAT, adding_up, file_bytes, find_files, read_documents
from ingot.data.tokenizers.gpt2_bpe import END_OF_TEXT
from ingot.data.tokenizers.hf_json import from_json
from ingot.data.tokenizers.sentencepiece import SentencePieceTokenizer, folded, message_parts
from ingot.data.tokenizers.tokenizer_base import CAPITAL, CAPITALS, MARKS, NARROW, SPACE, Tokenizer
from ingot.errors import ConfigError, DataError, Setting
from ingot.runtime.files import write_atomically

# Rules by which SentencePiece writes capitals as marks in front of small letters: `in The USA` is `in^ the^^ us^a`.

FOLDED = "nmt_nfkc"  # golf's rules, of which those for white space and control characters are kept
EXAMPLE = "A AA"  # a text with both marks: the trainer ends the whole program if it is to learn a character that it has not seen
SPACES = ("", " ")  # in front of a word
NORMALISER, DENORMALISER, FILE = 3, 5, 6  # fields of a model, and of the first two the name of the file with the rules


@contextmanager
def capital_rules() -> Iterator[dict[str, Any]]:
    """The trainer's settings for such a vocabulary, with the files that they name."""
    with tempfile.TemporaryDirectory() as folder:
        marking, unmarking = Path(folder, "marking.tsv"), Path(folder, "unmarking.tsv")
        marking.write_text(_lines(_marking()))
        unmarking.write_text(_lines(_unmarking()))
        files = {"normalization_rule_tsv": str(marking), "denormalization_rule_tsv": str(unmarking)}
        yield {**files, "required_chars": SPACE + MARKS}  # as bytes, which a rare character becomes, marks would be counted


def without_file_names(model: bytes) -> bytes:
    """A trained model without the names of the files, which would make two of the same text differ."""
    parts = []
    for field, value, part in message_parts(model):
        if field in (NORMALISER, DENORMALISER):
            value = b"".join(inner for name, _, inner in message_parts(value) if name != FILE)
            part = bytes([field << 3 | 2]) + _varint(len(value)) + value
        parts.append(part)
    return b"".join(parts)


def _marking() -> dict[str, str]:
    from sentencepiece import SentencePieceNormalizer

    characters = [chr(code) for code in range(1, 0x110000) if not 0xD800 <= code < 0xE000]
    library = SentencePieceNormalizer(rule_name=FOLDED, escape_whitespaces=False, remove_extra_whitespaces=False)
    folded = library.normalize(characters)
    rules = {old: new for old, new in zip(characters, folded, strict=True) if new in ("", " ") and new != old}
    for space, letters in product(SPACES, _runs()):
        rules[space + letters] = (CAPITAL, CAPITALS)[len(letters) - 1] + (" " if space else "") + letters.lower()
    return {**rules, CAPITAL: "", CAPITALS: ""}  # marks of the text itself would make capitals of its letters


def _unmarking() -> dict[str, str]:
    rules = {CAPITAL: "", CAPITALS: ""}  # where no letter follows
    for space, letters in product(("", " "), _runs()):
        rules[(CAPITAL, CAPITALS)[len(letters) - 1] + space + letters.lower()] = space + letters
    return rules


def _runs() -> list[str]:
    """One capital, and two: of longer words every two letters have a mark, since a rule has an end."""
    return [*ascii_uppercase, *map("".join, product(ascii_uppercase, repeat=2))]


def _lines(rules: Mapping[str, str]) -> str:
    """Rules as the trainer reads them: code points in base 16."""
    return "".join("\t".join(" ".join(f"{ord(c):X}" for c in side) for side in rule) + "\n" for rule in rules.items())


def _varint(number: int) -> bytes:
    low = [number >> shift & 0x7F for shift in range(0, max(1, number.bit_length()), 7)]
    return bytes([*(part | 0x80 for part in low[:-1]), low[-1]])


Trainable = Literal["sentencepiece", "bpe"]
VOCAB_SIZE = Setting("--vocab-size")
SUFFIXES = {"sentencepiece": ".model", "bpe": ".json"}
PORTION = 1 << 20  # characters that are learned from at once; only words at the seams of longer documents suffer
# The golf challenge's own settings, and two more: SentencePiece would pass over all but short documents, and could leave the
# space out of a text that has few.
SETTINGS: dict[str, Any] = {
    "model_type": "bpe", "character_coverage": 0.999, "byte_fallback": True, "split_digits": True, "add_dummy_prefix": False,
    "normalization_rule_name": "nmt_nfkc", "pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3, "hard_vocab_limit": False,
    "max_sentence_length": 8 * PORTION, "required_chars": SPACE, "minloglevel": 4,
}  # fmt: skip
LONGEST_WORD = 10_000  # characters; SentencePiece's normalisation makes up to six of one, and at 65,536 it ends the program
RESERVED = {0: " ", 0x2585: " "}  # the trainer passes over a text with U+2585 in it


def train_tokenizer(
    inputs: Sequence[Path],
    output: Path,
    kind: Trainable,
    vocab_size: int,
    *,
    documents: int | None = None,
    text_field: str = "text",
    mark_capitals: bool = False,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Tokenizer:
    """Learns a vocabulary from text files, or from their first `documents`, and writes it as one file.

    `mark_capitals`: of small letters alone, with marks in front of those that are capitals (SentencePiece's kind).
    """
    _check(output, kind, vocab_size, documents, overwrite)
    if mark_capitals and kind != "sentencepiece":
        raise ConfigError(f"{{0}} is for --kind sentencepiece and this is {kind}", Setting("--mark-capitals"))
    files, _ = find_files(inputs)
    advance = adding_up(progress, sum(map(file_bytes, files)))
    most = None if documents is None else min(documents, sys.maxsize)
    rules: AbstractContextManager[dict[str, Any]] = capital_rules() if mark_capitals else nullcontext({})
    with rules as settings:
        contents = learn(kind, islice(read_documents(files, text_field, advance), most), vocab_size, settings)
    if contents is None:
        raise DataError(f"no documents in {', '.join(map(str, inputs)) or 'no input'}; give files with text: {WHAT}")
    tokenizer = SentencePieceTokenizer(contents) if kind == "sentencepiece" else from_json(contents, END_OF_TEXT)
    if tokenizer.vocab_size < vocab_size:
        raise DataError(
            f"the text has pieces for {tokenizer.vocab_size:,} ids and {{0}} {vocab_size:,} asks for more; "
            f"give {tokenizer.vocab_size} or less, or more text",
            VOCAB_SIZE,
        )
    try:
        write_atomically(output.resolve(), contents)
    except OSError as error:
        raise DataError(f"cannot write {output}: {error.strerror or error}") from error
    return tokenizer


def learn(kind: Trainable, documents: Iterable[str], vocab_size: int, settings: Mapping[str, Any] | None = None) -> bytes | None:
    """The file of a vocabulary of at most this size, None if no document has text; `settings` are the trainer's, over ours."""
    texts = _Texts(documents)
    train = _train_sentencepiece if kind == "sentencepiece" else _train_bpe
    try:
        contents = train(texts, vocab_size, settings or {})
    except (RuntimeError, ValueError, TypeError, OverflowError) as error:
        raise texts.error or _explained(error, vocab_size) from None
    return contents if texts.count else None


class _Texts:
    """Portions of documents that are not empty; keeps the error that ended what a library was given, which it would swallow."""

    def __init__(self, documents: Iterable[str]) -> None:
        self._documents = documents
        self.count = 0
        self.error: BaseException | None = None

    def __iter__(self) -> Iterator[str]:
        for text in self._documents:
            self.count += bool(text)
            yield from _portions(text)

    def keeping_errors(self, parts: Iterable[str]) -> Iterator[str]:
        """The parts that a library is given of them."""
        try:
            yield from parts
        except GeneratorExit:
            raise  # the library has ended by itself
        except BaseException as error:
            self.error = error
            raise


def _portions(text: str) -> Iterator[str]:
    while len(text) > PORTION:
        cut = text.rfind(" ", PORTION // 2, PORTION)
        yield text[: cut if cut > 0 else PORTION]
        text = text[cut if cut > 0 else PORTION :]
    if text:
        yield text


def _train_sentencepiece(texts: _Texts, vocab_size: int, settings: Mapping[str, Any]) -> bytes:
    import sentencepiece  # type: ignore[import-untyped]

    settings = {"vocab_size": vocab_size, **SETTINGS, **settings}
    examples = [EXAMPLE] if CAPITAL in settings["required_chars"] else []
    parts = map(folded, _sentences(texts)) if examples else _sentences(texts)
    model, sentences = io.BytesIO(), texts.keeping_errors(chain(parts, examples))
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=sentences, model_writer=model, **settings)
    return without_file_names(model.getvalue())


def _sentences(texts: Iterable[str]) -> Iterator[str]:
    """Stripped texts. The trainer ends the whole program if no space is left in them, so there is one if need be."""
    spaced, some = False, ""
    for text in (text.translate(RESERVED).strip() for text in texts):
        spaced = spaced or re.search(r"[^\W_] [^\W_]", text) is not None
        some = some or next((character for character in text if character.isalnum()), "")
        yield from filter(None, _cut_words(text))
    if not spaced:
        yield f"{some or 'a'} {some or 'a'}"


def _cut_words(text: str) -> list[str]:
    """A text in parts, cut wherever a word becomes too long for the trainer; there is no U+0000 in it."""
    parts = re.compile(f".{{1,{LONGEST_WORD}}}", re.DOTALL)
    words = (word if len(word) <= LONGEST_WORD else "\0".join(parts.findall(word)) for word in text.split(" "))
    return " ".join(words).split("\0")


def _train_bpe(texts: _Texts, vocab_size: int, settings: Mapping[str, Any]) -> bytes:
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if unknown := [name for name in settings if not hasattr(trainers.BpeTrainer, name)]:
        raise ValueError(f"it has no setting {unknown[0]!r}")  # the library would pass over it
    library: Any = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    ours = {"vocab_size": vocab_size, "special_tokens": [END_OF_TEXT], "show_progress": False}
    trainer = trainers.BpeTrainer(**{**ours, "initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), **settings})
    library.train_from_iterator(texts.keeping_errors(texts), trainer)
    return str(library.to_str()).encode()


def _check(output: Path, kind: str, vocab_size: int, documents: int | None, overwrite: bool) -> None:
    if kind not in SUFFIXES:
        raise ConfigError(f"unknown kind of tokenizer {kind!r}; {' and '.join(SUFFIXES)} can be trained")
    if output.suffix != SUFFIXES[kind]:
        raise ConfigError(f"a {kind} tokenizer is a {SUFFIXES[kind]} file; give --output a name that ends so, not {output.name}")
    if not 257 <= vocab_size <= NARROW:
        raise ConfigError(f"--vocab-size {vocab_size:,} is out of range; give 257 (all bytes, and a start) to {NARROW:,}")
    if documents is not None and documents < 1:
        raise ConfigError(f"--documents {documents} leaves nothing to learn from; give 1 or more")
    if output.exists() and not overwrite:
        raise ConfigError(f"output {output} exists; replace it with --force or give another name")
    if not output.parent.is_dir():
        raise DataError(f"cannot write {output}: there is no folder {output.parent}; make it first")


def _explained(error: Exception, vocab_size: int) -> DataError:
    if small := re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(error)):
        return DataError(
            f"{{0}} {vocab_size:,} is too small for this text: its characters, all bytes and the special ids alone are "
            f"{small[1]}; give more",
            VOCAB_SIZE,
        )
    reason = " ".join(str(error).split())
    return DataError(f"the trainer cannot learn from this text: {reason[:200]}")
