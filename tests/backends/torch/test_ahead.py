"""What gets ready while the model is built."""

import subprocess
import sys
import threading
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from ingot.backends.torch import ahead, preloaded
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
        ("auto", "auto", True, {"triton", "compiler", "attention", "device"}),
        ("cuda:1", False, True, {"attention", "device"}),
        ("auto", "auto", False, set()),
        ("cpu", "auto", True, set()),
        ("cpu", True, False, {"triton", "compiler"}),
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


def test_processes_that_compile_start_before_the_compiler_is_imported(monkeypatch):
    done = []

    def imported(name):
        done.append(name)
        return SimpleNamespace(maybe_warm_pool=lambda: done.append("processes"))

    monkeypatch.setattr(ahead, "import_module", imported)
    ahead._start_compiler()
    assert done == ["torch._inductor.async_compile", "processes", "torch._inductor.compile_fx"]
    assert callable(import_module(done[0]).maybe_warm_pool)


@pytest.mark.parametrize("prepare", [ahead.hash_triton, ahead._start_compiler])
def test_an_import_that_the_end_of_the_program_stops_prints_nothing(monkeypatch, prepare):
    def stopped(name):
        raise RuntimeError("can't register atexit after shutdown")

    monkeypatch.setattr(ahead, "import_module", stopped)
    prepare()


def test_the_compiler_finds_the_hash_of_triton_that_was_made_ahead():
    cache = pytest.importorskip("triton.runtime.cache")
    cache.triton_key.cache_clear()
    ahead.hash_triton()
    assert import_module("torch._inductor.codecache").triton_key() == cache.triton_key()
    assert cache.triton_key.cache_info().misses == 1


def test_a_device_that_is_not_there_is_told_by_those_who_need_it():
    ahead._make_ready("cpu")
    ahead._make_ready("no such device")


@pytest.mark.parametrize("there", [True, False])
def test_what_forks_need_is_imported_where_a_driver_is(monkeypatch, tmp_path, there):
    called = []
    for name in ("hash_triton", "import_compiler", "load_flash4"):
        monkeypatch.setattr(preloaded, name, lambda name=name: called.append(name))
    (tmp_path / "driver").touch()
    monkeypatch.setattr(preloaded, "DRIVER", tmp_path / ("driver" if there else "none"))
    preloaded.preload()
    assert called == (["hash_triton", "import_compiler", "load_flash4"] if there else [])


def test_what_is_imported_for_forks_touches_no_device_and_leaves_no_thread():
    code = """
import os, sys, threading, torch
from ingot.backends.torch import preloaded
preloaded.DRIVER = preloaded.Path(os.devnull)
preloaded.preload()
assert "torch._inductor.compile_fx" in sys.modules
assert not torch.cuda.is_initialized()
assert threading.active_count() == 1
"""
    subprocess.run([sys.executable, "-c", code], check=True)
