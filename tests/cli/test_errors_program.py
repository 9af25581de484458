"""Mistakes: each is one line that says what is wrong and what to do, with the exit code of its class, and leaves nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from programs import DEMO, Ingot, one_line, train_words


@pytest.fixture
def broken(tmp_path: Path, data: Path) -> Path:
    """A copy of the dataset to spoil."""
    return Path(shutil.copytree(data, tmp_path / "broken"))


def refused(ingot: Ingot, run: Path, words: list[str], code: int) -> str:
    before = sorted(run.parent.rglob("*"))
    line = one_line(ingot(*words, code=code))
    made = [path for path in sorted(run.parent.rglob("*")) if path not in before and "programs" not in path.parts]
    assert made == []
    return line


def test_a_misspelt_setting_suggests_the_right_one(ingot: Ingot, data, tmp_path):
    (tmp_path / "c.yaml").write_text("training:\n  max_steps: 1\n")
    line = one_line(ingot("train", "--config", tmp_path / "c.yaml", "--optimizer.learning_rat", "1e-3", code=2))
    assert "optimizer.learning_rat " in line and "did you mean optimizer.learning_rate" in line


def test_a_missing_config_file_is_named(ingot: Ingot, tmp_path):
    line = one_line(ingot("train", "--config", tmp_path / "no.yaml", code=2))
    assert str(tmp_path / "no.yaml") in line


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("training__tokens_per_step", 250, "training.tokens_per_step=250 is not a multiple of data.seq_len=32"),
        ("model__heads", 5, "model.heads=5 does not divide model.width=96"),
        ("model__vocab_size", 100, "model.vocab_size=100 is smaller than the tokenizer's vocabulary of 260"),
        ("model__context", 16, "model.context=16 is shorter than data.seq_len=32"),
        ("model__file", "nowhere.py", "model.file=nowhere.py does not exist"),
        ("training__max_steps", "null", "this run would never end"),
        ("training__seed", 2**64, "training.seed"),
    ],
)
def test_settings_that_do_not_fit_are_exit_code_2(ingot: Ingot, data, tmp_path, setting, value, said):
    assert said in refused(ingot, tmp_path / "run", train_words(data, tmp_path / "run", **{setting: value}), 2)


def test_a_missing_data_folder_is_exit_code_3(ingot: Ingot, tmp_path):
    line = refused(ingot, tmp_path / "run", train_words(tmp_path / "nowhere", tmp_path / "run"), 3)
    assert str(tmp_path / "nowhere") in line and "ingot data prepare" in line


def test_a_shard_with_a_wrong_header_is_exit_code_3(ingot: Ingot, broken, tmp_path):
    shard = broken / "train_000000.bin"
    shard.write_bytes(b"\xff" * 4 + shard.read_bytes()[4:])
    assert str(shard) in refused(ingot, tmp_path / "run", train_words(broken, tmp_path / "run"), 3)


def test_a_shard_of_a_wrong_size_is_exit_code_3(ingot: Ingot, broken, tmp_path):
    shard = broken / "train_000000.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    assert str(shard) in refused(ingot, tmp_path / "run", train_words(broken, tmp_path / "run"), 3)


def test_rows_longer_than_the_text_are_exit_code_3(ingot: Ingot, data, tmp_path):
    long = {"data__seq_len": 65536, "training__tokens_per_step": 65536, "evaluation__stride": "null"}
    assert "data.seq_len + 1 = 65,537" in refused(ingot, tmp_path / "run", train_words(data, tmp_path / "run", **long), 3)


@pytest.mark.parametrize("content", [b"", b"caf\xe9 au lait \xff\xfe"], ids=["empty", "not UTF-8"])
def test_text_that_is_none_is_exit_code_3_and_prepares_nothing(ingot: Ingot, tmp_path, content):
    (tmp_path / "in.txt").write_bytes(content)
    words = ["data", "prepare", "--input", str(tmp_path / "in.txt"), "--tokenizer", "byte", "--output", str(tmp_path / "out")]
    assert str(tmp_path / "in.txt") in refused(ingot, tmp_path / "out", words, 3)


def test_an_output_folder_that_cannot_be_made_is_exit_code_2(ingot: Ingot, data, tmp_path):
    (tmp_path / "file").write_text("")
    line = refused(ingot, tmp_path / "file", train_words(data, tmp_path / "file" / "run", training__max_steps=1), 2)
    assert str(tmp_path / "file" / "run") in line


def test_other_settings_for_a_run_are_exit_code_4_and_named(ingot: Ingot, data, reference, until):
    line = one_line(ingot(*train_words(data, until(reference, 4), training__seed=7), code=4))
    assert "training.seed was 1337 and is 7" in line and "choose another training.output_dir" in line


def test_a_folder_without_a_checkpoint_cannot_write(ingot: Ingot, tmp_path):
    assert str(tmp_path) in one_line(ingot("generate", tmp_path, code=4))


def test_a_users_own_files_are_neither_replaced_nor_emptied(ingot: Ingot, data, tmp_path):
    settings = "".join(f"{name}: {value}\n" for name, value in {**DEMO, "data.path": data, "training.output_dir": "."}.items())
    own = {"config.yaml": f"base: demo\n{settings}", "metrics.jsonl": "my measurements\n", "model.py": "# my model\n"}
    for name, content in own.items():
        (tmp_path / name).write_text(content)
    said = one_line(ingot("train", "--config", "config.yaml", folder=tmp_path, code=4))
    assert "already contains config.yaml and metrics.jsonl, " in said and "choose another training.output_dir" in said
    assert {path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file()} == own
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} <= {"programs"}
