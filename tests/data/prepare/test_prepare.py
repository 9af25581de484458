import hashlib
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stopping import stop_behind, take_small_steps
from toy_tokenizers import llama_config, sentencepiece_file, shared

import ingot.data.prepare.pipeline as prepare_module
from ingot.data.prepare.pipeline import hold_out_ends, prepare, spread_documents
from ingot.data.store.dataset import Dataset
from ingot.data.text.text_files import WHAT
from ingot.data.tokenizers import open_tokenizer
from ingot.data.verify.audit import audit
from ingot.errors import ConfigError, DataError


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "in.txt"
    path.write_text("0123456789")
    return path


@pytest.fixture
def numbered(tmp_path):
    """Thirty documents, 00 to 29."""
    return jsonl(tmp_path / "numbered.jsonl", [f"{number:02d}" for number in range(30)])


def jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def documents(folder, name):
    dataset = Dataset.open(folder)
    starts = dataset.split(name).document_starts().astype(int)
    return [dataset.tokenizer.decode(dataset.split(name).read(a, b)) for a, b in itertools.pairwise(starts)]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# Splits


def test_few_documents_give_the_end_of_each_to_validation(tmp_path):
    source = jsonl(tmp_path / "a.jsonl", ["0123456789", "abcdefghijklmnopqrst"])
    prepare([source], tmp_path / "out", "byte")
    assert documents(tmp_path / "out", "train") == ["012345678", "abcdefghijklmnopqr"]
    assert documents(tmp_path / "out", "val") == ["9", "st"]


def test_more_than_twenty_documents_are_held_out_whole(tmp_path, numbered):
    prepare([numbered], tmp_path / "out", "byte")
    assert documents(tmp_path / "out", "val") == ["00", "10", "20"]
    assert len(documents(tmp_path / "out", "train")) == 27


@pytest.mark.parametrize(("count", "whole"), [(20, False), (21, True)])
def test_twenty_documents_are_few_and_empty_ones_do_not_count(tmp_path, count, whole):
    source = jsonl(tmp_path / "a.jsonl", ["0123456789", ""] * count)
    summary = prepare([source], tmp_path / "out", "byte")
    assert (summary.splits["val"].documents == 3) == whole
    assert summary.empty_documents == count


@given(st.integers(21, 300), st.sampled_from([0.01, 0.05, 0.1, 0.25, 1 / 3, 0.5, 0.9]))
def test_held_out_documents_are_evenly_spread_and_as_many_as_asked(count, fraction):
    rule = spread_documents(fraction)
    held = [number for number in range(count) if rule(number) == "val"]
    assert count * fraction <= len(held) + 1e-9 < count * fraction + 1
    assert len({b - a for a, b in itertools.pairwise(held)}) <= 2


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1), st.floats(0, 0.99))
def test_cut_documents_lose_no_character(texts, fraction):
    pieces = list(hold_out_ends(texts, fraction))
    assert "".join(text for _, text in pieces) == "".join(texts)
    assert all(text for _, text in pieces)


def test_validation_can_be_the_first_documents(tmp_path, numbered):
    prepare([numbered], tmp_path / "out", "byte", val_documents=2)
    assert documents(tmp_path / "out", "val") == ["00", "01"]
    assert documents(tmp_path / "out", "train")[0] == "02"


def test_validation_can_come_from_files_of_its_own(tmp_path, text, numbered):
    prepare([numbered], tmp_path / "out", "char", val_inputs=[text])
    assert documents(tmp_path / "out", "val") == ["0123456789"]
    assert len(documents(tmp_path / "out", "train")) == 30


@pytest.mark.parametrize("setting", [{"val_fraction": 0}, {"val_documents": 0}])
def test_there_may_be_no_validation(tmp_path, text, setting):
    summary = prepare([text], tmp_path / "out", "byte", **setting)
    dataset = Dataset.open(tmp_path / "out")
    assert audit(tmp_path / "out").ok
    assert dataset.split("val").tokens == 0
    assert dataset.split("val").paths == []
    assert summary.splits["val"].bytes_per_token is None


# What is written


