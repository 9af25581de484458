import json
import os
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import ingot as package
from ingot.cli.main import app
from ingot.data.store.dataset import identity
from ingot.data.text.text_files import WHAT
from ingot.errors import ConfigError, DataError

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(package.__file__).parents[1])}


@pytest.fixture
def ingot():
    return lambda *words: CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "in.txt"
    path.write_text("0123456789")
    return path


def prepare(ingot, source, output, *more):
    return ingot("data", "prepare", "--input", source, "--tokenizer", "byte", "--output", output, *more)


def test_prepare_prints_what_it_made_and_how_to_train_on_it(ingot, text, tmp_path):
    result = prepare(ingot, text, tmp_path / "out")
    lines = result.stdout.splitlines()
    assert result.exit_code == 0
    assert lines[0].startswith(f"{tmp_path / 'out'}: byte tokenizer, 260 ids, ")
    assert lines[1].split() == ["split", "documents", "tokens", "bytes", "bytes/token"]
    assert lines[2].split() == ["train", "1", "10", "9", "0.9000"]
    assert lines[3].split() == ["val", "1", "2", "1", "0.5000"]
    assert lines[-1] == f"train on it with: ingot train --recipe demo --data.path {tmp_path / 'out'}"


def test_prepare_as_json(ingot, text, tmp_path):
    result = json.loads(prepare(ingot, text, tmp_path / "out", "--json").stdout)
    assert result["folder"] == str(tmp_path / "out")
    assert (result["tokenizer"], result["vocab_size"]) == ("byte", 260)
    assert result["splits"]["train"] == {"documents": 1, "tokens": 10, "bytes": 9, "piece_bytes": 9, "bytes_per_token": 0.9}
    assert result["seconds"] >= 0


def test_every_option_reaches_the_preparation(ingot, tmp_path):
    train, val = tmp_path / "train.jsonl", tmp_path / "val.jsonl"
    train.write_text('{"body": "abcd"}\n' * 3)
    val.write_text('{"body": "x"}\n{"body": ""}\n')
    given = ("--text-field", "body", "--shard-tokens", "4", "--json")
    result = json.loads(prepare(ingot, train, tmp_path / "out", "--val-input", val, *given).stdout)
    assert (result["splits"]["train"]["documents"], result["splits"]["val"]["documents"]) == (3, 1)
    assert result["empty_documents"] == 1
    assert len(list((tmp_path / "out").glob("train_*.bin"))) == 4
    result = json.loads(prepare(ingot, train, tmp_path / "out", "--val-documents", "2", "--force", *given).stdout)
    assert result["splits"]["val"]["documents"] == 2
    result = json.loads(prepare(ingot, train, tmp_path / "out", "--val-fraction", "0.5", "--force", *given).stdout)
    assert result["splits"]["val"]["bytes"] == 6


