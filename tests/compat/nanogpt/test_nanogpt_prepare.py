"""data/*/prepare.py: the files that nanoGPT's scripts write of the same text."""

from __future__ import annotations

import hashlib
import json
import math
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from small_runs import ROOT, shared

from ingot.compat.nanogpt import prepare
from ingot.compat.nanogpt.prepare import openwebtext, shakespeare, shakespeare_char
from ingot.data.formats.nanogpt_folder import read_meta
from ingot.data.loading.data_path import open_dataset

END = 50256


def ids(path: Path) -> np.ndarray:
    return np.fromfile(path, "<u2")


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_tiny_shakespeare_by_characters_is_byte_for_byte_nanogpt_s(tmp_path):
    text = shared("tinyshakespeare/input.txt")
    assert shakespeare_char(tmp_path, ["--input", str(text)]) == 0
    assert sha256(tmp_path / "train.bin") == "6ec305602a99ac2802745a134e1f5e33e2231b4855525b00b9aebb730ac2626f"
    assert sha256(tmp_path / "val.bin") == "d37d30cc0c8327c270d493299c3dca54135f6d5f1c9ef60cda78076e311204b1"
    assert (len(ids(tmp_path / "train.bin")), len(ids(tmp_path / "val.bin"))) == (1_003_854, 111_540)
    meta, characters = read_meta(tmp_path / "meta.pkl"), sorted(set(text.read_text()))
    assert meta == {
        "vocab_size": 65,
        "itos": dict(enumerate(characters)),
        "stoi": {character: number for number, character in enumerate(characters)},
    }
    assert meta == pickle.loads((tmp_path / "meta.pkl").read_bytes())


