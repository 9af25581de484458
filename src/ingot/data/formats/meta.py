"""nanoGPT's meta.pkl: a vocabulary in a pickle, read without running anything that a pickle can run.

A pickle is a program. Only operations that build numbers, texts and containers of them are let through, and they are looked at
before the first is carried out.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from pathlib import Path
from typing import Any

from ingot.data.formats.base import read_file
from ingot.data.tokenizers import CharTokenizer, NumberTokenizer, Tokenizer, open_tokenizer
from ingot.errors import DataError

META = "meta.pkl"
MAX_BYTES = 1 << 24  # a vocabulary of 65,536 characters has 1 MB
SAFE = {
    "PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1",
    "BINFLOAT", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "EMPTY_DICT", "DICT", "SETITEM", "SETITEMS", "EMPTY_LIST", "LIST",
    "APPEND", "APPENDS", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT",
    "GET", "BINGET", "LONG_BINGET",
}  # fmt: skip


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def read_meta(path: Path) -> dict[str, Any]:
    """The dictionary of a meta.pkl."""
    contents, size = read_file(path, MAX_BYTES)
    if size > MAX_BYTES:
        raise DataError(f"{path} has {size:,} bytes, too many for a vocabulary; remove it and give --tokenizer")
    try:
        for code, argument, _ in pickletools.genops(contents):
            # A place in the memo is reserved with all those below it: a large number would take all memory there is.
            if code.name not in SAFE or (code.name.endswith("PUT") and int(argument or 0) > len(contents)):
                raise pickle.UnpicklingError(f"{code.name} is no part of a vocabulary")
        found = _Plain(io.BytesIO(contents)).load()
    except Exception as error:  # damaged pickles raise almost anything
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise DataError(f"{path} is refused: {reason}; it is damaged or not nanoGPT's: remove it and give --tokenizer") from None
    if not isinstance(found, dict) or type(found.get("vocab_size")) is not int:
        raise DataError(f"{path} does not say its vocab_size; it is not nanoGPT's: remove it and give --tokenizer")
    return found


def char_tokenizer(path: Path) -> CharTokenizer | None:
    """The characters that a meta.pkl lists; None where it has no list of single characters in nanoGPT's order."""
    meta = read_meta(path)
    stoi, itos = meta.get("stoi"), meta.get("itos")
    if not isinstance(stoi, dict) or not isinstance(itos, dict):
        return None
    characters: list[Any] = [itos.get(token) for token in range(len(itos))]
    single = all(isinstance(c, str) and len(c) == 1 and not 0xD800 <= ord(c) < 0xE000 for c in characters)
    if not single or characters != sorted(set(characters)) or not characters:
        return None
    if meta["vocab_size"] != len(characters) or stoi != {character: token for token, character in enumerate(characters)}:
        raise DataError(f"{path} is damaged: vocab_size, stoi and itos do not fit together; prepare the data again")
    return CharTokenizer(characters)


def nanogpt_tokenizer(folder: Path, name: str | None) -> Tokenizer:
    """The tokenizer of nanoGPT's folder: its characters, else the one that is named, and GPT-2's only without a meta.pkl."""
    path = folder / META
    if name == "number":
        if not path.is_file():
            raise DataError(f"data.tokenizer is number and {folder} has no {META}; write one that says vocab_size")
        return NumberTokenizer(read_meta(path)["vocab_size"])
    if not path.is_file():
        return open_tokenizer(name or "gpt2")
    if (found := char_tokenizer(path)) is not None:
        if name not in (None, "char"):
            raise DataError(f"data.tokenizer is {name} and {folder} has characters, as its {META} says; leave it out")
        return found
    if name is None:
        size = read_meta(path)["vocab_size"]
        raise DataError(
            f"{path} has {size:,} ids that are no single characters; name what made them with data.tokenizer, or number where "
            "they stand for no text"
        )
    return checked_size(path, open_tokenizer(name))


def checked_size(path: Path, tokenizer: Tokenizer) -> Tokenizer:
    """A tokenizer that has as many ids as a meta.pkl says."""
    if (size := read_meta(path)["vocab_size"]) != tokenizer.vocab_size:
        raise DataError(
            f"{path} says vocab_size {size:,} and the {tokenizer.kind} tokenizer has {tokenizer.vocab_size:,} ids; name the one "
            f"that made the tokens, or remove {META} if it is wrong"
        )
    return tokenizer


def meta_bytes(tokenizer: Tokenizer) -> bytes:
    """A meta.pkl that nanoGPT's train.py and sample.py read; ids that are no character on their own show as they decode."""
    itos = {token: tokenizer.decode_bytes([token]).decode("utf-8", "replace") for token in range(tokenizer.vocab_size)}
    stoi: dict[str, int] = {}
    for token, text in itos.items():
        stoi.setdefault(text, token)
    return pickle.dumps({"vocab_size": tokenizer.vocab_size, "itos": itos, "stoi": stoi})
