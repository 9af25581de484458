"""A checkpoint whose tensors several processes wrote, each its part."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ingot.errors import CheckpointError
from ingot.runs.checkpoints import _checksum, load_checkpoint, save_checkpoint
from ingot.runs.folder import INDEX
from ingot.runtime.tensors import to_array, to_record, write_tensors

WHOLE = np.arange(35, dtype=np.float32).reshape(5, 7)
CUTS = {"rank0": (slice(0, 2), slice(0, 7)), "rank1": (slice(2, 5), slice(0, 4)), "rank2": (slice(2, 5), slice(4, 7))}


def written(folder: Path, cuts: dict[str, tuple[slice, slice]]) -> Path:
    """A checkpoint of one tensor `w`, in a file for each rank."""
    path = save_checkpoint(folder, 3, {"model": [to_record("w", WHOLE, "F32")]}, {"step": 3})
    record = json.loads((path / INDEX).read_text())
    (path / "model.safetensors").unlink()
    record["files"], parts = {}, []
    for rank, place in cuts.items():
        file = f"model.{rank}.safetensors"
        size, sha256 = write_tensors(path / file, [to_record("w", WHOLE[place], "F32")])
        record["files"][file] = {"bytes": size, "sha256": sha256}
        parts.append({"file": file, "offset": [part.start for part in place]})
    record["tensors"]["model"]["w"]["parts"] = parts
    del record["sha256"]
    (path / INDEX).write_text(json.dumps({**record, "sha256": _checksum(record)}))
    return path


def test_a_tensor_that_three_ranks_wrote_is_read_whole(tmp_path):
    found = load_checkpoint(written(tmp_path, CUTS))
    assert np.array_equal(to_array(found.tensors["model"]["w"]), WHOLE)
    assert found.tensors["model"]["w"].shape == (5, 7)


@pytest.mark.parametrize(
    "cuts",
    [
        {rank: place for rank, place in CUTS.items() if rank != "rank2"},
        {**CUTS, "rank3": (slice(4, 5), slice(6, 7))},
    ],
    ids=["a part is missing", "two parts overlap"],
)
def test_parts_that_do_not_make_up_the_tensor_are_refused(tmp_path, cuts):
    with pytest.raises(CheckpointError, match="is damaged"):
        load_checkpoint(written(tmp_path, cuts))


def test_a_missing_part_file_is_named(tmp_path):
    path = written(tmp_path, CUTS)
    (path / "model.rank1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.rank1\.safetensors is missing"):
        load_checkpoint(path)