def test_tiny_shakespeare_is_nanogpts_to_the_byte(tmp_path):
    summary = prepare([shared("tinyshakespeare/input.txt")], tmp_path / "out", "char")
    assert summary.vocab_size == 65
    assert (summary.splits["train"].tokens, summary.splits["val"].tokens) == (1_003_854, 111_540)
    payload = {
        name: hashlib.sha256(Dataset.open(tmp_path / "out").split(name).shard(0).tobytes()).hexdigest()
        for name in ("train", "val")
    }
    assert payload == {
        "train": "6ec305602a99ac2802745a134e1f5e33e2231b4855525b00b9aebb730ac2626f",
        "val": "d37d30cc0c8327c270d493299c3dca54135f6d5f1c9ef60cda78076e311204b1",
    }


def test_tiny_shakespeare_has_as_many_gpt2_tokens_as_nanogpts_and_a_mark(tmp_path):
    summary = prepare([shared("tinyshakespeare/input.txt")], tmp_path / "out", "gpt2")
    assert (summary.splits["train"].tokens, summary.splits["val"].tokens) == (301_966 + 1, 36_059 + 1)


@pytest.mark.parametrize("tokenizer", ["byte", "char"])
def test_the_same_text_gives_the_same_bytes_twice(tmp_path, numbered, tokenizer):
    for name in ("a", "b"):
        prepare([numbered], tmp_path / name, tokenizer, shard_tokens=10)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_the_summary_counts_what_the_folder_holds(tmp_path):
    (tmp_path / "in.txt").write_text("é" * 100)
    summary = prepare([tmp_path / "in.txt"], tmp_path / "out", "byte")
    train = Dataset.open(tmp_path / "out").split("train")
    assert (train.documents, train.tokens, train.bytes) == (1, 181, 180)
    assert summary.splits["train"].bytes_per_token == 180 / 181
    assert asdict(summary)["splits"]["train"] == {
        "documents": 1, "tokens": 181, "bytes": 180, "piece_bytes": 180, "bytes_per_token": 180 / 181,
    }  # fmt: skip


@pytest.fixture
def files(tmp_path):
    """A tokenizer file of each sort."""
    (tmp_path / "toy.model").write_bytes(sentencepiece_file())
    (tmp_path / "toy.json").write_text(json.dumps(llama_config()))
    return tmp_path


@pytest.mark.parametrize(
    ("tokenizer", "kind", "pieces"),
    [("gpt2", "gpt2", 589), ("toy.model", "sentencepiece", 560), ("toy.json", "huggingface", 589)],
)
def test_text_is_prepared_with_any_tokenizer(files, tokenizer, kind, pieces, monkeypatch):
    monkeypatch.chdir(files)
    source = jsonl(files / "in.jsonl", ["the  cat <s> sat é."] * 29 + ["the \n cat"])
    summary = prepare([source], files / "out", tokenizer, val_fraction=0)
    dataset = Dataset.open(files / "out")
    assert audit(files / "out", byte_gap=0.1).ok
    assert (dataset.tokenizer.kind, summary.tokenizer, summary.vocab_size) == (kind, kind, dataset.tokenizer.vocab_size)
    assert dataset.tokenizer.fingerprint() == open_tokenizer(tokenizer).fingerprint()
    assert (summary.splits["train"].bytes, summary.splits["train"].piece_bytes) == (589, pieces)
    expected = "the cat <s> sat é." if kind == "sentencepiece" else "the  cat <s> sat é."
    assert documents(files / "out", "train")[0] == expected


def test_the_start_of_documents_can_be_chosen(files):
    source = jsonl(files / "in.jsonl", ["the cat"])
    prepare([source], files / "out", str(files / "toy.json"), bos="</s>", val_fraction=0)
    assert Dataset.open(files / "out").split("train").read(0, 1).tolist() == [2]
    refused(files, ConfigError, "bos '</s>' applies only to a tokenizer.json; char", source, tokenizer="char", bos="</s>")


def test_a_tokenizer_that_is_not_there_is_refused_before_anything_is_written(tmp_path, text):
    refused(tmp_path, DataError, "no tokenizer at gone.model", text, tokenizer="gone.model")


def test_the_size_of_shards_changes_nothing_but_the_files(tmp_path, numbered):
    prepare([numbered], tmp_path / "one", "byte")
    prepare([numbered], tmp_path / "many", "byte", shard_tokens=8)
    one, many = (Dataset.open(tmp_path / name).split("train") for name in ("one", "many"))
    assert len(many.paths) == 11
    assert np.array_equal(one.read(0, one.tokens), many.read(0, many.tokens))
    assert np.array_equal(one.document_starts(), many.document_starts())


