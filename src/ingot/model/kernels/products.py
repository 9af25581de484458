"""Products of many rows by quack-kernels, where a GPU is a Hopper and the package is installed; else by the library.

For what a layer makes of tokens and for the gradients of tokens they are some 5% faster than the library's on an H200, and
something can be done with a tile before it is written (quack_products.py). Gradients of weights, whose sums are long and whose
tiles few, stay the library's: those of the package are slower.
"""

from __future__ import annotations

import functools
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

HOPPER = (9, 0)


def product_format(x: Tensor) -> torch.dtype:
    """The number format of products: the one that a backend has set, or that of what is multiplied."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


@functools.cache
def quack(device: torch.device) -> ModuleType | None:
    """The package's products, in which tiles are changed as ours have to be; None where they are not to be had."""
    if torch.cuda.get_device_capability(device) != HOPPER:
        return None
    try:
        by = import_module("ingot.model.kernels.quack_products")
        few = torch.ones(128, 64, dtype=torch.bfloat16, device=device)
        by.product(few, few.T)
        torch.cuda.synchronize(device)
    except Exception:  # not there, for another torch, or of a version with other functions
        return None
    return by


def takes(*operands: Tensor) -> bool:
    """Whether the package takes these matrices: bf16, rows or columns that lie together and begin at multiples of 16 bytes."""
    return all(
        a.dtype == torch.bfloat16 and a.numel() and 1 in a.stride() and max(a.stride()) % 8 == 0 and a.data_ptr() % 16 == 0
        for a in operands
    )


def product(a: Tensor, b: Tensor) -> Tensor:
    """a (M, K) times b (K, N), for rows of tokens."""
    if a.is_cuda and takes(a, b) and b.size(1) % 8 == 0 and (by := quack(a.device)) is not None:
        return by.product(a, b)  # type: ignore[no-any-return]
    return a @ b
