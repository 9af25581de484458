import json
import os
import shlex
from lzma import compress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_files import write_shard
from toy_tokenizers import byte_level_config, llama_config, toy_hf, toy_sentencepiece

from ingot.data.formats.convert import FileLayout, convert
from ingot.data.formats.opener import open_tokens
from ingot.data.prepare.pipeline import write_dataset
from ingot.data.store.dataset import Dataset, identity
from ingot.data.tokenizers import ByteTokenizer, CharTokenizer, GPT2Tokenizer
from ingot.data.verify.audit import audit
from ingot.errors import DataError

TEXTS = ["To be, or not to be", "é€", "a", "the question " * 9]
STREAM = np.concatenate([ByteTokenizer().encode_document(text) for text in TEXTS])


@pytest.fixture(scope="module")
def many_shards(tmp_path_factory):
    """A dataset of seven tokens per shard, so that documents run over several."""
    folder = tmp_path_factory.mktemp("data") / "many"
    pieces = [("train", text) for text in TEXTS] + [("val", "held out")]
    write_dataset(pieces, folder, ByteTokenizer(), source=None, shard_tokens=7)
    return Dataset.open(folder)


@pytest.fixture
def folder(tmp_path):
    write_dataset([("train", "abc"), ("train", "de"), ("val", "f")], tmp_path / "set", ByteTokenizer(), source="a test")
    return tmp_path / "set"


def edit(folder, change, sign=True):
    path = folder / "dataset.json"
    record = json.loads(path.read_text())
    change(record)
    if sign:
        record["fingerprint"] = identity(record)
    path.write_text(json.dumps(record))


@settings(max_examples=50)
@given(st.data())
def test_a_read_is_a_slice_of_the_stream_wherever_shards_end(many_shards, data):
    start = data.draw(st.integers(0, len(STREAM)))
    stop = data.draw(st.integers(start, len(STREAM)))
    assert np.array_equal(many_shards.split("train").read(start, stop), STREAM[start:stop])


def test_a_read_fills_a_given_buffer_of_another_type(many_shards):
    buffer = np.full(30, -1, np.int64)
    out = many_shards.split("train").read(3, 23, buffer)
    assert np.shares_memory(out, buffer)
    assert buffer.tolist() == [*STREAM[3:23].tolist(), *[-1] * 10]


def test_a_read_beyond_the_end_is_an_error(many_shards):
    split = many_shards.split("train")
    for start, stop in ((-1, 3), (3, 2), (0, split.tokens + 1)):
        with pytest.raises(IndexError):
            split.read(start, stop)


def test_a_shard_replaced_before_its_first_use_is_noticed(folder):
    split = Dataset.open(folder).split("train")
    (folder / "train_000000.bin").unlink()
    write_shard(folder / "train_000000.bin", np.array([1, 5, 6], np.uint16))
    with pytest.raises(DataError, match=r"train_000000.bin was replaced while it was in use"):
        split.read(0, 1)


def test_shards_hold_the_stream_in_order(many_shards):
    shards = many_shards.split("train").slice(0, len(STREAM))
    assert [len(shard) for shard in shards[:-1]] == [7] * (len(shards) - 1)
    assert np.array_equal(np.concatenate(shards), STREAM)


def test_document_starts_point_at_the_marks_and_at_the_end(many_shards):
    split = many_shards.split("train")
    starts = split.document_starts()
    assert starts[-1] == split.tokens == len(STREAM)
    assert starts[:-1].tolist() == np.flatnonzero(STREAM == 1).tolist()


def test_bytes_are_those_of_the_text_and_shards_add_up(many_shards):
    record = many_shards.manifest.splits["train"]
    assert record.bytes == sum(len(text.encode()) for text in TEXTS)
    for key in ("bytes", "tokens", "documents"):
        assert sum(getattr(shard, key) for shard in record.shards) == getattr(record, key)
    for shard, tokens in zip(record.shards, many_shards.split("train").slice(0, len(STREAM)), strict=True):
        assert shard.bytes == (tokens >= 4).sum()
        assert shard.documents == (tokens == 1).sum()


def test_a_prepared_folder_opens_and_is_whole(folder):
    dataset = Dataset.open(folder)
    assert audit(folder).ok
    assert dataset.tokenizer.kind == "byte"
    assert dataset.tokenizer.decode(dataset.split("val").read(0, 2)) == "f"
    assert (dataset.split("train").documents, dataset.split("train").tokens, dataset.split("train").bytes) == (2, 7, 5)


