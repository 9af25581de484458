"""Blocks of text, the unit of work for encoding.

Text is split into blocks by size alone, so the result does not depend on the number of workers. JSON lines are parsed by the
workers.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ingot.data.store.writer import Encoded
from ingot.data.text.text_files import READERS, UTF8, kind_of, open_unpacked, read_documents, read_lines
from ingot.data.tokenizers import Tokenizer
from ingot.data.tokenizers.tokenizer_base import OUTSIDE, utf8
from ingot.runtime.files import reading

BLOCK_BYTES = 1 << 20  # target block size; a longer document forms its own block


class Lines(NamedTuple):
    """Whole lines of a JSON lines file, and the number of lines and bytes before them."""

    path: Path
    text_field: str
    data: bytes
    lines_before: int
    bytes_before: int


class EveryText(list[str]):
    """A list of texts in which an empty text counts as a document that consists only of a BOS token."""


Block = Lines | list[str]


def read_blocks(files: Sequence[Path], text_field: str, advance: Callable[[int], None], encoding: str = UTF8) -> Iterator[Block]:
    """Yield the documents of files as blocks; `advance` is called with the number of bytes just read."""
    for has_lines, group in groupby(files, lambda path: READERS.get(kind_of(path)) is read_lines):
        if not has_lines:
            yield from text_blocks(read_documents(group, text_field, advance, encoding))
            continue
        for path in group:
            lines = size = 0
            with reading(path), open_unpacked(path, advance, encoding) as stream:
                while data := stream.read(BLOCK_BYTES):
                    data += b"" if data.endswith(b"\n") else stream.readline()
                    yield Lines(path, text_field, data, lines, size)
                    lines, size = lines + data.count(b"\n"), size + len(data)


def text_blocks(texts: Iterable[str], characters: int = BLOCK_BYTES, documents: int | None = None) -> Iterator[list[str]]:
    """Yield texts in blocks of about `characters` characters and at most `documents` documents."""
    block: list[str] = []
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
    """Return the encoded documents of a block."""
    documents, empty = texts_of(block)
    ids, tokens = tokenizer.encode_batch(documents)
    sizes = np.fromiter(map(len, documents), np.int64, len(documents))
    if tokenizer.lossless:
        return Encoded(ids, tokens, sizes, sizes, empty)
    ends = np.cumsum(tokens)
    previous = np.append(np.int32(OUTSIDE), ids.astype(np.int32))[: len(ids)]
    previous[(ends - tokens)[tokens > 0]] = OUTSIDE
    counted = np.append(0, np.cumsum(tokenizer.target_bytes(previous, ids), dtype=np.int64))
    return Encoded(ids, tokens, sizes, np.diff(counted[ends], prepend=0), empty)


def texts_of(block: Block) -> tuple[list[bytes], int]:
    """Return the documents of a block in UTF-8, and the number of empty texts that were skipped."""
    texts: Iterable[str] = block if isinstance(block, list) else ()
    if isinstance(block, Lines):
        lines = io.BytesIO(block.data)
        texts = read_lines(lines, block.path, block.text_field, block.lines_before, block.bytes_before)
    encoded = list(map(utf8, texts))
    documents = encoded if isinstance(block, EveryText) else [text for text in encoded if text]
    return documents, len(encoded) - len(documents)