@pytest.mark.parametrize("script", [shakespeare, shakespeare_char, openwebtext])
@pytest.mark.parametrize("word", ["--nothing", "\x1b[31m", "x" * 10_000, "--workers=x"])
def test_a_word_that_means_nothing_is_one_line_that_can_be_read(tmp_path, capfd, script, word):
    assert script(tmp_path / "new", [word]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("prepare.py: error: ") and line.isprintable() and len(line) < 1200
    assert not (tmp_path / "new").exists()


def test_tiny_shakespeare_with_gpt2_s_tokens_has_as_many_as_nanogpt_s(tmp_path, capfd):
    assert shakespeare(tmp_path, ["--input", str(shared("tinyshakespeare/input.txt"))]) == 0
    assert (len(ids(tmp_path / "train.bin")), len(ids(tmp_path / "val.bin"))) == (301_966, 36_059)
    assert "train has 301,966 tokens" in capfd.readouterr().out
    assert not (tmp_path / "meta.pkl").exists()


@given(st.text(st.characters(codec="utf-8"), min_size=2, max_size=300))
def test_any_text_is_cut_at_nine_tenths_and_read_back(tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("char")
    (folder / "text").write_bytes(text.encode())
    read = text.replace("\r\n", "\n").replace("\r", "\n")  # as Python opens a text file
    assume(len(read) > 1)
    assert shakespeare_char(folder, ["--input", str(folder / "text")]) == 0
    itos = read_meta(folder / "meta.pkl")["itos"]
    parts = ["".join(itos[i] for i in ids(folder / f"{split}.bin").tolist()) for split in ("train", "val")]
    assert parts == [read[: int(len(read) * 0.9)], read[int(len(read) * 0.9) :]]


def test_what_is_prepared_can_be_trained_on(tmp_path):
    (tmp_path / "text").write_text("to be or not to be, that is the question\n" * 20)
    assert shakespeare_char(tmp_path, ["--input", str(tmp_path / "text")]) == 0
    dataset = open_dataset(str(tmp_path))
    assert dataset.tokenizer.decode(dataset.split("train").read(0, 5).tolist()) == "to be"


def test_documents_are_shuffled_as_nanogpt_shuffles_them_with_an_end_behind_each(tmp_path):
    texts = [f"document {number} " + "word " * (number % 7) if number % 50 else "" for number in range(2100)]
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert openwebtext(tmp_path / "owt", ["--input", str(tmp_path / "docs.jsonl")]) == 0
    import tiktoken

    from ingot.data.tokenizers import open_tokenizer

    encoding = open_tokenizer("gpt2")._encoding
    assert isinstance(encoding, tiktoken.Encoding)
    order = np.random.default_rng(2357).permutation(len(texts))
    held_out = math.ceil(0.0005 * len(texts))
    for name, documents in (("train.bin", order[held_out:]), ("val.bin", order[:held_out])):
        told = [i for number in documents for i in (*encoding.encode_ordinary(texts[number]), END)]
        assert ids(tmp_path / "owt" / name).tolist() == told
    assert {path.name for path in (tmp_path / "owt").iterdir()} == {"train.bin", "val.bin", ".download.lock"}


def test_workers_change_nothing_about_the_files(tmp_path):
    texts = [f"a document about {number} things\n" * (number % 13) for number in range(300)]
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for workers in ("1", "2"):
        arguments = ["--input", str(tmp_path / "docs.jsonl"), "--workers", workers, "--output", str(tmp_path / workers)]
        assert openwebtext(tmp_path, arguments) == 0
    assert all(sha256(tmp_path / "1" / name) == sha256(tmp_path / "2" / name) for name in ("train.bin", "val.bin"))


def test_without_a_network_the_text_in_the_package_does(tmp_path):
    assert shakespeare_char(tmp_path / "char", ["--bundled"]) == 0
    assert openwebtext(tmp_path / "owt", ["--bundled"]) == 0
    assert len(ids(tmp_path / "char" / "train.bin")) == int(5_057_198 * 0.9)
    assert (ids(tmp_path / "owt" / "train.bin") == END).sum() == 41


def test_a_download_that_fails_says_what_else_to_do(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(prepare, "TINY_SHAKESPEARE", "http://127.0.0.1:9/input.txt")
    assert shakespeare_char(tmp_path, []) == 3
    told = capfd.readouterr().err
    assert "--input FILE" in told and "--bundled" in told and len(told.splitlines()) == 1
    assert {path.name for path in tmp_path.iterdir()} <= {".download.lock"}


def test_without_the_hub_the_options_that_help_are_named(tmp_path, monkeypatch, capfd):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    assert openwebtext(tmp_path / "owt", []) == 3
    told = capfd.readouterr().err
    assert told.endswith("; give --input PATH or --bundled\n") and "cannot fetch" in told


def test_a_text_that_is_there_is_not_downloaded_again(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "TINY_SHAKESPEARE", "http://127.0.0.1:9/input.txt")
    (tmp_path / "input.txt").write_text("abc" * 100)
    assert shakespeare_char(tmp_path, []) == 0
    assert len(ids(tmp_path / "train.bin")) == 270


def test_a_download_of_something_else_is_refused(tmp_path, monkeypatch, capfd):
    (tmp_path / "page.html").write_text("<html>no such page</html>")
    monkeypatch.setattr(prepare, "TINY_SHAKESPEARE", (tmp_path / "page.html").as_uri())
    assert shakespeare_char(tmp_path / "out", []) == 3
    assert "is not tiny Shakespeare" in capfd.readouterr().err
    assert not (tmp_path / "out" / "input.txt").exists()


@pytest.mark.parametrize(
    ("write", "arguments", "code", "says"),
    [
        (shakespeare_char, ["--input", "nowhere.txt"], 3, "nowhere.txt cannot be read"),
        (shakespeare_char, ["--input", "empty.txt"], 3, "too short"),
        (shakespeare_char, ["--input", "latin1.txt"], 3, "not UTF-8"),
        (shakespeare_char, ["--input", "empty.txt", "--bundled"], 2, "not both"),
        (openwebtext, ["--input", "nowhere.jsonl"], 3, "no input at nowhere.jsonl"),
        (openwebtext, ["--input", "one.jsonl"], 3, "need at least one document each"),
        (shakespeare, ["--input", "text.txt", "--output", "char"], 3, "belongs to character-level data"),
        (openwebtext, ["--input", "one.jsonl", "--output", "char"], 3, "belongs to character-level data"),
        (shakespeare_char, ["--input", "text.txt", "--output", "text.txt/x"], 3, "cannot write"),
    ],
)
def test_a_mistake_is_one_line_and_an_exit_code(tmp_path, monkeypatch, capfd, write, arguments, code, says):
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").touch()
    Path("text.txt").write_text("some text")
    Path("latin1.txt").write_bytes("café".encode("latin-1"))
    Path("one.jsonl").write_text('{"text": "alone"}\n')
    Path("char").mkdir()
    Path("char/meta.pkl").touch()
    assert write(tmp_path / "out", arguments) == code
    told = capfd.readouterr().err
    assert says in told and len(told.splitlines()) == 1 and told.startswith("prepare.py: error: ")


def test_what_a_killed_preparation_left_is_cleared_away(tmp_path):
    (tmp_path / ".tokens.0a1b2c3d.tmp").write_bytes(b"half")
    (tmp_path / ".train.bin.0a1b2c3d.tmp").write_bytes(b"half")
    (tmp_path / "text").write_text("abc" * 100)
    assert shakespeare_char(tmp_path, ["--input", str(tmp_path / "text")]) == 0
    assert not list(tmp_path.glob(".*.tmp"))


@pytest.mark.parametrize("name", ["train.py", "bench.py", "data/shakespeare_char/prepare.py", "data/openwebtext/prepare.py"])
def test_outside_the_environment_a_script_says_in_one_line_how_to_get_in(name):
    ran = subprocess.run([sys.executable, "-S", "-E", ROOT / name], capture_output=True, text=True)
    assert ran.returncode == 1 and ran.stdout == ""
    assert "pip install -e ." in ran.stderr and "make" in ran.stderr and len(ran.stderr.splitlines()) == 1
