"""gpt-simple's folders as data.path: what is found in them, and what is said of damaged ones."""

import itertools
import json
import struct

import numpy as np
import pytest
from bucket_files import EOS, documents_of, write_buckets, write_pair
from toy_tokenizers import byte_level_config

from ingot.compat.gpt_simple.tokenize_jsonl import WindowRule, tokenize
from ingot.config.schema import DataSection
from ingot.data.formats.gpt_simple_folder import index_bytes, token_width
from ingot.data.loading.data_path import open_dataset
from ingot.data.loading.rows import make_rows
from ingot.errors import DataError


@pytest.fixture
def folder(tmp_path):
    return write_buckets(tmp_path / "data", {"web": documents_of("w", 7), "books": documents_of("b", 5)})


def test_buckets_lie_apart_and_the_split_is_all_of_them(folder):
    data = open_dataset(str(folder), "byte")
    train, buckets = data.split("train"), data.buckets("train")
    assert list(buckets) == ["books", "web"] == list(data.buckets("val"))
    assert train.documents == 12 and train.eos == EOS
    for name, documents in (("web", documents_of("w", 7)), ("books", documents_of("b", 5))):
        bucket, starts = buckets[name], buckets[name].document_starts().tolist()
        found = [bucket.read(a, b).tolist() for a, b in itertools.pairwise(starts)]
        assert found == documents
        assert (bucket.documents, bucket.tokens) == (len(documents), sum(map(len, documents)))
    everything = [t for document in documents_of("b", 5) + documents_of("w", 7) for t in document]
    assert train.read(0, train.tokens).tolist() == everything


def test_an_index_has_the_bytes_that_gpt_simple_writes():
    index = index_bytes([0, 5, 12, 14], [0, 0, 0], 2)
    assert len(index) == 16 + 32 + 6 == 54
    assert struct.unpack("<4sIII", index[:16]) == (b"GPTS", 1, 2, 3)
    assert struct.unpack("<4q", index[16:48]) == (0, 5, 12, 14)


def test_ids_have_32_bits_from_a_vocabulary_of_65536_on():
    assert [token_width(size) for size in (50_258, 65_535, 65_536, 128_256)] == [2, 2, 4, 4]


def test_a_window_cut_in_a_document_does_not_end_it_where_the_start_mark_is_the_end_mark_too(tmp_path):
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(json.dumps(byte_level_config()).replace("<|endoftext|>", "<s>"))  # a start mark and no end mark
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.jsonl").write_text(json.dumps({"text": "abcdefghij" * 5}))
    for split in ("train", "val"):
        tokenize(tmp_path / "text", tmp_path / "data" / split / "main", str(tokenizer), WindowRule(24, 4, least_characters=0))
    data = open_dataset(str(tmp_path / "data"), str(tokenizer))
    windows, mark = data.split("train").documents, data.tokenizer.bos
    batch = np.empty((windows, 2, 24), np.int32)
    make_rows(DataSection(seq_len=24, sampling="document"), 1, data).read(range(windows), range(windows), batch)
    assert data.tokenizer.eos is None and windows > 1
    assert np.count_nonzero(batch[:, 1] == mark) == 1  # the document is over once


def test_tokens_are_mapped_and_nothing_is_written(folder):
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    data = open_dataset(str(folder), "byte")
    shards = [data.split("train").shard(number) for number in range(len(data.split("train").paths))]
    assert shards and all(isinstance(shard.base, np.memmap) or isinstance(shard, np.memmap) for shard in shards)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_ids_of_32_bits_are_read_beside_ids_of_16(tmp_path):
    folder = write_buckets(tmp_path / "data", {"web": documents_of("w", 4)})
    write_pair(folder / "train" / "web" / "00002.bin", [[100, 101, EOS]], width=4)
    split = open_dataset(str(folder), "byte", trust_tokens=True).split("train")
    assert split.read(split.tokens - 3, split.tokens).tolist() == [100, 101, EOS]


def test_the_fingerprint_follows_the_windows_too(tmp_path):
    one, other, same = (write_buckets(tmp_path / name, {"web": documents_of("w", 4)}) for name in "abc")
    write_pair(other / "train" / "web" / "00000.bin", documents_of("w", 2), repeats=[0, 1])
    prints = [open_dataset(str(folder), "byte").fingerprint for folder in (one, other, same)]
    assert prints[0] == prints[2] != prints[1]


def test_a_folder_of_tokens_needs_to_be_told_its_tokenizer(folder):
    with pytest.raises(DataError, match=r"does not name their tokenizer; set data\.tokenizer to it"):
        open_dataset(str(folder))


def test_a_tokenizer_that_did_not_make_the_tokens_is_refused(folder):
    write_pair(folder / "train" / "web" / "00002.bin", [[300, EOS]])
    with pytest.raises(DataError, match=r"00002\.bin holds token 300, outside the 260 ids"):
        open_dataset(str(folder), "byte")


def test_a_bucket_without_validation_is_named(folder):
    write_pair(folder / "train" / "code" / "0.bin", [[5, EOS]])
    with pytest.raises(DataError, match=r"train/code has files but .*val/code has none"):
        open_dataset(str(folder), "byte")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", r"unexpected header in .*web/00000\.idx"),
        (b"GPTX" + struct.pack("<III", 1, 2, 0), r"unexpected header in .*web/00000\.idx: magic b'GPTX'"),
        (b"GPTS" + struct.pack("<III", 2, 2, 0) + bytes(8), r"web/00000\.idx: magic b'GPTS', version 2"),
        (b"GPTS" + struct.pack("<III", 1, 2, 9), r"size mismatch in .*web/00000\.idx"),
        (b"GPTS" + struct.pack("<III", 1, 2, 1) + struct.pack("<qqH", 4, 2, 0), r"web/00000\.idx is damaged"),
    ],
)
def test_a_damaged_index_is_named(folder, content, said):
    (folder / "train" / "web" / "00000.idx").write_bytes(content)
    with pytest.raises(DataError, match=said) as error:
        open_dataset(str(folder), "byte")
    assert error.value.exit_code == 3


def test_tokens_that_are_fewer_than_the_index_says_are_named(folder):
    path = folder / "train" / "web" / "00001.bin"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"size mismatch in .*web/00001\.bin: .* bytes expected by its \.idx"):
        open_dataset(str(folder), "byte")


def test_tokens_without_an_index_and_an_index_without_tokens_are_named(folder):
    (folder / "train" / "web" / "00002.bin").write_bytes(b"\1\0")
    with pytest.raises(DataError, match=r"cannot read .*00002\.idx"):
        open_dataset(str(folder), "byte")
    (folder / "train" / "web" / "00002.bin").unlink()
    (folder / "train" / "web" / "00001.bin").unlink()
    with pytest.raises(DataError, match=r"cannot read .*00001\.bin"):
        open_dataset(str(folder), "byte")


def test_a_mix_of_an_unknown_bucket_is_refused_with_those_there_are(folder):
    with pytest.raises(DataError, match=r"data\.mix names the bucket boks; .* books, web") as error:
        make_rows(DataSection(seq_len=16, sampling="pack", mix={"boks": 1}), 4, open_dataset(str(folder), "byte"))
    assert error.value.exit_code == 3
