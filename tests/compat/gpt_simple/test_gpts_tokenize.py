"""JSON lines to pairs of .bin and .idx: windows without repetitions at the end, lines that are left out, files that fail."""

import gzip
import json

import numpy as np
import pytest

from ingot.compat.gpt_simple.tokenize_jsonl import WindowRule, tokenize
from ingot.data.formats.gpt_simple_folder import Pair, cut_windows, read_index
from ingot.data.tokenizers import ByteTokenizer
from ingot.errors import ConfigError, DataError, RunError

BYTE = ByteTokenizer()


def lines(path, *texts):
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def ids(text):
    return [*BYTE.encode(text).tolist(), BYTE.eos]


@pytest.mark.parametrize(
    ("length", "found"),
    [
        (3, [(0, 3, 0)]),
        (8, [(0, 8, 0)]),  # gpt-simple makes a window of 9 and one that only repeats
        (9, [(0, 8, 0), (6, 9, 2)]),
        (14, [(0, 8, 0), (6, 14, 2)]),
        (15, [(0, 8, 0), (6, 14, 2), (12, 15, 2)]),
    ],
)
def test_windows_end_with_the_document_and_none_is_longer_than_asked(length, found):
    assert list(cut_windows(length, 8, 2)) == found


def test_a_pair_for_every_file_read_back_as_the_same_documents(tmp_path):
    texts = {"a": ["the first text", "x" * 30], "b": ["another one"]}
    lines(tmp_path / "in" / "a.jsonl", *texts["a"])
    lines(tmp_path / "in" / "b.jsonl.gz", *texts["b"])
    found = tokenize(tmp_path / "in", tmp_path / "out", "byte", WindowRule(16, 4, least_characters=1))
    assert [(one.file, one.documents, one.error) for one in found] == [("a.jsonl", 2, ""), ("b.jsonl.gz", 1, "")]
    for name, some in texts.items():
        pair = Pair(tmp_path / "out" / f"{name}.bin")
        documents = [[i for part in document for i in part.tolist()] for document in pair.documents(BYTE.eos)]
        assert documents == [ids(text)[:-1] for text in some]
    _, offsets, repeats = read_index(tmp_path / "out" / "a.idx")
    assert np.diff(offsets).tolist() == [15, 16, 16, 7] and repeats.tolist() == [0, 0, 4, 4]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a.bin", "a.idx", "b.bin", "b.idx"]


def test_lines_that_are_left_out_are_counted(tmp_path):
    (tmp_path / "in").mkdir()
    rows = [
        '{"text": "long enough"}',
        "not json",
        "[1]",
        '{"other": 1}',
        '{"text": 5}',
        '{"text": "ab"}',
        "",
        '{"text": "\\ud800 is half of a pair"}',
    ]
    (tmp_path / "in" / "a.jsonl").write_text("\n".join(rows))
    [one] = tokenize(tmp_path / "in", tmp_path / "out", "byte", WindowRule(least_characters=5))
    assert (one.documents, one.skipped) == (1, 6)


def test_an_overlap_by_chance_is_the_same_each_time_and_about_as_often_as_asked():
    windows = WindowRule(16, 4, 0.7)
    drawn = [windows.overlap_of("a.jsonl", line) for line in range(1000)]
    assert set(drawn) == {0, 4} and 650 < drawn.count(4) < 750
    assert drawn[:8] == [4, 4, 0, 4, 0, 0, 4, 0]  # of any process, on any day
    assert WindowRule(16, 4, 0.0).overlap_of("a", 1) == 0 and WindowRule(16, 4).overlap_of("a", 1) == 4


def test_a_file_that_fails_is_told_after_the_rest_is_made(tmp_path, cli):
    lines(tmp_path / "in" / "b.jsonl", "some text")
    (tmp_path / "in" / "a.jsonl.gz").write_bytes(b"not packed")
    found = tokenize(tmp_path / "in", tmp_path / "out", "byte", WindowRule(least_characters=1))
    assert [bool(one.error) for one in found] == [True, False]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["b.bin", "b.idx"]
    words = ("--input_dir", tmp_path / "in", "--output_dir", tmp_path / "again", "--tokenizer_path", "gpt2")
    said = cli("tokenize", *words, "--min_text_length", 1, code=RunError.exit_code).err
    assert "b.jsonl: 1 documents" in said and "1 of 2 files" in said and str(tmp_path / "in/a.jsonl.gz") in said


def test_several_processes_write_the_same_bytes(tmp_path):
    for name in "abc":
        lines(tmp_path / "in" / f"{name}.jsonl", *(f"{name} {number} " * 9 for number in range(20)))
    windows = WindowRule(16, 4, 0.5, 1)
    one = tokenize(tmp_path / "in", tmp_path / "one", "byte", windows)
    two = tokenize(tmp_path / "in", tmp_path / "two", "byte", windows, workers=2)
    assert one == two
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_mistakes_are_told_before_anything_is_written(tmp_path):
    lines(tmp_path / "in" / "a.jsonl", "text")
    with pytest.raises(ConfigError, match="an overlap of 9 tokens does not fit windows of 16"):
        tokenize(tmp_path / "in", tmp_path / "out", "byte", WindowRule(16, 9))
    with pytest.raises(DataError, match=r"there is no folder .*; give the folder with the \.jsonl"):
        tokenize(tmp_path / "none", tmp_path / "out", "byte", WindowRule())
    lines(tmp_path / "in" / "a.jsonl.gz", "text")
    with pytest.raises(DataError, match=r"would be written to the same \.bin"):
        tokenize(tmp_path / "in", tmp_path / "out", "byte", WindowRule())
    assert not (tmp_path / "out").exists()