def test_options_for_files_that_are_not_utf8_reach_the_preparation(ingot, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_bytes("café".encode("latin-1") * 20)
    (tmp_path / "in/b.txt").write_text("plain " * 20)
    given = ("--val-fraction", "0", "--force", "--json")
    for option, count in ((("--encoding", "latin-1"), 2), (("--skip-unreadable",), 1)):
        told = json.loads(prepare(ingot, tmp_path / "in", tmp_path / "out", *option, *given).stdout)
        assert told["splits"]["train"]["documents"] == count


def test_without_validation_the_printed_command_does_not_evaluate(ingot, text, tmp_path):
    last = prepare(ingot, text, tmp_path / "out", "--val-fraction", "0").stdout.splitlines()[-1]
    assert last.endswith(f"--data.path {tmp_path / 'out'} --evaluation.every 0 --evaluation.points 0 --evaluation.at_start false")


def test_files_that_a_shell_wrote_after_one_input_are_inputs_too(ingot, text, tmp_path):
    for name in ("b.txt", "c.txt"):
        (tmp_path / name).write_text(f"the words of {name} " * 20)
    result = prepare(ingot, text, tmp_path / "out", tmp_path / "b.txt", tmp_path / "c.txt", "--val-fraction", "0", "--json")
    assert json.loads(result.stdout)["splits"]["train"]["documents"] == 3


def test_a_file_alone_is_prepared_by_bytes_in_a_folder_of_its_name(ingot, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.tar.txt").write_text("words of a book " * 100)
    result = ingot("data", "prepare", "book.tar.txt")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("data/book: byte tokenizer, 260 ids") and (tmp_path / "data/book/dataset.json").is_file()


@pytest.mark.parametrize(
    ("words", "said"), [([], "no input is given; name a file or folder"), (["a.txt", "b.txt"], "--output DIR")]
)
def test_what_is_missing_of_a_preparation_is_told(ingot, tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    result = ingot("data", "prepare", *words)
    assert isinstance(result.exception, ConfigError) and said in str(result.exception)
    assert list(tmp_path.iterdir()) == []


def test_no_negative_number_of_ids_can_be_listed(ingot, text, tmp_path):
    prepare(ingot, text, tmp_path / "out")
    assert ingot("data", "inspect", tmp_path / "out", "--top", "-1").exit_code == 2


@pytest.mark.parametrize("name", ["cached_challenge_fineweb.py", "download_hf_docs_and_tokenize.py"])
def test_outside_the_environment_a_script_of_golf_says_in_one_line_how_to_get_in(name):
    script = Path(package.__file__).parents[2] / "data" / name
    ran = subprocess.run([sys.executable, "-S", "-E", script], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "pip install -e ." in ran.stderr and len(ran.stderr.splitlines()) == 1


def test_several_inputs_are_one_dataset(ingot, text, tmp_path):
    (tmp_path / "more.txt").write_text("abc")
    result = prepare(ingot, text, tmp_path / "out", "--input", tmp_path / "more.txt", "--json")
    assert json.loads(result.stdout)["splits"]["train"]["documents"] == 2


def test_a_users_mistake_is_one_of_our_errors(ingot, text, tmp_path):
    assert isinstance(prepare(ingot, tmp_path / "gone.txt", tmp_path / "out").exception, DataError)
    assert not (tmp_path / "out").exists()


OUT_OF_RANGE = [
    ("--shard-tokens", "0"), ("--shard-tokens", str(2**31)), ("--val-fraction", "2"), ("--val-fraction", "-1"),
    ("--val-fraction", "nan"), ("--val-documents", "-1"), ("--workers", "0"),
]  # fmt: skip


@pytest.mark.parametrize("words", [("--shard-tokens", "many"), ("--unknown", "1"), *OUT_OF_RANGE])
def test_a_malformed_command_exits_with_2(ingot, text, tmp_path, words):
    assert prepare(ingot, text, tmp_path / "out", *words).exit_code == 2


@pytest.fixture
def english(tmp_path):
    path = tmp_path / "english.txt"
    words, draw = ("The", "cats", "sat", "on", "the", "mat", "and", "12", "more", "came", "to", "see", "noise"), random.Random(0)
    lines = [" ".join(draw.choices(words, k=9)) for _ in range(40)]
    path.write_text("".join(f"{line},\n and {line[::-1]}.\n" for line in lines))
    return path


def train_tokenizer(ingot, source, output, *more):
    return ingot("data", "train-tokenizer", "--input", source, "--output", output, "--vocab-size", "290", *more)


@pytest.mark.parametrize(
    ("kind", "name", "shown"), [("sentencepiece", "a.model", "sentencepiece"), ("bpe", "a.json", "huggingface")]
)
def test_a_tokenizer_is_trained_and_used_as_the_output_says(ingot, english, tmp_path, kind, name, shown):
    result = train_tokenizer(ingot, english, tmp_path / name, "--kind", kind)
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"{tmp_path / name}: {shown} tokenizer, 290 ids, ")
    command = shlex.split(lines[1].removeprefix("use it with: ingot ").replace("DIR", str(tmp_path / "out")))
    assert ingot(*command).exit_code == 0
    assert ingot("data", "verify", tmp_path / "out", "--byte-gap", "0.2").exit_code == 0  # it folds much of this text


def test_a_trained_tokenizer_as_json(ingot, english, tmp_path):
    result = json.loads(train_tokenizer(ingot, english, tmp_path / "a.model", "--kind", "sentencepiece", "--json").stdout)
    assert (result["file"], result["kind"], result["vocab_size"]) == (str(tmp_path / "a.model"), "sentencepiece", 290)
    again = json.loads(
        train_tokenizer(
            ingot, english, tmp_path / "a.model", "--kind", "sentencepiece", "--json", "--force", "--documents", "1"
        ).stdout
    )
    assert again["fingerprint"] == result["fingerprint"]


def test_a_trained_tokenizer_replaces_a_file_only_by_force_and_makes_no_folder(ingot, english, tmp_path):
    output = tmp_path / "a.model"
    output.write_text("mine")
    for path, said in ((output, "exists; --force replaces it"), (tmp_path / "gone" / "a.model", "gone does not exist")):
        result = train_tokenizer(ingot, english, path, "--kind", "sentencepiece")
        assert isinstance(result.exception, ConfigError) and said in str(result.exception)
    assert output.read_text() == "mine" and not (tmp_path / "gone").exists()


def test_both_counts_of_bytes_are_shown_where_they_differ(ingot, english, tmp_path):
    train_tokenizer(ingot, english, tmp_path / "a.model", "--kind", "sentencepiece")
    prepared = ingot(
        "data", "prepare", "--input", english, "--tokenizer", tmp_path / "a.model", "--output", tmp_path / "out"
    ).stdout
    for lines in (prepared.splitlines(), ingot("data", "verify", tmp_path / "out").stdout.splitlines()):
        assert lines[1].split() == ["split", "documents", "tokens", "bytes", "bytes/token", "piece", "bytes"]
        train = lines[2].split()
        assert int(train[5].replace(",", "")) < int(train[3].replace(",", ""))
    assert "piece bytes (the size of the decoded tokens) differ from bytes" in prepared


def test_an_unknown_tokenizer_is_refused_with_those_there_are(ingot, text, tmp_path):
    result = ingot("data", "prepare", "--input", text, "--tokenizer", "bpe", "--output", tmp_path / "out")
    assert isinstance(result.exception, ConfigError)
    assert "unknown tokenizer 'bpe'; give byte, char, bpe:N, gpt2, a file" in str(result.exception)


def test_verify_prints_the_splits_of_a_sound_folder(ingot, text, tmp_path):
    prepare(ingot, text, tmp_path / "out")
    result = ingot("data", "verify", tmp_path / "out")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0] == f"{tmp_path / 'out'}: whole; byte tokenizer, 260 ids"
    assert result.stdout.splitlines()[2].split() == ["train", "1", "10", "9", "0.9000"]


def test_verify_as_json(ingot, text, tmp_path):
    made = json.loads(prepare(ingot, text, tmp_path / "out", "--json").stdout)
    result = json.loads(ingot("data", "verify", tmp_path / "out", "--json").stdout)
    assert result["ok"] is True
    assert result["splits"] == made["splits"]
    assert result["fingerprint"] == made["fingerprint"]


def test_verify_finds_a_damaged_shard(ingot, text, tmp_path):
    prepare(ingot, text, tmp_path / "out")
    shard = tmp_path / "out/train_000000.bin"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xff")
    result = ingot("data", "verify", tmp_path / "out")
    assert result.exit_code == 3
    assert "shard-sha256" in result.stdout


@pytest.fixture
def prepared(ingot, tmp_path):
    """Forty documents in several shards, every fourth of them validation."""
    words, draw = ("ash", "birch", "cedar", "elm", "fir", "hazel", "larch", "oak", "pine", "rowan", "yew"), random.Random(0)
    texts = [" ".join(draw.choices(words, k=60)) for _ in range(40)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare(ingot, tmp_path / "text.jsonl", tmp_path / "out", "--val-fraction", "0.25", "--shard-tokens", "5000")
    return tmp_path / "out"


def copy_a_validation_document(folder, ingot):
    lines = (folder.parent / "text.jsonl").read_text().splitlines(keepends=True)
    planted = folder.parent / "planted.jsonl"
    planted.write_text("".join([*lines[:9], *lines[8:]]))  # document 8 is validation and 9 is not
    prepare(ingot, planted, folder, "--val-fraction", "0.25", "--shard-tokens", "5000", "--force")


def flip_a_byte(folder, ingot):
    shard = folder / "train_000001.bin"
    data = bytearray(shard.read_bytes())
    data[2000] ^= 1
    shard.write_bytes(data)


def cut_a_shard(folder, ingot):
    os.truncate(folder / "train_000000.bin", 5000)


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (copy_a_validation_document, "overlap-documents: .*val_000000.bin, document 2 of val, .* equals document 6 of train"),
        (flip_a_byte, "shard-sha256: .*train_000001.bin: has changed since it was written"),
        (
            cut_a_shard,
            r"shard-size: .*train_000000.bin.* 5,000 bytes instead of the [\d,]+ of a header and [\d,]+ tokens: it is cut short",
        ),
    ],
)
def test_verify_finds_each_planted_fault_and_names_it(ingot, prepared, plant, found):
    assert ingot("data", "verify", prepared).exit_code == 0
    plant(prepared, ingot)
    result = ingot("data", "verify", prepared)
    assert result.exit_code == 3
    assert re.search(f"(?m)^{found}", result.stdout)


def test_verify_finds_that_another_tokenizer_made_the_tokens(ingot, english, tmp_path):
    (tmp_path / "other.txt").write_text(english.read_text()[::-1].swapcase())
    for name in ("english", "other"):
        train_tokenizer(ingot, tmp_path / f"{name}.txt", tmp_path / f"{name}.model", "--kind", "sentencepiece")
        ingot("data", "prepare", "--input", english, "--tokenizer", tmp_path / f"{name}.model", "--output", tmp_path / name)
    path = tmp_path / "english/dataset.json"
    record = json.loads(path.read_text()) | {"tokenizer": json.loads((tmp_path / "other/dataset.json").read_text())["tokenizer"]}
    path.write_text(json.dumps(record | {"fingerprint": identity(record)}))
    result = ingot("data", "verify", tmp_path / "english", "--byte-gap", "1")
    assert result.exit_code == 3
    assert re.search(r"(?m)^tokenizer-mismatch: .*train_000000.bin, token 0: .*different tokens", result.stdout)
    assert "overlap" not in result.stdout


def test_verify_finds_that_another_tokenizer_is_given(ingot, prepared):
    result = ingot("data", "verify", prepared, "--tokenizer", "gpt2")
    assert result.exit_code == 3
    assert re.search(r"(?m)^tokenizer-mismatch: .*its tokenizer \(byte, .*is not the given tokenizer \(gpt2, ", result.stdout)


@pytest.mark.parametrize(
    ("damage", "words", "said"),
    [
        (None, ["--data.tokenizer", "gpt2"], r"data.tokenizer is gpt2 but .* was prepared with .*byte"),
        ({"vocab_size": 300}, [], r".*dataset.json is damaged: its tokenizer does not match its fingerprint"),
        ({"fingerprint": "0" * 64}, [], r".*dataset.json is damaged: its tokenizer does not match its fingerprint"),
    ],
)
def test_training_refuses_data_whose_fingerprint_is_not_that_of_its_tokenizer(prepared, damage, words, said):
    if damage:
        path = prepared / "dataset.json"
        record = json.loads(path.read_text())
        record["tokenizer"] |= damage
        path.write_text(json.dumps(record | {"fingerprint": identity(record)}))
    command = [sys.executable, "-m", "ingot", "train", "--recipe", "demo", "--data.path", "out", *words]
    result = subprocess.run(command, cwd=prepared.parent, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (3, "")
    assert re.fullmatch(f"ingot: error: {said}.*\n", result.stderr)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["prepare", "--input", "empty.txt", "--tokenizer", "byte", "--output", "out"], 3, "empty.txt is empty"),
        (
            ["prepare", "--input", "in.txt", "--tokenizer", "byte", "--output", "out", "--val-fraction", "2"],
            2,
            "Invalid value for '--val-fraction': Input should be",
        ),
        (["verify", "gone"], 3, "no data at gone"),
        (["prepare", "--input", "in.txt", "--tokenizer", "my.model", "--output", "out"], 3, "no tokenizer at my.model"),
        (
            ["train-tokenizer", "--input", "in.txt", "--kind", "bpe", "--vocab-size", "900", "--output", "a.json"],
            3,
            "the text yields a vocabulary of only 266 ids, fewer than --vocab-size 900",
        ),
        (
            ["train-tokenizer", "--input", "in.txt", "--kind", "sentencepiece", "--vocab-size", "900", "--output", "a.model"],
            3,
            "the text yields a vocabulary of only ",
        ),
    ],
)
def test_the_program_says_a_mistake_in_one_line_and_its_exit_code(text, words, code, said):
    (text.parent / "empty.txt").write_text("")
    command = [sys.executable, "-m", "ingot", "data", *words]
    result = subprocess.run(command, cwd=text.parent, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert result.returncode == code
    assert result.stdout == ""
    assert result.stderr.startswith(f"ingot: error: {said}")
    assert result.stderr.count("\n") == 1
    assert sorted(path.name for path in text.parent.iterdir()) == ["empty.txt", "in.txt"]


def test_the_program_warns_of_files_it_passed_over_on_stderr_alone(text):
    (text.parent / "b.rst").write_text("no text for us")
    command = [
        sys.executable,
        "-m",
        "ingot",
        "data",
        "prepare",
        "--input",
        ".",
        "--tokenizer",
        "char",
        "--output",
        "out",
        "--json",
    ]
    result = subprocess.run(command, cwd=text.parent, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert json.loads(result.stdout)["ignored_files"] == 1
    assert re.fullmatch(rf"[^\n]*b\.rst[^\n]*{re.escape(WHAT)}[^\n]*\n", result.stderr)


def test_the_commands_load_nothing_heavy_before_they_run():
    heavy = ("torch", "numpy", "pydantic", "sentencepiece", "tokenizers", "tiktoken", "huggingface_hub")
    script = f"import sys, ingot.cli.data; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=ENVIRONMENT, check=True)
    assert result.stdout == "[]\n"


def test_the_command_that_is_printed_fits_the_tokenizer(tmp_path, capsys):
    """A vocabulary that makes a step of the demo take seconds on a CPU is not passed on without a word."""
    from types import SimpleNamespace

    from ingot.cli.data import next_command

    def lines(vocab_size: int, tokens: int) -> list[str]:
        splits = {"train": SimpleNamespace(tokens=tokens), "val": SimpleNamespace(tokens=100)}
        return next_command(SimpleNamespace(folder=tmp_path, vocab_size=vocab_size, splits=splits))

    assert lines(260, 10**9) == [f"train on it with: ingot train --recipe demo --data.path {tmp_path}"]
    small, large = lines(50_257, 10**6), lines(50_257, 10**9)
    assert small[0] == f"train on it with: ingot train --recipe demo --data.path {tmp_path}"
    assert large[0] == f"train on it with: ingot train --recipe gpt2 --data.path {tmp_path}"
    assert all("50,257 ids" in found[1] and "--tokenizer byte" in found[1] for found in (small, large))


@pytest.mark.parametrize(
    "words", [("--vocab-size", "256"), ("--vocab-size", "65537"), ("--vocab-size", "300", "--documents", "0")]
)
def test_a_vocabulary_that_cannot_be_learned_is_a_malformed_command(ingot, text, tmp_path, words):
    result = ingot("data", "train-tokenizer", text, "--kind", "bpe", "--output", tmp_path / "out.json", *words)
    assert result.exit_code == 2
    assert not (tmp_path / "out.json").exists()
