"""A sum and its norm, and their gradient, as Triton kernels; a program holds whole rows in registers, one step after the other.

Rows are memory's work alone, so what counts is how many bytes are on their way: a row of 1,024 numbers belongs to one warp, which
waits for no other and needs no shared memory to add its numbers up, and many of them share a multiprocessor.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ingot.model.kernels.triton_mlp import processors

WIDEST = 8192  # numbers of a row: 32 in each of 256 threads
NUMBERS = 1024  # of a warp


class Cut(NamedTuple):
    """How rows are shared: those of a step, warps of a program, programs of a multiprocessor; from 2 stages on it reads ahead."""

    rows: int
    warps: int
    programs: int
    stages: int


def forward_cut(width: int) -> Cut:
    """What a width takes: 12 warps are as many as always find registers, 166 each at the most (sm_90)."""
    return _cut(width, 12)


def backward_cut(width: int) -> Cut:
    """What a width takes: beside its rows a program holds weights and their gradients, in up to 250 registers a thread."""
    return _cut(width, 8)


def _cut(width: int, warps: int) -> Cut:
    block = triton.next_power_of_2(width)
    shared_by = max(1, block // NUMBERS)
    return Cut(max(1, NUMBERS // block), shared_by, max(1, warps // shared_by), 1)


def fits(x: Tensor) -> bool:
    """Whether the registers of a program hold rows as wide as these."""
    return 0 < x.size(1) <= WIDEST and len(x) > 0


def add_norm(
    x: Tensor,
    branch: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    epsilon: float,
    centred: bool,
    dtype: torch.dtype,
    cut: Cut | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sum (M, C) of x and a branch, if there is one, its norm, means of rows, if they are subtracted, and inverse spreads."""
    x, M, C = x.contiguous(), *x.shape
    total = x.new_empty(0 if branch is None else x.shape)
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    inverse = x.new_empty(M, dtype=torch.float32)
    mean = inverse.new_empty(M if centred else 0)
    cut = cut or forward_cut(C)
    _add_norm[_programs(x, cut)](
        x, x if branch is None else branch.contiguous(), weight, weight if bias is None else bias, total, y, mean, inverse,
        M, epsilon, C=C, CENTRED=centred, BRANCHED=branch is not None, BIASED=bias is not None,
        BLOCK=triton.next_power_of_2(C), ROWS=cut.rows, STAGES=cut.stages, num_warps=cut.warps,
    )  # fmt: skip
    return total, y, mean, inverse


