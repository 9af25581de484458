"""What interrupts training: the toys run through the engine, and a pause is found where there is one."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pauses
import pytest
from pauses import TOY

from ingot.data.store.shards import TokenStream

STEP, PAUSE = 0.1, 0.25


def pretend(monkeypatch, paused):
    """Let the engine's steps be told of every STEP seconds, those that `paused` names by their number PAUSE later."""

    def told_at(shape, changes):
        times = [0.0]
        for step in range(2, changes["training.max_steps"] + 1):
            times.append(times[-1] + STEP + (PAUSE if paused(step) else 0))
        return times

    monkeypatch.setattr(pauses, "told_at", told_at)


@pytest.mark.parametrize("late", [1, 2, 40])
def test_what_a_checkpoint_costs_is_found(tmp_path, monkeypatch, late):
    pretend(monkeypatch, lambda step: step > pauses.SAVE_EVERY and step % pauses.SAVE_EVERY == late)  # so many steps after it
    found = pauses.checkpoints(replace(TOY), tmp_path)  # another that is equal has the steps of a real one
    assert found["usual"] == pytest.approx(STEP) and found["extra"] == pytest.approx([PAUSE] * pauses.CHECKPOINTS)
    assert found["part"] == pytest.approx(PAUSE / (pauses.SAVE_EVERY * STEP))
    assert "costs 250, 250, 250, 250 ms, every 100 steps of 100.0 ms: 2.50%" in pauses.told("checkpoints", found)


@pytest.mark.parametrize("late", [-2, 0, 1])
def test_what_another_shard_costs_is_found(tmp_path, monkeypatch, late):
    pretend(monkeypatch, lambda step: step > 5 and step % pauses.SHARD_STEPS == late % pauses.SHARD_STEPS)
    found = pauses.shards(replace(TOY), tmp_path)
    assert found["usual"] == pytest.approx(STEP) and found["extra"] == pytest.approx([PAUSE] * (pauses.SHARDS - 1))
    assert "another shard costs 250.00 ms among steps of 100.0 ms, the median of 5, and at most 250.00" in pauses.told(
        "shards", found
    )


def test_a_shard_that_is_slow_to_open_is_seen_through_the_engine(tmp_path, monkeypatch):
    """By a clock on which a step takes STEP seconds and the opening of a shard PAUSE, however fast the machine is."""
    shard, spent = TokenStream.shard, []

    def slowly(self, number):
        if number and number not in self._maps:
            spent.append(PAUSE)
        return shard(self, number)

    def read_clock():
        spent.append(STEP)
        return sum(spent)

    monkeypatch.setattr(TokenStream, "shard", slowly)
    monkeypatch.setattr(pauses, "time", SimpleNamespace(perf_counter=read_clock))
    found = pauses.shards(TOY, tmp_path)
    assert found["usual"] == pytest.approx(STEP) and found["extra"] == pytest.approx([PAUSE] * len(found["extra"]))


def test_the_toys_run_through_the_engine(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["pauses.py", "--toy", "--results", str(tmp_path / "found.jsonl")])
    pauses.main()
    said = capsys.readouterr().out
    assert "checkpoints: a checkpoint costs" in said and "shards: another shard costs" in said
    assert len((tmp_path / "found.jsonl").read_text().splitlines()) == 2
