"""The bench of micro-batches: a toy steps in all its sizes, and the trials of a run are seen."""

import sys

import micro_batch
from step_profile import TOY

from ingot.backends.torch import tune
from ingot.backends.torch.backend import TorchBackend


def test_a_toy_is_stepped_in_every_size(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["micro_batch.py", "--toy", "--cuts", "1", "--steps", "1"])
    micro_batch.main()
    rows = [line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert rows == ["rows at once", "8", "4", "8"]


def test_the_trials_of_a_run_are_told_and_left_as_they_were(monkeypatch):
    plain = tune.smallest_micro_batch
    monkeypatch.setattr(
        TorchBackend, "_tune", lambda self, batch, *_: tune.Tuned(self._smallest_micro_batch(batch, len(batch)), "default")
    )
    tried, kept, _ = micro_batch.trials(TOY)
    assert max(tried) == 8 and kept["micro_batch"] in tried and min(tried.values()) > 0
    assert tune.smallest_micro_batch is plain
