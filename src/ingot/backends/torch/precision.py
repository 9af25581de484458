"""Dtypes and attention kernels of passes by name, and the scale of an fp16 loss."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

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
