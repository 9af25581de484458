"""Matrices of 8-bit numbers in both layouts, as a Triton kernel: 8-bit products take both operands along the inner dimension."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 128, 8


def rounded(x: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(R, C) in units of `scale` as 8-bit numbers, the largest where they would be larger, and its transpose (C, R)."""
    x = x.to(torch.bfloat16)  # of float32 Triton 3.6 writes wrong numbers on an H200, in both layouts
    straight, turned = (torch.empty(shape, dtype=dtype, device=x.device) for shape in (x.shape, x.shape[::-1]))
    _both_layouts[_grid(x)](
        x.contiguous(), straight, turned, *x.shape, 1.0 / scale,
        LARGEST=torch.finfo(dtype).max, ROUNDS=True, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return straight, turned


def transposed(x: Tensor) -> Tensor:
    """A contiguous (C, R) of (R, C) numbers of one byte."""
    turned = torch.empty(x.shape[::-1], dtype=torch.uint8, device=x.device)
    bytes_of = x.view(torch.uint8)
    _both_layouts[_grid(x)](bytes_of, bytes_of, turned, *x.shape, 1.0, LARGEST=0.0, ROUNDS=False, BLOCK=BLOCK, num_warps=WARPS)
    return turned.view(x.dtype)


def _grid(x: Tensor) -> tuple[int, int]:
    return triton.cdiv(x.size(0), BLOCK), triton.cdiv(x.size(1), BLOCK)


@triton.jit
def _both_layouts(  # type: ignore[no-untyped-def]
    x, straight, turned, rows, columns, factor, LARGEST: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    at = row[:, None] * columns + column[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tile = tl.load(x + at, mask=inside, other=0)
    if ROUNDS:
        tile = tl.minimum(tl.maximum(tile.to(tl.float32) * factor, -LARGEST), LARGEST).to(straight.dtype.element_ty)
        tl.store(straight + at, tile, mask=inside)
    to = column[:, None] * rows + row[None, :]
    tl.store(turned + to, tl.trans(tile), mask=(column < columns)[:, None] & (row < rows)[None, :])
