"""What gets ready while the model is built."""

import threading

import pytest
import torch

from ingot.backends.torch import ahead
from ingot.config.schema import Config
from ingot.runtime.ranks import Ranks


@pytest.fixture
def started(monkeypatch):
    """The names of the threads that are started, and what each is given."""
    found = {}

    class Noted:
        def __init__(self, target, args, name, daemon):
            assert daemon  # a program that ends does not wait for them endlessly
            self.name, self.args = name, args

        def start(self):
            found[self.name] = next(iter(self.args), None)

        def join(self, timeout):
            assert timeout == ahead.PATIENCE

    monkeypatch.setattr(threading, "Thread", Noted)
    return found


@pytest.mark.parametrize(
    ("device", "compile_as", "there", "expected"),
    [
        ("auto", "auto", True, {"compiler", "attention", "device"}),
        ("cuda:1", False, True, {"attention", "device"}),
        ("auto", "auto", False, set()),
        ("cpu", "auto", True, set()),
        ("cpu", True, False, {"compiler"}),
    ],
)
def test_the_compiler_and_the_gpu_get_ready_where_they_are_used(started, monkeypatch, device, compile_as, there, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    ahead.prepare_ahead(Config(training={"max_steps": 1, "device": device, "compile": compile_as}), Ranks())
    assert started.keys() == expected
    assert started.get("device") in (None, "cuda:1" if ":" in device else "cuda:0")


def test_a_program_that_ends_waits_for_threads_in_native_code_which_would_abort_it(started, monkeypatch):
    waited = []
    monkeypatch.setattr(ahead.atexit, "register", lambda join, seconds: waited.append((join.__self__.name, seconds)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    ahead.prepare_ahead(Config(training={"max_steps": 1, "device": "cuda"}), Ranks())
    assert waited == [(name, ahead.PATIENCE) for name in ("attention", "device")]


def test_an_import_that_the_end_of_the_program_stops_prints_nothing(monkeypatch):
    def stopped(name):
        raise RuntimeError("can't register atexit after shutdown")

    monkeypatch.setattr(ahead, "import_module", stopped)
    ahead._import_compiler()


def test_a_device_that_is_not_there_is_told_by_those_who_need_it():
    ahead._make_ready("cpu")
    ahead._make_ready("no such device")
