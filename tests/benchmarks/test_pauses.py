"""What interrupts training: the toys run through the engine, and a pause is found where there is one."""

import sys
from dataclasses import replace

import pauses
import pytest
from pauses import TOY

STEP, PAUSE = 0.1, 0.25


def pretend(monkeypatch, paused):
    """Let the engine's steps be told of every STEP seconds, those that `paused` names by their number PAUSE later."""

    def told_at(shape, changes):
        times = [0.0]
        for step in range(2, changes["training.max_steps"] + 1):
            times.append(times[-1] + STEP + (PAUSE if paused(step) else 0))
        return times

    monkeypatch.setattr(pauses, "told_at", told_at)


def test_what_a_checkpoint_costs_is_found(tmp_path, monkeypatch):
    pretend(monkeypatch, lambda step: step % pauses.SAVE_EVERY == 1 and step > 1)  # the step after it is late
    found = pauses.checkpoints(replace(TOY), tmp_path)  # another that is equal has the steps of a real one
    assert found["usual"] == pytest.approx(STEP) and found["extra"] == pytest.approx([PAUSE] * pauses.CHECKPOINTS)
    assert found["part"] == pytest.approx(PAUSE / (pauses.SAVE_EVERY * STEP))
    assert "costs 250, 250, 250, 250 ms, every 100 steps of 100.0 ms: 2.50%" in pauses.told("checkpoints", found)


def test_what_another_shard_costs_is_found(tmp_path, monkeypatch):
    pretend(monkeypatch, lambda step: (step - 1) % pauses.SHARD_STEPS == 0)  # the first step of a shard is late
    found = pauses.shards(replace(TOY), tmp_path)
    assert found["usual"] == pytest.approx(STEP) and found["worst"] == pytest.approx(PAUSE)
    assert sum(extra > PAUSE / 2 for extra in found["extra"]) == pauses.SHARDS - 3  # the first begins, the second is skipped


def test_the_toys_run_through_the_engine(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["pauses.py", "--toy", "--results", str(tmp_path / "found.jsonl")])
    pauses.main()
    said = capsys.readouterr().out
    assert "checkpoints: a checkpoint costs" in said and "shards: a step of" in said
    assert len((tmp_path / "found.jsonl").read_text().splitlines()) == 2
