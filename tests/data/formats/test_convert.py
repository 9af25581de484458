import hashlib
import json
import pickle
import resource
import shutil
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_files import write_shard
from toy_tokenizers import byte_level_config, llama_config, sentencepiece_file, shared, toy_hf
from typer.testing import CliRunner

from ingot.cli.data import convert_command
from ingot.data.formats import convert as module
from ingot.data.formats.convert import FileLayout, convert
from ingot.data.formats.gpt_simple_folder import Pair
from ingot.data.formats.opener import open_tokens
from ingot.data.prepare.pipeline import prepare, write_dataset
from ingot.data.store.dataset import Dataset
from ingot.data.store.documents import Marks, marks_of
from ingot.data.store.shards import open_shard
from ingot.data.tokenizers import ByteTokenizer, CharTokenizer, GPT2Tokenizer, SentencePieceTokenizer
from ingot.data.verify.audit import audit
from ingot.errors import ConfigError, DataError

TEXTS = st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20), min_size=1, max_size=4)
GPT2, BYTE = GPT2Tokenizer(), ByteTokenizer()
END = GPT2.bos


def prepared(folder, tokenizer, train, val=("held out",), **settings):
    pieces = [*(("train", text) for text in train), *(("val", text) for text in val)]
    return write_dataset(pieces, folder, tokenizer, source=None, **settings)


def nanogpt(folder, *tokens, val=(1,)):
    folder.mkdir(parents=True, exist_ok=True)
    for name, stream in (("train", tokens), ("val", val)):
        (folder / f"{name}.bin").write_bytes(np.array(stream, "<u2").tobytes())
    return open_tokens(folder)


def texts(folder, split="train"):
    dataset = Dataset.open(folder)
    data = dataset.split(split)
    starts = data.document_starts()
    return [dataset.tokenizer.decode(data.read(int(start), int(stop))) for start, stop in pairwise(starts)]


