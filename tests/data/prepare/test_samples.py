import hashlib
import json
import lzma
import os
import subprocess
import sys
from importlib.resources import files

import pytest
from toy_tokenizers import sentencepiece_file, toy_sentencepiece

from ingot.data.loading.data_path import open_dataset, resolve
from ingot.data.prepare import cached
from ingot.data.prepare.cached import sample_path
from ingot.data.prepare.pipeline import prepare, write_dataset
from ingot.data.tokenizers import CharTokenizer, by_name
from ingot.data.tokenizers.by_name import learn_from
from ingot.data.verify.audit import audit
from ingot.errors import ConfigError, DataError


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
    assert {work["split"] for work in works} == {"train", "val"}
    assert len({work["title"] for work in works}) == 42


def test_the_works_with_the_smallest_hashes_of_their_titles_are_held_out_up_to_a_twentieth_of_the_text():
    lines = lzma.decompress((files("ingot.data") / "samples/shakespeare.jsonl.xz").read_bytes()).splitlines()
    works = sorted(map(json.loads, lines), key=lambda work: hashlib.sha256(work["title"].encode()).hexdigest())
    splits = [work["split"] for work in works]
    count = splits.count("val")
    assert splits == ["val"] * count + ["train"] * (42 - count)
    sizes = [len(work["text"]) for work in works]
    assert sum(sizes[: count - 1]) < 0.05 * sum(sizes) <= sum(sizes[:count])


@pytest.mark.parametrize(("tokenizer", "extra"), [("byte", 42), ("char", 0)])
def test_a_sample_opens_with_either_tokenizer(tokenizer, extra):
    dataset = open_dataset("sample:shakespeare", tokenizer)
    assert audit(dataset.folder).ok
    splits = [dataset.split(name) for name in ("train", "val")]
    assert [split.documents for split in splits] == [38, 4]
    assert sum(split.bytes for split in splits) == 5_057_198
    assert sum(split.tokens for split in splits) == 5_057_198 + extra


def test_a_sample_opens_with_a_vocabulary_learned_from_it_and_counts_the_same_bytes(monkeypatch):
    monkeypatch.setattr(by_name, "LEARNED_BYTES", 1 << 19)
    dataset = open_dataset("sample:shakespeare", "bpe:512")
    assert dataset.tokenizer.vocab_size == 512 and dataset.tokenizer.lossless
    splits = [dataset.split(name) for name in ("train", "val")]
    assert sum(split.bytes for split in splits) == 5_057_198
    assert all(1.8 < split.bytes / split.tokens < 2.0 for split in splits)
    assert open_dataset("sample:shakespeare", "bpe:512").folder == dataset.folder


def test_a_sample_is_prepared_once():
    first = sample_path("shakespeare", "byte")
    stamp = (first / "dataset.json").stat()
    assert sample_path("shakespeare", "byte") == first
    assert (first / "dataset.json").stat().st_ino == stamp.st_ino


def test_a_sample_that_another_process_made_meanwhile_is_left_as_it_is(monkeypatch):
    folder = sample_path("shakespeare", "byte")
    made, looks = (folder / "dataset.json").stat().st_ino, []
    is_sound = cached.is_sound
    monkeypatch.setattr(cached, "is_sound", lambda path: bool(looks.append(path) or len(looks) > 1) and is_sound(path))
    assert sample_path("shakespeare", "byte") == folder
    assert len(looks) == 2 and (folder / "dataset.json").stat().st_ino == made


def test_bytes_are_the_default():
    assert open_dataset("sample:shakespeare").tokenizer.kind == "byte"


def test_a_damaged_cache_is_made_again():
    folder = sample_path("shakespeare", "byte")
    (folder / "val_000000.bin").unlink()
    assert sample_path("shakespeare", "byte") == folder
    assert audit(folder).ok


