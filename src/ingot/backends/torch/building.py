"""What the programs of `builders` do: a pass of one row there and back, for the kernels of other packages that it compiles."""

from __future__ import annotations

import numpy as np
import torch

from ingot.backends.torch.build import fill_outline
from ingot.backends.torch.cuda_graphs import uses_cuda_graphs
from ingot.backends.torch.inference import TorchInference
from ingot.backends.torch.kernels import SHORT, has_kernel, use_kernels, worth_trying
from ingot.backends.torch.parallel import compiles
from ingot.backends.torch.precision import FLASH4
from ingot.config.schema import Config
from ingot.runtime.children import end_with_parent
from ingot.runtime.ranks import Ranks

# Of each program: the attention it computes with, and the kernels of ours that call what it is to build.
BUILDS = {"attention": (FLASH4, ("qkv",)), "products": ("default", ("mlp", "gate"))}
SMALL = 1 / 32  # of the free memory: what weights and gradients of a program may take


def builds(config: Config, vocab_size: int) -> list[str]:
    """What a run of this config may use: attention is always tried, products where one of the kernels that call them is."""
    t = config.training
    recorded = uses_cuda_graphs(config, vocab_size, compiles(config, True), on_cuda=True, ranks=Ranks())
    tried = worth_trying(t.kernels, waits=t.tokens_per_step <= SHORT and not recorded)
    return [build for build, (_, names) in BUILDS.items() if build == "attention" or any(name in tried for name in names)]


def main(build: str, settings: str, vocab_size: str) -> None:
    end_with_parent()
    config = Config.model_validate_json(settings)
    if build in builds(config, int(vocab_size)):
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
        with self._computing(attention):
            self.model(*self._upload(np.zeros((1, 3 if documents else 2, seq_len), np.int32))).backward()
        self.wait()