def test_the_fingerprint_is_the_same_wherever_the_text_came_from(folder, tmp_path):
    write_dataset([("train", "abc"), ("train", "de"), ("val", "f")], tmp_path / "b", ByteTokenizer(), source="elsewhere")
    write_dataset([("train", "abc"), ("train", "dE"), ("val", "f")], tmp_path / "c", ByteTokenizer(), source="a test")
    assert Dataset.open(tmp_path / "b").fingerprint == Dataset.open(folder).fingerprint
    assert Dataset.open(tmp_path / "c").fingerprint != Dataset.open(folder).fingerprint


def test_fingerprints_of_data_stay_what_they_were_before_pieces_were_counted(folder, tmp_path):
    assert Dataset.open(folder).fingerprint == "95cded7400045ab7d87adbe6fd8f9dcee7ea7df5270436bff1a15dbc1fcf6b0d"
    pieces = [("train", "abc"), ("train", "de"), ("val", "f")]
    write_dataset(pieces, tmp_path / "char", CharTokenizer("abcdef"), source="a test")
    assert Dataset.open(tmp_path / "char").fingerprint == "3b36d64c39edb05280799b02676883f980b1ef7e19006485f48e6b66b786893c"


def test_data_whose_pieces_were_not_counted_opens_and_is_whole(folder):
    before = Dataset.open(folder).fingerprint
    for name in ("train", "val"):
        edit(folder, lambda record, name=name: record["splits"][name].pop("piece_bytes"), sign=False)
    dataset = Dataset.open(folder)
    assert audit(folder).ok
    assert dataset.split("train").piece_bytes is None
    assert dataset.fingerprint == before


@pytest.mark.parametrize("shard_tokens", [3, 1000])
@pytest.mark.parametrize(
    "tokenizer",
    [
        CharTokenizer("".join(TEXTS) + "wpc"),
        GPT2Tokenizer(),
        toy_sentencepiece(),
        toy_sentencepiece(start="<start>", dummy_prefix=True),
        toy_hf(byte_level_config()),
        toy_hf(llama_config()),
        toy_hf(llama_config(), ""),
    ],
    ids=lambda tokenizer: f"{tokenizer.kind}-{tokenizer.bos}",
)
def test_pieces_of_every_kind_are_counted_document_by_document(tmp_path, tokenizer, shard_tokens):
    texts = [*TEXTS, "  two  spaces  "]
    write_dataset([("train", text) for text in texts], tmp_path / "set", tokenizer, source=None, shard_tokens=shard_tokens)
    dataset = Dataset.open(tmp_path / "set")
    assert audit(tmp_path / "set", byte_gap=1).ok  # some of them fold much of this text
    train, record = dataset.split("train"), dataset.manifest.splits["train"]
    documents = [tokenizer.encode_document(text).astype(np.int64) for text in texts]
    counted = sum(int(tokenizer.target_bytes([-1, *ids[:-1]], ids).sum()) for ids in documents)
    assert train.piece_bytes == counted
    assert train.bytes == sum(len(text.encode()) for text in texts)
    assert (train.piece_bytes == train.bytes) or not tokenizer.lossless
    assert sum(shard.bytes for shard in record.shards) == train.bytes
    assert np.array_equal(train.read(0, train.tokens), np.concatenate(documents))


def test_documents_wait_for_each_other_and_lose_their_order_never(tmp_path, monkeypatch):
    pieces = [("val" if number % 3 else "train", f"document {number}") for number in range(50)]
    write_dataset(pieces, tmp_path / "one", ByteTokenizer(), source=None)
    monkeypatch.setattr("ingot.data.prepare.pipeline.BLOCK_BYTES", 30)
    write_dataset(pieces, tmp_path / "many", ByteTokenizer(), source=None)
    assert Dataset.open(tmp_path / "one").fingerprint == Dataset.open(tmp_path / "many").fingerprint


def test_a_document_that_the_tokenizer_leaves_nothing_of_is_left_out(tmp_path):
    tokenizer = toy_sentencepiece(start="<start>")
    write_dataset([("train", "cat"), ("train", "  "), ("train", "s")], tmp_path / "set", tokenizer, source=None)
    train = Dataset.open(tmp_path / "set").split("train")
    assert (train.documents, train.bytes) == (2, 4)
    assert audit(tmp_path / "set").ok


def test_the_fingerprint_does_not_depend_on_how_the_tokenizer_was_compressed(tmp_path, monkeypatch):
    write_dataset([("train", "the cat")], tmp_path / "a", toy_sentencepiece(), source=None)
    monkeypatch.setattr("ingot.data.tokenizers.tokenizer_base.lzma.compress", lambda data: compress(data, preset=0))
    write_dataset([("train", "the cat")], tmp_path / "b", toy_sentencepiece(), source=None)
    a, b = (Dataset.open(tmp_path / name) for name in "ab")
    assert a.manifest.tokenizer.spec != b.manifest.tokenizer.spec
    assert a.fingerprint == b.fingerprint


