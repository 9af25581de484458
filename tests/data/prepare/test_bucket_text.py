"""Text in buckets: prepared into folders that keep them apart, converted there and back, and JSON lines as data.path."""

import gzip
import json
import logging
from pathlib import Path

import numpy as np
import pytest

from ingot.data.formats.convert import convert
from ingot.data.formats.opener import open_tokens
from ingot.data.loading.data_path import open_dataset
from ingot.data.prepare.pipeline import prepare
from ingot.data.store.dataset import Dataset
from ingot.data.text.text_files import find_buckets, kind_of
from ingot.data.tokenizers import ByteTokenizer
from ingot.errors import DataError

TEXTS = {"books": [f"A book of number {n}." for n in range(9)], "web": [f"<p>{n * n}</p>" for n in range(15)]}


def write_lines(path: Path, texts: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    for name, texts in TEXTS.items():
        write_lines(tmp_path / "text" / "train" / name / "a.jsonl", texts[:5])
        write_lines(tmp_path / "text" / "train" / name / "b.jsonl.gz", texts[5:])
        write_lines(tmp_path / "text" / "val" / name / "a.jsonl", texts[:2])
    return tmp_path / "text"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def texts_of(data: Dataset, split: str = "train") -> dict[str, list[str]]:
    found = {}
    for name, bucket in data.buckets(split).items():
        starts = bucket.document_starts().tolist()
        found[name] = [data.tokenizer.decode(bucket.read(a, b)) for a, b in zip(starts, starts[1:], strict=False)]  # noqa: RUF007
    return found


def test_json_lines_in_buckets_are_prepared_once_and_opened_again(lines, cache, caplog):
    with caplog.at_level(logging.WARNING):
        data = open_dataset(str(lines), "byte")
        assert texts_of(data) == TEXTS
        again = open_dataset(str(lines), "byte")
    assert again.folder == data.folder and data.folder.parent == cache
    assert len([record for record in caplog.records if "preparing" in record.message]) == 1
    assert data.buckets("val")["web"].bytes == sum(len(text) for text in TEXTS["web"][:2])


def test_other_text_and_another_tokenizer_are_other_data(lines):
    first = open_dataset(str(lines), "byte")
    assert open_dataset(str(lines), "gpt2").fingerprint != first.fingerprint
    write_lines(lines / "train" / "web" / "c.jsonl", ["one more"])
    assert texts_of(open_dataset(str(lines), "byte"))["web"] == [*TEXTS["web"], "one more"]


def test_one_file_of_json_lines_is_prepared(tmp_path):
    write_lines(tmp_path / "all.jsonl", [f"text {n}" for n in range(40)])
    data = open_dataset(str(tmp_path / "all.jsonl"), "byte")
    assert data.split("train").documents + data.split("val").documents == 40
    assert data.buckets("train") == {}


def test_text_needs_a_tokenizer(lines):
    with pytest.raises(DataError, match=r"text holds text.*--recipe auto .*data\.tokenizer=bpe:2048"):
        open_dataset(str(lines))


@pytest.mark.parametrize("tokenizer", [None, "byte"])
def test_a_file_without_a_byte_is_said_to_be_empty(tmp_path, tokenizer):
    (tmp_path / "none.jsonl").touch()
    with pytest.raises(DataError, match=r"none\.jsonl is empty; give a file with text"):
        open_dataset(str(tmp_path / "none.jsonl"), tokenizer)


def test_text_of_another_name_is_told_with_the_command_that_takes_it(tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"txt": "a"}\n')
    with pytest.raises(DataError, match=r"found: .txt.; .*data prepare .*mine\.jsonl.*--tokenizer byte.* --text-field NAME"):
        open_dataset(str(tmp_path / "mine.jsonl"), "byte")


@pytest.mark.parametrize("line", ["[1, 2]", '"text"', "{", '{"body": 3}'])
def test_a_line_that_is_not_an_object_with_text_is_named_by_file_and_line(lines, line):
    path = lines / "train" / "web" / "a.jsonl"
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(DataError, match=r"web/a\.jsonl:6: ") as error:
        open_dataset(str(lines), "byte")
    assert error.value.exit_code == 3


def test_a_bucket_of_text_without_validation_is_named(lines):
    write_lines(lines / "train" / "code" / "a.jsonl", ["x"])
    with pytest.raises(DataError, match=r"train/code has files but .*val/code has none"):
        open_dataset(str(lines), "byte")


def test_a_prepared_folder_keeps_buckets_however_often_it_is_cut_into_shards(lines, tmp_path):
    prepare([lines], tmp_path / "data", "byte", buckets=find_buckets(lines, kind_of), shard_tokens=37)
    data = open_dataset(str(tmp_path / "data"))
    assert texts_of(data) == TEXTS
    record = data.manifest.splits["train"]
    assert sum(bucket.tokens for bucket in record.buckets) == record.tokens
    assert [bucket.bytes for bucket in record.buckets] == [sum(map(len, TEXTS[name])) for name in ("books", "web")]


def test_buckets_are_part_of_the_fingerprint(lines, tmp_path):
    with_buckets = find_buckets(lines, kind_of)
    apart = prepare([lines], tmp_path / "apart", "byte", buckets=with_buckets).fingerprint
    together = prepare([lines / "train"], tmp_path / "together", "byte", val_inputs=[lines / "val"]).fingerprint
    assert apart != together


def test_convert_keeps_buckets_there_and_back(lines, tmp_path):
    prepare([lines], tmp_path / "data", "byte", buckets=find_buckets(lines, kind_of))
    convert(open_tokens(tmp_path / "data"), tmp_path / "there", "gpt-simple")
    assert sorted(path.name for path in (tmp_path / "there" / "train").iterdir()) == ["books", "web"]
    there = open_dataset(str(tmp_path / "there"), "byte")
    assert {name: bucket.documents for name, bucket in there.buckets("train").items()} == {"books": 9, "web": 15}
    assert there.split("train").eos == ByteTokenizer.eos
    convert(open_tokens(tmp_path / "there"), tmp_path / "back", "ingot", tokenizer="byte")
    back = open_dataset(str(tmp_path / "back"))
    assert texts_of(back) == TEXTS and texts_of(back, "val") == {name: texts[:2] for name, texts in TEXTS.items()}


def test_a_format_without_buckets_says_that_they_are_one_now(lines, tmp_path, caplog):
    prepare([lines], tmp_path / "data", "byte", buckets=find_buckets(lines, kind_of))
    with caplog.at_level(logging.WARNING):
        convert(open_tokens(tmp_path / "data"), tmp_path / "shards", "shards")
    assert any("the buckets books, web are merged" in record.message for record in caplog.records)
    assert np.fromfile(next((tmp_path / "shards").glob("*train*")), "<i4", 3)[2] > 0
