"""What gets ready while the model is built."""

import subprocess
import sys
import threading
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from ingot.backends.torch import startup
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
            found[self.name] = self.args

        def join(self, timeout=None):
            assert timeout in (None, startup.EXIT_PATIENCE_SECONDS)
            found["waited for"] = self.name

    monkeypatch.setattr(threading, "Thread", Noted)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace())
    return found


@pytest.mark.parametrize(
    ("device", "compile_as", "there", "expected", "imports"),
    [
        ("auto", "auto", True, {"triton", "imports", "device"}, (True, True)),  # the compiler, FlashAttention 4
        ("cuda:1", False, True, {"imports", "device"}, (False, True)),
        ("auto", "auto", False, set(), None),
        ("cpu", "auto", True, set(), None),
        ("cpu", True, False, {"triton", "imports"}, (True, False)),
    ],
)
def test_the_compiler_and_the_gpu_get_ready_where_they_are_used(
    started, monkeypatch, device, compile_as, there, expected, imports
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    wait = startup.prepare_ahead(Config(training={"max_steps": 1, "device": device, "compile": compile_as}), Ranks())
    assert started.keys() == expected
    assert started.get("device") in (None, ("cuda:1" if ":" in device else "cuda:0",))
    assert started.get("imports") == imports  # one after another, all in one thread
    wait()
    assert started.get("waited for") == (imports and "imports")


def test_without_triton_no_thread_looks_for_it(started, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)  # importing it fails
    startup.prepare_ahead(Config(training={"max_steps": 1, "device": "cpu", "compile": True}), Ranks())
    assert started.keys() == {"imports"}


def test_a_program_that_ends_waits_for_threads_in_native_code_which_would_abort_it(started, monkeypatch):
    waited = []
    monkeypatch.setattr(startup.atexit, "register", lambda join, seconds: waited.append((join.__self__.name, seconds)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    startup.prepare_ahead(Config(training={"max_steps": 1, "device": "cuda"}), Ranks())
    assert waited == [(name, startup.EXIT_PATIENCE_SECONDS) for name in ("device", "imports")]


# 6 s: what is imported are torch and its compiler, in a program of its own.
def test_only_one_thread_at_a_time_imports_the_compiler():
    """Two of them could meet in its circles, and one would get a module that is half made."""
    code = """
import sys, threading

class Witness:
    met = []

    def find_spec(self, name, *_):
        here, there = threading.current_thread(), [t.name for t in threading.enumerate()]
        if name.startswith(("torch._dynamo", "torch._inductor", "triton")) and here.name != "imports" and "imports" in there:
            self.met.append((here.name, name))

sys.meta_path.insert(0, Witness())
from ingot.backends.open import open_backend
from ingot.config.schema import Config
from ingot.runtime.ranks import Ranks

model = {"family": "golf", "layers": 2, "heads": 2, "kv_heads": 1, "width": 16}
training = {"max_steps": 1, "tokens_per_step": 32, "device": "cpu", "compile": True}
open_backend(Config(model=model, data={"seq_len": 16}, training=training), 64, Ranks()).close()
assert "torch._inductor.compile_fx" in sys.modules
assert not Witness.met, Witness.met
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# 3 s: torch in a program of its own.
def test_models_are_built_without_the_compiler_which_a_thread_imports_meanwhile():
    code = """
import sys
from ingot.config.schema import Config
from ingot.backends.torch.build import build_model

small = {"layers": 2, "heads": 2, "width": 16}
for family in ("gpt2", "golf", "llama", "frontier"):
    fewer = {"context": 16} if family == "gpt2" else {"kv_heads": 1}
    build_model(Config(model={**small, **fewer, "family": family}, data={"seq_len": 16}, training={"max_steps": 1}), 64)
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_processes_that_compile_start_before_the_compiler_is_imported(monkeypatch):
    done = []

    def imported(name):
        done.append(name)
        return SimpleNamespace(maybe_warm_pool=lambda: done.append("processes"))

    monkeypatch.setattr(startup, "import_module", imported)
    startup._import_ahead(compiler=True, flash4=False)
    assert done == ["torch._inductor.async_compile", "processes", "torch._inductor.compile_fx"]
    assert callable(import_module(done[0]).maybe_warm_pool)


def test_an_import_that_the_end_of_the_program_stops_prints_nothing(monkeypatch):
    def stopped(name):
        raise RuntimeError("can't register atexit after shutdown")

    monkeypatch.setattr(startup, "import_module", stopped)
    startup.hash_triton()
    startup._import_ahead(compiler=True, flash4=True)


def test_the_compiler_finds_the_hash_of_triton_that_was_made_ahead():
    cache = pytest.importorskip("triton.runtime.cache")
    cache.triton_key.cache_clear()
    startup.hash_triton()
    assert cache.triton_key.cache_info().misses == 1
    assert import_module("torch._inductor.runtime.triton_compat").triton_key() == cache.triton_key()
    assert cache.triton_key.cache_info().misses == 1


def test_what_triton_needs_of_the_driver_is_made_ahead(monkeypatch):
    made = []

    class Lazy:
        @property
        def active(self):
            made.append(True)

    monkeypatch.setitem(sys.modules, "triton.runtime.driver", SimpleNamespace(driver=Lazy()))
    startup._wake_device("cpu")
    assert made


def test_a_device_that_is_not_there_is_told_by_those_who_need_it():
    startup._wake_device("cpu")
    startup._wake_device("no such device")
