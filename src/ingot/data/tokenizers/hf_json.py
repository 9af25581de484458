"""Any tokenizer.json, read with the library `tokenizers`.

The bytes of an id are derived from the file. Byte-level vocabularies spell bytes in a fixed alphabet, so their bytes are exact.
Vocabularies that write a space as U+2581 are read like SentencePiece's, with one byte per space. In all others, the bytes of an
id are those that decoding it after a word adds to the text. Special tokens in a text are encoded as plain text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np

from ingot.data.tokenizers.tokenizer_base import SPACE, FileTokenizer, IdArray, Ids, NoSpacePiece, byte_alphabet, check_size, utf8
from ingot.data.tokenizers.word_table import GPT2_RULE, WordTable
from ingot.errors import DataError

# If the file's post-processor prepends nothing to a text, the first of these names that is a special token is the BOS token.
STARTS = (
    "<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "<|bos|>", "[BOS]", "<|endoftext|>", "[CLS]",
)  # fmt: skip
ENDS = ("</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>", "<|eos|>", "[EOS]", "[SEP]")
PADS = ("<pad>", "[PAD]", "<|pad|>", "<|padding|>")
BYTE = re.compile("<0x([0-9A-F]{2})>")
ALPHABET = byte_alphabet()
DAMAGED = "this is not a tokenizer.json, or it is damaged"
MAX_GROWTH = 1000  # maximum factor by which consecutive replacements may lengthen a text
KEEPING = ("Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")  # Split behaviours that drop no text
Entry = tuple[bytes | None, bool]  # the bytes of an id (None: special), and whether they begin with a word's leading space


class HFTokenizer(FileTokenizer):
    """A tokenizer from a tokenizer.json; `bos` is the id before every document."""

    kind = "huggingface"

    def __init__(self, contents: bytes, bos: int | None, built: Any = None) -> None:
        self.contents, self.bos, self._tokenizer = contents, bos, built or _build(contents)
        specials = _specials(self._tokenizer)
        self.eos, self.pad = _named(specials, ENDS), _named(specials, PADS)
        if bos is not None and (type(bos) is not int or bos not in specials):
            raise DataError(f"damaged tokenizer: bos {bos} is not a special token")
        with _explained(DAMAGED):
            config = json.loads(contents)
            decoders = list(_components(config.get("decoder")))
            types = {part.get("type") for part in decoders}
            spaces = any(part.get("type") == "Replace" and part.get("pattern") == {"String": SPACE} for part in decoders)
            self._style = "bytes" if "ByteLevel" in types else "spaces" if spaces or "Metaspace" in types else "words"
            self.lossless = _is_lossless(config)
            pieces, spaced = zip(*_pieces(self._tokenizer, config, self._style), strict=True)
            first = self._tokenizer.encode("a", add_special_tokens=False).ids[:1]
        adds_space = any(spaced[token] for token in first)
        self._use(pieces, spaced, adds_space=adds_space, counts_first_space=not adds_space)

    @property
    def marks_texts(self) -> bool:
        """True if the file's post-processor prepends `bos` to a text."""
        return self.bos is not None and self._tokenizer.encode("a").ids[:1] == [self.bos]

    def encode(self, text: str) -> IdArray:
        utf8(text)
        with _explained("the tokenizer cannot encode this text"):
            return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, self.dtype)

    def decode(self, ids: Ids) -> str:
        if self._style == "words":  # only the library knows where these vocabularies omit spaces
            return str(self._tokenizer.decode(self._checked(ids).tolist()))
        return super().decode(ids)

    def spec(self) -> dict[str, Any]:
        return {"kind": self.kind, "bos": self.bos, **super().spec()}

    def _encode_all(self, texts: Sequence[bytes]) -> Iterable[IdArray]:
        if self._table:
            return self._table.encode_all(texts)
        return (np.array(ids, self.dtype) for ids in self._encode_batch([text.decode() for text in texts]))

    def _encode_batch(self, texts: list[str]) -> list[list[int]]:
        with _explained("the tokenizer cannot encode this text"):
            return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    @property
    def splits_like_gpt2(self) -> bool:
        """True for a byte-level tokenizer whose only preprocessing is GPT-2's regex."""
        config = json.loads(self.contents)
        splits, added = config.get("pre_tokenizer") or {}, config.get("added_tokens") or ()
        by_rule = splits.get("type") == "ByteLevel" and splits.get("use_regex", True) and not splits.get("add_prefix_space")
        return bool(by_rule and not config.get("normalizer") and all(token.get("special") for token in added))

    @cached_property
    def _table(self) -> WordTable | None:
        """Return a word cache if splits_like_gpt2, else None."""
        if not self.splits_like_gpt2:
            return None
        return WordTable(
            lambda words, _: self._encode_batch([word.decode() for word in words]), self.encode, *GPT2_RULE, dtype=self.dtype
        )


