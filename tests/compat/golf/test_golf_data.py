"""Data that would train or score wrongly are refused before anything is built, and what was found is told."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from golf_toys import Golf, manifest, shard
from toy_tokenizers import WORDS, sentencepiece_file, toy_sentencepiece

from ingot.compat.golf.data_check import pattern

TOKENS, DOCUMENTS = 1332, 10


@pytest.fixture
def data(toys: Path, tmp_path: Path) -> Path:
    """A copy of the toys, to be damaged; a manifest would lie two folders above."""
    shutil.copytree(toys / "data/datasets/toy", tmp_path / "data/datasets/toy")
    return tmp_path / "data/datasets/toy"


def validation(data: Path) -> list[int]:
    return [int(token) for token in np.fromfile(data / "fineweb_val_000000.bin", "<u2")[512:]]


def test_validation_is_counted_and_told(golf: Golf, data: Path) -> None:
    tokens = validation(data)
    size = int(toy_sentencepiece().target_bytes(np.array(tokens[:1312]), np.array(tokens[1:1313])).sum())
    ran = golf(DATA_PATH=str(data), ITERATIONS="0")
    assert (
        f"note: validation: {TOKENS} tokens in {tokens.count(1)} documents; scored: 1312 tokens, {size} bytes, "
        f"{size / 1312:.6f} bytes per token"
    ) in ran.out.splitlines()
    loss, bits = ran.exact
    assert bits == pytest.approx(loss / np.log(2) * 1312 / size, abs=2e-8)


def test_counts_of_the_manifest_are_those_of_the_validation_split(golf: Golf, data: Path) -> None:
    documents = validation(data).count(1)
    manifest(data, tokens_val=TOKENS, docs_val=documents, files_train=2)
    assert "warning" not in golf(DATA_PATH=str(data), ITERATIONS="0").out
    manifest(data, tokens_val=TOKENS + 1)
    said = golf.refuses(3, DATA_PATH=str(data))
    assert f"has {TOKENS} tokens, but its manifest lists {TOKENS + 1}" in said
    manifest(data, tokens_val=TOKENS, docs_val=documents + 1)
    assert f"has {documents} documents, but its manifest lists {documents + 1}" in golf.refuses(3, DATA_PATH=str(data))


def test_a_validation_split_cut_short_is_noticed_by_its_manifest(golf: Golf, data: Path) -> None:
    manifest(data, tokens_val=TOKENS)
    (data / "fineweb_val_000000.bin").write_bytes(shard(validation(data)[:700]))
    assert "it is truncated or from another dataset" in golf.refuses(3, DATA_PATH=str(data))


def test_a_tokenizer_that_is_not_the_data_sets_is_refused_by_the_manifest(golf: Golf, data: Path) -> None:
    manifest(data, tokenizer="fineweb_1024_bpe.model")
    said = golf.refuses(3, DATA_PATH=str(data))
    assert "was made with the tokenizer fineweb_1024_bpe.model" in said and re.search(r"not TOKENIZER_PATH=\S+/toy\.model$", said)


def test_a_tokenizer_with_other_words_is_refused_without_a_manifest(golf: Golf, data: Path, tmp_path: Path) -> None:
    (tmp_path / "other.model").write_bytes(sentencepiece_file(WORDS[::-1]))
    said = golf.refuses(3, DATA_PATH=str(data), TOKENIZER_PATH="other.model")
    assert "TOKENIZER_PATH" in said


def test_random_tokens_are_trained_on_where_one_says_so(golf: Golf, data: Path) -> None:
    for path in data.glob("*.bin"):
        path.write_bytes(shard(np.random.default_rng(0).integers(4, 274, 5000).tolist()))
    said = golf.refuses(3, DATA_PATH=str(data))
    assert "did not make the tokens of" in said and "set TRUST_TOKENS" in said
    golf(DATA_PATH=str(data), TRUST_TOKENS="1", ITERATIONS="1")


def test_fewer_train_shards_than_published_are_a_warning_and_more_are_refused(golf: Golf, data: Path) -> None:
    manifest(data, files_train=80)
    (said,) = re.findall("^note: warning: (.*)$", golf(DATA_PATH=str(data), ITERATIONS="0").out, re.M)
    assert "has 2 of the 80 train shards" in said
    manifest(data, files_train=1)
    assert "has 2 train shards, but" in golf.refuses(3, DATA_PATH=str(data))


@pytest.mark.parametrize("content", ["{", "[]", '{"datasets": 5}', '{"datasets": [{"name": "toy", "stats": [1]}]}', "null"])
def test_a_manifest_of_any_form_is_read_or_refused_with_a_sentence(golf: Golf, data: Path, content: str) -> None:
    (data.parent.parent / "manifest.json").write_text(content)
    if content in ("{", "[]", "null"):
        assert "manifest.json" in golf.refuses(3, DATA_PATH=str(data))
    else:
        golf(DATA_PATH=str(data), ITERATIONS="0")


def test_of_an_empty_folder_validation_is_missed_first(golf: Golf, data: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    advice = "; run `ingot data download` or set DATA_PATH"
    assert golf.refuses(3, DATA_PATH="empty") == f"no files found for empty/fineweb_val_*.bin{advice}"
    for path in data.glob("*train*"):
        path.unlink()
    assert golf.refuses(3, DATA_PATH=str(data)).startswith(f"no files found for {data}/fineweb_train_*.bin")


def test_files_of_another_name_are_not_trained_on_by_mistake(golf: Golf, data: Path) -> None:
    (data / "edu_val_000001.bin").write_bytes((data / "fineweb_val_000000.bin").read_bytes())
    assert "edu_val_000001.bin" in golf.refuses(3, DATA_PATH=str(data))


def test_a_validation_split_that_fills_no_row_is_refused(golf: Golf, data: Path) -> None:
    (data / "fineweb_val_000000.bin").write_bytes(shard(validation(data)[:32]))
    assert "more than TRAIN_SEQ_LEN=32" in golf.refuses(3, DATA_PATH=str(data))


def test_another_vocabulary_than_the_tokenizers_is_refused_with_both(golf: Golf) -> None:
    said = golf.refuses(2, VOCAB_SIZE="2048")
    assert "VOCAB_SIZE=2048" in said and "vocab_size=274" in said


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "fewer than the 1,024"), (b"x" * 3000, "has magic"), (shard([5] * 9)[:-2], "cut short"), (None, "no files")],
)
def test_a_damaged_shard_is_refused_with_its_name(golf: Golf, data: Path, content: bytes | None, said: str) -> None:
    path = data / "fineweb_val_000000.bin"
    path.unlink() if content is None else path.write_bytes(content)
    found = golf.refuses(3, DATA_PATH=str(data))
    assert said in found and "fineweb_val_" in found


@pytest.mark.parametrize(
    ("path", "content", "said"),
    [
        ("none.model", None, "there is no tokenizer none.model; run `ingot data download`"),
        ("text.model", b"hello", "text.model: this is not a SentencePiece model"),
        ("empty.model", b"", "empty.model: this is not a SentencePiece model"),
    ],
)
def test_a_tokenizer_that_is_none_is_refused(golf: Golf, tmp_path: Path, path: str, content: bytes | None, said: str) -> None:
    if content is not None:
        (tmp_path / path).write_bytes(content)
    assert golf.refuses(3, TOKENIZER_PATH=path).startswith(said)


def test_a_folder_that_ingot_prepared_is_trained_on_too(golf: Golf, toys: Path, tmp_path: Path) -> None:
    from ingot.data.prepare.pipeline import write_dataset

    texts = [("train" if number > 2 else "val", "The cats that teach A cat " * 10) for number in range(30)]
    write_dataset(iter(texts), tmp_path / "prepared", toy_sentencepiece(), source={})
    ran = golf(DATA_PATH="prepared", ITERATIONS="2", TRAIN_LOG_EVERY="1")
    assert "train_loader:dataset:prepared train_shards:1" in ran.lines and len(ran.losses) == 2
    assert ran.value("val_loader") == "shards" and " pattern=prepared/val_*.bin tokens:" in ran.out


def test_files_of_the_challenges_export_are_named_as_they_are_beside_our_description(data: Path) -> None:
    (data / "dataset.json").write_text("{}")
    assert pattern({"DATA_PATH": str(data)}, "val") == f"{data}/fineweb_val_*.bin"
