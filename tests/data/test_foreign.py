import pickle
from pathlib import Path

import numpy as np
import pytest
from toy_tokenizers import sentencepiece_file

from ingot.data.foreign import open_foreign
from ingot.data.samples import open_dataset
from ingot.data.shards import write_shard
from ingot.errors import DataError


def nanogpt(folder: Path, train: list[int], val: list[int] | None, characters: str | None = None) -> Path:
    folder.mkdir()
    np.array(train, "<u2").tofile(folder / "train.bin")
    if val is not None:
        np.array(val, "<u2").tofile(folder / "val.bin")
    if characters is not None:
        itos = dict(enumerate(characters))
        meta = {"vocab_size": len(characters), "itos": itos, "stoi": {c: i for i, c in itos.items()}}
        (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    return folder


@pytest.fixture
def shards(tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    for name, first in (("train_000001", 5), ("train_000000", 0), ("val_000000", 100), ("val_bytes_000000", 200)):
        write_shard(folder / f"fineweb_{name}.bin", np.arange(first, first + 5))
    return folder


def test_characters_of_nanogpt_are_read_with_their_meta(tmp_path):
    data = open_dataset(str(nanogpt(tmp_path / "d", [0, 1, 2, 1], [2, 2], "abc")))
    assert (data.tokenizer.kind, data.tokenizer.vocab_size) == ("char", 3)
    assert data.tokenizer.decode_bytes(data.split("train").read(0, 4)) == b"abcb"
    assert data.split("val").tokens == 2


def test_a_folder_of_nanogpt_without_meta_has_gpt2s_tokens(tmp_path):
    data = open_dataset(str(nanogpt(tmp_path / "d", [15496, 995], None)))
    assert data.tokenizer.decode_bytes(data.split("train").read(0, 2)) == b"Hello world"
    assert data.split("val").tokens == 0


def test_shards_are_one_stream_in_the_order_of_their_names_and_byte_counts_are_no_tokens(shards, tmp_path):
    (tmp_path / "toy.model").write_bytes(sentencepiece_file())
    data = open_foreign(shards, str(tmp_path / "toy.model"))
    assert data is not None
    assert data.split("train").read(0, 10).tolist() == list(range(10))
    assert data.split("val").read(0, 5).tolist() == list(range(100, 105))


def test_shards_need_to_be_told_their_tokenizer(shards):
    with pytest.raises(DataError, match=r"data\.tokenizer"):
        open_dataset(str(shards))


def test_the_fingerprint_changes_with_the_data_and_not_with_its_place(tmp_path):
    same, moved = (open_dataset(str(nanogpt(tmp_path / name, [1, 2, 3], [4]))) for name in ("a", "b"))
    other = open_dataset(str(nanogpt(tmp_path / "c", [1, 2, 4], [4])))
    assert same.fingerprint == moved.fingerprint != other.fingerprint


def test_a_file_cut_in_a_token_is_refused(tmp_path):
    folder = nanogpt(tmp_path / "d", [1, 2, 3], [4])
    (folder / "train.bin").write_bytes(b"abc")
    with pytest.raises(DataError, match=r"train\.bin has 3 bytes, an odd number"):
        open_dataset(str(folder))


def test_what_needs_documents_says_how_to_get_them(tmp_path):
    data = open_dataset(str(nanogpt(tmp_path / "d", [1, 2, 3], [4])))
    with pytest.raises(DataError, match="ingot data convert"):
        data.split("train").document_starts()


def test_another_tokenizer_than_the_characters_is_refused(tmp_path):
    folder = nanogpt(tmp_path / "d", [0, 1], [1], "ab")
    with pytest.raises(DataError, match="has characters"):
        open_dataset(str(folder), "gpt2")


def test_a_folder_of_neither_kind_is_told_as_before(tmp_path):
    with pytest.raises(DataError, match=r"has no dataset\.json"):
        open_dataset(str(tmp_path))
