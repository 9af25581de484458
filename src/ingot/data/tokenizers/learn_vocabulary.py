"""Learn a vocabulary from text: SentencePiece BPE as golf trains it, or byte-level BPE as in GPT-2.

Training is deterministic: the same text gives the same file. Text is streamed in chunks, but SentencePiece keeps all of it in
memory. With `mark_capitals` a SentencePiece model encodes capitals as a mark before lower-case letters: with the marks ^ and ^^,
`in The USA` becomes `in^ the^^ us^a`.
"""

from __future__ import annotations

import io
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain, islice, product
from pathlib import Path
from string import ascii_uppercase
from typing import Any, Literal

from ingot.data.text.text_files import WHAT, Progress, adding_up, file_bytes, find_files, read_documents
from ingot.data.tokenizers.gpt2_bpe import END_OF_TEXT
from ingot.data.tokenizers.hf_json import from_json
from ingot.data.tokenizers.sentencepiece import SentencePieceTokenizer, folded, message_parts
from ingot.data.tokenizers.tokenizer_base import CAPITAL, CAPITALS, MARKS, SPACE, Tokenizer
from ingot.errors import ConfigError, DataError, Setting
from ingot.runtime.files import write_atomically, writing_output

Trainable = Literal["sentencepiece", "bpe"]
VOCAB_SIZE = Setting("--vocab-size")
SUFFIXES = {"sentencepiece": ".model", "bpe": ".json"}
PORTION = 1 << 20  # characters per chunk; longer documents are split, between words where possible
# The settings of the golf challenge, and two that Ingot adds: max_sentence_length and required_chars.
# By default SentencePiece skips long documents, and may omit the space from the vocabulary if the text has few spaces.
SETTINGS: dict[str, Any] = {
    "model_type": "bpe", "character_coverage": 0.999, "byte_fallback": True, "split_digits": True, "add_dummy_prefix": False,
    "normalization_rule_name": "nmt_nfkc", "pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3, "hard_vocab_limit": False,
    "max_sentence_length": 8 * PORTION, "required_chars": SPACE, "minloglevel": 4,
}  # fmt: skip
# Longer words are split: SentencePiece aborts on words of 65,536 characters, and its normalisation may expand a character to six.
LONG_WORD = re.compile("[^ ]{10000}(?=[^ ])")
RESERVED = {0: " ", 0x2585: " "}  # SentencePiece skips a text that contains U+2585
FOLDED = "nmt_nfkc"  # golf's normalisation; with capital marks, only its rules for white space and control characters apply
EXAMPLE = "A AA"  # contains both marks once encoded: SentencePiece aborts the process if a required character does not occur
NORMALISER, DENORMALISER, FILE = 3, 5, 6  # protobuf fields: a model's two normalisers, and the name of the rule file in each


def capital_rules(folder: Path) -> dict[str, Any]:
    """Write the rule files for capital marks to a folder and return the trainer settings that use them."""
    # Each capital mark must be in the vocabulary: otherwise a rare mark is encoded as byte pieces, whose bytes would be counted.
    settings = {"required_chars": SPACE + MARKS}
    for name, rules in zip(("normalization_rule_tsv", "denormalization_rule_tsv"), _marking_rules(), strict=True):
        # A rule is a pair of code point lists in hexadecimal.
        lines = ("\t".join(" ".join(f"{ord(c):X}" for c in side) for side in rule) + "\n" for rule in rules.items())
        (folder / name).write_text("".join(lines))
        settings[name] = str(folder / name)
    return settings


def without_file_names(model: bytes) -> bytes:
    """Remove the names of temporary files from a trained model, so that the same text gives the same file."""
    parts = []
    for field, value, part in message_parts(model):
        if field in (NORMALISER, DENORMALISER):
            value = b"".join(inner for name, _, inner in message_parts(value) if name != FILE)
            size = len(value)
            low = [size >> shift & 0x7F for shift in range(0, max(1, size.bit_length()), 7)]
            part = bytes([field << 3 | 2, *(digit | 0x80 for digit in low[:-1]), low[-1]]) + value  # tag, size (varint), data
        parts.append(part)
    return b"".join(parts)


@cache
def _marking_rules() -> tuple[dict[str, str], dict[str, str]]:
    """Return the rules that replace capitals with marked lower-case letters, and the rules that restore the capitals.

    A rule covers one or two capitals; longer words in capitals have a mark for every two letters.
    """
    from sentencepiece import SentencePieceNormalizer

    characters = [chr(code) for code in range(1, 0x110000) if not 0xD800 <= code < 0xE000]
    library = SentencePieceNormalizer(rule_name=FOLDED, escape_whitespaces=False, remove_extra_whitespaces=False)
    normalised = library.normalize(characters)
    marking = {old: new for old, new in zip(characters, normalised, strict=True) if new in ("", " ") and new != old}
    unmarking = {CAPITAL: "", CAPITALS: ""}  # a mark without a letter after it is dropped
    for space, letters in product(("", " "), [*ascii_uppercase, *map("".join, product(ascii_uppercase, repeat=2))]):
        marked = MARKS[len(letters) - 1] + space + letters.lower()
        marking[space + letters], unmarking[marked] = marked, space + letters
    marking |= {CAPITAL: "", CAPITALS: ""}  # drop mark characters in the text itself, which would capitalise its letters
    return marking, unmarking


