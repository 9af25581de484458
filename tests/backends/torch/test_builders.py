"""Programs that make kernels of other packages beside a run: when they are started, and that they end."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch_kit import make

from ingot.backends import open as opening
from ingot.backends.torch import backend, startup
from ingot.backends.torch.startup import BUILDS, Builders
from ingot.backends.torch.tune import Tuned
from ingot.config.schema import Config
from ingot.errors import ConfigError
from ingot.runtime.ranks import Ranks


@pytest.fixture
def able(monkeypatch, tmp_path):
    """A machine on which programs are worth their time, and a note of those that were started."""
    started = []

    class Noted(subprocess.Popen):
        def __init__(self, command, *args, **kwargs):
            ours = any("ingot.backends.torch.startup" in str(part) for part in command)  # torch's compiler starts programs too
            if ours:
                started.append(self)
            super().__init__(["cat"] if ours else command, *args, **kwargs)

    monkeypatch.setenv("INGOT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(startup, "NVIDIA_DEVICES", (str(tmp_path),))
    monkeypatch.setattr(startup, "has_flash4", lambda: True)
    monkeypatch.setattr(startup, "cpu_count", lambda: startup.MIN_CORES)
    monkeypatch.setattr(startup.subprocess, "Popen", Noted)
    return started


def programs(world_size=1, local_rank=0, model=None, data=None, **training):
    settings = Config(model=model or {}, data=data or {}, training={"max_steps": 1, **training})
    return Builders(settings, 64, Ranks(world_size=world_size, local_rank=local_rank))


def ended(running):
    """Let them have done what they do."""
    for program in running._processes:
        program.stdin.close()
    running.wait()


def test_a_run_waits_for_them_before_it_measures_and_stops_them_at_its_end(monkeypatch):
    calls = []

    class Noting(Builders):
        def wait(self):
            calls.append("wait")

        def stop(self):
            calls.append("stop")

    monkeypatch.setattr(startup, "Builders", Noting)
    monkeypatch.setattr(backend.TorchBackend, "_tune", lambda *_: calls.append("tune") or Tuned(1, "default"))
    opened = make()
    assert calls == ["stop", "wait", "tune"], "on a CPU it stops them first"
    opened.close()
    assert calls == ["stop", "wait", "tune", "stop"]


def test_a_run_that_cannot_begin_ends_them(able):
    with pytest.raises(ConfigError):
        opening.open_backend(Config(model={"vocab_size": 8}, training={"max_steps": 1}), 64, Ranks())
    assert len(able) == len(BUILDS) and all(program.poll() is not None for program in able)


def test_they_begin_before_torch_is_imported():
    code = "import sys, ingot.backends.torch.startup; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_programs_that_do_not_end_are_ended(able, monkeypatch):
    monkeypatch.setattr(startup, "BUILDER_PATIENCE_SECONDS", 0.2)
    running = programs()
    assert len(able) == len(BUILDS) and all(program.poll() is None for program in able)
    running.wait()
    assert all(program.poll() is not None for program in able)
    running.wait()
    assert programs()._processes, "what they had no time for is not done"


def test_a_run_that_ends_early_ends_them(able):
    programs().stop()
    assert [program.poll() for program in able] == [-signal.SIGKILL] * len(BUILDS)  # killed, not waited for


def test_what_was_made_is_not_made_again(able):
    ended(programs())
    assert len(able) == len(BUILDS)
    for same in ({}, {"model": {"layers": 3}}, {"data": {"seq_len": 128}}, {"loss_chunk": 64}):
        assert not programs(**same)._processes
    others = [{"model": {"heads": 6}}, {"model": {"bias": False}}, {"data": {"document_mask": True}}]
    for other in [*others, {"kernels": "off"}, {"cuda_graphs": False}]:
        ended(programs(**other))
        assert not programs(**other)._processes
    assert len(able) == len(BUILDS) * 6


def test_a_program_that_was_killed_has_made_nothing(able):
    running = programs()
    able[0].kill()
    able[1].stdin.close()
    running.wait()
    assert programs()._processes


def test_another_kind_of_gpu_needs_its_own(able, monkeypatch, tmp_path):
    monkeypatch.setattr(startup, "GPU_FOLDERS", tmp_path / "gpus")
    ended(programs())
    (tmp_path / "gpus" / "0").mkdir(parents=True)
    (tmp_path / "gpus" / "0" / "information").write_text("Model: \t NVIDIA H200\nIRQ: 5\n")
    ended(programs())
    assert len(able) == len(BUILDS) * 2
    (tmp_path / "gpus" / "0" / "information").write_text("Model: \t NVIDIA H200\nIRQ: 7\n")
    assert not programs()._processes


@pytest.mark.parametrize(
    "lack",
    [
        {"precision": "fp32"},
        {"world_size": 2},
        {"deterministic": True},
        {"device": "cpu"},
        {"local_rank": 1},
        {"model": {"family": "file", "file": __file__}},
    ],
    ids=str,
)
def test_there_are_none_for_a_run_that_needs_none(able, lack):
    programs(**lack).wait()
    assert able == []


@pytest.mark.parametrize(("name", "answer"), [("cpu_count", startup.MIN_CORES - 1), ("has_flash4", False)])
def test_there_are_none_on_a_machine_without_cores_or_the_package(able, monkeypatch, name, answer):
    monkeypatch.setattr(startup, name, lambda: answer)
    programs().wait()
    assert able == []


def test_there_are_none_without_a_gpu_to_use(able, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    programs().wait()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(startup, "NVIDIA_DEVICES", (str(tmp_path / "none"),))
    programs().wait()
    assert able == []


def test_a_run_that_turns_out_to_be_on_a_cpu_ends_them_at_once(able, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    opening.open_backend(Config(model={"layers": 1, "heads": 2, "width": 32}, training={"max_steps": 1}), 64, Ranks())
    assert len(able) == len(BUILDS) and all(program.poll() is not None for program in able)


def test_a_cache_that_cannot_be_written_is_no_error(able, monkeypatch):
    monkeypatch.setenv("INGOT_CACHE", str(Path(__file__)))
    programs().wait()
    assert able == []
