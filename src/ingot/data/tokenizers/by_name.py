"""From a name or a spec to a tokenizer.

A name is byte, gpt2, a file, a folder with one, or a tokenizer on the Hugging Face hub. What was asked for is what one gets, or
an error: no other tokenizer ever takes its place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.data.tokenizers.gpt2_bpe import END_OF_TEXT, GPT2Tokenizer, from_merges, from_ranks
from ingot.data.tokenizers.hf_json import from_json, hf_from_spec
from ingot.data.tokenizers.plain import ByteTokenizer, char_from_spec, number_from_spec, read_byte_file
from ingot.data.tokenizers.sentencepiece import SentencePieceTokenizer
from ingot.data.tokenizers.tokenizer_base import MAX_FILE_BYTES, NARROW, Tokenizer, unpack
from ingot.errors import ConfigError, DataError, IngotError
from ingot.runtime.files import open_to_read, user_path

# Tokenizers that are made from the text they are for, and known by a name only until then: `char` and `bpe:N`.

CHAR, BPE = "char", "bpe:"
LEARNED_BYTES = 1 << 24  # of the text that is learned from: 2,048 ids of 5 MB take 2.4 s of a core
SEAM_BYTES = 1 << 16  # where the end of a word is looked for: Chinese may have its last space long before


def is_made(name: str) -> bool:
    """Whether a tokenizer of this name is made from the text it is for."""
    return name == CHAR or name.startswith(BPE)


def fits(name: str, tokenizer: Tokenizer, asked: str | None) -> bool:
    """Whether a tokenizer is what this name became, whatever text it was made from; `asked` is the name it had, where known.

    A text may have pieces for less than N ids, so only where the name is unknown does the size of the vocabulary have to be N.
    """
    if name == CHAR:
        return tokenizer.kind == CHAR
    size = bpe_size(asked) if asked is not None and asked.startswith(BPE) else tokenizer.vocab_size
    return tokenizer.kind == "huggingface" and tokenizer.lossless and size == bpe_size(name)


def bpe_size(name: str) -> int:
    """The N of `bpe:N`."""
    size = name.removeprefix(BPE)
    if not (size.isascii() and size.isdigit() and 257 <= int(size) <= NARROW):
        raise ConfigError(f"{name} does not say how many ids to learn; give {BPE}N, with N from 257 to {NARROW:,}")
    return int(size)


def learn_bpe(name: str, documents: Iterable[bytes]) -> Tokenizer:
    """Learn `bpe:N` from the first of the documents of a training text."""
    from ingot.data.tokenizers.learn_vocabulary import learn

    contents = learn("bpe", (text.decode() for text in _first(documents)), bpe_size(name))
    if contents is None:
        raise DataError(f"there is no text to learn {name} from; give documents with text")
    return from_json(contents, END_OF_TEXT)


def _first(documents: Iterable[bytes]) -> Iterator[bytes]:
    left = LEARNED_BYTES
    for text in documents:
        if len(text) > left:
            yield text[: _seam(text, left)]
            return
        yield text
        left -= len(text)


def _seam(text: bytes, end: int) -> int:
    """Where to cut a longer text: between two words near the end, or else between two characters."""
    cut = max(text.rfind(space, max(end - SEAM_BYTES, 0), end) for space in (b" ", b"\n", b"\r"))
    if cut >= 0:
        return cut
    while text[end] & 0xC0 == 0x80:  # inside a character of UTF-8
        end -= 1
    return end


SPECS: dict[str, Callable[[dict[str, Any]], Tokenizer]] = {
    "byte": lambda spec: ByteTokenizer(),
    "char": char_from_spec,
    "gpt2": lambda spec: GPT2Tokenizer(),
    "sentencepiece": lambda spec: SentencePieceTokenizer(unpack(spec)),
    "huggingface": hf_from_spec,
    "number": number_from_spec,
}
KINDS = tuple(SPECS)
SUFFIXES = (".model", ".json", ".tiktoken")
MERGES = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))
HUB = "hf:"
HUB_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
HOW = (
    "byte, char, bpe:N, gpt2, a file (.model, tokenizer.json), a folder with one, or a name on the Hugging Face hub (ORG/NAME, "
    "hf:NAME)"
)


def from_spec(spec: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that gave `spec`."""
    kind = spec.get("kind")
    if not isinstance(kind, str) or kind not in SPECS:
        raise DataError(f"unknown tokenizer kind {kind!r}; this version of ingot knows {', '.join(KINDS)}")
    return SPECS[kind](dict(spec))


def open_tokenizer(name: str, bos: str | None = None) -> Tokenizer:
    """The tokenizer called `name`. `bos`: the token that starts documents, where a tokenizer.json does not say; "" for none."""
    if name in ("byte", "gpt2"):
        _refuse_bos(bos, name)
        return ByteTokenizer() if name == "byte" else GPT2Tokenizer()
    if is_made(name):
        _refuse_bos(bos, name)
        raise ConfigError(f"a {name} tokenizer is made from the text it is for; prepare that text with --tokenizer {name}")
    if name == "number":
        raise ConfigError("number is for nanoGPT's folders whose ids stand for no text; their meta.pkl says how many there are")
    path = user_path(name)
    if name and not name.startswith(HUB) and path.exists():
        return _open_path(path, bos)
    if name.startswith(HUB) or (re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) and path.suffix not in SUFFIXES):
        return _open_path(_fetch(name.removeprefix(HUB), name), bos, name)
    if "/" in name or path.suffix in SUFFIXES:
        raise DataError(f"no tokenizer at {name}: there is no such file or folder; give {HOW}")
    raise ConfigError(f"unknown tokenizer {name!r}; give {HOW}")


