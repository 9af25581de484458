import json

import numpy as np
import pytest
import typer
from shard_files import write_shard
from toy_tokenizers import toy_sentencepiece
from typer.testing import CliRunner

from ingot.cli.data import inspect_command
from ingot.data.prepare.pipeline import write_dataset
from ingot.data.tokenizers import ByteTokenizer, CharTokenizer, GPT2Tokenizer
from ingot.data.verify import audit as audit_module
from ingot.data.verify.audit import inspect
from ingot.errors import ConfigError, DataError

TRAIN = ["a", "bb bb", "the whole\nof a longer text, aaaaaa", "é"]


def prepare(folder, tokenizer=None, train=TRAIN, **options):
    pieces = [*(("train", one) for one in train), ("val", "held out")]
    write_dataset(pieces, folder, tokenizer or ByteTokenizer(), source=None, **options)
    return folder


@pytest.fixture
def folder(tmp_path):
    return prepare(tmp_path / "set", shard_tokens=7)


@pytest.fixture
def command():
    app = typer.Typer()
    app.command()(inspect_command)
    return lambda *words: CliRunner().invoke(app, [str(word) for word in words])


@pytest.mark.parametrize("chunk", [1, 5, 1 << 20])
def test_counts_are_those_of_the_text_wherever_shards_and_chunks_end(folder, monkeypatch, chunk):
    monkeypatch.setattr(audit_module, "CHUNK_TOKENS", chunk)
    train = inspect(folder).splits["train"]
    encoded = "".join(TRAIN).encode()
    assert (train.documents, train.tokens) == (4, len(encoded) + 4)
    assert train.bytes == train.piece_bytes == len(encoded)
    assert train.bytes_per_token == len(encoded) / (len(encoded) + 4)
    assert train.vocabulary["size"] == 260
    assert train.vocabulary["used"] == 260 - train.vocabulary["never_used"] == len(set(encoded)) + 1


def test_the_most_frequent_ids_come_first_with_their_text(folder):
    most = inspect(folder, top=4).splits["train"].vocabulary["most_frequent"]
    text = "".join(TRAIN)
    assert [(use["id"], use["text"], use["count"]) for use in most[:2]] == [
        (4 + ord("a"), "a", text.count("a")),
        (4 + ord(" "), " ", text.count(" ")),
    ]
    assert [use["count"] for use in most] == sorted((use["count"] for use in most), reverse=True)
    assert most[0]["share"] == text.count("a") / (len(text.encode()) + 4)


def test_special_ids_have_no_text_and_half_characters_are_shown_as_bytes(tmp_path):
    uses = inspect(prepare(tmp_path / "set"), top=260).splits["train"].vocabulary["most_frequent"]
    by_id = {use["id"]: use["text"] for use in uses}
    assert by_id[1] is None
    assert by_id[4 + 0xC3] == "\\xc3"


def test_lengths_are_counted_in_bins_that_double(folder):
    lengths = inspect(folder).splits["train"].lengths
    expected = [1 + len(one.encode()) for one in TRAIN]
    assert (lengths["shortest"], lengths["longest"]) == (min(expected), max(expected))
    assert (lengths["mean"], lengths["median"]) == (np.mean(expected), np.median(expected))
    assert lengths["histogram"] == [
        {"low": low, "high": 2 * low - 1, "documents": sum(low <= length < 2 * low for length in expected)}
        for low in (2, 4, 8, 16, 32)
    ]


def test_beginnings_are_spread_over_the_split_and_in_one_line(folder):
    found = inspect(folder, beginnings=2).splits["train"].beginnings
    assert [(one["document"], one["token"], one["text"]) for one in found] == [(0, 0, "a"), (3, 43, "é")]
    assert inspect(folder).splits["train"].beginnings[2]["text"] == "the whole of a longer text, aaaaaa"
    assert inspect(folder, beginnings=0).splits["train"].beginnings == []
    assert len(inspect(folder, beginnings=10**20).splits["train"].beginnings) == len(TRAIN)


