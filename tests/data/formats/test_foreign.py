import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from shard_files import write_shard
from toy_tokenizers import byte_level_config, sentencepiece_file, toy_sentencepiece

from ingot.config.schema import DataSection
from ingot.data.formats.convert import convert
from ingot.data.formats.nanogpt_folder import meta_bytes
from ingot.data.formats.opener import open_foreign, open_tokens
from ingot.data.loading.data_path import open_dataset
from ingot.data.loading.rows import make_rows
from ingot.data.prepare.pipeline import write_dataset
from ingot.data.tokenizers import ByteTokenizer, open_tokenizer
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


def test_shards_of_ids_above_65535_give_rows(tmp_path):
    config, tokenizer = byte_level_config(), tmp_path / "tokenizer.json"
    config["model"]["vocab"] = {token: number + 70_000 if number else 0 for token, number in config["model"]["vocab"].items()}
    tokenizer.write_text(json.dumps(config))
    write_dataset(
        [("train", "some words of a text"), ("val", "more")], tmp_path / "ours", open_tokenizer(str(tokenizer)), source={}
    )
    convert(open_tokens(tmp_path / "ours"), tmp_path / "shards", "shards")
    ours, data = open_dataset(str(tmp_path / "ours")), open_dataset(str(tmp_path / "shards"), str(tokenizer))
    assert data.split("train").read(0, 9).tolist() == ours.split("train").read(0, 9).tolist()
    batch = np.empty((1, 2, 8), np.int32)
    make_rows(DataSection(seq_len=8, sampling="stream"), 1, data).read(range(1), range(1), batch)
    assert batch.max() > 70_000 and batch[0, 0].tolist() == data.split("train").read(0, 8).tolist()


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
    with pytest.raises(DataError, match="is character data"):
        open_dataset(str(folder), "gpt2")


def test_a_folder_of_neither_kind_is_told_as_before(tmp_path):
    with pytest.raises(DataError, match=r"has no dataset\.json"):
        open_dataset(str(tmp_path))


# Which tokenizer made them

TEXT = "The cat that cats teach. A cat, that the cats teach; that A cat. " * 40


def other_vocabulary(folder: Path) -> Path:
    """A folder of nanoGPT's with a meta.pkl that lists no single characters, as `ingot data convert` writes it for bytes."""
    nanogpt(folder, ByteTokenizer().encode_document(TEXT).tolist(), None)
    (folder / "meta.pkl").write_bytes(meta_bytes(ByteTokenizer()))
    return folder


@pytest.fixture
def text_shards(tmp_path):
    """Shards of a SentencePiece vocabulary where a download puts them, and the tokenizer."""
    folder = tmp_path / "datasets/fineweb10B_toy"
    folder.mkdir(parents=True)
    for name in ("train_000000", "val_000000"):
        write_shard(folder / f"fineweb_{name}.bin", toy_sentencepiece().encode_document(TEXT))
    (tmp_path / "tokenizers").mkdir()
    (tmp_path / "tokenizers/toy.model").write_bytes(sentencepiece_file())
    return folder


def test_a_meta_that_is_not_understood_needs_the_tokenizer_to_be_named(tmp_path):
    folder = other_vocabulary(tmp_path / "d")
    with pytest.raises(DataError, match=r"260 ids .*; set data\.tokenizer to"):
        open_dataset(str(folder))
    assert open_dataset(str(folder), "byte").tokenizer.kind == "byte"


def test_ids_that_stand_for_no_text_are_numbers_where_one_says_so(tmp_path):
    folder = nanogpt(tmp_path / "d", [3, 1, 4, 1, 5] * 50, None)
    with pytest.raises(DataError, match=r"data\.tokenizer is .*number, but .* has no meta\.pkl; add .* with vocab_size"):
        open_dataset(str(folder), "number")
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 7}))
    with pytest.raises(DataError, match=r"7 ids .*; .* or to number"):
        open_dataset(str(folder))
    found = open_dataset(str(folder), "number").tokenizer
    assert (found.kind, found.vocab_size, found.decode([3, 1])) == ("number", 7, "3 1")
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 5}))
    with pytest.raises(DataError, match="holds token 5, outside the 5 ids"):
        open_dataset(str(folder), "number")


def test_a_meta_with_another_number_of_ids_than_the_tokenizer_is_refused(tmp_path):
    with pytest.raises(DataError, match="has vocab_size 260 but the gpt2 tokenizer has 50,257"):
        open_dataset(str(other_vocabulary(tmp_path / "d")), "gpt2")


def test_a_tokenizer_that_did_not_make_the_shards_is_refused(text_shards, tmp_path):
    assert open_foreign(text_shards, str(tmp_path / "tokenizers/toy.model")) is not None
    with pytest.raises(DataError, match="did not make the tokens of"):
        open_foreign(text_shards, "gpt2")


def test_a_folder_of_nanogpt_without_meta_is_not_taken_for_gpt2s_if_it_is_not(tmp_path):
    folder = nanogpt(tmp_path / "d", ByteTokenizer().encode_document(TEXT).tolist(), None)
    with pytest.raises(DataError, match=r"without a meta\.pkl, GPT-2's tokenizer is the default"):
        open_dataset(str(folder))


def test_tokens_that_are_trusted_are_not_asked_for_their_text(tmp_path):
    drawn = np.random.default_rng(0).integers(0, 260, 5000).tolist()
    folder = nanogpt(tmp_path / "d", drawn, None)
    with pytest.raises(DataError, match=r"did not make the tokens of .*data\.trust_tokens"):
        open_dataset(str(folder), "byte")
    assert open_dataset(str(folder), "byte", trust_tokens=True).split("train").read(0, 5000).tolist() == drawn


def test_tokens_that_are_trusted_still_have_to_be_in_the_vocabulary(tmp_path):
    folder = nanogpt(tmp_path / "d", [260] * 100, None)
    with pytest.raises(DataError, match="holds token 260, outside the 260 ids"):
        open_dataset(str(folder), "byte", trust_tokens=True)


@pytest.mark.parametrize("place", [0, 3000, 5999])
def test_ids_outside_the_vocabulary_are_found_in_every_file(tmp_path, place):
    for number in range(40):
        tokens = np.full(6000, 100, np.uint16)
        tokens[place] = 300 if number == 33 else 100
        write_shard(tmp_path / f"fineweb_train_{number:06d}.bin", tokens)
    with pytest.raises(DataError, match=r"fineweb_train_000033\.bin holds token 300, outside the 260 ids"):
        open_foreign(tmp_path, "byte")


def listed(folder: Path, **tokenizer: str) -> None:
    dataset = {"name": folder.name, "tokenizer_name": "toy"}
    (folder.parents[1] / "manifest.json").write_text(
        json.dumps({"datasets": [dataset], "tokenizers": [{"name": "toy", **tokenizer}]})
    )


def test_downloaded_shards_need_no_tokenizer_to_be_named(text_shards):
    listed(text_shards, model_path="tokenizers/toy.model")
    assert open_dataset(str(text_shards)).tokenizer.kind == "sentencepiece"


@pytest.mark.parametrize("path", ["tokenizers/other.model", "../toy.model", "/etc/hostname", ""])
def test_a_manifest_whose_tokenizer_is_not_in_its_folder_says_nothing(text_shards, path):
    listed(text_shards, model_path=path)
    (text_shards.parents[2] / "toy.model").write_bytes(sentencepiece_file())
    with pytest.raises(DataError, match=r"does not name their tokenizer"):
        open_dataset(str(text_shards))