def train_tokenizer(
    inputs: Sequence[Path],
    output: Path,
    kind: Trainable,
    vocab_size: int,
    *,
    documents: int | None = None,
    text_field: str = "text",
    mark_capitals: bool = False,
    progress: Progress | None = None,
) -> Tokenizer:
    """Learn a vocabulary from text files, or from their first `documents` documents, and write it to `output`.

    With `mark_capitals` (sentencepiece only), capitals are encoded as marks before lower-case letters.
    """
    if output.suffix != SUFFIXES[kind]:
        raise ConfigError(f"--output {output.name} must end in {SUFFIXES[kind]}, the suffix of {kind} tokenizer files")
    if mark_capitals and kind != "sentencepiece":
        raise ConfigError(f"{{0}} is for --kind sentencepiece, not {kind}", Setting("--mark-capitals"))
    files, _ = find_files(inputs)
    advance = adding_up(progress, sum(map(file_bytes, files)))
    with tempfile.TemporaryDirectory() as folder:
        settings = capital_rules(Path(folder)) if mark_capitals else {}
        contents = learn(kind, islice(read_documents(files, text_field, advance), documents), vocab_size, settings)
    if contents is None:
        raise DataError(f"no documents in {', '.join(map(str, inputs)) or 'the input'}; give files with text: {WHAT}")
    tokenizer = SentencePieceTokenizer(contents) if kind == "sentencepiece" else from_json(contents, END_OF_TEXT)
    if tokenizer.vocab_size < vocab_size:
        most = f"the text yields a vocabulary of only {tokenizer.vocab_size:,} ids, fewer than {{0}} {vocab_size:,}"
        raise DataError(most, VOCAB_SIZE, advice=f"lower {{0}} to {tokenizer.vocab_size} or use more text")
    with writing_output(output):
        write_atomically(output.resolve(), contents)
    return tokenizer


def learn(kind: Trainable, documents: Iterable[str], vocab_size: int, settings: Mapping[str, Any] | None = None) -> bytes | None:
    """Learn at most `vocab_size` ids; return the tokenizer file, or None if there is no text. `settings` override SETTINGS."""
    count, errors, settings = 0, list[BaseException](), settings or {}

    def portions() -> Iterator[str]:
        nonlocal count
        for text in documents:
            count += bool(text)
            while len(text) > PORTION:
                space = text.rfind(" ", PORTION // 2, PORTION)
                cut = space if space > 0 else PORTION
                yield text[:cut]
                text = text[cut:]
            if text:
                yield text

    parts = portions()
    if kind == "sentencepiece":
        parts = _sentences(parts)
        if CAPITAL in settings.get("required_chars", ""):
            parts = chain(map(folded, parts), [EXAMPLE])

    def keeping_errors() -> Iterator[str]:  # the libraries swallow exceptions raised by the iterator
        try:
            yield from parts
        except GeneratorExit:
            raise  # the library stopped reading early
        except BaseException as error:
            errors.append(error)
            raise

    try:
        if kind == "bpe":
            from tokenizers import Tokenizer as Library
            from tokenizers import decoders, models, pre_tokenizers, trainers

            library: Any = Library(models.BPE())
            library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            library.decoder = decoders.ByteLevel()
            alphabet, marks = pre_tokenizers.ByteLevel.alphabet(), [END_OF_TEXT]
            trainer = trainers.BpeTrainer(
                vocab_size=vocab_size, special_tokens=marks, initial_alphabet=alphabet, show_progress=False
            )
            library.train_from_iterator(keeping_errors(), trainer)
            contents = str(library.to_str()).encode()
        else:
            import sentencepiece  # type: ignore[import-untyped]

            model, settings = io.BytesIO(), {"vocab_size": vocab_size, **SETTINGS, **settings}
            sentencepiece.SentencePieceTrainer.train(sentence_iterator=keeping_errors(), model_writer=model, **settings)
            contents = without_file_names(model.getvalue())
    except (RuntimeError, ValueError, TypeError, OverflowError) as error:
        if errors:
            raise errors[0] from None
        reason = " ".join(str(error).split())
        if small := re.search(r"smaller than required_chars\. \d+ vs (\d+)", reason):
            least = f"{{0}} {vocab_size:,} is too small for this text: its characters, bytes and special ids need {small[1]}"
            raise DataError(least, VOCAB_SIZE, advice="give a larger {0}") from None
        raise DataError(f"the trainer cannot learn from this text: {reason[:200]}") from None
    return contents if count else None


def _sentences(texts: Iterable[str]) -> Iterator[str]:
    """Yield texts on which SentencePiece does not abort: long words are split, and at least one text contains a space."""
    spaced, letter = False, ""
    for text in (text.translate(RESERVED).strip() for text in texts):
        spaced = spaced or re.search(r"[^\W_] [^\W_]", text) is not None
        letter = letter or next((character for character in text if character.isalnum()), "")
        # Split words that are too long for SentencePiece; U+0000 was replaced above, so it can be the separator.
        yield from filter(None, LONG_WORD.sub("\\g<0>\0", text).split("\0"))
    if not spaced:
        yield f"{letter or 'a'} {letter or 'a'}"
