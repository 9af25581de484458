"""Ids above 65,535 from a tokenizer to a batch: prepared, converted, inspected, verified and read."""

import json
from pathlib import Path

import numpy as np
import pytest
from toy_tokenizers import byte_level_config

from ingot.config.schema import DataSection
from ingot.data.formats.convert import convert
from ingot.data.formats.opener import open_tokens
from ingot.data.loading.data_path import open_dataset
from ingot.data.loading.rows import make_rows
from ingot.data.prepare.pipeline import prepare
from ingot.data.store.shards import HEADER_BYTES
from ingot.data.tokenizers import open_tokenizer
from ingot.data.verify.audit import audit, inspect

FIRST = 70_000  # what is added to every id but that of the mark, which is 0
TEXT = "".join(f"word {i * 7 % 8} and then {i % 8}, " for i in range(400))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    """A byte-level vocabulary with a hole below id 70,000."""
    config = byte_level_config()
    vocabulary = config["model"]["vocab"]
    config["model"]["vocab"] = {token: number + FIRST if number else 0 for token, number in vocabulary.items()}
    path = tmp_path_factory.mktemp("wide") / "tokenizer.json"
    path.write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def prepared(tokenizer, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "text").mkdir()
    for number in range(30):
        (folder / "text" / f"{number}.txt").write_text(TEXT[number * 40 : 2000 + number * 300])
    prepare([folder / "text"], folder / "data", str(tokenizer), shard_tokens=5000)
    return folder / "data"


def test_prepared_shards_have_32_bits_and_a_version_of_their_own(prepared, tokenizer):
    header = np.fromfile(prepared / "train_000000.bin", "<i4", 3)
    assert header.tolist() == [20240520, 2, 5000]
    assert (prepared / "train_000000.bin").stat().st_size == HEADER_BYTES + 4 * 5000
    assert json.loads((prepared / "dataset.json").read_text())["version"] == 2
    data, known = open_dataset(str(prepared)), open_tokenizer(str(tokenizer))
    split = data.split("val")
    ids = split.read(0, split.tokens)
    assert ids.dtype == np.uint32 and ids.max() > FIRST and ids[0] == known.bos == 0
    assert "word 7 and then 1, " in known.decode(ids)


@pytest.mark.parametrize("sampling", ["pack", "shuffle"])
def test_batches_hold_them(prepared, sampling):
    rows = make_rows(DataSection(seq_len=32, sampling=sampling), 4, open_dataset(str(prepared)))
    batch = np.empty((4, 2, 32), np.int32)
    rows.read(range(4), range(4), batch)
    assert batch.max() >= FIRST


def test_inspect_and_verify_read_them(prepared):
    found = inspect(prepared)
    assert found.splits["train"].tokens == open_dataset(str(prepared)).split("train").tokens
    assert {one.code for one in audit(prepared).findings} <= {"overlap-ngrams"}  # the text repeats itself


@pytest.mark.parametrize("to", ["gpt-simple", "shards"])
def test_they_are_converted_there_and_back(prepared, tokenizer, tmp_path, to):
    convert(open_tokens(prepared), tmp_path / "there", to)
    given = {} if to == "gpt-simple" else {"tokenizer": str(tokenizer)}
    convert(open_tokens(tmp_path / "there"), tmp_path / "back", "ingot", **{"tokenizer": str(tokenizer), **given})
    for split in ("train", "val"):
        before, after = (open_dataset(str(folder)).split(split) for folder in (prepared, tmp_path / "back"))
        assert np.array_equal(before.read(0, before.tokens), after.read(0, after.tokens))


def test_a_format_of_16_bits_refuses_them(prepared, tmp_path):
    from ingot.errors import DataError

    with pytest.raises(DataError, match=r"token 70,\d+ does not fit the 16-bit ids of train\.bin"):
        convert(open_tokens(prepared), tmp_path / "out", "nanogpt")