def test_without_our_variable_the_cache_of_the_desktop_is_used(tmp_path, monkeypatch):
    monkeypatch.delenv("INGOT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert sample_path("shakespeare", "byte").parent == tmp_path / "xdg/ingot"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert sample_path("shakespeare", "byte").parent == tmp_path / ".cache/ingot"


def test_a_cache_that_cannot_be_written_is_an_error_that_names_the_variable(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError, match=r"cannot write .*INGOT_CACHE"):
        sample_path("shakespeare", "byte")


def test_processes_that_prepare_at_once_all_succeed(tmp_path):
    script = "from ingot.data.loading.data_path import open_dataset; print(open_dataset('sample:shakespeare').fingerprint)"
    env = {**os.environ, "INGOT_CACHE": str(tmp_path)}
    processes = [subprocess.Popen([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert len(set(outputs)) == 1
    assert len([path for path in tmp_path.iterdir() if not path.name.startswith(".")]) == 1  # and a lock


def test_an_unknown_sample_is_refused_with_the_known_ones():
    with pytest.raises(DataError, match=r"unknown sample 'milton'; available: sample:shakespeare"):
        resolve("sample:milton")


def test_an_unknown_tokenizer_for_a_sample_is_refused():
    with pytest.raises(ConfigError, match=r"unknown tokenizer 'bpe'"):
        resolve("sample:shakespeare", "bpe")


def test_a_sample_is_prepared_with_any_tokenizer_and_kept_apart_by_it(tmp_path):
    (tmp_path / "a.model").write_bytes(sentencepiece_file())
    (tmp_path / "b.model").write_bytes(sentencepiece_file())
    a, b, c = (open_dataset("sample:shakespeare", name) for name in (f"{tmp_path}/a.model", f"{tmp_path}/b.model", "byte"))
    assert a.folder == b.folder != c.folder
    assert (a.tokenizer.kind, c.tokenizer.kind) == ("sentencepiece", "byte")
    assert sum(a.split(name).bytes for name in ("train", "val")) == 5_057_198
    assert a.split("train").piece_bytes < a.split("train").bytes
    assert c.split("train").piece_bytes == c.split("train").bytes


def test_a_folder_is_taken_as_it_is_and_a_home_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert str(resolve("some/where")) == "some/where"
    assert resolve("~/data") == tmp_path / "data"


def test_another_tokenizer_than_the_datasets_is_refused_with_both_names():
    folder = sample_path("shakespeare", "byte")
    with pytest.raises(DataError, match=r"data\.tokenizer is char but .* was prepared with .*byte"):
        open_dataset(str(folder), "char")
    assert open_dataset(str(folder), "byte").tokenizer.kind == "byte"


def test_a_tokenizer_that_is_given_must_be_the_datasets_by_its_fingerprint(tmp_path):
    for name, dummy_prefix in (("a", False), ("b", True)):
        (tmp_path / f"{name}.model").write_bytes(sentencepiece_file(dummy_prefix=dummy_prefix))
    write_dataset([("train", "the cat")], tmp_path / "data", toy_sentencepiece(), source=None)
    assert open_dataset(str(tmp_path / "data"), str(tmp_path / "a.model")).tokenizer.kind == "sentencepiece"
    with pytest.raises(DataError, match=r"data\.tokenizer is .*b\.model but .* was prepared with another tokenizer"):
        open_dataset(str(tmp_path / "data"), str(tmp_path / "b.model"))


def test_char_is_given_for_any_characters(tmp_path):
    write_dataset([("train", "abc")], tmp_path / "data", CharTokenizer("abc"), source=None)
    assert open_dataset(str(tmp_path / "data"), "char").tokenizer.vocab_size == 3


def test_a_learned_vocabulary_is_given_for_what_was_asked_and_for_no_other(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "to be or not to be " * 9}) + "\n")
    prepare([tmp_path / "a.jsonl"], tmp_path / "data", "bpe:300")
    found = open_dataset(str(tmp_path / "data"), "bpe:300").tokenizer
    assert 257 < found.vocab_size < 300  # the text has no more pieces
    for name in ("bpe:257", "bpe:4096", f"bpe:{found.vocab_size}", "char"):
        with pytest.raises(DataError, match=rf"data\.tokenizer is {name} but .* was prepared with .*bpe:300"):
            open_dataset(str(tmp_path / "data"), name)
    with pytest.raises(ConfigError, match=r"bpe:many .* give bpe:N, with N from 257 to 65,536"):
        open_dataset(str(tmp_path / "data"), "bpe:many")


def test_a_learned_vocabulary_of_a_folder_that_does_not_say_what_was_asked_is_known_by_its_size(tmp_path):
    text = b"to be or not to be, that is the question: whether it is nobler to suffer " * 3
    tokenizer = learn_from("bpe:300", list, lambda: [text])
    write_dataset([("train", "to be")], tmp_path / "data", tokenizer, source=None)
    assert open_dataset(str(tmp_path / "data"), f"bpe:{tokenizer.vocab_size}").tokenizer.kind == "huggingface"
    with pytest.raises(DataError, match=rf"data\.tokenizer is bpe:8192 but .*huggingface.*{tokenizer.vocab_size} ids"):
        open_dataset(str(tmp_path / "data"), "bpe:8192")


def test_a_size_that_cannot_be_learned_is_all_that_is_told_of_a_sample(caplog):
    with pytest.raises(ConfigError, match=r"bpe:100 .* from 257 to 65,536"):
        sample_path("shakespeare", "bpe:100")
    assert not caplog.records


def test_a_cache_that_may_not_be_looked_into_is_an_error_that_names_the_variable(open_folder, as_nobody, monkeypatch):
    (open_folder / "closed").mkdir(mode=0)
    monkeypatch.setenv("INGOT_CACHE", str(open_folder / "closed" / "cache"))
    with as_nobody(), pytest.raises(DataError, match=r"Permission denied.*INGOT_CACHE"):
        sample_path("shakespeare", "byte")
    (open_folder / "closed").chmod(0o700)
