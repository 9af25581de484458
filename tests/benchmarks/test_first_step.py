"""The bench of the time to the first step: a toy goes the way of a run, and the phases add up to it."""

import time

import first_step
import pytest
from step_profile import TOY

from ingot.backends.torch import backend


@pytest.fixture
def unpatched(monkeypatch):
    """The parts that a child process times are as they were afterwards."""
    for name in first_step.PARTS:
        owner = backend if hasattr(backend, name) else backend.TorchBackend
        monkeypatch.setattr(owner, name, getattr(owner, name))


def test_the_phases_of_a_toy_add_up_to_its_first_step(tmp_path, unpatched, capsys):
    settings = {**TOY.changes, **first_step.RUN, "model.vocab_size": 260, "training.output_dir": str(tmp_path / "run")}
    found = first_step.child({"recipe": TOY.recipe, **settings}, time.time())
    assert {"imports", "building the model", "choosing kernels", "priming", "training"} <= found["phases"].keys()
    assert sum(found["phases"].values()) == pytest.approx(found["total"], abs=0.05) and found["parts"]["build_model"] > 0
    first_step.show("toy", {"new": found, "seen": found})
    assert "| **to the first step** |" in capsys.readouterr().out