def from_json(contents: bytes, bos: str | None = None) -> HFTokenizer:
    """Build a tokenizer from a tokenizer.json. `bos` names the BOS token; "" means no BOS token; if None, it is inferred."""
    tokenizer = _build(contents)
    specials = _specials(tokenizer)
    if bos is None:
        with _explained(DAMAGED):
            marked, plain = (tokenizer.encode("a", add_special_tokens=special).ids[:1] for special in (True, False))
        is_marked = marked and marked != plain and marked[0] in specials
        return HFTokenizer(contents, int(marked[0]) if is_marked else _named(specials, STARTS), tokenizer)
    if bos and tokenizer.token_to_id(bos) not in specials:
        listed = ", ".join(list(specials.values())[:10]) or "none"
        raise DataError(f"{bos!r} is not a special token and cannot start documents; special tokens: {listed}")
    return HFTokenizer(contents, tokenizer.token_to_id(bos) if bos else None, tokenizer)


def _build(contents: bytes) -> Any:
    import tokenizers

    with _explained(DAMAGED):
        tokenizer = tokenizers.Tokenizer.from_str(contents.decode())
        config = json.loads(contents)
        for step in ("normalizer", "decoder"):  # replacements that expand each other's output could exhaust memory
            growths: list[tuple[str, int]] = []  # each replacement's output, and its maximum growth factor
            for part in (part for part in _components(config.get(step)) if part.get("type") == "Replace"):
                pattern, content = part["pattern"].get("String"), part["content"]  # `pattern` is None for a regular expression
                fed = max((growth for text, growth in growths if pattern is None or set(pattern) & set(text)), default=1)
                longer = len(content) > len(pattern or "x")
                growths.append((content, fed * (1 + len(content) // len(pattern or "x") if longer else 1)))
                if growths[-1][1] > MAX_GROWTH:
                    raise DataError(f"the Replace steps of this tokenizer.json can make a text over {MAX_GROWTH:,} times longer")
    check_size(1 + max(tokenizer.get_vocab().values(), default=-1))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # encode special tokens in a text as plain text
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None  # the same text must always get the same ids
    return tokenizer


@contextmanager
def _explained(problem: str) -> Iterator[None]:
    """Convert any exception of the library, including Rust panics, to a DataError that begins with `problem`."""
    try:
        yield
    except DataError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DataError(f"{problem}: {' '.join(str(error).split())[:200]}") from None


def _specials(tokenizer: Any) -> dict[int, str]:
    return {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}


def _named(specials: dict[int, str], names: Sequence[str]) -> int | None:
    return next((i for name in names for i, content in specials.items() if content == name), None)


def _components(component: Any) -> Iterator[dict[str, Any]]:
    if isinstance(component, dict):
        yield component
        for key in ("decoders", "pretokenizers", "normalizers"):
            for inner in component.get(key) or ():
                yield from _components(inner)


def _pieces(tokenizer: Any, config: dict[str, Any], style: str) -> list[Entry]:
    vocabulary = tokenizer.get_vocab()
    table: list[Entry] = [(None, False)] * (1 + max(vocabulary.values()))
    if style == "words":  # the bytes of an id are those that decoding it after a word adds
        word = tokenizer.encode("a", add_special_tokens=False).ids
        before = tokenizer.decode(word, skip_special_tokens=False)
        texts = tokenizer.decode_batch([[*word, i] for i in range(len(table))], skip_special_tokens=False)
        table = [((piece := text.removeprefix(before).encode()), piece.startswith(b" ")) for text in texts]
    for token, i in vocabulary.items():
        if style == "bytes":
            piece = bytes(ALPHABET[character] for character in token) if set(token) <= set(ALPHABET) else token.encode()
            table[i] = (piece, piece.startswith(b" "))
        elif style == "spaces":
            byte = BYTE.fullmatch(token)
            spaced = (token.replace(SPACE, " ").encode(), token.startswith(SPACE))
            table[i] = (bytes([int(byte[1], 16)]), False) if byte else spaced
    for i, added in tokenizer.get_added_tokens_decoder().items():
        table[i] = (None if added.special else added.content.encode(), False)
    model = config["model"]
    unknown = vocabulary.get(model.get("unk_token"), model.get("unk_id"))
    if isinstance(unknown, int) and style != "bytes" and unknown < len(table):
        # In SentencePiece-style vocabularies a new text starts after <unk>; elsewhere <unk> is empty and the next space is kept.
        table[unknown] = (None if style == "spaces" else b"", False)
    if style == "spaces" and (b" ", True) not in table:
        raise NoSpacePiece(
            "the vocabulary has no piece for a single space (U+2581), so byte counts would be wrong; choose another tokenizer"
        )
    return table


def _is_lossless(config: dict[str, Any]) -> bool:
    """Return True for plain byte-level BPE: no component changes, adds or drops text."""
    model, splits = config["model"], list(_components(config.get("pre_tokenizer")))
    added = [token for token in config.get("added_tokens") or () if not token.get("special")]
    return (
        model.get("type") == "BPE"
        and set(ALPHABET) <= set(model.get("vocab") or ())
        and not (model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"))
        and not config.get("normalizer")
        and [part.get("type") for part in _components(config.get("decoder"))] == ["ByteLevel"]
        and any(part.get("type") == "ByteLevel" for part in splits)
        and all(part.get("type") in ("ByteLevel", "Sequence", "Digits", "Split") for part in splits)
        and not any(part.get("add_prefix_space") for part in splits)
        and all(part.get("behavior") in KEEPING for part in splits if part["type"] == "Split")
        and not any(token.get("lstrip") or token.get("rstrip") for token in added)
    )