def refused(message, call, *given, error=DataError, **options):
    with pytest.raises(error) as caught:
        call(*given, **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# There and back


@given(TEXTS, st.sampled_from(["nanogpt", "gpt-simple", "shards"]), st.sampled_from([BYTE, GPT2]), st.sampled_from([11, 1000]))
@settings(max_examples=20)
def test_data_that_goes_there_and_comes_back_is_the_same_data(tmp_path_factory, train, format, tokenizer, shard_tokens):
    base = tmp_path_factory.mktemp("convert")
    manifest = prepared(base / "ours", tokenizer, train, shard_tokens=shard_tokens)
    layout = FileLayout(shard_tokens=shard_tokens, max_length=100, overlap=3)
    there = convert(open_tokens(base / "ours"), base / "theirs", format, layout=layout)
    back = convert(open_tokens(base / "theirs"), base / "back", "ingot", tokenizer=tokenizer.kind, layout=layout)
    assert Dataset.open(base / "back").fingerprint == manifest.fingerprint
    assert texts(base / "back") == train
    assert texts(base / "back", "val") == ["held out"]
    record = manifest.splits["train"]
    assert (back.splits["train"].documents, back.splits["train"].tokens) == (record.documents, record.tokens)
    assert there.splits["train"].bytes == back.splits["train"].bytes == record.bytes == sum(len(t.encode()) for t in train)
    shutil.rmtree(base)


def test_tiny_shakespeare_becomes_nanogpts_own_files_to_the_byte(tmp_path):
    source = shared("tinyshakespeare/input.txt")
    prepare([source], tmp_path / "ours", "char")
    convert(open_tokens(tmp_path / "ours"), tmp_path / "nanogpt", "nanogpt")
    found = {name: hashlib.sha256((tmp_path / "nanogpt" / name).read_bytes()).hexdigest() for name in ("train.bin", "val.bin")}
    assert found["train.bin"] == "6ec305602a99ac2802745a134e1f5e33e2231b4855525b00b9aebb730ac2626f"
    assert found["val.bin"] == "d37d30cc0c8327c270d493299c3dca54135f6d5f1c9ef60cda78076e311204b1"
    chars = sorted(set(source.read_text()))
    meta = pickle.loads((tmp_path / "nanogpt/meta.pkl").read_bytes())
    assert meta == {"vocab_size": 65, "itos": dict(enumerate(chars)), "stoi": {c: i for i, c in enumerate(chars)}}
    convert(open_tokens(tmp_path / "nanogpt"), tmp_path / "back", "ingot")
    assert Dataset.open(tmp_path / "back").fingerprint == Dataset.open(tmp_path / "ours").fingerprint


def test_characters_go_through_every_format(tmp_path):
    manifest = prepared(tmp_path / "ours", CharTokenizer("held outabcé"), ["abcé" * 20], shard_tokens=50)
    layout = FileLayout(shard_tokens=50, max_length=16, overlap=4)
    convert(open_tokens(tmp_path / "ours"), tmp_path / "nanogpt", "nanogpt")
    convert(open_tokens(tmp_path / "nanogpt"), tmp_path / "shards", "shards", layout=layout)
    convert(open_tokens(tmp_path / "shards"), tmp_path / "simple", "gpt-simple", layout=layout)
    convert(open_tokens(tmp_path / "simple"), tmp_path / "again", "nanogpt")
    shutil.copy(tmp_path / "nanogpt/meta.pkl", tmp_path / "again")
    convert(open_tokens(tmp_path / "again"), tmp_path / "back", "ingot", layout=layout)
    assert Dataset.open(tmp_path / "back").fingerprint == manifest.fingerprint


@pytest.mark.parametrize("format", ["nanogpt", "gpt-simple", "shards"])
def test_what_comes_back_is_whole(tmp_path, format):
    prepared(tmp_path / "ours", BYTE, ["one", "two " * 20, "three"], shard_tokens=50)
    convert(open_tokens(tmp_path / "ours"), tmp_path / "theirs", format, layout=FileLayout(max_length=32, overlap=8))
    convert(open_tokens(tmp_path / "theirs"), tmp_path / "back", "ingot", tokenizer="byte", layout=FileLayout(shard_tokens=30))
    assert texts(tmp_path / "back") == ["one", "two " * 20, "three"]
    assert audit(tmp_path / "back").ok


# Marks


def test_marks_behind_documents_become_marks_in_front(tmp_path):
    a, b = GPT2.encode("Hello there"), GPT2.encode(" again")
    summary = convert(nanogpt(tmp_path / "owt", *a, END, *b, END, val=[*b, END]), tmp_path / "ours", "ingot", tokenizer="gpt2")
    assert texts(tmp_path / "ours") == ["Hello there", " again"]
    assert list(Dataset.open(tmp_path / "ours").split("train").read(0, len(a) + len(b) + 2)) == [END, *a, END, *b]
    assert summary.splits["train"].tokens == len(a) + len(b) + 2
    assert summary.splits["train"].bytes == len("Hello there again")


def test_data_without_any_mark_is_one_document(tmp_path):
    summary = convert(nanogpt(tmp_path / "in", *GPT2.encode("no mark")), tmp_path / "ours", "ingot", tokenizer="gpt2")
    assert (texts(tmp_path / "ours"), summary.splits["train"].documents) == (["no mark"], 1)


def test_a_sentencepiece_vocabulary_has_a_mark_for_each_side(tmp_path):
    model = tmp_path / "toy.model"
    model.write_bytes(sentencepiece_file())
    tokenizer = SentencePieceTokenizer(model.read_bytes())
    marks = marks_of(tokenizer)
    assert marks.bos == tokenizer.bos != marks.eos
    manifest = prepared(tmp_path / "ours", tokenizer, ["a b", "b"])
    convert(open_tokens(tmp_path / "ours"), tmp_path / "simple", "gpt-simple")
    (pair,) = (tmp_path / "simple/train").rglob("*.bin")
    tokens = list(np.fromfile(pair, "<u2"))
    assert tokens.count(marks.eos) == 2
    assert tokens[-1] == marks.eos
    assert marks.bos not in tokens
    convert(open_tokens(tmp_path / "simple"), tmp_path / "back", "ingot", tokenizer=str(model))
    records = [Dataset.open(tmp_path / name).manifest.splits["train"] for name in ("ours", "back")]
    assert records[0].shards[0].sha256 == records[1].shards[0].sha256
    assert records[1].bytes == records[1].piece_bytes == manifest.splits["train"].piece_bytes


def test_a_mark_can_be_given_where_there_is_no_tokenizer(tmp_path):
    source = nanogpt(tmp_path / "in", 5, 6, 9, 7, 9)
    convert(source, tmp_path / "simple", "gpt-simple", mark=9)
    assert [list(document[0]) for document in Pair(tmp_path / "simple/train/main/00000.bin").documents(9)] == [[5, 6], [7]]
    convert(open_tokens(tmp_path / "simple"), tmp_path / "shards", "shards", mark=9, layout=FileLayout(name="mine"))
    assert list(open_shard(tmp_path / "shards/mine_train_000000.bin")) == [9, 5, 6, 9, 7]


def test_without_tokenizer_or_mark_a_stream_stays_as_it_is_and_says_so(tmp_path, caplog):
    write_shard(tmp_path / "a.bin", np.arange(5, dtype=np.uint16))
    summary = convert(open_tokens(tmp_path / "a.bin"), tmp_path / "out", "nanogpt")
    assert list(np.fromfile(tmp_path / "out/train.bin", "<u2")) == [0, 1, 2, 3, 4]
    assert summary.splits["train"].bytes is None
    assert "document boundaries are unknown, so each split becomes one document" in caplog.text
    assert "has no validation data, which nanogpt needs" in caplog.text


@pytest.mark.parametrize(
    ("tokenizer", "marks"),
    [
        (GPT2, Marks(END, END)),
        (BYTE, Marks(1, 2)),
        (CharTokenizer("a"), Marks()),
        (SentencePieceTokenizer(sentencepiece_file()), Marks(1, 2)),
        (SentencePieceTokenizer(sentencepiece_file(start="<x>")), Marks(2, 2)),
        (toy_hf(llama_config()), Marks(1, 2)),
        (toy_hf(byte_level_config()), Marks(*[toy_hf(byte_level_config()).bos] * 2)),
    ],
)
def test_a_tokenizer_says_what_stands_around_documents(tokenizer, marks):
    assert marks_of(tokenizer) == marks


# Mistakes


def test_tokens_that_are_not_in_the_vocabulary_are_refused_and_nothing_is_left(tmp_path):
    source = nanogpt(tmp_path / "in", 5, 300)
    message = "holds token 300, outside the 260 ids of byte"
    refused(message, convert, source, tmp_path / "new/out", "ingot", tokenizer="byte")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("format", ["shards", "nanogpt", "gpt-simple"])
def test_a_tokenizer_that_did_not_make_the_tokens_is_refused_and_nothing_is_left(tmp_path, format):
    (tmp_path / "toy.model").write_bytes(sentencepiece_file())
    right = SentencePieceTokenizer(sentencepiece_file())
    prepared(tmp_path / "in", right, ["The cat that cats teach A cat " * 9] * 5, ["A cat that teach " * 9])
    convert(open_tokens(tmp_path / "in"), tmp_path / "tokens", format)
    (tmp_path / "tokens/meta.pkl").unlink(missing_ok=True)
    message = f"the gpt2 tokenizer did not make the tokens of {tmp_path / 'tokens'}"
    refused(message, convert, open_tokens(tmp_path / "tokens"), tmp_path / "out", "ingot", tokenizer="gpt2")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "tokens", "toy.model"]
    convert(open_tokens(tmp_path / "tokens"), tmp_path / "out", "ingot", tokenizer=str(tmp_path / "toy.model"))
    assert texts(tmp_path / "out") == texts(tmp_path / "in")