def test_a_tokenizer_with_another_file_inside_is_refused(tmp_path):
    write_dataset([("train", "the cat")], tmp_path / "set", toy_sentencepiece(), source=None)
    other = toy_sentencepiece(dummy_prefix=True).spec()
    edit(tmp_path / "set", lambda record: record["tokenizer"].update(spec=other))
    with pytest.raises(DataError, match=r"its tokenizer does not match its fingerprint"):
        Dataset.open(tmp_path / "set")


def test_pieces_that_were_counted_wrong_are_noticed(tmp_path):
    write_dataset([("train", "the  cat")], tmp_path / "set", toy_sentencepiece(), source=None)
    edit(tmp_path / "set", lambda record: record["splits"]["train"].update(piece_bytes=6), sign=False)
    with pytest.raises(DataError, match=r"was edited or damaged: its fingerprint does not match"):
        Dataset.open(tmp_path / "set")
    edit(tmp_path / "set", lambda record: record["splits"]["train"].update(piece_bytes=6))
    (finding,) = audit(tmp_path / "set", byte_gap=1).findings
    assert "the tokens decode to 7 bytes but 6 were recorded when the data was written" in finding.line


def test_an_unknown_split_is_refused_with_the_known_ones(folder):
    with pytest.raises(DataError, match=r"no split 'test'; it has train, val"):
        Dataset.open(folder).split("test")


def test_a_missing_folder_says_how_to_prepare_it(tmp_path):
    command = f"ingot data prepare --input FILE --tokenizer byte --output {tmp_path / 'gone'}"
    with pytest.raises(DataError, match=f"no data at {tmp_path / 'gone'}: .*prepare it with: {command}"):
        Dataset.open(tmp_path / "gone")


def test_a_text_file_gives_the_command_that_prepares_it(tmp_path):
    text = tmp_path / "my text.txt"
    text.write_text("hello")
    with pytest.raises(DataError) as caught:
        Dataset.open(text)
    command = shlex.split(str(caught.value).partition("with: ")[2])
    assert command[:3] == ["ingot", "data", "prepare"]
    assert command[3:] == ["--input", str(text), "--tokenizer", "byte", "--output", "DIR"]


def test_a_folder_that_was_not_prepared_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"it has no dataset.json"):
        Dataset.open(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 100_000])
def test_a_damaged_description_is_refused(folder, content):
    (folder / "dataset.json").write_bytes(content)
    with pytest.raises(DataError, match=r"dataset.json is damaged: .*prepare the data again"):
        Dataset.open(folder)


@pytest.mark.parametrize("content", [b"[]", b"{}", b'{"format": "other"}'])
def test_another_json_file_is_no_dataset(folder, content):
    (folder / "dataset.json").write_bytes(content)
    with pytest.raises(DataError, match=r"does not describe an ingot dataset"):
        Dataset.open(folder)


def test_a_newer_version_asks_for_an_upgrade(folder):
    edit(folder, lambda record: record.update(version=3))
    with pytest.raises(DataError, match=r"has version 3 but this version of ingot reads only versions up to 2; upgrade ingot"):
        Dataset.open(folder)


def test_an_edited_description_is_noticed(folder):
    edit(folder, lambda record: record["splits"]["val"].update(bytes=17), sign=False)
    with pytest.raises(DataError, match=r"was edited or damaged: its fingerprint does not match"):
        Dataset.open(folder)


def test_a_file_outside_the_folder_is_never_read(folder):
    edit(folder, lambda record: record["splits"]["val"]["shards"][0].update(file="../val_000000.bin"))
    with pytest.raises(DataError, match=r"is damaged: splits.val.shards.0.file"):
        Dataset.open(folder)


def test_a_missing_field_is_named(folder):
    edit(folder, lambda record: record["splits"]["val"].pop("bytes"))
    with pytest.raises(DataError, match=r"is damaged: splits.val.bytes"):
        Dataset.open(folder)


@pytest.mark.parametrize("name", ["train", "val"])
def test_a_description_without_a_split_is_refused(folder, name):
    edit(folder, lambda record: record["splits"].pop(name))
    with pytest.raises(DataError, match=f"is damaged: it has no split {name}"):
        Dataset.open(folder)


def test_a_tokenizer_that_is_not_what_it_says_is_refused(folder):
    edit(folder, lambda record: record["tokenizer"].update(vocab_size=300))
    with pytest.raises(DataError, match=r"its tokenizer does not match"):
        Dataset.open(folder)


def test_a_missing_shard_is_noticed_at_opening(folder):
    (folder / "val_000000.bin").unlink()
    with pytest.raises(DataError, match=r"val_000000.bin cannot be read: No such file"):
        Dataset.open(folder)


