"""Documents that another program has read are left out of the first epoch, and only of that."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ingot.config.loading import load_config
from ingot.data.formats.gpt_simple_folder import index_bytes
from ingot.data.loading.data_path import open_dataset
from ingot.data.loading.rows import make_rows, read_already_read, write_already_read
from ingot.errors import ConfigError, DataError

DOCUMENTS = 40


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two buckets; a document is two ids of its own."""
    for split in ("train", "val"):
        for number, bucket in enumerate(("a", "b")):
            folder = tmp_path / "data" / split / bucket
            folder.mkdir(parents=True)
            tokens = [[10 + number, 20 + document] for document in range(DOCUMENTS)]
            np.array(tokens, "<u2").tofile(folder / "0.bin")
            (folder / "0.idx").write_bytes(index_bytes(list(range(0, 2 * DOCUMENTS + 1, 2)), [0] * DOCUMENTS, 2))
    return tmp_path / "data"


def documents_of_epochs(data: Path, file: Path, epochs: int, **settings: object) -> list[list[int]]:
    """The documents of the bucket a in the order in which they are read."""
    given = {"path": str(data), "tokenizer": "byte", "trust_tokens": True, "seq_len": 8, "sampling": "pack", "epochs": epochs}
    sections = {"data": {**given, "already_read": str(file), **settings}, "training": {"max_steps": 1, "tokens_per_step": 8}}
    config = load_config(python=sections, environment={}).config.data
    rows = make_rows(config, 1, open_dataset(str(data), "byte", True)).sources["a"]  # type: ignore[attr-defined]
    count = rows.available(range(1000), epochs)
    batch = np.empty((count, rows.planes, 8), np.int32)
    rows.read(range(count), range(count), batch)
    return [[int(row[place]) - 20 for place in (1, 3, 5, 7) if row[place]] for row in batch[:, 0]]


def test_they_are_left_out_of_the_first_epoch_and_read_in_the_second(data: Path, tmp_path: Path) -> None:
    mask = np.zeros(DOCUMENTS, bool)
    mask[[0, 3, 4, 5, 39]] = True
    write_already_read(tmp_path / "read.json", {"a": mask})
    one = [n for row in documents_of_epochs(data, tmp_path / "read.json", 1, mix={"a": 1.0, "b": 1.0}) for n in row]
    assert sorted(one) == [n for n in range(DOCUMENTS) if not mask[n]]
    two = [n for row in documents_of_epochs(data, tmp_path / "read.json", 2, mix={"a": 1.0, "b": 1.0}) for n in row]
    assert two[: len(one)] == one and sorted(two[len(one) :]) == list(range(DOCUMENTS))


def test_a_bucket_that_was_read_to_its_end_is_over(data: Path, tmp_path: Path) -> None:
    write_already_read(tmp_path / "read.json", {"a": np.ones(DOCUMENTS, bool)})
    assert documents_of_epochs(data, tmp_path / "read.json", 1, mix={"a": 1.0}) == []


def test_the_list_says_what_was_written(data: Path, tmp_path: Path) -> None:
    mask = np.random.RandomState(0).rand(DOCUMENTS) < 0.5
    write_already_read(tmp_path / "read.json", {"b": mask})
    found = read_already_read(str(tmp_path / "read.json"), open_dataset(str(data), "byte", True))
    assert (found["b"] == mask).all() and not found["a"].any()


def test_a_list_of_other_data_or_a_damaged_one_is_refused_by_its_name(data: Path, tmp_path: Path) -> None:
    dataset, path = open_dataset(str(data), "byte", True), tmp_path / "read.json"
    write_already_read(path, {"a": np.zeros(DOCUMENTS + 1, bool)})
    with pytest.raises(DataError, match=r"read\.json lists 41 documents in the bucket a, but .* has 40"):
        read_already_read(str(path), dataset)
    for text in ("{", "[]", json.dumps({"format": "other", "version": 1, "buckets": {}})):
        path.write_text(text)
        with pytest.raises(DataError, match=r"read\.json is not a record of the documents already read"):
            read_already_read(str(path), dataset)
    with pytest.raises(DataError, match="cannot be read"):
        read_already_read(str(tmp_path / "none.json"), dataset)


def test_rows_that_are_no_documents_have_none_to_leave_out(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.already_read"):
        documents_of_epochs(data, tmp_path / "read.json", 1, sampling="shuffle")
