"""Documents that another program has read before a run goes on here: they are left out of its first epoch.

A file lists them as ranges of document numbers, by bucket. It also says how many documents each bucket had, so that it is not
taken for that of other data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ingot.data.store.dataset import Dataset
from ingot.errors import DataError, Setting
from ingot.runtime.files import read_json, user_path, write_atomically

FORMAT, VERSION = "ingot-already-read", 1
Mask = NDArray[np.bool_]  # for each document of a bucket, whether it has been read


def write_already_read(path: Path, masks: Mapping[str, Mask]) -> None:
    """Write the file for these buckets."""
    told = {
        name: {"documents": len(mask), "read": np.flatnonzero(np.diff(mask, prepend=False, append=False)).reshape(-1, 2).tolist()}
        for name, mask in masks.items()
    }
    write_atomically(path, json.dumps({"format": FORMAT, "version": VERSION, "buckets": told}))


def read_already_read(path: str, dataset: Dataset) -> dict[str, Mask]:
    """Which documents of each bucket of a dataset a file lists."""
    try:
        record = read_json(user_path(path))
        if (record["format"], record["version"]) != (FORMAT, VERSION):
            raise ValueError(FORMAT)
        told = {
            name: (int(one["documents"]), np.array(one["read"], np.int64).reshape(-1, 2))
            for name, one in record["buckets"].items()
        }
    except OSError as error:
        raise DataError(f"{{0}} cannot be read: {error.strerror}", Setting("data.already_read", path)) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DataError("{0} is not a list of documents, or it is damaged", Setting("data.already_read", path)) from None
    masks = {}
    for name, bucket in dataset.buckets("train").items():
        documents = len(bucket.document_starts()) - 1
        count, ranges = told.get(name, (documents, np.empty((0, 2), np.int64)))
        if count != documents or (len(ranges) and not 0 <= ranges.min() <= ranges.max() <= documents):
            raise DataError(
                f"{{0}} lists the bucket {name} with {count:,} documents, and {dataset.folder} has {documents:,} in it",
                Setting("data.already_read", path),
                advice="it is of other data: give the data that the run began with",
            )
        masks[name] = np.zeros(documents, np.bool_)
        for first, stop in ranges.tolist():
            masks[name][first:stop] = True
    return masks
