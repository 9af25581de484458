"""Kernels of FlashAttention 4 and quack-kernels, made by programs beside a run whose shape is new to the machine.

Both packages compile a kernel in Python when it is first used, seconds for each, and keep it on the disk. Two programs use them
on one row while the run builds its model and tries kernels of ours, and the run finds theirs on the disk. Nothing depends on
them: what they have not made is compiled where it is used.
"""

from __future__ import annotations

import subprocess
import time
from contextlib import suppress

import numpy as np
import torch

from ingot.backends.torch.attention import has_flash4, keep_compiled
from ingot.backends.torch.build import fill_outline
from ingot.backends.torch.choices import Choices
from ingot.backends.torch.cuda_graphs import uses_cuda_graphs
from ingot.backends.torch.inference import TorchInference
from ingot.backends.torch.kernels import SHORT, has_kernel, use_kernels, worth_trying
from ingot.backends.torch.parallel import compiles
from ingot.backends.torch.precision import FLASH4
from ingot.config.schema import Config
from ingot.runtime.children import cpu_count, end_with_parent, python_command
from ingot.runtime.ranks import Ranks

# Of each program: the attention it computes with, and the kernels of ours that call what it is to build.
BUILDS = {"attention": (FLASH4, ("qkv",)), "products": ("default", ("mlp", "gate"))}
ENOUGH_CORES = 4  # below, they would only take the run's own time
SMALL = 1 / 32  # of the free memory: what weights and gradients of a program may take
PATIENCE = 30.0  # seconds


class Builders:
    """The programs that build for a run; none where it needs nothing of them."""

    def __init__(self, config: Config, vocab_size: int, precision: str, ranks: Ranks, choices: Choices):
        self._programs: list[subprocess.Popen[bytes]] = []
        tries = choices.kernels_are_new() and not config.training.deterministic and config.model.family != "file"
        if tries and precision == "bf16" and ranks.world_size == 1 and cpu_count() >= ENOUGH_CORES and has_flash4():
            keep_compiled()
            with suppress(OSError):  # too many processes
                self._programs += (_start(build, config, vocab_size) for build in builds(config, vocab_size))

    def wait(self) -> None:
        """Let them end: what they make is on the disk then, and the device's time and memory are the run's alone."""
        deadline = time.monotonic() + PATIENCE
        for program in self._programs:
            with suppress(subprocess.TimeoutExpired):
                program.wait(max(0.0, deadline - time.monotonic()))
        self.stop()

    def stop(self) -> None:
        for program in self._programs:
            program.kill()
            program.communicate()
        self._programs.clear()


def builds(config: Config, vocab_size: int) -> list[str]:
    """What a run of this config may use: attention is always tried, products where one of the kernels that call them is."""
    t = config.training
    recorded = uses_cuda_graphs(config, vocab_size, compiles(config, True), on_cuda=True, ranks=Ranks())
    tried = worth_trying(t.kernels, waits=t.tokens_per_step <= SHORT and not recorded)
    return [build for build, (_, names) in BUILDS.items() if build == "attention" or any(name in tried for name in names)]


def _start(build: str, config: Config, vocab_size: int) -> subprocess.Popen[bytes]:
    code = "from ingot.backends.torch.builders import main; main(*sys.argv[1:])"
    command = python_command(code, build, config.model_dump_json(), str(vocab_size))
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def main(build: str, settings: str, vocab_size: str) -> None:
    end_with_parent()
    config = Config.model_validate_json(settings)
    OneRow.of(config, int(vocab_size)).make(build, config.data.seq_len, config.data.document_mask)


class OneRow(TorchInference):
    """The model of a run, with whatever its memory held for weights."""

    def make(self, build: str, seq_len: int, documents: bool) -> None:
        """A pass of one row there and back, for the kernels that it compiles; none where the run may need the memory."""
        if self._device.type == "cuda" and 8 * self.parameters > SMALL * torch.cuda.mem_get_info(self._device)[0]:
            return
        attention, names = BUILDS[build]
        self.model = fill_outline(self.model, self._device).train()
        use_kernels(self.model, [name for name in names if has_kernel(self.model, name)])
        with self._arithmetic(attention):
            self.model(*self._upload(np.zeros((1, 3 if documents else 2, seq_len), np.int32))).backward()
        self.wait()