def test_a_meta_that_lists_no_characters_must_have_as_many_ids_as_the_tokenizer(tmp_path):
    prepared(tmp_path / "in", ByteTokenizer(), ["some text"] * 3)
    convert(open_tokens(tmp_path / "in"), tmp_path / "tokens", "nanogpt")
    tokens = open_tokens(tmp_path / "tokens")
    refused("has vocab_size 260 but the gpt2", convert, tokens, tmp_path / "out", "ingot", tokenizer="gpt2")
    convert(open_tokens(tmp_path / "tokens"), tmp_path / "out", "ingot", tokenizer="byte")
    assert texts(tmp_path / "out") == texts(tmp_path / "in")


def test_what_the_tokens_stand_for_must_be_known_once_and_only_once(tmp_path):
    source = nanogpt(tmp_path / "in", 5)
    refused("name its tokenizer; name it with --tokenizer", convert, source, tmp_path / "out", "ingot", error=ConfigError)
    prepared(tmp_path / "ours", BYTE, ["a"])
    ours = open_tokens(tmp_path / "ours")
    refused("already names its tokenizer, byte", convert, ours, tmp_path / "out", "shards", tokenizer="gpt2", error=ConfigError)
    refused("is already a prepared folder", convert, ours, tmp_path / "out", "ingot", error=ConfigError)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"to": "gguf"}, "unknown format 'gguf'; choose one of ingot, nanogpt, gpt-simple, shards"),
        ({"mark": 1 << 24}, "--mark 16777216 is not a token id"),
        ({"mark": -1}, "--mark -1 is not a token id"),
        ({"layout": FileLayout(shard_tokens=0)}, "--shard-tokens 0 is out of range"),
        ({"layout": FileLayout(shard_tokens=2**31)}, "--shard-tokens 2,147,483,648 is out of range"),
        ({"layout": FileLayout(name="../x")}, "--name '../x' is not a valid file name"),
        ({"layout": FileLayout(name="")}, "--name '' is not a valid file name"),
        ({"to": "gpt-simple", "layout": FileLayout(overlap=2000)}, "an overlap of 2,000 tokens does not fit windows of 3,072"),
        ({"tokenizer": "gpt3"}, "unknown tokenizer 'gpt3'"),
    ],
)
def test_a_wrong_setting_is_one_line(tmp_path, given, problem):
    source = nanogpt(tmp_path / "in", 5)
    refused(problem, convert, source, tmp_path / "out", **{"to": "shards", **given}, error=ConfigError)
    assert not (tmp_path / "out").exists()


