"""nanoGPT's data folder: train.bin and val.bin (uint16, no header) and, for character data, a meta.pkl.

The files have no document index. GPT-2 data has <|endoftext|> after each document; character data has no separators.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

from ingot.data.store.dataset import Dataset, Split, foreign_record
from ingot.data.store.shards import open_plain
from ingot.data.tokenizers import CharTokenizer, NumberTokenizer, Tokenizer, open_tokenizer
from ingot.errors import DataError, Setting
from ingot.runtime.files import reading

META = "meta.pkl"
TOKENIZER = Setting("data.tokenizer")
FILES = {"train": "train.bin", "val": "val.bin"}


def open_nanogpt(path: Path, strict: bool = True) -> Dataset:
    """Open a folder with train.bin, val.bin or both, or one such file. The only check is that file sizes are even."""
    folder = path if path.is_dir() else path.parent
    if path.is_dir():
        files = {split: path / name for split, name in FILES.items() if (path / name).is_file()}
    else:
        files = {"val" if path.name.startswith("val") else "train": path}
    if not files:
        raise DataError(f"{path} has neither train.bin nor val.bin; it is not nanoGPT data")
    splits = {}
    for name, file in files.items():
        sizes = {file: len(open_plain(file))}
        splits[name] = Split(name, folder, foreign_record(folder, sizes), sizes, open_plain, marks_after=True)
    about, tokenizer = f"nanoGPT's {' and '.join(file.name for file in files.values())}", None
    if (meta := folder / META).is_file():
        tokenizer = char_tokenizer(meta)
        about += f" with {META}" + (f" ({tokenizer.vocab_size} characters)" if tokenizer else "")
    return Dataset(path, "nanogpt", splits, about, tokenizer)


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler that refuses all classes and functions, so that loading an untrusted pickle cannot run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a vocabulary file")


def read_meta(path: Path) -> dict[str, Any]:
    """Read the dictionary of a meta.pkl without executing code from it."""
    with reading(path):
        contents = path.read_bytes()
    try:
        meta = _PlainUnpickler(io.BytesIO(contents)).load()
    except Exception as error:  # damaged pickles raise almost any exception
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise DataError(f"cannot read {path}: {reason}; it is damaged or not nanoGPT's; remove it and give --tokenizer") from None
    if not isinstance(meta, dict) or type(meta.get("vocab_size")) is not int:
        raise DataError(f"{path} has no vocab_size, so nanoGPT did not write it; remove it and give --tokenizer")
    return meta


def char_tokenizer(path: Path) -> CharTokenizer | None:
    """Return the tokenizer of a meta.pkl that lists single characters in sorted order, as nanoGPT writes it; else return None."""
    meta = read_meta(path)
    stoi, itos = meta.get("stoi"), meta.get("itos")
    if not isinstance(stoi, dict) or not isinstance(itos, dict):
        return None
    characters: list[Any] = [itos.get(token) for token in range(len(itos))]
    single = all(isinstance(c, str) and len(c) == 1 and not 0xD800 <= ord(c) < 0xE000 for c in characters)
    if not single or characters != sorted(set(characters)) or not characters:
        return None
    if meta["vocab_size"] != len(characters) or stoi != {character: token for token, character in enumerate(characters)}:
        raise DataError(f"{path} is damaged: vocab_size, stoi and itos are inconsistent; prepare the data again")
    return CharTokenizer(characters)


def nanogpt_tokenizer(folder: Path, name: str | None) -> Tokenizer:
    """Open a nanoGPT folder's tokenizer: the characters that meta.pkl lists, or the tokenizer `name` (default: GPT-2's)."""
    path = folder / META
    if name == "number":
        if not path.is_file():
            raise DataError(f"{{0}} is set to number, but {folder} has no {META}; add a {META} with vocab_size", TOKENIZER)
        return NumberTokenizer(read_meta(path)["vocab_size"])
    if not path.is_file():
        return open_tokenizer(name or "gpt2")
    if (characters := char_tokenizer(path)) is not None:
        if name not in (None, "char"):
            raise DataError(f"{{0}} is {name}, but {folder} is character data (see its {META}); leave {{0}} out", TOKENIZER)
        return characters
    if name is None:
        size = read_meta(path)["vocab_size"]
        advice = "set {0} to the tokenizer that made the tokens, or to number if the ids do not represent text"
        raise DataError(f"{path} has {size:,} ids that are not single characters", TOKENIZER, advice=advice)
    tokenizer = open_tokenizer(name)
    check_meta_size(folder, tokenizer)
    return tokenizer


def check_meta_size(folder: Path, tokenizer: Tokenizer) -> None:
    """Raise an error if the folder has a meta.pkl whose vocab_size differs from the tokenizer's vocabulary size."""
    path = folder / META
    if path.is_file() and (size := read_meta(path)["vocab_size"]) != tokenizer.vocab_size:
        problem = f"{path} has vocab_size {size:,} but the {tokenizer.kind} tokenizer has {tokenizer.vocab_size:,} ids"
        raise DataError(f"{problem}; name the tokenizer that made the tokens, or remove {META} if it is wrong")


def meta_bytes(tokenizer: Tokenizer) -> bytes:
    """Return a meta.pkl for nanoGPT's train.py and sample.py; it maps each id to its text, with U+FFFD for partial characters."""
    itos = {token: tokenizer.decode_bytes([token]).decode("utf-8", "replace") for token in range(tokenizer.vocab_size)}
    stoi: dict[str, int] = {}
    for token, text in itos.items():
        stoi.setdefault(text, token)
    return pickle.dumps({"vocab_size": tokenizer.vocab_size, "itos": itos, "stoi": stoi})
