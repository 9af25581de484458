import json
import lzma
import os
import subprocess
import sys
import tempfile
from importlib.resources import files

import pytest

from ingot.data.dataset import Dataset
from ingot.data.samples import open_dataset, resolve, sample_path
from ingot.errors import DataError


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def use_cache(cache, monkeypatch):
    monkeypatch.setenv("INGOT_CACHE", str(cache))


def test_the_package_holds_42_works_split_by_work():
    lines = lzma.decompress((files("ingot.data") / "samples/shakespeare.jsonl.xz").read_bytes()).splitlines()
    works = [json.loads(line) for line in lines]
    assert len(works) == 42
    assert sum(len(work["text"].encode()) for work in works) == 5_057_198
    assert [work["title"] for work in works if work["split"] == "val"] == ["King Richard III"]
    assert {work["split"] for work in works} == {"train", "val"}
    assert len({work["title"] for work in works}) == 42


@pytest.mark.parametrize(("tokenizer", "extra"), [("byte", 42), ("char", 0)])
def test_a_sample_opens_with_either_tokenizer(tokenizer, extra):
    dataset = open_dataset("sample:shakespeare", tokenizer)
    dataset.verify()
    splits = [dataset.split(name) for name in ("train", "val")]
    assert [split.documents for split in splits] == [41, 1]
    assert sum(split.bytes for split in splits) == 5_057_198
    assert sum(split.tokens for split in splits) == 5_057_198 + extra


def test_a_sample_is_prepared_once():
    first = sample_path("shakespeare", "byte")
    stamp = (first / "dataset.json").stat()
    assert sample_path("shakespeare", "byte") == first
    assert (first / "dataset.json").stat().st_ino == stamp.st_ino


def test_bytes_are_the_default():
    assert open_dataset("sample:shakespeare").tokenizer.kind == "byte"


def test_a_damaged_cache_is_made_again():
    folder = sample_path("shakespeare", "byte")
    (folder / "val_000000.bin").unlink()
    assert sample_path("shakespeare", "byte") == folder
    Dataset.open(folder).verify()


def test_without_our_variable_the_cache_of_the_desktop_is_used(tmp_path, monkeypatch):
    monkeypatch.delenv("INGOT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert sample_path("shakespeare", "byte").parent == tmp_path / "xdg/ingot"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert sample_path("shakespeare", "byte").parent == tmp_path / ".cache/ingot"


def test_a_cache_that_cannot_be_written_is_replaced_by_a_temporary_one_with_a_warning(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = sample_path("shakespeare", "byte")
    assert folder.parent == tmp_path / f"ingot-{os.getuid()}"
    assert len(caplog.records) == 1
    assert "cannot write" in caplog.text
    assert "INGOT_CACHE" in caplog.text


def test_processes_that_prepare_at_once_all_succeed(tmp_path):
    script = "from ingot.data.samples import open_dataset; print(open_dataset('sample:shakespeare').fingerprint)"
    env = {**os.environ, "INGOT_CACHE": str(tmp_path)}
    processes = [subprocess.Popen([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len(set(outputs)) == 1
    assert len(list(tmp_path.iterdir())) == 1


def test_an_unknown_sample_is_refused_with_the_known_ones():
    with pytest.raises(DataError, match=r"no sample 'milton'; the samples are sample:shakespeare"):
        resolve("sample:milton")


def test_an_unknown_tokenizer_for_a_sample_is_refused():
    with pytest.raises(DataError, match=r"unknown tokenizer 'bpe'"):
        resolve("sample:shakespeare", "bpe")


def test_a_folder_is_taken_as_it_is_and_a_home_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert str(resolve("some/where")) == "some/where"
    assert resolve("~/data") == tmp_path / "data"


def test_another_tokenizer_than_the_datasets_is_refused_with_both_names():
    folder = sample_path("shakespeare", "byte")
    with pytest.raises(DataError, match=r"data.tokenizer is char and .* was prepared with byte"):
        open_dataset(str(folder), "char")
    assert open_dataset(str(folder), "byte").tokenizer.kind == "byte"
