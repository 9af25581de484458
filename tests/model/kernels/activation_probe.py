"""A kernel that gives the activation of each number of a block and its slope there, as the kernels of the MLP compute them."""

import triton
import triton.language as tl

from ingot.model.kernels.triton_mlp import _activated


@triton.jit
def activate(x, y, slope, COUNT: tl.constexpr, ACTIVATION: tl.constexpr):
    at = tl.arange(0, COUNT)
    found, slope_there = _activated(tl.load(x + at), ACTIVATION)
    tl.store(y + at, found)
    tl.store(slope + at, slope_there)