def open_unless_made(name: str, bos: str | None = None) -> Tokenizer | None:
    """The tokenizer called `name`; None for the sound name of one that is made from text, which knows no `bos`."""
    if not is_made(name) or bos is not None:
        return open_tokenizer(name, bos)
    if name != CHAR:
        bpe_size(name)
    return None


def _open_path(path: Path, bos: str | None, shown: str | None = None) -> Tokenizer:
    path = _file_in(path) if path.is_dir() else path
    try:
        if path.suffix == ".json" and path.name not in dict(MERGES):
            contents = _read(path)
            if (opened := read_byte_file(contents)) is None:
                return from_json(contents, bos)
            _refuse_bos(bos, str(path))
            return opened
        _refuse_bos(bos, str(path))
        if path.suffix == ".model":
            return SentencePieceTokenizer(_read(path))
        if path.suffix == ".tiktoken":
            return from_ranks(_read(path))
        if path.name in dict(MERGES):
            return from_merges(_read(path), _read(path.with_name(dict(MERGES)[path.name])))
    except DataError as error:
        raise error.within(str(shown or path)) from None
    raise ConfigError(f"{path} is not a tokenizer that can be read; give {HOW}")


def _file_in(folder: Path) -> Path:
    """The file of a folder that says most: tokenizer.json, a .model, GPT-2's two files, ranks."""
    if (folder / "tokenizer.json").is_file():
        return folder / "tokenizer.json"
    for pattern in ("*.model", *(first for first, _ in MERGES), "*.tiktoken"):
        found = sorted(folder.glob(pattern))
        if len(found) > 1:
            raise DataError(f"{folder} holds several tokenizers: {', '.join(path.name for path in found)}; name one of the files")
        if found:
            return found[0]
    raise DataError(
        f"no tokenizer in {folder}; it needs tokenizer.json, a .model, encoder.json and vocab.bpe, or a .tiktoken file"
    )


def _read(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise DataError(f"{path.stat().st_size:,} bytes are too many for a tokenizer")
        with open_to_read(path) as file:
            return file.read()
    except OSError as error:
        raise DataError(f"cannot read {path.name}: {error.strerror}") from error


def _refuse_bos(bos: str | None, name: str) -> None:
    if bos is not None:
        raise ConfigError(f"bos {bos!r} is for a tokenizer.json; {name} says itself how documents start")


def _fetch(repository: str, name: str) -> Path:
    """The tokenizer file of a hub repository, from the hub or its cache."""
    from ingot.data.hub import FileInfo, Hub, Missing, Unreachable

    hub, unreachable = Hub(repository, "model", attempts=1), None
    for file in HUB_FILES:
        try:
            return hub.fetch(file, None, FileInfo())
        except Missing:
            continue
        except Unreachable as error:
            hub.offline, unreachable = True, unreachable or error  # another file may be in the cache
        except IngotError as error:
            raise DataError(f"cannot fetch the tokenizer {name}, which is not a file or folder here: {error}") from None
    if unreachable:
        raise DataError(
            f"cannot fetch the tokenizer {name}, which is not a file or folder here: {unreachable}; go online once, or give the "
            "path of its tokenizer.json"
        )
    raise DataError(f"the repository {name} has none of {', '.join(HUB_FILES)}; give the path of a tokenizer file")


# Whether a tokenizer made some tokens: given the text they stand for, it makes the same again, and another hardly ever does.

HEAD, ENOUGH = 96, 16  # tokens that are tried, and without which they say too little
SHARE = 0.75  # of the texts tried that come back; of web text and code all did, with another tokenizer at most 17 of 32


@dataclass
class RoundTrips:
    """How many samples were tried, and the numbers of those that became other tokens."""

    tried: int = 0
    wrong: list[int] = field(default_factory=list)

    @property
    def fit(self) -> bool:
        """Whether the tokenizer made the tokens."""
        return self.tried - len(self.wrong) >= SHARE * self.tried


def round_trips(tokenizer: Tokenizer, samples: Iterable[NDArray[Any]], trust: bool = False) -> RoundTrips:
    """Which samples of tokens become the same again when their text is encoded; `trust`: none is tried."""
    found = RoundTrips()
    if trust:
        return found
    for number, ids in enumerate(samples):
        if (same := _round_trips(tokenizer, ids)) is not None:
            found.tried += 1
            found.wrong += [] if same else [number]
    return found


def _round_trips(tokenizer: Tokenizer, ids: NDArray[Any]) -> bool | None:
    """Whether the first text of `ids` becomes them again; None where they have too little text without a mark in it."""
    empty = np.flatnonzero(tokenizer.target_bytes(ids, ids) == 0)
    marks = [place for place in empty if tokenizer.is_special(int(ids[place]))]
    text = next((part[:HEAD] for part in np.split(ids, marks) if len(part) > ENOUGH), ids[:0])
    if not len(text):
        return None
    quarter = len(text) // 4
    try:
        return text[quarter:-quarter].astype(tokenizer.dtype).tobytes() in tokenizer.encode(tokenizer.decode(text)).tobytes()
    except DataError:
        return False