def test_a_shard_cut_short_is_noticed_at_opening(folder):
    shard = folder / "train_000000.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(
        DataError, match=r"train_000000.bin has 1,036 bytes instead of the 1,038 of a header and 7 tokens: it is cut short"
    ):
        Dataset.open(folder)


def test_a_shard_of_another_dataset_is_noticed_at_opening(folder):
    (folder / "train_000000.bin").unlink()
    write_shard(folder / "train_000000.bin", np.array([1, 5, 6], np.uint16))
    with pytest.raises(DataError, match=r"holds 3 tokens but dataset.json records 7"):
        Dataset.open(folder)


def test_shards_that_do_not_add_up_are_noticed_at_opening(folder):
    edit(folder, lambda record: record["splits"]["val"].update(tokens=9))
    with pytest.raises(DataError, match=r"the shards have 2 tokens .*the split records 9"):
        Dataset.open(folder)


def test_a_document_index_of_another_size_is_noticed_at_opening(folder):
    (folder / "train.index").write_bytes(bytes(8))
    with pytest.raises(DataError, match=r"train\.index must have 24 bytes for 2 documents, but has 8"):
        Dataset.open(folder)


def test_a_missing_document_index_is_noticed_at_opening(folder):
    (folder / "val.index").unlink()
    with pytest.raises(DataError, match=r"val.index cannot be read"):
        Dataset.open(folder)


def flip(path, bit):
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


@pytest.mark.parametrize("told", [True, False], ids=["with its checksum", "without"])
@pytest.mark.parametrize("bit", [0, 62, 63, 64 + 40, 64 + 63, 128 + 1, 128 + 63])
def test_no_bit_of_a_document_index_can_be_another_without_being_noticed(folder, bit, told):
    flip(folder / "train.index", bit)
    if not told:  # as older data has it
        edit(folder, lambda record: record["splits"]["train"].pop("document_index_sha256"), sign=False)
    with pytest.raises(DataError, match=r"train.index .*; copy the folder again or prepare the data again"):
        Dataset.open(folder).split("train").document_starts()


def test_a_document_index_that_rises_and_is_not_what_was_written_is_refused(folder):
    flip(folder / "train.index", 64)  # the second document begins at 5 and not at 4
    with pytest.raises(DataError, match=r"train.index has changed since it was written: its checksum differs"):
        Dataset.open(folder).split("train").document_starts()


def test_a_token_that_begins_a_shard_continues_its_text(tmp_path):
    tokenizer = toy_sentencepiece()  # which counts the space before a word, except where a text starts
    write_dataset([("train", "The cat that cats teach " * 3)], tmp_path / "set", tokenizer, source=None, shard_tokens=3)
    train = Dataset.open(tmp_path / "set").split("train")
    ids = train.read(0, train.tokens).astype(np.int64)
    sizes = tokenizer.target_bytes(np.array([-1, *ids[:-1]]), ids)
    assert len(train.record.shards) > 5 and train.piece_bytes == sizes.sum()
    for number, shard in enumerate(train.record.shards[:-1]):  # the last one has the bytes of text that no token stands for
        assert shard.bytes == sizes[3 * number : 3 * number + 3].sum()
    convert(open_tokens(tmp_path / "set"), tmp_path / "pairs", "gpt-simple")
    (tmp_path / "toy.model").write_bytes(tokenizer.contents)
    convert(
        open_tokens(tmp_path / "pairs"),
        tmp_path / "back",
        "ingot",
        tokenizer=str(tmp_path / "toy.model"),
        layout=FileLayout(shard_tokens=3),
    )
    assert Dataset.open(tmp_path / "back").split("train").bytes == sizes.sum()


@pytest.mark.parametrize("format", ["ingot", "nanogpt", "gpt-simple", "shards"])
def test_every_file_is_on_the_disk_before_the_folder_gets_its_name(folder, tmp_path, monkeypatch, format):
    synced, fsync = {}, os.fsync

    def watched(descriptor):
        fsync(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}")
        synced[os.fstat(descriptor).st_ino] = path.read_bytes() if path.is_file() else b""

    monkeypatch.setattr(os, "fsync", watched)
    if format == "ingot":
        pieces = [("train", "abcdef"), ("val", "ghi")]
        write_dataset(pieces, tmp_path / "out", ByteTokenizer(), source=None, shard_tokens=3)
    else:
        convert(open_tokens(folder), tmp_path / "out", format, layout=FileLayout(shard_tokens=3))
    for path in (tmp_path, tmp_path / "out", *(tmp_path / "out").rglob("*")):
        assert synced[path.stat().st_ino] == (path.read_bytes() if path.is_file() else b""), path
