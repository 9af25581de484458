"""nanoGPT's data folder: train.bin and val.bin, uint16 without a header, and for characters a meta.pkl.

Nothing in the files says where documents begin: GPT-2's <|endoftext|> stands after each, characters have no mark at all.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ingot.data.formats.documents import ByteCounter, Document, Marks, PlainWriter, StreamWriter, TokenSource, cut, read_file
from ingot.data.store.shards import HEADER_BYTES, TokenStream, open_plain
from ingot.data.tokenizers import CharTokenizer, NumberTokenizer, Tokenizer, open_tokenizer
from ingot.errors import DataError, Setting
from ingot.runtime.files import write_atomically

FILES = {"train": "train.bin", "val": "val.bin"}


class NanoGPTSource(TokenSource):
    """A folder with train.bin and perhaps val.bin, or one such file."""

    format = "nanogpt"

    def __init__(self, path: Path, sure: bool) -> None:
        self.path = path
        if path.is_dir():
            files = {split: path / name for split, name in FILES.items() if (path / name).is_file()}
        else:
            files = {"val" if path.name.startswith("val") else "train": path}
        if not files:
            raise DataError(f"{path} has neither train.bin nor val.bin; it is not data of nanoGPT")
        for file in files.values() if not sure else ():
            _check_headerless(file)
        self._streams = {split: TokenStream([file], [len(open_plain(file))], open_plain) for split, file in files.items()}
        self.tokens = {split: stream.tokens for split, stream in self._streams.items()}
        self._meta = meta = next(iter(files.values())).with_name(META)
        self.about = f"nanoGPT's {' and '.join(file.name for file in files.values())}"
        if meta.is_file():
            self.tokenizer = char_tokenizer(meta)
            self.about += f" with {META}" + (f" ({self.tokenizer.vocab_size} characters)" if self.tokenizer else "")

    def documents(self, split: str, marks: Marks) -> Iterator[Document]:
        return cut(self._streams[split], marks, ends_first=True)

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        if self._meta.is_file():
            checked_size(self._meta, tokenizer)


def nanogpt_writer(folder: Path, split: str, marks: Marks, counter: ByteCounter | None, files: ExitStack) -> StreamWriter:
    """Writes train.bin or val.bin: each document with its end mark after it."""
    limit = 1 << 62
    return StreamWriter(Marks(None, marks.eos), counter, limit, lambda _: PlainWriter(folder / FILES[split], files))


def write_meta(folder: Path, tokenizer: Tokenizer) -> None:
    """Writes meta.pkl, except for GPT-2's vocabulary, which is what nanoGPT takes without one."""
    if tokenizer.kind != "gpt2":
        write_atomically(folder / META, meta_bytes(tokenizer))


def _check_headerless(path: Path) -> None:
    head, size = read_file(path, HEADER_BYTES)
    if size > HEADER_BYTES and not any(head[12:]):
        raise DataError(f"{path} begins with what looks like a damaged header; if it has none, say so with --from nanogpt")


META = "meta.pkl"
TOKENIZER = Setting("data.tokenizer")
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
                raise pickle.UnpicklingError(f"{code.name} is not a part of a vocabulary")
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
            raise DataError(f"{{0}} is number and {folder} has no {META}; write one that says vocab_size", TOKENIZER)
        return NumberTokenizer(read_meta(path)["vocab_size"])
    if not path.is_file():
        return open_tokenizer(name or "gpt2")
    if (found := char_tokenizer(path)) is not None:
        if name not in (None, "char"):
            raise DataError(f"{{0}} is {name} and {folder} has characters, as its {META} says; leave it out", TOKENIZER)
        return found
    if name is None:
        size = read_meta(path)["vocab_size"]
        raise DataError(
            f"{path} has {size:,} ids that are not single characters",
            TOKENIZER,
            advice="name what made them with {0}, or number where they stand for no text",
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
    """A meta.pkl that nanoGPT's train.py and sample.py read; ids that are not a character on their own show as they decode."""
    itos = {token: tokenizer.decode_bytes([token]).decode("utf-8", "replace") for token in range(tokenizer.vocab_size)}
    stoi: dict[str, int] = {}
    for token, text in itos.items():
        stoi.setdefault(text, token)
    return pickle.dumps({"vocab_size": tokenizer.vocab_size, "itos": itos, "stoi": stoi})