def test_files_of_a_folder_that_are_no_text_are_passed_over_with_a_warning(tmp_path, caplog):
    source = tmp_path / "in"
    source.mkdir()
    (source / "a.txt").write_text("0123456789")
    (source / "empty.txt").write_text("")
    (source / "b.rst").write_text("no")
    (source / "README.md").write_text("no")
    summary = prepare([source], tmp_path / "out", "byte")
    assert (summary.ignored_files, summary.empty_documents) == (2, 1)
    (told,) = [record.getMessage() for record in caplog.records]
    assert "ignoring 2 files" in told and str(source / "README.md") in told and told.endswith(f"or not {WHAT}")


@pytest.mark.parametrize("tokenizer", ["byte", "char"])
def test_progress_ends_at_the_total(tmp_path, numbered, tokenizer):
    calls = []
    prepare([numbered], tmp_path / "out", tokenizer, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1][0] == calls[-1][1] >= numbered.stat().st_size
    assert calls == sorted(calls)


# Mistakes


def refused(tmp_path, error, match, *inputs, tokenizer="byte", **settings):
    """Preparation raises one line and leaves the folder as it was."""
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(error, match=match) as caught:
        prepare(list(inputs), tmp_path / "new" / "out", tokenizer, **settings)
    assert "\n" not in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_missing_input_is_refused(tmp_path):
    refused(tmp_path, DataError, "no input at .*gone.txt", tmp_path / "gone.txt")


def test_an_empty_file_is_refused_by_name(tmp_path, text):
    (tmp_path / "empty.txt").write_text("")
    refused(tmp_path, DataError, "empty.txt is empty", text, tmp_path / "empty.txt")


def test_a_folder_without_documents_is_refused(tmp_path):
    source = tmp_path / "in"
    source.mkdir()
    (source / "a.txt").write_text("")
    jsonl(source / "b.jsonl", ["", ""])
    refused(tmp_path, DataError, f"no documents in {source}", source)


def test_validation_without_documents_is_refused(tmp_path, text):
    val = jsonl(tmp_path / "val.jsonl", [""])
    refused(tmp_path, DataError, f"no documents in {val}", text, val_inputs=[val])


@pytest.mark.parametrize("tokenizer", ["byte", "char"])
@pytest.mark.parametrize(
    ("line", "match"),
    [
        (b"\xff", "bad.jsonl is not UTF-8: byte 0xff at offset 800"),
        (b"{", "bad.jsonl:41: not JSON"),
        (b"{}", "bad.jsonl:41: no field"),
        (b'{"text": 1}', "bad.jsonl:41: field 'text' is not a string"),
    ],
)
def test_a_bad_line_in_the_middle_leaves_nothing_behind(tmp_path, tokenizer, line, match):
    (tmp_path / "bad.jsonl").write_bytes(b'{"text": "abcdefg"}\n' * 40 + line)
    refused(tmp_path, DataError, match, tmp_path / "bad.jsonl", tokenizer=tokenizer)


def test_an_unknown_extension_is_refused_when_named(tmp_path):
    (tmp_path / "a.rst").write_text("text")
    refused(tmp_path, DataError, r"cannot read .*a\.rst: expected \.txt", tmp_path / "a.rst")


def test_too_many_characters_for_the_char_tokenizer_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("".join(map(chr, range(0x20000, 0x30001))))
    refused(tmp_path, DataError, "65,537 distinct characters", tmp_path / "a.txt", tokenizer="char")


def test_text_must_not_be_both_training_and_validation(tmp_path, text):
    refused(tmp_path, DataError, "in.txt is given twice", tmp_path, val_inputs=[text])


@pytest.mark.parametrize("settings", [{"val_documents": 1}, {"val_fraction": 0.99}])
def test_something_must_be_left_to_train_on(tmp_path, text, settings):
    refused(tmp_path, DataError, "no text is left to train on", text, **settings)


def test_two_rules_for_validation_are_refused(tmp_path, text, numbered):
    refused(tmp_path, ConfigError, "--val-input and --val-documents", text, val_inputs=[numbered], val_documents=3)


def test_an_unknown_tokenizer_is_refused(tmp_path, text):
    refused(tmp_path, ConfigError, "unknown tokenizer 'bpe'", text, tokenizer="bpe")


