"""`ingot sweep` as a program: killed outright, its run saves itself, and the same command goes on with it."""

from __future__ import annotations

import json
import time
from pathlib import Path

from programs import PATIENCE, Ingot, losses, state, train_words


def eventually(is_so, program) -> None:
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < deadline, program.stderr
        time.sleep(0.005)


def test_a_sweep_that_was_killed_leaves_a_run_that_saved_and_goes_on_with_it(ingot: Ingot, data: Path, tmp_path: Path):
    settings = train_words(data, tmp_path / "x", training__save_every=1000, artifact__write="false")[1:]
    settings = [word for word in settings if "output_dir" not in word and "max_steps" not in word]
    words = ["sweep", *settings, "--vary=training.max_steps=150,40", "--seeds=1", "-o", tmp_path / "sweep", "--json"]
    first, second = (tmp_path / "sweep" / f"max_steps={steps}" / "seed-1" for steps in (150, 40))
    program = ingot.start(*words)
    eventually(lambda: (first / "metrics.jsonl").is_file() and (first / "metrics.jsonl").stat().st_size, program)
    program.process.kill()  # and not its group
    eventually(lambda: state(first)["status"] != "running", program)
    assert state(first)["status"] == "stopped" and 0 < state(first)["step"] < 150
    told = json.loads(ingot(*words).stdout)
    assert [arm["n"] for arm in told["arms"]] == [1, 1]
    assert (len(losses(first)), len(losses(second))) == (150, 40)
