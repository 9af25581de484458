"""What programs beside a run compute, so that kernels of other packages are compiled."""

import subprocess

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ingot.backends.torch.inference import TorchInference
from ingot.backends.torch.startup import BUILDS, needed_builds
from ingot.config.schema import Config
from ingot.runtime.processes import python_command

MODELS = {
    "gpt2": {"layers": 1, "heads": 2, "width": 32},
    "golf": {"layers": 2, "heads": 2, "kv_heads": 1, "width": 32},
    "llama": {"layers": 1, "heads": 2, "width": 32},
    "frontier": {"layers": 2, "heads": 2, "width": 32, "window": 8},
}
OF_FLASH4 = {name + end for name in ("flash_attention", "packed_flash_attention", "qkv_attention") for end in ("", "_backward")}
OF_MATMULS = {name + end for name in ("mlp", "gated_mlp") for end in ("", "_backward")}


def config(family="gpt2", documents=False, **training):
    settings = {"model": {"family": family, **MODELS[family]}, "data": {"seq_len": 16, "document_mask": documents}}
    return Config.model_validate(
        {**settings, "training": {"device": "cpu", "max_steps": 1, "tokens_per_step": 65536, **training}}
    )


class Operations(TorchDispatchMode):
    """The names of our own operations that are used."""

    def __init__(self):
        super().__init__()
        self.used = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "ingot":
            self.used.add(function.name().split("::")[1])
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("documents", [False, True])
def test_a_program_computes_one_row_by_what_it_is_to_build(family, documents):
    for build, found in (("attention", OF_FLASH4), ("matmuls", OF_MATMULS)):
        with Operations() as operations:
            TorchInference.of(config(family, documents), 64).run_row(*BUILDS[build], 16, documents, 1 / 32)
        assert {name.endswith("backward") for name in operations.used & found} == {True, False}, (build, operations.used)
        assert not operations.used & (OF_FLASH4 | OF_MATMULS) - found


def test_a_program_ends_well():
    code = "from ingot.backends.torch.startup import main; main(*sys.argv[1:])"
    with subprocess.Popen(python_command(code, "attention", config().model_dump_json(), "64"), stdin=subprocess.PIPE) as program:
        assert program.wait() == 0


def test_matmuls_are_built_for_runs_that_try_kernels_with_them():
    for all_of_them in ({}, {"kernels": ["mlp"]}, {"tokens_per_step": 8192}, {"tokens_per_step": 8192, "kernels": ["gate"]}):
        assert needed_builds(config(**all_of_them), 64) == ["attention", "matmuls"]
    for less in ({"kernels": "off"}, {"kernels": ["loss"]}, {"tokens_per_step": 8192, "cuda_graphs": False}):
        assert needed_builds(config(**less), 64) == ["attention"]
    assert needed_builds(config(tokens_per_step=8192, deterministic=True), 64) == ["attention"], "auto records nothing there"


def test_a_model_whose_memory_the_run_may_need_is_not_built(monkeypatch):
    model = TorchInference.of(config(), 64)
    model._device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 * model.parameters * 31, 0))
    model.run_row("default", (), 16, False, 1 / 32)
    assert all(p.is_meta for p in model.model.parameters())


def test_a_program_whose_run_is_gone_ends():
    code = "import time; from ingot.backends.torch import startup; startup.needed_builds = lambda *_: time.sleep(600); "
    command = python_command(code + "startup.main(*sys.argv[1:])", "attention", config().model_dump_json(), "64")
    with subprocess.Popen(command, stdin=subprocess.PIPE) as program:
        program.stdin.close()
        assert program.wait(300) == 1
