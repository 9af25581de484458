"""Text in blocks: cut by size alone, so that neither the blocks nor what becomes of them depends on who encodes them.

Lines of JSON are parsed by whoever encodes them.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from pydantic_core import from_json

from ingot.data.store.shards import PART_TOKENS
from ingot.data.store.writer import Encoded
from ingot.data.text.records import read_lines
from ingot.data.text.text_files import CODECS, READERS, Text, open_unpacked, read_texts
from ingot.data.tokenizers import Tokenizer
from ingot.data.tokenizers.tokenizer_base import OUTSIDE, IdArray, utf8
from ingot.errors import DataError, IngotError
from ingot.runtime.files import reading

BLOCK_BYTES = 1 << 20  # of text that one worker encodes at once
NEWLINE = ord("\n")


class Lines(NamedTuple):
    """Whole lines of a file of JSON lines, and how many lines and bytes of it come before."""

    path: Path
    text_field: str
    data: bytes
    lines_before: int
    bytes_before: int


class EveryText(list[Text]):
    """Texts of which those without a character are documents too: their mark alone."""


Block = Lines | list[Text]


def read_blocks(files: Sequence[Path], text_field: str, advance: Callable[[int], None]) -> Iterator[Block]:
    """The documents of files as blocks; `advance` is told the bytes read."""
    others: list[Path] = []
    for path in files:
        if _has_lines(path):
            yield from text_blocks(read_texts(others, text_field, advance))
            yield from _line_blocks(path, text_field, advance)
            others = []
        else:
            others.append(path)
    yield from text_blocks(read_texts(others, text_field, advance))


def text_blocks(texts: Iterable[Text], characters: int = BLOCK_BYTES, documents: int | None = None) -> Iterator[list[Text]]:
    """Texts a block at a time, of at most so many documents."""
    block: list[Text] = []
    size = 0
    for text in texts:
        block.append(text)
        size += len(text)
        if size >= characters or len(block) == documents:
            yield block
            block, size = [], 0
    if block:
        yield block


def encode_block(tokenizer: Tokenizer, block: Block) -> Encoded:
    """The documents of a block."""
    documents, empty = texts_of(block)
    ids, tokens = tokenizer.encode_batch(documents)
    sizes = np.fromiter(map(len, documents), np.int64, len(documents))
    pieces = sizes if tokenizer.lossless else _piece_bytes(tokenizer, ids, tokens)
    return Encoded(ids, tokens, sizes, pieces, empty)


def texts_of(block: Block) -> tuple[list[bytes], int]:
    """The documents of a block in UTF-8, and how many texts are none because they are empty."""
    texts = [text if isinstance(text, bytes) else utf8(text) for text in block] if isinstance(block, list) else _parse(block)
    documents = texts if isinstance(block, EveryText) else [text for text in texts if text]
    return documents, len(texts) - len(documents)


def _piece_bytes(tokenizer: Tokenizer, ids: IdArray, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """The bytes that the tokens of each document stand for, counted a part at a time: one document may be all there is."""
    ends = np.cumsum(tokens)
    starts, sums, total = (ends - tokens)[tokens > 0], np.zeros(len(ends), np.int64), 0
    for begin in range(0, len(ids), PART_TOKENS):
        part = ids[begin : begin + PART_TOKENS]
        end = begin + len(part)
        previous = np.append(np.int32(ids[begin - 1]), part[:-1].astype(np.int32))
        first, last = np.searchsorted(starts, [begin, end])
        previous[starts[first:last] - begin] = OUTSIDE
        counted = np.cumsum(tokenizer.target_bytes(previous, part), dtype=np.int64)
        first, last = np.searchsorted(ends, [begin, end], "right")
        sums[first:last] = total + counted[ends[first:last] - begin - 1]
        total += int(counted[-1])
    return np.diff(sums, prepend=0)


def encode_or_explain(tokenizer: Tokenizer, block: Block) -> Encoded | IngotError:
    """`encode_block`, with a mistake in the text as a value, which survives the way back to the user better than a raise."""
    try:
        return encode_block(tokenizer, block)
    except IngotError as error:
        return error


def _has_lines(path: Path) -> bool:
    named = path.with_suffix("") if path.suffix.lower() in CODECS else path
    return READERS.get(named.suffix.lower()) is read_lines


def _line_blocks(path: Path, text_field: str, advance: Callable[[int], None]) -> Iterator[Lines]:
    lines = size = 0
    with reading(path), open_unpacked(path, advance) as stream:
        while data := stream.read(BLOCK_BYTES):
            data += b"" if data.endswith(b"\n") else stream.readline()
            yield Lines(path, text_field, data, lines, size)
            lines, size = lines + len(_newlines(data)), size + len(data)


def _parse(block: Lines) -> list[bytes]:
    """The documents of lines; if one is wrong, from blank lines in front the reader learns its place in the file."""
    if (found := _parse_plain(block.data, block.text_field)) is not None:
        return found
    try:
        return [text.encode() for text in _read(block, [b"\n"][: block.lines_before])]
    except DataError:
        each, more = divmod(block.bytes_before, block.lines_before or 1)
        before = (b" " * (each - 1 + (line < more)) + b"\n" for line in range(block.lines_before))
        for _ in _read(block, before):
            pass
        raise


def _parse_plain(data: bytes, text_field: str) -> list[bytes] | None:
    """The texts in UTF-8 of whole lines with an object each; None: `read_lines` has to read them, or say what is wrong."""
    texts: list[bytes] = []
    begin = 0
    try:
        for end in [*_newlines(data).tolist(), *([] if data.endswith(b"\n") else [len(data)])]:
            texts.append(from_json(data[begin:end], cache_strings="none")[text_field].encode())
            begin = end + 1
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return texts


def _newlines(data: bytes) -> NDArray[np.int64]:
    return np.flatnonzero(np.frombuffer(data, np.uint8) == NEWLINE)


def _read(block: Lines, before: Iterable[bytes]) -> Iterator[str]:
    lines = chain(before, io.BytesIO(block.data))
    return read_lines(cast(BinaryIO, lines), block.path, block.text_field)


def size_of(block: Block) -> int:
    """The bytes or characters of a block, which is how much memory it takes."""
    return sum(map(len, block)) if isinstance(block, list) else len(block.data)


# Which documents are validation: always the same ones, whoever prepares them and in however many steps.

Piece = tuple[str, str | bytes]  # the split of a document, and its text or the UTF-8 of it
PART_BYTES = 1 << 20  # looked at at once
Rule = Callable[[int], str]  # the split of the document with this number, from 0


def always(split: str) -> Rule:
    """All documents are of one split."""
    return lambda number: split


@dataclass(frozen=True)
class InBucket:
    """All documents are of one split, and of one bucket of it."""

    split: str
    bucket: str

    def __call__(self, number: int) -> str:
        return self.split


def first_documents(count: int) -> Rule:
    """The first `count` documents are validation."""
    return lambda number: "val" if number < count else "train"


def spread_documents(fraction: float) -> Rule:
    """Document i is validation where ceil(i * fraction) goes up: evenly spread, the first always among them."""
    part = Fraction(str(fraction))  # exact, so that 0.1 is every tenth document however many there are
    above, below = part.numerator, part.denominator
    return lambda number: "val" if -(-(number + 1) * above // below) > -(-number * above // below) else "train"


def hold_out_ends(texts: Iterable[str | bytes], fraction: float) -> Iterator[Piece]:
    """The last `fraction` of the characters of every document is validation, rounded as nanoGPT does."""
    for text in texts:
        cut = int(len(text) * (1 - fraction)) if isinstance(text, str) else _cut(text, fraction)
        if cut or not text:
            yield "train", text[:cut]
        if cut < len(text):
            yield "val", text[cut:]


def training_texts(blocks: Iterable[tuple[Rule, Block]]) -> Iterator[bytes]:
    """The documents of blocks that are not held out."""
    count = 0
    for rule, block in blocks:
        documents, _ = texts_of(block)
        yield from (text for number, text in enumerate(documents, count) if rule(number) == "train")
        count += len(documents)


def _cut(text: bytes, fraction: float) -> int:
    """Where in UTF-8 the character is at which validation begins."""
    starts = range(0, len(text), PART_BYTES)
    counts = [int(np.count_nonzero(_begins(text[start : start + PART_BYTES]))) for start in starts]
    left = int(sum(counts) * (1 - fraction))
    for start, count in zip(starts, counts, strict=True):
        if left < count:
            return start + int(np.flatnonzero(_begins(text[start : start + PART_BYTES]))[left])
        left -= count
    return len(text)


def _begins(text: bytes) -> NDArray[np.bool_]:
    """The bytes with which characters begin."""
    return (np.frombuffer(text, np.uint8) & 0xC0) != 0x80
