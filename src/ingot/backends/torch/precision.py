"""The arithmetic of forward and backward: number format, attention kernel, order of sums, and the scale of an fp16 loss."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ingot.backends.torch.state import Named, tensor
from ingot.runtime.machine import cache_root
from ingot.runtime.tensors import TensorRecord

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
GROUPED = "-grouped"  # ends the name of a kernel that is given keys and values with the heads they have
ATTENTION = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
FLASH4 = "flash4"  # FlashAttention 4 of a package of its own: a model calls it by itself
CUDNN_FLASH4 = "cudnn-flash4"  # its backward pass, and cuDNN's forward pass


def choose_no_kernel_by_speed() -> None:
    """What deterministic mode asks of cuBLAS and of the compiler, before either is used."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
    compiler: Any = import_module("torch._inductor.config")
    compiler.deterministic = True


@contextlib.contextmanager
def arithmetic(kind: str, precision: str, attention: str = "default", deterministic: bool = False) -> Iterator[None]:
    """Precision and attention kernel of what is computed inside, and whether its sums have a fixed order."""
    with contextlib.ExitStack() as stack:
        if deterministic:
            stack.enter_context(_fixed_order())
        if precision != "fp32":
            stack.enter_context(torch.autocast(kind, DTYPES[precision]))
        if (kernel := attention.removesuffix(GROUPED)) in ATTENTION:
            stack.enter_context(sdpa_kernel(ATTENTION[kernel]))
        yield


@contextlib.contextmanager
def _fixed_order() -> Iterator[None]:
    """Only algorithms that give the same bits each time; drawing tokens, for one, has none, and happens outside."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


class LossScale:
    """Brings an fp16 loss into range: halves when a gradient overflows, doubles after 2,000 good steps. 1 in other precisions."""

    def __init__(self, used: bool, device: torch.device):
        self.used = used
        self.value = torch.tensor(65536.0 if used else 1.0, device=device)
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device)

    def unscale(self, grads: list[Tensor]) -> None:
        """Divide gradients by the scale, in place."""
        if self.used:
            torch._foreach_mul_(grads, 1.0 / self.value)

    def update(self, overflow: Tensor) -> None:
        """Take in whether a gradient of this step overflowed."""
        if self.used:
            torch._amp_update_scale_(self.value, self._good_steps, overflow.float(), 2.0, 0.5, 2000)

    def tensors(self) -> Named:
        """What a checkpoint keeps of it."""
        return [("scaler/scale", self.value), ("scaler/good_steps", self._good_steps)] if self.used else []

    def take(self, memory: dict[str, TensorRecord]) -> None:
        """Put back what `tensors` named, and take it out of the optimizer's memory."""
        scale, good_steps = memory.pop("scaler/scale", None), memory.pop("scaler/good_steps", None)
        if self.used and scale is not None and good_steps is not None:
            self.value.copy_(tensor(scale))
            self._good_steps.copy_(tensor(good_steps))


# FlashAttention 4, and quack-kernels, which comes with it: whether they are installed, and where they keep what they compile.


def has_flash4() -> bool:
    with suppress(Exception):  # an older FlashAttention of that name may be there, and be for another torch
        return find_spec("flash_attn.cute") is not None
    return False


def keep_compiled() -> None:
    """Before they are imported: they compile kernels when these are first used, seconds for each; later runs find them."""
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(cache_root() / "flash4"))
    os.environ.setdefault("QUACK_CACHE_DIR", str(cache_root() / "quack"))