def test_one_split_can_be_chosen(folder):
    assert list(inspect(folder).splits) == ["train", "val"]
    assert list(inspect(folder, "val").splits) == ["val"]
    with pytest.raises(DataError, match=r"has no split 'test'; it has train, val"):
        inspect(folder, "test")


def test_both_counts_of_bytes_are_there_where_the_tokenizer_folds_text(tmp_path):
    train = inspect(prepare(tmp_path / "set", toy_sentencepiece(), ["The   cats"])).splits["train"]
    assert (train.bytes, train.piece_bytes) == (10, 8)


@pytest.mark.parametrize("tokenizer", [CharTokenizer("".join(TRAIN) + "held out"), GPT2Tokenizer()], ids=["char", "gpt2"])
def test_documents_are_known_with_and_without_marks(tmp_path, tokenizer):
    train = inspect(prepare(tmp_path / "set", tokenizer)).splits["train"]
    assert train.documents == 4
    assert [one["text"] for one in train.beginnings] == [" ".join(one.split()) for one in TRAIN]


def test_bare_shards_are_inspected_with_the_tokenizer_that_is_given(tmp_path):
    ids = np.concatenate([ByteTokenizer().encode_document(one) for one in TRAIN])
    write_shard(tmp_path / "fineweb_train_000000.bin", ids)
    train = inspect(tmp_path, tokenizer="byte").splits["train"]
    assert (train.documents, train.bytes, train.piece_bytes) == (4, None, len("".join(TRAIN).encode()))
    with pytest.raises(ConfigError, match="name it with --tokenizer"):
        inspect(tmp_path)


def test_tokens_outside_the_vocabulary_are_refused(tmp_path):
    write_shard(tmp_path / "fineweb_train_000000.bin", np.array([1, 70, 260, 300], np.uint16))
    with pytest.raises(DataError, match=r"2 tokens of train .*260 ids"):
        inspect(tmp_path, tokenizer="byte")


def test_an_empty_split_is_shown_as_one(tmp_path):
    write_dataset([("train", "a")], tmp_path / "set", ByteTokenizer(), source=None)
    val = inspect(tmp_path / "set").splits["val"]
    assert (val.documents, val.tokens, val.bytes_per_token, val.lengths, val.beginnings) == (0, 0, None, None, [])


@pytest.mark.parametrize("file", ["train_000000.bin", "train.index", "dataset.json"])
def test_a_damaged_folder_is_refused_with_the_way_to_all_findings(folder, file):
    (folder / file).write_bytes(b"")
    with pytest.raises(DataError, match="ingot data verify"):
        inspect(folder)


def test_the_command_prints_numbers_a_histogram_and_beginnings(command, folder):
    result = command(folder, "--split", "train", "--top", "1", "--documents", "1")
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[0] == f"{folder}: byte tokenizer" and lines[2] == "train"
    assert "documents 4" in lines and "bytes per token 0.9130" in lines
    used = len(set("".join(TRAIN).encode())) + 1
    assert f"vocabulary 260 ids, {used} used, {260 - used} never used" in lines
    assert "101 'a' 8 17.39%" in lines
    assert "2 to 3 2 ########################################" in lines
    assert lines[-1] == "document 0, 2 tokens: a"


def test_the_command_as_json(command, folder):
    found = json.loads(command(folder, "--json").stdout)
    assert found["folder"] == str(folder) and list(found["splits"]) == ["train", "val"]
    assert found["splits"]["train"]["lengths"]["histogram"][0] == {"low": 2, "high": 3, "documents": 2}


def test_text_cannot_do_anything_to_the_terminal(command, tmp_path):
    result = command(prepare(tmp_path / "set", train=["\x1b[2Jcleared", "\u202egnorw", "\x07\x07\x07"]), "--split", "train")
    assert result.exit_code == 0
    assert not {"\x1b", "\u202e", "\x07"} & set(result.stdout)
    assert "\\x1b[2Jcleared" in result.stdout