def test_data_without_training_documents_is_refused(tmp_path):
    (tmp_path / "val.bin").write_bytes(b"\1\0")
    refused("has nothing to train on", convert, open_tokens(tmp_path), tmp_path / "out", "shards", mark=9)


# The output


@pytest.mark.parametrize("format", ["ingot", "nanogpt", "gpt-simple", "shards"])
def test_an_output_that_exists_is_replaced_only_when_asked_and_whatever_its_format(tmp_path, format):
    source, output = nanogpt(tmp_path / "in", 5, 6), tmp_path / "out"
    for first in ("nanogpt", "ingot", "gpt-simple", "shards"):
        convert(source, output, first, tokenizer="byte", overwrite=True)
        refused(
            f"output {output} exists; replace it with --force",
            convert,
            source,
            output,
            format,
            tokenizer="byte",
            error=ConfigError,
        )
        convert(source, output, format, tokenizer="byte", overwrite=True)
    assert open_tokens(output).format == format
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_a_folder_with_anything_else_in_it_is_never_replaced(tmp_path):
    source, output = nanogpt(tmp_path / "in", 5), tmp_path / "out"
    again = partial(convert, source, output, "shards", mark=1, overwrite=True)
    for name in ("notes.txt", "train/web/prepare.py", "train/web/deep/00000.bin", "model.bin"):
        (output / name).parent.mkdir(parents=True)
        (output / name).write_text("mine")
        refused(f"holds {name.rpartition('/')[0] if 'deep' in name else name}", again, error=ConfigError)
        assert (output / name).read_text() == "mine"
        shutil.rmtree(output)
    output.write_text("mine")
    refused("is a file; give a folder that does not exist yet", again, error=ConfigError)


def test_the_source_is_never_the_output(tmp_path):
    source = nanogpt(tmp_path / "in/data", 5)
    for output in (tmp_path / "in/data", tmp_path / "in", tmp_path / "in/x/../data"):
        refused("must not be the source", convert, source, output, "shards", mark=1, overwrite=True, error=ConfigError)
    assert source.tokens == open_tokens(tmp_path / "in/data").tokens


def test_a_conversion_that_fails_leaves_the_old_output_and_nothing_else(tmp_path, monkeypatch):
    source, output = nanogpt(tmp_path / "in", 5, 6), tmp_path / "out"
    convert(source, output, "nanogpt", tokenizer="byte")
    before = {path.name: path.read_bytes() for path in output.iterdir()}

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "meta_bytes", fail)
    refused("cannot write", convert, source, output, "nanogpt", tokenizer="byte", overwrite=True)
    assert {path.name: path.read_bytes() for path in output.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_what_a_killed_conversion_left_is_swept_away_by_the_next(tmp_path, python):
    nanogpt(tmp_path / "in", 5, 6)
    program = (
        "import os, signal, sys; from pathlib import Path\n"
        "from ingot.data.formats import convert as module; from ingot.data.formats.opener import open_tokens\n"
        "module.meta_bytes = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "base = Path(sys.argv[1]); module.convert(open_tokens(base / 'in'), base / 'out', 'nanogpt', tokenizer='byte')"
    )
    assert python(program, tmp_path).wait(300) == -9
    assert sorted(path.name[:13] for path in tmp_path.iterdir()) == [".out.partial-", "in"]
    convert(open_tokens(tmp_path / "in"), tmp_path / "out", "nanogpt", tokenizer="byte")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_more_files_than_a_process_may_open_are_converted(tmp_path):
    prepared(tmp_path / "ours", BYTE, ["0123456789"] * 30, shard_tokens=4)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 60), hard))
    try:
        for source, output, to in (("ours", "shards", "shards"), ("shards", "simple", "gpt-simple"), ("simple", "back", "ingot")):
            tokenizer = None if source == "ours" else "byte"
            convert(open_tokens(tmp_path / source), tmp_path / output, to, tokenizer=tokenizer, layout=FileLayout(shard_tokens=4))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(list((tmp_path / "shards").iterdir())) > 80
    assert Dataset.open(tmp_path / "back").fingerprint == Dataset.open(tmp_path / "ours").fingerprint


