"""Training losses after as many tokens, of two runs and of the arms of a sweep."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from experiments_kit import said, write_finished

from ingot.experiments.comparing import compare
from ingot.experiments.losses import losses_apart, losses_of


def noted(folder: Path, losses: dict[int, float]) -> Path:
    """A run with these training losses by tokens."""
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({"kind": "train", "tokens": t, "loss": loss}) + "\n" for t, loss in losses.items())
    return folder


def side(folder: Path, *losses: dict[int, float], **known) -> list[Path]:
    runs = enumerate(losses, 1)
    return [noted(write_finished(folder / str(seed), 1.0 + seed / 100, seed, **known), found) for seed, found in runs]


def test_the_later_half_of_what_both_noted_is_compared_whatever_the_budget_bought():
    first = {10: 9.0, 20: 5.0, 30: 4.0, 40: 3.0, 50: 2.0}
    second = {10: 9.5, 20: 5.5, 30: 4.1, 35: 0.0, 40: 3.3}
    assert losses_apart([(first, second)]) == pytest.approx((0.1 + 0.3) / 2)
    assert losses_apart([(first, second), (first, {50: 3.0})]) == pytest.approx((0.2 + 1.0) / 2)
    assert losses_apart([(first, {15: 1.0})]) is None and losses_apart([]) is None


def test_losses_are_those_of_training_that_are_numbers():
    records = [
        {"kind": "train", "tokens": 64, "loss": 2.5}, {"kind": "train", "tokens": 128, "loss": None},
        {"kind": "train", "tokens": 192, "loss": float("nan")}, {"kind": "train", "loss": 2.0},
        {"kind": "evaluation", "tokens": 256, "loss": 2.0},
    ]  # fmt: skip
    assert losses_of(records) == {64: 2.5}


def test_two_arms_are_compared_seed_by_seed(tmp_path, capsys):
    a = side(tmp_path / "a", {64: 3.0, 128: 2.0}, {64: 3.5, 128: 2.5})
    b = side(tmp_path / "b", {64: 3.0, 128: 2.1}, {64: 3.5, 128: 2.7}, settings={"data.sampling": "redraw"})
    assert compare(a, b).loss_difference == pytest.approx(0.15)
    assert "training loss after as many tokens, of equal seeds: B - A +0.1500\n" in said(capsys, "compare", *a, "--", *b)[1]
    told = json.loads(said(capsys, "compare", "--json", *b, "--", *a)[1])
    assert told["loss_difference"] == pytest.approx(-0.15)


def test_losses_in_other_tokens_are_not_compared(tmp_path, capsys):
    a = side(tmp_path / "a", {64: 3.0}, {64: 3.5})
    b = side(tmp_path / "b", {64: 2.0}, {64: 2.5}, data_fingerprint="e" * 64)
    assert compare(a, b).loss_difference is None
    assert "training loss" not in said(capsys, "compare", *a, "--", *b)[1]


def test_the_table_of_a_sweep_has_them(tiny_words, capsys):
    words = ["sweep", "--vary", "optimizer.learning_rate=0.001,0.002", "--seeds", "1,2", *tiny_words]
    head, first, second = said(capsys, *words)[1].splitlines()
    told = json.loads(said(capsys, *words, "--json")[1])["arms"]
    lines = [[Path(trial["run"], "metrics.jsonl").read_text().splitlines() for trial in arm["trials"]] for arm in told]
    runs = [[losses_of(map(json.loads, run)) for run in arm] for arm in lines]
    expected = losses_apart(zip(*runs, strict=True))
    assert expected and told[0]["loss_difference"] is None and told[1]["loss_difference"] == pytest.approx(expected)
    at = head.index("loss vs first")
    assert first[at:].startswith("- ") and second[at:].startswith(f"{expected:+.4f} ")
