"""The precision of passes: autocast dtype, attention kernel, order of sums, and the scale of an fp16 loss."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ingot.backends.torch.state import Named, tensor
from ingot.runtime.tensors import TensorRecord

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
GROUPED = "-grouped"  # suffix of a kernel that takes fewer key and value heads than query heads
ATTENTION = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
FLASH4 = "flash4"  # FlashAttention 4, from its own package: models call it themselves
CUDNN_FLASH4 = "cudnn-flash4"  # FlashAttention 4's backward pass and cuDNN's forward pass


@contextlib.contextmanager
def arithmetic(kind: str, precision: str, attention: str = "default", deterministic: bool = False) -> Iterator[None]:
    """Set the precision, the attention kernel and, if deterministic, a fixed order of sums for the passes in the block."""
    with contextlib.ExitStack() as stack:
        if deterministic:  # only bit-reproducible algorithms; sampling tokens has none, and happens outside the block
            before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
            stack.callback(torch.use_deterministic_algorithms, before[0], warn_only=before[1])
            torch.use_deterministic_algorithms(True)
        if precision != "fp32":
            stack.enter_context(torch.autocast(kind, DTYPES[precision]))
        if (kernel := attention.removesuffix(GROUPED)) in ATTENTION:
            stack.enter_context(sdpa_kernel(ATTENTION[kernel]))
        yield


class LossScale:
    """The scale of an fp16 loss: halved when a gradient overflows, doubled after 2,000 good steps. 1 in other precisions."""

    def __init__(self, used: bool, device: torch.device):
        self.used = used
        self.value = torch.tensor(65536.0 if used else 1.0, device=device)
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device)

    def unscale(self, grads: list[Tensor]) -> None:
        """Divide gradients by the scale, in place."""
        if self.used:
            torch._foreach_mul_(grads, 1.0 / self.value)

    def update(self, overflow: Tensor) -> None:
        """Adjust the scale, given whether a gradient of this step overflowed."""
        if self.used:
            torch._amp_update_scale_(self.value, self._good_steps, overflow.float(), 2.0, 0.5, 2000)

    def tensors(self) -> Named:
        """Return the state to store in a checkpoint."""
        return [("scaler/scale", self.value), ("scaler/good_steps", self._good_steps)] if self.used else []

    def restore(self, state: dict[str, TensorRecord]) -> None:
        """Restore the state from the tensors that `tensors` returned, and remove them from the optimizer's state."""
        scale, good_steps = state.pop("scaler/scale", None), state.pop("scaler/good_steps", None)
        if self.used and scale is not None and good_steps is not None:
            self.value.copy_(tensor(scale))
            self._good_steps.copy_(tensor(good_steps))
