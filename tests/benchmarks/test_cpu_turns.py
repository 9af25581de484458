"""The benchmark of two versions on a CPU, at toy size."""

import cpu_turns
import pytest


def block(seconds, losses):
    return {"cpu": seconds, "clock": 2 * seconds, "losses": losses}


def test_blocks_that_follow_each_other_are_compared(capsys):
    turns = [(block(3.0, [5.0, 4.0]), block(2.0, [5.0, 4.0])), (block(10.0, [3.0, 2.5]), block(5.0, [3.0, 2.0]))]
    cpu_turns.show(turns, steps=2)
    processor, clock, _, losses = capsys.readouterr().out.splitlines()[2:]
    assert processor == "| the processor | 3250.00 | 1500.00 | 1750.00 | 1000.00 | 1.750 | 1.625 to 1.875 |"
    assert clock.endswith("| 1.750 | 1.625 to 1.875 |")
    assert losses == "losses apart: 5.0e-01 at most, 2.5000 and 2.0000 at the end"


@pytest.mark.long
def test_the_same_version_twice_has_the_same_losses(capsys):
    cpu_turns.main(["--toy", "--shape", "demo", "--rounds", "2", "--steps", "2"])
    assert "losses apart: 0.0e+00 at most" in capsys.readouterr().out