def test_a_disk_that_takes_no_more_is_one_line_and_leaves_nothing(tmp_path, text):
    text.write_text("x" * 100_000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        refused(tmp_path, DataError, "cannot write .*out: File too large", text)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_an_output_below_a_file_is_refused(tmp_path, text):
    with pytest.raises(DataError, match=r"cannot write .*: (Not a directory|File exists)"):
        prepare([text], text / "out", "byte")


# The output folder


def test_an_existing_dataset_is_replaced_only_by_force(tmp_path, text):
    prepare([text], tmp_path / "out", "byte", val_fraction=0)
    before = contents(tmp_path / "out")
    with pytest.raises(ConfigError, match=r"out exists; replace it with --force"):
        prepare([text], tmp_path / "out", "char")
    assert contents(tmp_path / "out") == before
    prepare([text], tmp_path / "out", "char", overwrite=True)
    assert Dataset.open(tmp_path / "out").tokenizer.kind == "char"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "out"]


def test_a_failed_replacement_keeps_the_old_dataset(tmp_path, text):
    prepare([text], tmp_path / "out", "byte")
    before = contents(tmp_path / "out")
    bad = jsonl(tmp_path / "bad.jsonl", ["a"] * 30)
    bad.write_text(bad.read_text() + "{")
    with pytest.raises(DataError, match=r"not JSON"):
        prepare([bad], tmp_path / "out", "byte", overwrite=True)
    assert contents(tmp_path / "out") == before


def test_an_empty_folder_is_filled(tmp_path, text):
    (tmp_path / "out").mkdir()
    prepare([text], tmp_path / "out", "byte")
    assert audit(tmp_path / "out").ok


@pytest.mark.parametrize("beside", [[], ["dataset.json", "train_000000.bin"]])
def test_a_folder_with_anything_else_is_never_replaced(tmp_path, text, beside):
    (tmp_path / "out").mkdir()
    for name in ["thesis.tex", *beside]:
        (tmp_path / "out" / name).write_text("mine")
    with pytest.raises(ConfigError, match=r"holds thesis.tex, .* only replaces folders of token data"):
        prepare([text], tmp_path / "out", "byte", overwrite=True)
    assert (tmp_path / "out/thesis.tex").read_text() == "mine"


@pytest.mark.parametrize(
    "names",
    [
        ["train/story.txt", "val/story.txt"],
        ["dataset.json", "train/story.txt"],
        ["dataset.json", "train/web"],
        ["dataset.json", "val"],
        ["train/web/00000.bin"],
        ["meta.pkl"],
        ["train_000000.bin"],
        ["train/web/00000.idx", "train/web/notes.idx"],
    ],
)
def test_files_of_somebodys_own_are_never_replaced_wherever_they_lie(tmp_path, text, names):
    for name in names:
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).write_text("mine")
    with pytest.raises(ConfigError, match="only replaces folders of token data"):
        prepare([text], tmp_path / "out", "byte", overwrite=True)
    assert all((tmp_path / "out" / name).read_text() == "mine" for name in names)


def test_a_link_inside_the_output_to_a_folder_is_not_replaced(tmp_path, text):
    prepare([text], tmp_path / "out", "byte")
    (tmp_path / "mine").mkdir()
    (tmp_path / "out/train").symlink_to(tmp_path / "mine")
    with pytest.raises(ConfigError, match=r"holds train, .* only replaces folders of token data"):
        prepare([text], tmp_path / "out", "byte", overwrite=True)
    assert (tmp_path / "out/train").is_symlink()


def test_a_replacement_killed_between_its_two_renames_has_lost_nothing(tmp_path, text, caplog):
    prepare([text], tmp_path / "out", "byte")
    before = contents(tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / ".out.partial-0-old")
    (tmp_path / ".out.partial-0").mkdir()
    with pytest.raises(ConfigError, match="exists; replace it with --force"):
        prepare([text], tmp_path / "out", "char")
    assert contents(tmp_path / "out") == before
    assert "out: the process that was replacing it was killed" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "out"]


def test_data_that_was_replaced_before_a_kill_does_not_come_back(tmp_path, text):
    for name in ("out", ".out.partial-0-old"):  # killed between its second rename and the removal of the old folder
        prepare([text], tmp_path / name, "byte")
    prepare([text], tmp_path / "out", "char", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "out"]


def test_a_file_in_the_place_of_the_output_is_refused(tmp_path, text):
    with pytest.raises(ConfigError, match=r"in.txt is a file"):
        prepare([text], text, "byte", overwrite=True)


