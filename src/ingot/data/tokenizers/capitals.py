"""Rules by which SentencePiece writes capitals as marks in front of small letters: `in The USA` is `in^ the^^ us^a`.

A word is then one piece whether it begins a sentence or not, and what a model learns of one it knows of the other. A mark stands
before the space of its word, where it may join a full stop. The rules are compiled into the .model file: whoever encodes or
decodes with the library needs nothing else, but for more than one space in front of a capital, which `folded` makes one before.
White space is folded and control characters are dropped as golf's rules do it, and no other character is rewritten.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from ingot.data.tokenizers.fast.proof import message_parts
from ingot.data.tokenizers.pieces import CAPITAL, CAPITALS, MARKS, SPACE

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
