"""bench.py: ten steps to warm up, twenty that count."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ingot.compat.nanogpt.bench import main

SMALL = [
    "--device=cpu", "--batch_size=2", "--block_size=8", "--n_layer=1", "--n_head=2", "--n_embd=8", "--mfu_peak=1e12",
]  # fmt: skip


def test_twenty_steps_are_timed_behind_ten(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*SMALL, "--real_data=False"]) == 0
    out = capfd.readouterr().out
    assert [len(re.findall(rf"^\d+/{steps} loss: 10\.\d{{4}}$", out, re.M)) for steps in (10, 20)] == [10, 20]
    assert re.search(r"^time per iteration: \d+\.\d{4}ms, MFU: \d+\.\d\d%, [\d,]+ tokens/s$", out, re.M)
    assert not any(tmp_path.iterdir())


def test_a_profile_is_a_file(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*SMALL, "--real_data=False", "--profile=True"]) == 0
    assert list(Path("bench_log").glob("*.json*"))


def test_real_data_are_read_where_there_are_some(capfd, tmp_path, monkeypatch):
    from ingot.compat.nanogpt.prepare import shakespeare

    monkeypatch.chdir(tmp_path)
    assert main(SMALL) == 3
    assert "data/openwebtext" in capfd.readouterr().err
    Path("text").write_text("some words " * 200)
    assert shakespeare(Path("data/openwebtext"), ["--input", "text"]) == 0
    assert main(SMALL) == 0


def test_characters_are_no_data_for_the_model_that_is_measured(capfd, tmp_path, monkeypatch):
    from ingot.compat.nanogpt.prepare import shakespeare_char

    monkeypatch.chdir(tmp_path)
    Path("text").write_text("some words " * 200)
    assert shakespeare_char(Path("data/openwebtext"), ["--input", "text"]) == 0
    assert main(SMALL) == 2
    assert "--real_data=False" in capfd.readouterr().err


@pytest.mark.parametrize("argument", ["--n_head=3", "--batch_size=0", "--device=abacus", "--seed=-1"])
def test_a_mistake_is_one_line(capfd, tmp_path, monkeypatch, argument):
    monkeypatch.chdir(tmp_path)
    assert main([*SMALL, "--real_data=False", argument]) == 2
    assert len(capfd.readouterr().err.splitlines()) == 1
