"""Folders in which data lies in buckets: train/NAME/ and val/NAME/, whatever files these hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ingot.data import SPLITS
from ingot.errors import DataError

Buckets = dict[str, dict[str, list[Path]]]  # of each split, the files of each bucket


def find_buckets(folder: Path, wanted: Callable[[Path], bool]) -> Buckets:
    """Of each split the buckets, and of each bucket those of its files that are wanted, in order; {} where there are none.

    A bucket to train on that has no validation files, or the other way round, is refused.
    """
    found: Buckets = {split: {} for split in SPLITS}
    for split in SPLITS:
        for bucket in sorted(path for path in folder.glob(f"{split}/*") if path.is_dir()):
            if files := sorted(file for file in bucket.iterdir() if wanted(file) and file.is_file()):
                found[split][bucket.name] = files
    train, val = found["train"], found["val"]
    for name in sorted(train.keys() ^ val.keys()):
        has, lacks = SPLITS if name in train else reversed(SPLITS)
        raise DataError(f"{folder / has / name} has no counterpart: there is nothing in {folder / lacks / name}; add some to it")
    return found if train else {}