def test_progress_counts_the_bytes_of_the_documents(tmp_path):
    seen = []
    source = nanogpt(tmp_path / "in", 5, 9, 6, 9, 7, 9)
    convert(source, tmp_path / "out", "shards", mark=9, progress=lambda *numbers: seen.append(numbers))
    assert seen == [(2, 14), (4, 14), (6, 14), (8, 14)]


# The command


@pytest.fixture
def run():
    app = typer.Typer()
    app.callback()(lambda: None)
    app.command("convert")(convert_command)
    return lambda *words: CliRunner().invoke(app, ["convert", *map(str, words)])


def test_the_command_says_what_it_found_and_what_it_made(run, tmp_path):
    nanogpt(tmp_path / "in", *GPT2.encode("Hello"), END, val=[END])
    result = run(tmp_path / "in", "--to", "ingot", "--tokenizer", "gpt2", "--output", tmp_path / "out")
    assert result.exit_code == 0
    assert result.stderr == f"{tmp_path / 'in'}: nanogpt: nanoGPT's train.bin and val.bin\n"
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"{tmp_path / 'out'}: ingot, gpt2 tokenizer, ")
    assert [line.split() for line in lines[1:4]] == [
        ["split", "documents", "tokens", "bytes", "bytes/token"],
        ["train", "1", "2", "5", "2.5000"],
        ["val", "1", "1", "0", "0.0000"],
    ]
    assert lines[4] == f"train on it with: ingot train --recipe demo --data.path {tmp_path / 'out'}"


def test_the_command_as_json_with_every_option(run, tmp_path):
    nanogpt(tmp_path / "in", 5, 6, 9)
    (tmp_path / "out").mkdir()
    options = (
        "--from",
        "nanogpt",
        "--mark",
        9,
        "--name",
        "web",
        "--max-length",
        2,
        "--overlap",
        1,
        "--shard-tokens",
        2,
        "--force",
    )
    result = run(tmp_path / "in", "--to", "gpt-simple", "--output", tmp_path / "out", *options, "--json")
    facts = json.loads(result.stdout)
    assert facts.pop("seconds") >= 0
    assert facts == {
        "source": str(tmp_path / "in"),
        "found": "nanogpt",
        "folder": str(tmp_path / "out"),
        "format": "gpt-simple",
        "tokenizer": None,
        "splits": {
            "train": {"documents": 1, "tokens": 4, "bytes": None, "piece_bytes": None, "bytes_per_token": None},
            "val": {"documents": 1, "tokens": 2, "bytes": None, "piece_bytes": None, "bytes_per_token": None},
        },
    }
    assert list(np.fromfile(tmp_path / "out/train/web/00000.bin", "<u2")) == [5, 6, 6, 9]


def test_text_is_sent_to_the_command_that_takes_it(run, tmp_path):
    (tmp_path / "a.txt").write_text("x")
    result = run(tmp_path, "--to", "nanogpt", "--output", tmp_path / "out")
    assert isinstance(result.exception, DataError)
    assert "prepare it with: ingot data prepare" in str(result.exception)


@pytest.mark.parametrize("to", ["nanogpt", "shards", "gpt-simple"])
def test_a_damaged_document_index_is_refused_before_a_document_is_read(tmp_path, to):
    prepared(tmp_path / "in", BYTE, ["one", "two"])
    index = tmp_path / "in/train.index"
    index.write_bytes(index.read_bytes()[:15] + b"\x40" + index.read_bytes()[16:])  # the second begins at token 2**62
    refused("train.index does not increase", convert, open_tokens(tmp_path / "in"), tmp_path / "out", to)
    assert not (tmp_path / "out").exists()
