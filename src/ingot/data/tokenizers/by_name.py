"""Open a tokenizer by its name or its spec, and learn the tokenizers that depend on the text.

A name is `byte`, `gpt2`, a tokenizer file, a folder with such a file, or a repository on the Hugging Face hub. The result is
exactly the named tokenizer or an error, never a fallback. `char` and `bpe:N` are learned from the text that they will encode and
cannot be opened before that. `bpe:N` learns at most N ids of byte-level BPE, which is lossless, from training text only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ingot.data.tokenizers.gpt2_bpe import END_OF_TEXT, GPT2Tokenizer, from_merges
from ingot.data.tokenizers.hf_json import HFTokenizer, from_json
from ingot.data.tokenizers.plain import ByteTokenizer, CharTokenizer, NumberTokenizer, read_byte_file
from ingot.data.tokenizers.sentencepiece import SentencePieceTokenizer
from ingot.data.tokenizers.tokenizer_base import MAX_FILE_BYTES, NARROW, Tokenizer, unpack
from ingot.errors import ConfigError, DataError, IngotError
from ingot.runtime.files import open_to_read, user_path

CHAR, BPE = "char", "bpe:"
LEARNED_BYTES = 1 << 24  # bpe:N learns from at most this many bytes of training text; 2,048 ids from 5 MB take 2.4 s on one core
SEAM_BYTES = 1 << 16  # truncate at a space or line break at most this many bytes before the limit; Chinese text has few of either
SUFFIXES = (".model", ".json")
MERGES = {"encoder.json": "vocab.bpe", "vocab.json": "merges.txt"}  # GPT-2's vocabulary file -> its merges file
HUB = "hf:"
HUB_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
HOW = (
    "byte, char, bpe:N, gpt2, a file (.model, tokenizer.json), a folder with such a file, or a name on the Hugging Face hub "
    "(ORG/NAME, hf:NAME)"
)


def from_spec(spec: Mapping[str, Any]) -> Tokenizer:
    """Rebuild the tokenizer that a spec describes."""
    kind = spec.get("kind")
    kinds: dict[Any, Callable[[], Tokenizer]] = {
        "byte": ByteTokenizer,
        "char": lambda: CharTokenizer(str.encode(spec["characters"]).decode()),  # raises for non-strings and lone surrogates
        "gpt2": GPT2Tokenizer,
        "sentencepiece": lambda: SentencePieceTokenizer(unpack(spec)),
        "huggingface": lambda: HFTokenizer(unpack(spec), spec.get("bos")),
        "number": lambda: NumberTokenizer(spec["vocab_size"]),
    }
    if not isinstance(kind, str) or kind not in kinds:
        raise DataError(f"unknown tokenizer kind {kind!r}; this version of ingot supports {', '.join(kinds)}")
    try:
        return kinds[kind]()
    except (LookupError, TypeError, ValueError) as error:
        raise DataError(f"damaged tokenizer: its {kind} description has missing or wrong values ({error!r})") from None


def open_tokenizer(name: str, bos: str | None = None) -> Tokenizer:
    """Open the tokenizer called `name`. `bos` overrides the BOS token of a tokenizer.json; "" means no BOS token."""
    if name in ("byte", "gpt2"):
        _refuse_bos(bos, name)
        return ByteTokenizer() if name == "byte" else GPT2Tokenizer()
    if is_learned(name):
        _refuse_bos(bos, name)
        raise ConfigError(f"a {name} tokenizer must first be trained on text; run: ingot data prepare PATH --tokenizer {name}")
    if name == "number":
        raise ConfigError("the number tokenizer is only for nanoGPT folders with a meta.pkl and ids that do not represent text")
    path = user_path(name)
    if name and not name.startswith(HUB) and path.exists():
        return _open_path(path, bos)
    if name.startswith(HUB) or (re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) and path.suffix not in SUFFIXES):
        from ingot.data.hub import Hub, Unreachable

        try:
            folder = Hub(name.removeprefix(HUB), "model").snapshot(HUB_FILES)
        except IngotError as error:
            advice = "; go online once, or give the path of its tokenizer.json" if isinstance(error, Unreachable) else ""
            raise DataError(f"cannot fetch the tokenizer {name}, which is not a local file or folder: {error}{advice}") from None
        return _open_path(folder, bos, name)
    if "/" in name or path.suffix in SUFFIXES:
        raise DataError(f"no tokenizer at {name}: no such file or folder; give {HOW}")
    raise ConfigError(f"unknown tokenizer {name!r}; give {HOW}")


def open_unless_learned(name: str, bos: str | None = None) -> Tokenizer | None:
    """Open a tokenizer. If it must be learned from text, return None after checking its name and that `bos` is None."""
    if not is_learned(name) or bos is not None:
        return open_tokenizer(name, bos)
    if name != CHAR:
        bpe_size(name)
    return None


def is_learned(name: str) -> bool:
    """Return True for the names of tokenizers that are learned from the text they will encode: char and bpe:N."""
    return name == CHAR or name.startswith(BPE)


def is_learned_as(name: str, tokenizer: Tokenizer, recorded_name: str | None) -> bool:
    """Return True if a tokenizer was learned as `name`; `recorded_name` is the name it was learned under, if known.

    Learning bpe:N from a small text can give fewer than N ids, so the recorded name takes precedence over the vocabulary size.
    """
    if name == CHAR:
        return tokenizer.kind == CHAR
    size = bpe_size(recorded_name) if recorded_name is not None and recorded_name.startswith(BPE) else tokenizer.vocab_size
    return tokenizer.kind == "huggingface" and tokenizer.lossless and size == bpe_size(name)


def bpe_size(name: str) -> int:
    """Return N from the tokenizer name `bpe:N`; raise ConfigError if it is not a valid vocabulary size."""
    size = name.removeprefix(BPE)
    if not (size.isascii() and size.isdigit() and 257 <= int(size) <= NARROW):
        raise ConfigError(f"{name} has no valid vocabulary size; give {BPE}N, with N from 257 to {NARROW:,}")
    return int(size)


def learn_from(name: str | None, texts: Callable[[], Iterable[str]], training_texts: Callable[[], Iterable[bytes]]) -> Tokenizer:
    """Learn a `char` tokenizer from all texts, or `bpe:N` from the first LEARNED_BYTES bytes of the training texts."""
    if name == CHAR:
        return CharTokenizer(character for text in texts() for character in set(text))
    assert name is not None
    from ingot.data.tokenizers.learn_vocabulary import learn

    contents = learn("bpe", _first_bytes(training_texts()), bpe_size(name))
    if contents is None:
        raise DataError(f"no text to learn {name} from; give documents with text")
    return from_json(contents, END_OF_TEXT)


def _first_bytes(documents: Iterable[bytes]) -> Iterator[str]:
    left = LEARNED_BYTES
    for text in documents:
        if len(text) > left:  # truncate between two words, or else between two characters
            cut = max(text.rfind(space, max(left - SEAM_BYTES, 0), left) for space in (b" ", b"\n", b"\r"))
            yield text[: cut if cut >= 0 else left].decode(errors="ignore")
            return
        yield text.decode()
        left -= len(text)


def _open_path(path: Path, bos: str | None, shown: str | None = None) -> Tokenizer:
    if path.is_dir() or shown:  # a folder: use tokenizer.json, a .model or GPT-2's two files, in this order
        where = shown or path
        found = (sorted(path.glob(pattern)) for pattern in ("tokenizer.json", "*.model", *MERGES))
        if not (paths := next(filter(None, found), [])):
            raise DataError(f"no tokenizer in {where}; expected tokenizer.json, a .model, or encoder.json and vocab.bpe")
        path, *others = paths
        if others:
            names = ", ".join(each.name for each in paths)
            raise DataError(f"{where} holds several tokenizers: {names}; name one of the files")
    is_json = path.suffix == ".json" and path.name not in MERGES
    if not is_json:
        _refuse_bos(bos, str(path))
    try:
        if is_json:
            contents = _read(path)
            if byte_tokenizer := read_byte_file(contents):
                _refuse_bos(bos, str(path))
            return byte_tokenizer or from_json(contents, bos)
        if path.suffix == ".model":
            return SentencePieceTokenizer(_read(path))
        if path.name in MERGES:
            return from_merges(_read(path), _read(path.with_name(MERGES[path.name])))
    except DataError as error:
        raise error.within(str(shown or path)) from None
    raise ConfigError(f"{path} is not a tokenizer file; give {HOW}")


def _read(path: Path) -> bytes:
    try:
        with open_to_read(path) as file:
            contents = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise DataError(f"cannot read {path.name}: {error.strerror}") from error
    if len(contents) > MAX_FILE_BYTES:
        raise DataError(f"a tokenizer file may have at most {MAX_FILE_BYTES:,} bytes")
    return contents


def _refuse_bos(bos: str | None, name: str) -> None:
    if bos is not None:
        raise ConfigError(f"bos {bos!r} applies only to a tokenizer.json; {name} already defines how documents start")


# Round-trip check: the right tokenizer encodes the decoded text to the same tokens; a different tokenizer hardly ever does.

HEAD, ENOUGH = 96, 16  # tokens checked per sample: at most the first 96 of a document with more than 16
MIN_MATCHING = 0.75  # fraction of samples that must round-trip: all do on web text and code, at most 17/32 with a wrong tokenizer


class RoundTrips(NamedTuple):
    """The number of samples checked, and the indices of those that did not round-trip."""

    tried: int
    wrong: list[int]

    @property
    def fit(self) -> bool:
        """True if enough samples round-trip to conclude that this tokenizer produced the tokens."""
        return self.tried - len(self.wrong) >= MIN_MATCHING * self.tried


def round_trips(tokenizer: Tokenizer, samples: Iterable[NDArray[Any]]) -> RoundTrips:
    """Decode and re-encode samples of tokens and report which ones changed."""
    tried, wrong = 0, []
    for number, ids in enumerate(samples):
        # Use the first document in the sample with enough tokens between special ids.
        empty = np.flatnonzero(tokenizer.target_bytes(ids, ids) == 0)
        special = [position for position in empty if tokenizer.is_special(int(ids[position]))]
        text = next((part[:HEAD] for part in np.split(ids, special) if len(part) > ENOUGH), ids[:0])
        if not len(text):
            continue
        quarter = len(text) // 4
        middle = text[quarter:-quarter].astype(tokenizer.dtype).tobytes()
        tried += 1
        try:
            same = middle in tokenizer.encode(tokenizer.decode(text)).tobytes()
        except DataError:
            same = False
        wrong += [] if same else [number]
    return RoundTrips(tried, wrong)
