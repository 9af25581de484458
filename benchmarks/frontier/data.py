"""The corpus as tokens, and the orders in which a training reads them.

Tokens are kept as 16-bit numbers on the device: 90 million of them are 181 MB, and a step's rows are one gather without a loader.
"""

from __future__ import annotations

import itertools
import json
import lzma
import multiprocessing
import os
import random
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from frontier.model import BOS

TRAIN, VALIDATION = ("train-00.jsonl.xz", "train-01.jsonl.xz"), ("val.jsonl.xz",)
CHUNK = 1 << 20  # bytes of text that a process encodes at a time
_processor: Any = None  # of an encoding process


@dataclass(frozen=True)
class Tokens:
    """Documents, each with BOS in front, joined."""

    ids: np.ndarray[Any, np.dtype[np.uint16]]
    starts: np.ndarray[Any, np.dtype[np.int64]]  # of each document
    text_bytes: int  # of the original text in UTF-8
    vocabulary: int


def load_corpus(folder: Path, tokenizer: Path, cache: Path, processes: int = 16) -> tuple[Tokens, Tokens]:
    """Training and validation tokens; kept under `cache`, where a second call finds them."""
    files = [folder / name for name in (*TRAIN, *VALIDATION)]
    key = zlib.crc32(repr([tokenizer.name, *((file.name, file.stat().st_size) for file in files)]).encode())
    kept = [cache / f"{name}-{key:08x}.npz" for name in ("train", "validation")]
    if not all(path.exists() for path in kept):
        cache.mkdir(parents=True, exist_ok=True)
        # Forked before the GPU is touched: a fresh interpreter per process would import torch sixteen times.
        pool_of = multiprocessing.get_context("fork").Pool(processes, _load_tokenizer, (str(tokenizer),))
        with ThreadPoolExecutor(len(files)) as threads, pool_of as pool:
            read = [threads.submit(lambda path: lzma.decompress(path.read_bytes()), file) for file in files]
            splits = (read[: len(TRAIN)], read[len(TRAIN) :])
            for path, split in zip(kept, splits, strict=True):
                lines = itertools.chain.from_iterable(_chunks(text.result()) for text in split)
                _save(path, list(pool.imap(_encode, lines)))
    import sentencepiece

    vocabulary = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer)).vocab_size()
    if vocabulary > 1 << 15:
        raise ValueError(f"{tokenizer} has {vocabulary:,} pieces; 16-bit numbers on the device hold {1 << 15:,}")
    train, validation = (_load(path, vocabulary) for path in kept)
    return train, validation


def _load_tokenizer(model: str) -> None:
    import sentencepiece

    global _processor
    _processor = sentencepiece.SentencePieceProcessor(model_file=model)


def _chunks(text: bytes) -> Iterator[bytes]:
    """Whole lines, about CHUNK bytes at a time."""
    start = 0
    while start < len(text):
        end = text.find(b"\n", start + CHUNK)
        end = len(text) if end < 0 else end + 1
        yield text[start:end]
        start = end


def _encode(lines: bytes) -> tuple[np.ndarray[Any, Any], list[int], int]:
    """The tokens of some lines of JSON, the length of each document and the bytes of the text."""
    texts = [json.loads(line)["text"] for line in lines.splitlines() if line.strip()]
    documents = [[BOS, *_processor.encode(text)] for text in texts]
    ids = np.fromiter(itertools.chain.from_iterable(documents), np.uint16)
    return ids, [len(document) for document in documents], sum(len(text.encode()) for text in texts)


def _save(path: Path, parts: list[tuple[np.ndarray[Any, Any], list[int], int]]) -> None:
    ids, lengths, sizes = zip(*parts, strict=True)
    ends = np.cumsum(np.fromiter(itertools.chain.from_iterable(lengths), np.int64))
    starts = np.concatenate([[0], ends[:-1]])
    partial = path.with_suffix(f".{os.getpid()}.npz")
    np.savez(partial, ids=np.concatenate(ids), starts=starts, text_bytes=np.int64(sum(sizes)))
    partial.replace(path)


def _load(path: Path, vocabulary: int) -> Tokens:
    with np.load(path) as kept:
        return Tokens(kept["ids"], kept["starts"], int(kept["text_bytes"]), vocabulary)


