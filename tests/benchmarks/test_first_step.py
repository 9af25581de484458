"""The bench of the time to the first step: a toy goes the way of a run, and the phases add up to it."""

import itertools
import sys
import time
from importlib import import_module
from types import SimpleNamespace

import first_step
import pytest
from step_profile import TOY

from ingot.backends.torch import backend, tune
from ingot.backends.torch import startup as builders


@pytest.fixture
def unpatched(monkeypatch):
    """The parts that a child process times are as they were afterwards."""
    for name in first_step.PARTS:
        owner = next(owner for owner in (backend, tune, backend.TorchBackend) if hasattr(owner, name))
        monkeypatch.setattr(owner, name, getattr(owner, name))
    for name in ("use_kernels", "failure_of"):
        monkeypatch.setattr(tune, name, getattr(tune, name))
    monkeypatch.setattr(builders, "Builders", builders.Builders)


def test_the_phases_of_a_toy_add_up_to_its_first_step(tmp_path, unpatched, monkeypatch, capsys):
    ticks = itertools.count(1)  # a clock that goes on by a second whenever it is read
    monkeypatch.setattr(first_step, "time", SimpleNamespace(time=lambda: next(ticks), perf_counter=lambda: next(ticks)))
    settings = {**TOY.changes, **first_step.RUN, "model.vocab_size": 260, "training.output_dir": str(tmp_path / "run")}
    found = first_step.child({"recipe": TOY.recipe, **settings}, 1)
    assert {"imports", "building the model", "choosing kernels", "priming step 1", "training"} <= found["phases"].keys()
    assert sum(found["phases"].values()) == found["total"] and found["parts"]["build_model"] > 0
    first_step.show("toy", {"new": found, "seen": found})
    assert "| **to the first step** |" in capsys.readouterr().out


def test_a_recipe_with_stages_has_a_phase_for_each_priming_step_of_each(tmp_path, unpatched, capsys):
    tiny = {"model.layers": 2, "model.width": 32, "model.vocab_size": 260, "model.window": 8, "data.seq_len": 32}
    stages = [{"share": 0.5, "seq_len": 16}, {"share": 0.5, "seq_len": 32}]
    more = {"training.stages": stages, "training.tokens_per_step": 64, "training.device": "cpu"}
    settings = {**first_step.RUN, **tiny, **more, "training.output_dir": str(tmp_path / "run"), "sample": 3, "driver": True}
    found = first_step.child({"recipe": "golf/frontier", **settings}, time.time())
    assert [name for name in found["phases"] if name.startswith("priming")] == [
        f"priming step {step}, stage {stage}" for stage in ("1 (rows of 16)", "2 (rows of 32)") for step in (1, 2)
    ]
    first_step.show("toy", {"new": found})
    assert "ingot.train.start.run" in capsys.readouterr().out


def test_a_module_that_every_start_compiles_anew_is_counted(tmp_path, monkeypatch):
    (tmp_path / "not_compiled.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = first_step.without_bytecode()
    import_module("not_compiled")
    assert first_step.without_bytecode() == before + 1
    del sys.modules["not_compiled"]