def test_a_link_to_a_dataset_stays_a_link(tmp_path, text):
    prepare([text], tmp_path / "real", "byte")
    (tmp_path / "link").symlink_to("real")
    prepare([text], tmp_path / "link", "char", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert Dataset.open(tmp_path / "real").tokenizer.kind == "char"


def test_what_a_killed_preparation_left_is_removed_and_what_a_live_one_writes_is_not(tmp_path, text):
    script = """
import sys, time
from pathlib import Path
from ingot.data.prepare.pipeline import write_dataset
from ingot.data.tokenizers import ByteTokenizer
def pieces():
    yield "train", "abc"
    print("writing", flush=True)
    time.sleep(60)
write_dataset(pieces(), Path(sys.argv[1]), ByteTokenizer(), source=None)
"""
    output = tmp_path / "out"
    process = subprocess.Popen([sys.executable, "-c", script, str(output)], stdout=subprocess.PIPE, env=dict(os.environ))
    try:
        assert process.stdout.readline() == b"writing\n"
        with pytest.raises(ConfigError, match="another process is writing"):
            prepare([text], output, "byte")
        process.send_signal(signal.SIGKILL)
        process.wait()
        prepare([text], output, "byte")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "out"]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


# Workers


@pytest.fixture
def small_steps(monkeypatch):
    """Blocks and points to go on from that fit tests."""
    take_small_steps(monkeypatch.setattr)


