"""Where the original stood in its data: from the rows it had read of each file to the documents in them.

It packs every file by itself, in an order drawn from the file's number in the sorted listing: 256 documents at a time, the
longest first, each into the first row that has room. So the documents of a file's first rows are found by packing it again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ingot.data.formats.gpt_simple import read_index
from ingot.data.loading.already_read import Mask
from ingot.doors.gpt_simple.checkpoint import ALL
from ingot.errors import CheckpointError

SEED = 42  # of its data order, whatever training.seed is
BUFFER = 256


def documents_read(data: Path, cursors: Mapping[str, Mapping[int, int]], max_length: int, packing: bool) -> dict[str, Mask]:
    """Which documents of each bucket lie in the rows that were read, by the numbers they have in the bucket."""
    masks = {}
    for bucket, files in cursors.items():
        paths = sorted((data / "train" / bucket).glob("*.bin"))
        if unknown := [number for number in files if not 0 <= number < len(paths)]:
            raise CheckpointError(
                f"the checkpoint has read file {unknown[0] + 1} of {data / 'train' / bucket}, which has {len(paths)}; it is of "
                "other data: give the data that the run began with"
            )
        parts = [np.empty(0, np.bool_)]
        for number, path in enumerate(paths):
            lengths = np.diff(read_index(path.with_suffix(".idx"))[1])
            parts.append(_read_of_file(lengths, number, files.get(number, 0), max_length, packing))
        masks[bucket] = np.concatenate(parts)
    return masks


def _read_of_file(lengths: NDArray[np.int64], number: int, rows: int, max_length: int, packing: bool) -> Mask:
    mask = np.full(len(lengths), rows == ALL)
    for documents in islice(file_rows(lengths, number, max_length, packing), max(0, rows)):
        mask[documents] = True
    return mask


def file_rows(lengths: NDArray[np.int64], number: int, max_length: int, packing: bool = True) -> Iterator[list[int]]:
    """The documents of each row of a file, in the order in which the original reads them."""
    order = np.arange(len(lengths))
    np.random.RandomState(hash((SEED, number)) % 2**31).shuffle(order)  # its own generator, so the same order
    if not packing:
        yield from ([document] for document in order.tolist())
        return
    cut = np.minimum(lengths, max_length)
    for start in range(0, len(order), BUFFER):
        documents = order[start : start + BUFFER]
        by_length = documents[np.argsort(-lengths[documents], kind="stable")]
        yield from _first_fit(by_length.tolist(), cut[by_length].tolist(), max_length)


def _first_fit(documents: list[int], lengths: list[int], room: int) -> list[list[int]]:
    rows: list[list[int]] = []
    filled: list[int] = []
    for document, length in zip(documents, lengths, strict=True):
        place = next((row for row, tokens in enumerate(filled) if tokens + length <= room), None) if length < room else None
        if place is None:
            rows.append([document])
            filled.append(length)
        else:
            rows[place].append(document)
            filled[place] += length
    return rows