def add_norm_backward(
    dy: Tensor,
    d_total: Tensor | None,
    total: Tensor,
    weight: Tensor,
    mean: Tensor,
    inverse: Tensor,
    biased: bool,
    branch_dtype: torch.dtype | None,
    cut: Cut | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient for the stream (M, C), the same as `branch_dtype`, if that is given, and those of weight and bias (2 or 1, C).

    A program adds up the last of its own rows; these sums are added in their order, so that equal inputs give equal bits.
    """
    dy, total, M, C = dy.contiguous(), total.contiguous(), *total.shape
    dx = torch.empty_like(total)
    narrow = dx.new_empty(0) if branch_dtype is None else torch.empty_like(dx, dtype=branch_dtype)
    cut = cut or backward_cut(C)
    programs = _programs(total, cut)
    sums = total.new_empty(*programs, 2 if biased else 1, C, dtype=torch.float32)
    _add_norm_back[programs](
        dy, dy if d_total is None else d_total.contiguous(), total, weight, mean, inverse, dx, narrow, sums, M, C=C,
        CENTRED=len(mean) > 0, SUMMED=d_total is not None, BIASED=biased, NARROWED=branch_dtype is not None,
        BLOCK=triton.next_power_of_2(C), ROWS=cut.rows, STAGES=cut.stages, num_warps=cut.warps,
    )  # fmt: skip
    return dx, narrow, sums.sum(0)


def _programs(x: Tensor, cut: Cut) -> tuple[int]:
    return (min(processors(x) * cut.programs, triton.cdiv(len(x), cut.rows)),)


@triton.jit
def _add_norm(  # type: ignore[no-untyped-def]
    x, branch, weight, bias, total, y, mean, inverse, M, epsilon, C: tl.constexpr, CENTRED: tl.constexpr,
    BRANCHED: tl.constexpr, BIASED: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)[None, :]
    w = tl.load(weight + column, mask=column < C, other=0.0).to(tl.float32)
    if BIASED:
        b = tl.load(bias + column, mask=column < C, other=0.0).to(tl.float32)
    for step in tl.range(tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = step * ROWS + tl.arange(0, ROWS)
        start = (row.to(tl.int64) * C)[:, None]
        there = (row < M)[:, None] & (column < C)
        wide = tl.load(x + start + column, mask=there, other=0.0).to(tl.float32)
        if BRANCHED:
            added = wide + tl.load(branch + start + column, mask=there, other=0.0).to(tl.float32)
            kept = added.to(total.dtype.element_ty)
            tl.store(total + start + column, kept, mask=there)
            wide = kept.to(tl.float32)  # what the backward pass reads
        if CENTRED:
            middle = tl.sum(wide, 1) / C
            tl.store(mean + row, middle, mask=row < M)
            wide = tl.where(there, wide - middle[:, None], 0.0)
        spread = tl.rsqrt(tl.sum(wide * wide, 1) / C + epsilon)
        tl.store(inverse + row, spread, mask=row < M)
        wide *= spread[:, None] * w
        if BIASED:
            wide += b
        tl.store(y + start + column, wide.to(y.dtype.element_ty), mask=there)


@triton.jit
def _add_norm_back(  # type: ignore[no-untyped-def]
    dy, d_total, total, weight, mean, inverse, dx, narrow, sums, M, C: tl.constexpr, CENTRED: tl.constexpr,
    SUMMED: tl.constexpr, BIASED: tl.constexpr, NARROWED: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)[None, :]
    w = tl.load(weight + column, mask=column < C, other=0.0).to(tl.float32)
    d_weight = tl.zeros((ROWS, BLOCK), tl.float32)
    if BIASED:
        d_bias = tl.zeros((ROWS, BLOCK), tl.float32)
    for step in tl.range(tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = step * ROWS + tl.arange(0, ROWS)
        start = (row.to(tl.int64) * C)[:, None]
        there = (row < M)[:, None] & (column < C)
        unit = tl.load(total + start + column, mask=there, other=0.0).to(tl.float32)
        grad = tl.load(dy + start + column, mask=there, other=0.0).to(tl.float32)
        if SUMMED:
            more = tl.load(d_total + start + column, mask=there, other=0.0).to(tl.float32)
        spread = tl.load(inverse + row, mask=row < M, other=0.0)[:, None]
        if CENTRED:
            unit -= tl.load(mean + row, mask=row < M, other=0.0)[:, None]
        unit *= spread
        d_weight += grad * unit
        if BIASED:
            d_bias += grad
        grad *= w
        along = tl.sum(grad * unit, 1) / C
        if CENTRED:
            grad -= (tl.sum(grad, 1) / C)[:, None]
        grad = (grad - unit * along[:, None]) * spread
        if SUMMED:
            grad += more
        tl.store(dx + start + column, grad.to(dx.dtype.element_ty), mask=there)
        if NARROWED:
            tl.store(narrow + start + column, grad.to(narrow.dtype.element_ty), mask=there)
    places = tl.arange(0, BLOCK)
    to = sums + tl.program_id(0) * (2 if BIASED else 1) * C + places
    tl.store(to, tl.sum(d_weight, 0), mask=places < C)
    if BIASED:
        tl.store(to + C, tl.sum(d_bias, 0), mask=places < C)