@pytest.fixture
def corpus(tmp_path):
    """Files of several sorts, with empty documents among them."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    texts = [f"Document {number}: the cat's {'fur ' * (number * 7 % 23)}is soft, é!" * (number % 5) for number in range(120)]
    jsonl(folder / "a.jsonl", texts[:60])
    (folder / "b.txt").write_text("one text\n" * 30)
    (folder / "c.csv").write_text("text\n" + "".join(f"row {number}\n" for number in range(40)))
    jsonl(folder / "d.ndjson", texts[60:])
    return folder


@pytest.mark.parametrize("tokenizer", ["byte", "char", "gpt2", "toy.model"])
def test_the_bytes_are_the_same_for_any_number_of_workers(tmp_path, corpus, files, small_steps, tokenizer, monkeypatch):
    monkeypatch.chdir(files)
    for workers in (1, 2) if tokenizer != "byte" else (1, 3):
        summary = prepare([corpus], tmp_path / f"out{workers}", tokenizer, shard_tokens=1000, workers=workers)
        assert summary.empty_documents == 24
        assert contents(tmp_path / f"out{workers}") == contents(tmp_path / "out1")


# Killed work goes on


def killed(tmp_path, points=1, workers=1):
    """Begins to prepare the corpus and is killed after this many points to go on from; gives the folder that is left."""
    path = os.pathsep.join([str(Path(prepare_module.__file__).parents[3]), os.environ.get("PYTHONPATH", "")])
    program = [sys.executable, str(Path(__file__).parents[1] / "stopping.py"), str(tmp_path), str(points), str(workers)]
    assert subprocess.run(program, env={**os.environ, "PYTHONPATH": path}, check=False).returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    (partial,) = tmp_path.glob(".out.partial-*")
    return partial


def prepare_corpus(tmp_path, name="out", **settings):
    return prepare([tmp_path / "corpus"], tmp_path / name, "byte", **{"shard_tokens": 1000, **settings})


@pytest.fixture
def whole(tmp_path, corpus, small_steps):
    """What a run that nobody kills makes of the corpus."""
    prepare_corpus(tmp_path, "whole")
    return contents(tmp_path / "whole")


@pytest.mark.parametrize(("points", "workers"), [(1, 1), (9, 2), (20, 1)])
def test_killed_work_goes_on_and_gives_the_same_bytes(tmp_path, whole, points, workers):
    killed(tmp_path, points, workers)
    summary = prepare_corpus(tmp_path, workers=workers)
    assert summary.continued_documents > 0
    assert contents(tmp_path / "out") == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "out", "whole"]


def test_work_that_is_killed_again_and_again_comes_to_its_end(tmp_path, whole):
    documents = 0
    for _ in range(4):
        partial = killed(tmp_path, 3)
        point = json.loads((partial / "journal.jsonl").read_text().splitlines()[-1])
        assert point["documents"] > documents
        documents = point["documents"]
    assert prepare_corpus(tmp_path).continued_documents == documents
    assert contents(tmp_path / "out") == whole


def test_a_point_that_was_half_noted_does_no_harm_to_those_that_follow(tmp_path, whole):
    with (killed(tmp_path, 3) / "journal.jsonl").open("a") as file:
        file.write('{"blocks": 3, "docu')
    partial = killed(tmp_path, 3)
    points = [json.loads(line)["documents"] for line in (partial / "journal.jsonl").read_text().splitlines()[1:]]
    assert len(points) == 6
    assert points == sorted(points)
    assert prepare_corpus(tmp_path).continued_documents == points[-1]
    assert contents(tmp_path / "out") == whole


def test_what_was_encoded_before_is_not_encoded_again(tmp_path, whole, monkeypatch):
    partial = killed(tmp_path, 15)
    point = json.loads((partial / "journal.jsonl").read_text().splitlines()[-1])
    encoded = []
    encode = prepare_module.local_engine

    @contextmanager
    def counting(tokenizer, workers):
        with encode(tokenizer, workers) as engine:
            yield lambda blocks: (encoded.append(found) or found for found in engine(blocks))

    monkeypatch.setattr(prepare_module, "local_engine", counting)
    summary = prepare_corpus(tmp_path)
    total = sum(split.documents for split in summary.splits.values())
    assert sum(len(found.tokens) for found in encoded) == total - point["documents"] < total
    assert summary.empty_documents == 24


def test_work_without_a_point_to_go_on_from_begins_anew(tmp_path, whole):
    killed(tmp_path, 0)
    assert prepare_corpus(tmp_path).continued_documents == 0
    assert contents(tmp_path / "out") == whole


def test_inputs_may_be_named_another_way_when_killed_work_goes_on(tmp_path, whole, monkeypatch):
    killed(tmp_path, 15)
    monkeypatch.chdir(tmp_path)
    summary = prepare([Path("corpus/../corpus")], Path("out"), "byte", shard_tokens=1000)
    assert summary.continued_documents > 0
    assert Dataset.open("out").fingerprint == Dataset.open("whole").fingerprint


def test_kept_work_that_is_removed_is_named_with_the_reason(tmp_path, whole, caplog):
    partial = killed(tmp_path, 15)
    prepare_corpus(tmp_path, val_fraction=0.2)
    assert str(partial) in caplog.text and "different (what is held out)" in caplog.text


def touch_input(tmp_path, partial):
    (tmp_path / "corpus/c.csv").write_text("text\nother\n")


def cut_the_journal(tmp_path, partial):
    lines = (partial / "journal.jsonl").read_bytes().splitlines(keepends=True)
    (partial / "journal.jsonl").write_bytes(lines[0] + lines[1][:-9])


def spoil_the_journal(tmp_path, partial):
    lines = (partial / "journal.jsonl").read_bytes().splitlines(keepends=True)
    (partial / "journal.jsonl").write_bytes(lines[0] + b'{"blocks": -1}\n')


def cut_a_shard(tmp_path, partial):
    os.truncate(partial / "train_000000.bin", 1500)


def remove_the_index(tmp_path, partial):
    (partial / "val.index").unlink()


@pytest.mark.parametrize("change", [touch_input, cut_the_journal, spoil_the_journal, cut_a_shard, remove_the_index])
def test_work_that_cannot_be_trusted_begins_anew(tmp_path, whole, change):
    change(tmp_path, killed(tmp_path, 15))
    assert prepare_corpus(tmp_path).continued_documents == 0
    prepare_corpus(tmp_path, "again")
    assert contents(tmp_path / "out") == contents(tmp_path / "again")
    assert not list(tmp_path.glob(".out.partial-*"))


@pytest.mark.parametrize(
    "settings", [{"shard_tokens": 500}, {"val_fraction": 0.2}, {"val_documents": 3}, {"text_field": "text "}]
)
def test_other_work_does_not_go_on_where_this_was(tmp_path, whole, settings):
    killed(tmp_path, 15)
    if "text_field" in settings:
        for path in (tmp_path / "corpus").iterdir():
            path.write_text(path.read_text().replace('"text"', '"text "').replace("text\n", "text \n", 1))
    assert prepare_corpus(tmp_path, **settings).continued_documents == 0
    prepare_corpus(tmp_path, "again", **settings)
    assert contents(tmp_path / "out") == contents(tmp_path / "again")


def test_what_was_written_behind_the_last_point_does_not_matter(tmp_path, whole):
    partial = killed(tmp_path, 15)
    for name in ("train.index", "val.index", max(path.name for path in partial.glob("train_*.bin"))):
        with (partial / name).open("ab") as file:
            file.write(b"x" * 1001)
    (partial / "train_000099.bin").write_text("x")
    (partial / "dataset.json").write_text("{}")
    with (partial / "journal.jsonl").open("a") as file:
        file.write('{"blocks": 3, "docu')
    assert prepare_corpus(tmp_path).continued_documents > 0
    assert contents(tmp_path / "out") == whole


def test_a_full_disk_is_one_line_and_what_was_written_is_kept(tmp_path, whole, caplog):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8000, limits[1]))
    try:
        with pytest.raises(DataError, match=r"cannot write .*out: File too large") as told:
            prepare_corpus(tmp_path, shard_tokens=100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(told.value)
    assert "the data prepared so far is kept in" in caplog.text and "run the same command to resume" in caplog.text
    assert prepare_corpus(tmp_path, shard_tokens=100_000).continued_documents > 0
    prepare_corpus(tmp_path, "again", shard_tokens=100_000)
    assert contents(tmp_path / "out") == contents(tmp_path / "again")


def test_an_interrupt_keeps_what_was_written_and_says_so(tmp_path, whole, caplog):
    def interrupt():
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_behind(5, interrupt, patch.setattr)
        prepare_corpus(tmp_path)
    assert "run the same command to resume" in caplog.text
    assert prepare_corpus(tmp_path).continued_documents > 0
    assert contents(tmp_path / "out") == whole


def test_a_mistake_in_the_text_keeps_nothing(tmp_path, corpus, small_steps):
    (corpus / "e.jsonl").write_text("{")
    with pytest.raises(DataError, match=r"e\.jsonl:1: not JSON"):
        prepare_corpus(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus"]


def test_a_second_process_at_the_same_work_is_refused_and_does_not_disturb_the_first(tmp_path, whole):
    refusals = []

    def meanwhile():
        if not refusals:
            with pytest.raises(ConfigError, match="another process is writing") as refused:
                prepare_corpus(tmp_path)
            refusals.append(refused)

    with pytest.MonkeyPatch.context() as patch:
        stop_behind(5, meanwhile, patch.setattr)
        prepare_corpus(tmp_path)
    assert refusals and contents(tmp_path / "out") == whole
    assert not list(tmp_path.glob(".out.partial-*"))


# Large documents


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process's memory is read from /proc")
@pytest.mark.parametrize(("tokenizer", "shard_tokens"), [("byte", 3_000_000), ("char", 100_000_000)])
def test_a_large_file_takes_a_few_times_its_size_in_memory(tmp_path, tokenizer, shard_tokens):
    size = 12_000_000
    (tmp_path / "in.txt").write_text("all work and no play\n" * (size // 21))
    program = (
        "import re, sys; from pathlib import Path; from ingot.data.prepare.pipeline import prepare\n"
        "peak = lambda: int(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1])\n"
        "prepare([Path('small.txt')], Path('small'), sys.argv[1]); before = peak()\n"
        "prepare([Path('in.txt')], Path('out'), sys.argv[1], shard_tokens=int(sys.argv[2])); print((peak() - before) * 1024)"
    )
    (tmp_path / "small.txt").write_text("all work " * 500_000)
    environment = {**os.environ, "PYTHONPATH": str(Path(prepare_module.__file__).parents[3])}
    command = [sys.executable, "-c", program, tokenizer, str(shard_tokens)]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert int(ran.stdout) < 9 * size


def test_a_tokenizer_that_is_not_there_is_noticed_before_the_input_is_looked_for(tmp_path):
    with pytest.raises(ConfigError, match="unknown tokenizer 'gtp2'"):
        prepare([Path("hf:nobody/nothing")], tmp_path / "out", "gtp2")


@pytest.mark.parametrize("planted", ["file", "folder"])
def test_a_leftover_with_links_in_it_is_not_continued_and_changes_nothing_elsewhere(tmp_path, text, planted):
    mine, left = tmp_path / "mine", tmp_path / ".out.partial-0"
    mine.mkdir()
    (mine / "journal.jsonl").write_text("{}\nlines of mine, the last without an end")
    if planted == "file":
        left.mkdir()
        (left / "journal.jsonl").symlink_to(mine / "journal.jsonl")
        prepare([text], tmp_path / "out", "byte")
    else:
        left.symlink_to(mine)
        with pytest.raises(ConfigError, match="symbolic link"):
            prepare([text], tmp_path / "out", "byte")
    assert (mine / "journal.jsonl").read_text() == "{}\nlines of mine, the last without an end"


def test_a_vocabulary_is_learned_from_the_text_that_is_not_held_out(tmp_path):
    lines = [{"text": ("never seen " if number % 10 == 0 else "always here ") * 20} for number in range(30)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    prepare([tmp_path / "a.jsonl"], tmp_path / "out", "bpe:300")
    dataset = Dataset.open(tmp_path / "out")
    held_out, kept = dataset.split("val"), dataset.split("train")
    assert held_out.documents == 3  # every tenth
    words = [dataset.tokenizer.encode(f"a {word}").size for word in ("always", "here", "never", "seen")]
    assert max(words[:2]) < min(words[2:])
    assert held_out.bytes / held_out.tokens < 1.7 < kept.bytes / kept.tokens


def test_a_size_that_cannot_be_learned_is_refused_before_inputs_are_looked_for(tmp_path):
    with pytest.raises(ConfigError, match=r"bpe:100 .* from 257 to 65,536"):
        prepare([tmp_path / "not there"], tmp_path / "out", "bpe:100")


# Files in other encodings, and the tokenizer of a text that names none


@pytest.fixture
def mixed(tmp_path):
    """A folder with files in UTF-8 and in another encoding."""
    folder = tmp_path / "mixed"
    folder.mkdir()
    (folder / "a.txt").write_text("caf\u00e9 in UTF-8")
    (folder / "b.txt").write_bytes("caf\u00e9".encode("latin-1"))
    (folder / "c.jsonl").write_bytes(b'{"text": "plain"}\n{"text": "caf\xe9"}\n')
    return folder


def test_all_files_that_are_not_utf8_are_named_at_once(tmp_path, mixed, caplog):
    with pytest.raises(DataError, match=r"2 files are not utf-8.*--encoding.*--skip-unreadable"):
        prepare([mixed], tmp_path / "out", "byte", val_fraction=0)
    assert [record.args[0].name for record in caplog.records] == ["b.txt", "c.jsonl"]
    assert not (tmp_path / "out").exists()


def test_one_file_that_is_not_utf8_is_named_with_the_byte_and_what_to_give(tmp_path, mixed):
    with pytest.raises(DataError, match=r"b\.txt is not UTF-8: byte 0xe9 at offset 3.*--encoding"):
        prepare([mixed / "b.txt"], tmp_path / "out", "byte", val_fraction=0)


def test_files_that_are_not_utf8_are_left_out_if_that_is_asked(tmp_path, mixed, caplog):
    prepare([mixed], tmp_path / "out", "byte", val_fraction=0, skip_unreadable=True)
    assert documents(tmp_path / "out", "train") == ["caf\u00e9 in UTF-8"]
    assert len(caplog.records) == 2


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16", "UTF8"])
def test_text_in_another_encoding_is_the_text(tmp_path, encoding):
    texts = ["caf\u00e9", "na\u00efve\n" * 3]
    (tmp_path / "a.txt").write_bytes(texts[0].encode(encoding))
    (tmp_path / "b.jsonl").write_bytes((json.dumps({"text": texts[1]}, ensure_ascii=False) + "\n").encode(encoding))
    prepare([tmp_path / "a.txt", tmp_path / "b.jsonl"], tmp_path / "out", "byte", val_fraction=0, encoding=encoding)
    assert documents(tmp_path / "out", "train") == texts


def test_a_word_that_is_no_encoding_is_refused(tmp_path, text):
    for name in ("latin-99", "hex"):
        with pytest.raises(ConfigError, match="--encoding"):
            prepare([text], tmp_path / "out", "byte", encoding=name)


def test_a_text_above_half_a_megabyte_is_given_a_vocabulary_of_its_own_and_that_is_said(tmp_path, text, caplog, monkeypatch):
    monkeypatch.setattr("ingot.data.tokenizers.by_name.LEARNED_BYTES", 1 << 14)
    (tmp_path / "large.txt").write_text("to be or not to be, " * 27_000)
    summary = prepare([tmp_path / "large.txt"], tmp_path / "large")
    assert Dataset.open(tmp_path / "large").manifest.source["tokenizer"] == "bpe:2048"
    assert summary.tokenizer == "huggingface" and "bpe:2048" in caplog.text
    assert prepare([text], tmp_path / "small").tokenizer == "byte"
    assert prepare([tmp_path / "large.txt"], tmp_path / "named", "byte").tokenizer == "byte"
