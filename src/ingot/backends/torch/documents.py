"""Documents of a batch as FlashAttention 4 takes them: where they begin in all tokens, rows one after another.

Compiled graphs have one size, so there is room for a fixed number of them. Room costs time: the kernels' grids grow with it.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Tokens of a document for which there is room, on average. A grid for 64 x 1024 tokens has then 1,083 blocks of 128 per head, of
# which 512 and more have something to do; with 64 it would have 1,591.
LENGTH = 128


def boundaries(numbers: NDArray[np.int32]) -> NDArray[np.int32] | None:
    """Where documents begin, from the number (rows, length) of each token's, then the end as often as there is room.

    Every row begins one. None where there are more than there is room for: one per row and one per 128 tokens.
    """
    rows, length = numbers.shape
    begins = np.ones(numbers.shape, bool)
    np.not_equal(numbers[:, 1:], numbers[:, :-1], out=begins[:, 1:])
    found = np.flatnonzero(begins)
    starts = np.full(rows + rows * length // LENGTH + 1, numbers.size, np.int32)
    if len(found) >= len(starts):
        return None
    starts[: len(found)] = found
    return starts


def upload(starts: NDArray[np.int32], device: torch.device) -> Tensor:
    """On the device, without waiting for what that computes."""
    host = torch.from_numpy(starts)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