def toy_corpus(documents: int = 24, seed: int = 0) -> tuple[Tokens, Tokens]:
    """Made-up sentences as bytes: what a test can learn in a second."""
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(2, 6))) for _ in range(40)]

    def split(count: int) -> Tokens:
        texts = [" ".join(draw.choices(words, k=draw.randint(20, 200))) for _ in range(count)]
        encoded = [[BOS, *(byte + 2 for byte in text.encode())] for text in texts]
        starts = np.cumsum([0, *(len(document) for document in encoded)])[:-1]
        ids = np.array(list(itertools.chain.from_iterable(encoded)), np.uint16)
        return Tokens(ids, starts, sum(map(len, texts)), 258)

    return split(documents), split(max(2, documents // 6))


class Order:
    """Endless rows of training tokens; a pass reads every token once.

    `redrawn`: each pass permutes the documents, joins them, cuts the join into rows from a random place on (it is a ring) and
    permutes the rows. `rows` permutes the rows alone, `fixed` nothing. What a pass cannot fill a row with begins the next one.
    Rows have the longest length an arm uses; shorter ones are their equal parts, so a change of length skips and repeats nothing.
    """

    def __init__(self, tokens: Tokens, length: int, kind: str, seed: int, device: torch.device, part: float = 1.0):
        ids, starts = tokens.ids, tokens.starts
        if part < 1.0:  # the files are shuffled: the first documents are a fair sample
            count = max(1, int(part * len(starts)))
            ids, starts = ids[: starts[count]] if count < len(starts) else ids, starts[:count]
        self._ids = torch.from_numpy(ids.view(np.int16)).to(device)
        self._starts = torch.from_numpy(starts.astype(np.int64)).to(device)
        self._lengths = torch.diff(self._starts, append=torch.tensor([len(ids)], device=device))
        self._length, self._kind, self._seed, self._device = length, kind, seed, device
        self._carry = self._ids[:0]
        self._pass = self._read = 0
        self._rows_read = 0
        if len(ids) < 2 * length:
            raise ValueError(f"{len(ids):,} training tokens are too few for rows of {length:,}")
        self._draw()

    @property
    def passes(self) -> float:
        """How often the text was read."""
        return self._rows_read * self._length / len(self._ids)

    def _draw(self) -> None:
        generator = torch.Generator().manual_seed(1_000_003 * self._seed + self._pass)
        stream = self._joined(generator) if self._kind == "redrawn" else self._ids
        stream = torch.cat([self._carry, stream])
        if self._kind == "redrawn":
            stream = stream.roll(-int(torch.randint(self._length, (), generator=generator)))
        count = len(stream) // self._length
        self._carry = stream[count * self._length :]
        # A row's last target is the first token of the row after it in the ring.
        self._rows = torch.cat([stream, stream[:1]]).unfold(0, self._length + 1, self._length)[:count]
        order = torch.arange(count) if self._kind == "fixed" else torch.randperm(count, generator=generator)
        self._order = order.to(self._device)
        self._read = 0
        self._pass += 1

    def _joined(self, generator: torch.Generator) -> Tensor:
        """All documents in a new order."""
        order = torch.randperm(len(self._starts), generator=generator).to(self._device)
        lengths = self._lengths[order]
        shift = self._starts[order] - (lengths.cumsum(0) - lengths)  # from a place in the join to its place in the corpus
        places = torch.repeat_interleave(shift, lengths, output_size=len(self._ids))
        return self._ids[places.add_(torch.arange(len(self._ids), device=self._device))]

    def next(self, rows: int) -> Tensor:
        """The next rows with their last target, (rows, length + 1)."""
        parts: list[Tensor] = []
        while rows:
            if self._read == len(self._order):
                self._draw()
            taken = self._order[self._read : self._read + rows]
            parts.append(self._rows[taken].long())
            self._read += len(taken)
            self._rows_read += len(taken)
            rows -= len(taken)
        return torch.cat(parts)


def split_rows(rows: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets (rows, length), from rows that are a multiple of that and one longer."""
    # Contiguous whatever the length: a view with another stride would be another graph, compiled within the clock.
    return rows[:, :-1].reshape(-1, length).contiguous(), rows[:, 1:].reshape(-1, length).contiguous()


def windows(tokens: Tokens, length: int, rows: int, device: torch.device) -> list[tuple[Tensor, Tensor, Tensor]]:
    """A split in windows that do not overlap, in batches of `rows`: inputs, targets and whether a target counts.

    Every token but the very first of the split is predicted once, BOS included; the first of a window by the window before.
    """
    ids = torch.from_numpy(tokens.ids.view(np.int16)).to(device)
    step = rows * length
    batches = []
    for start in range(0, len(ids) - 1, step):
        piece = ids[start : start + step + 1].long()
        counts = torch.arange(step, device=device) < len(piece) - 1
        piece = torch.cat([piece, piece.new_full((step + 1 - len(piece),), BOS)])
        batches.append((piece[:-1].view(rows, length), piece[1:].view(rows, length), counts))
    return batches
