"""The table of speed: originals by their own programs, ours in turns with them, and nothing measured twice."""

import argparse
import json
import sys

import pytest
import speed_h200
from speed_h200 import LINES, ROWS, golf, nanogpt, table

BENCH = "print('time per iteration: 99.0000ms, MFU: 1%'); print('time per iteration: 12.5000ms, MFU: 40%')"
TRAIN = """
import pathlib, sys, time
assert "--dataset=random" in sys.argv and pathlib.Path("data/random/train.bin").stat().st_size == 2_000_000
print("step 0: train loss 10.9"); print("iter 0: loss 10.9", flush=True); time.sleep(60)
pathlib.Path("went-on").touch()
"""
GOLF = """
import os, pathlib
import numpy as np, sentencepiece
shard = np.fromfile(next(pathlib.Path(os.environ["DATA_PATH"]).glob("fineweb_train_*.bin")), "<i4", 3)
assert shard.tolist() == [20240520, 1, 8_000_000]
assert sentencepiece.SentencePieceProcessor(model_file=os.environ["TOKENIZER_PATH"]).vocab_size() == 1024
for step in (1, 10, 20, int(os.environ["ITERATIONS"])):
    spent = 5000 + step * int(os.environ["TRAIN_BATCH_TOKENS"]) / 1024
    print(f"step:{step}/40 train_loss:6.9 train_time:{spent:.0f}ms step_avg:1ms")
pathlib.Path("final_model.pt").touch()
"""


@pytest.fixture
def folders(tmp_path):
    """Folders of programs that say what the originals say, and a place to run copies of them."""
    for name, text in (("bench.py", BENCH), ("train.py", TRAIN), ("train_gpt.py", GOLF)):
        (tmp_path / "source").mkdir(exist_ok=True)
        (tmp_path / "source" / name).write_text(text)
    (tmp_path / "place").mkdir()
    return tmp_path / "source", tmp_path / "place"


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["speed_h200.py", *map(str, words)])
    speed_h200.main()


def test_nanogpt_is_timed_by_the_last_line_of_its_bench(folders):
    assert nanogpt("124m-12x1024", *folders) == {"ms": 12.5}


def test_nanogpt_is_stopped_at_its_first_iteration(folders):
    found = nanogpt("first-step", *folders)
    assert found.keys() == {"new", "seen"} and not (folders[1] / "went-on").exists()


def test_golf_is_timed_without_its_first_steps_and_leaves_its_folder_alone(folders):
    source, place = folders
    assert golf("golf-131k", source, place) == {"ms": 128.0}
    assert sorted(file.name for file in source.iterdir()) == ["bench.py", "train.py", "train_gpt.py"]


def test_ours_takes_turns_with_the_original_and_nothing_is_measured_again(folders, tmp_path, monkeypatch, capsys):
    words = ["--rows", "124m-12x1024", "--turns", "2", "--nanogpt", folders[0], "--results", tmp_path / "r.jsonl"]
    figures = iter([22.0, 24.0])
    monkeypatch.setattr(speed_h200, "ours", lambda *given: {"ms": next(figures)})
    run(monkeypatch, *words)
    told = capsys.readouterr().out
    assert "| 124M, 12 x 1024, ms | 12.5 | 23.0 |" in told and "nothing is left" in told
    lines = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert [line["program"] for line in lines] == ["original", "ours"] * 2
    run(monkeypatch, *words)
    assert capsys.readouterr().out.splitlines()[-4:] == told.splitlines()[-4:]


@pytest.mark.long
def test_every_row_of_ours_has_a_toy(tmp_path, monkeypatch, capsys):
    run(monkeypatch, "--toy", "--turns", 1, "--rows", "frontier", "gpt-simple", "first-step", "--results", tmp_path / "r.jsonl")
    told = capsys.readouterr().out
    assert "nothing is left" in told and told.count("; took ") == 3 and "| - |" not in told


def test_what_would_not_end_in_time_and_what_fails_is_left_for_later(folders, tmp_path, monkeypatch, capsys):
    run(monkeypatch, "--toy", "--limit", 60, "--results", tmp_path / "r.jsonl")
    assert capsys.readouterr().out.count("not begun") == 2 * len(ROWS)
    (folders[0] / "bench.py").write_text("raise SystemExit('no GPU')")
    monkeypatch.setattr(speed_h200, "ours", lambda *given: {"ms": 22.0})
    run(monkeypatch, "--rows", "124m-12x1024", "--nanogpt", folders[0], "--turns", 1, "--results", tmp_path / "r.jsonl")
    told = capsys.readouterr().out
    assert "FAILED: RuntimeError" in told and "no GPU" in told and "some figures are left" in told
    assert "| (25.8) | 22.0 | 23.0 | 21.0 | must |" in told


def test_the_table_says_what_is_reached():
    def line(row, program, **figures):
        return {"row": row, "program": program, **figures}

    results = [
        *(line("golf-393k", "ours", ms=ms, choices={"micro_batch": 12}, peak_gib=11.04) for ms in (214.0, 216.0, 214.4)),
        line("gpt-simple", "ours", tokens_per_second=599_999.0),
        line("gpt-simple", "original", tokens_per_second=424_000.0),
        line("first-step", "ours", new=34.0, seen=11.0),
    ]
    found = table(results, ROWS).splitlines()[2:]
    assert len(found) == len(LINES)
    assert "| (376) | 214.4 | 240.0 | 215.0 | aim | 12, 11.0 |" in found[0]
    assert "| 424,000 | 599,999 | 600,000 | 650,000 | no |" in found[5]
    assert "| (37, nanoGPT) | 34.0 | 35.0 | 20.0 | must |" in found[6] and "| (-) | 11.0 | 10.0 | 5.0 | no |" in found[7]


def test_a_row_without_its_original_has_ours_alone():
    given = argparse.Namespace(turns=2, rows=["frontier", "golf-131k"], golf="folder", nanogpt=None, gpt_simple=None, set=["a=1"])
    names = [case.name for case in speed_h200.cases(given)][:3]
    assert names == ["frontier, ours, turn 1, a=1", "golf-131k, original, turn 1", "golf-131k, ours, turn 1, a=1"]
