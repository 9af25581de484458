"""Triton kernels of the fused loss: cross-entropy with the gradient of the logits, and conversion of matrices to FP8.

One program handles one row of logits and writes the gradient over the logits or to another tensor. Rows of up to 16,384 logits
are kept in registers and are read and written once. Longer rows are read twice. The first pass subtracts the maximum of the first
block, not of the whole row, from all logits, so that blocks do not depend on each other. If the sum of exponentials overflows,
because a later logit is larger by 80 or more, it is recomputed with a running maximum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LONGEST_WHOLE = 16384  # a program keeps a row of up to this many logits in registers
LONG_BLOCK, LONG_WARPS = 4096, 8  # for longer rows; on an H200, 65,536 x 50,304 logits take 5.2 ms (6.7 ms with 8192, 32 warps)


def block_and_warps(vocabulary: int) -> tuple[int, int]:
    """Return how many logits of a row a program processes at once, and with how many warps."""
    if vocabulary > LONGEST_WHOLE:
        return LONG_BLOCK, LONG_WARPS
    block = triton.next_power_of_2(vocabulary)
    return block, max(2, block // 1024)  # for 1,024 and 8,192 logits, this is the fastest of 2 to 32 warps


def losses_of_logits_(
    logits: Tensor,
    targets: Tensor,
    softcap: float | None,
    with_grad: bool,
    shape: tuple[int, int] | None = None,
    into: Tensor | None = None,
    factor: float = 1.0,
) -> Tensor:
    """Return the losses (N), 0 for ignored targets; if `with_grad`, overwrite the logits (N, V) with the gradient times `factor`.

    If `into` is given, the gradient is written there instead; `into` must have the shape and strides of the logits.
    """
    rows, vocabulary = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    block, warps = shape or block_and_warps(vocabulary)
    if rows:
        _loss_of_row[(rows,)](
            logits, targets, losses, logits if into is None else into, logits.stride(0), softcap or 1.0, factor,
            VOCABULARY=vocabulary, CAPPED=softcap is not None, WITH_GRAD=with_grad, WHOLE=block >= vocabulary, BLOCK=block,
            num_warps=warps,
        )  # fmt: skip
    return losses


@triton.jit
def _bent(x, softcap, CAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Apply the softcap, if any, to logits; return the results and the derivatives."""
    if CAPPED:
        t = 1.0 - 2.0 / (1.0 + tl.exp(x * (2.0 / softcap)))  # tanh; for large x exp is infinite and t is 1
        return softcap * t, 1.0 - t * t
    else:  # noqa: RET505  # Triton compiles code after a return
        return x, 1.0


@triton.jit
def _loss_of_row(  # type: ignore[no-untyped-def]
    logits, targets, losses, grads, stride, softcap, factor,
    VOCABULARY: tl.constexpr, CAPPED: tl.constexpr, WITH_GRAD: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    grads += row * stride
    target = tl.load(targets + row)
    counts = target >= 0
    hit = _bent(tl.load(logits + tl.maximum(target, 0)).to(tl.float32), softcap, CAPPED)[0]
    columns = tl.arange(0, BLOCK)
    if WHOLE:
        inside = columns < VOCABULARY
        z, slope = _bent(tl.load(logits + columns, mask=inside, other=0.0).to(tl.float32), softcap, CAPPED)
        z = tl.where(inside, z, -float("inf"))
        top = tl.max(z, 0)
        e = tl.exp(z - top)
        total = tl.sum(e, 0)
        if WITH_GRAD:
            grad = (e * (1.0 / total) - tl.where(columns == target, 1.0, 0.0)) * slope
            grad = tl.where(counts, grad * factor, 0.0)
            tl.store(grads + columns, grad.to(grads.dtype.element_ty), mask=inside)
    else:
        z = _bent(tl.load(logits + columns).to(tl.float32), softcap, CAPPED)[0]
        top = tl.max(z, 0)
        sums = tl.exp(z - top)
        for start in range(BLOCK, VOCABULARY, BLOCK):
            at = start + columns
            x = tl.load(logits + at, mask=at < VOCABULARY, other=0.0, eviction_policy="evict_last").to(tl.float32)
            z = _bent(x, softcap, CAPPED)[0]
            sums += tl.where(at < VOCABULARY, tl.exp(z - top), 0.0)
        total = tl.sum(sums, 0)
        if total == float("inf"):
            total = 0.0
            for start in range(0, VOCABULARY, BLOCK):
                at = start + columns
                x = tl.load(logits + at, mask=at < VOCABULARY, other=0.0).to(tl.float32)
                z = tl.where(at < VOCABULARY, _bent(x, softcap, CAPPED)[0], -float("inf"))
                higher = tl.maximum(top, tl.max(z, 0))
                total = total * tl.exp(top - higher) + tl.sum(tl.exp(z - higher), 0)
                top = higher
        if WITH_GRAD:
            log_total = tl.log(total) + top
            for start in range(0, VOCABULARY, BLOCK):
                at = start + columns
                x = tl.load(logits + at, mask=at < VOCABULARY, other=0.0, eviction_policy="evict_first").to(tl.float32)
                z, slope = _bent(x, softcap, CAPPED)
                grad = (tl.exp(z - log_total) - tl.where(at == target, 1.0, 0.0)) * slope
                grad = tl.where(counts, grad * factor, 0.0)
                tl.store(grads + at, grad.to(grads.dtype.element_ty), mask=at < VOCABULARY)
    tl.store(losses + row, tl.where(counts, tl.log(total) + top - hit, 0.0))


# FP8 matrices in both layouts, because both operands of an FP8 matmul must be contiguous along the inner dimension.

FP8_BLOCK, FP8_WARPS = 128, 8


def rounded(x: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x (R, C) / `scale` in FP8, clamped to the range of `dtype`, and the transpose of the result (C, R)."""
    x = x.to(torch.bfloat16)  # on an H200, Triton 3.6 converts float32 to FP8 incorrectly
    plain, flipped = (torch.empty(shape, dtype=dtype, device=x.device) for shape in (x.shape, x.shape[::-1]))
    _both_layouts[_grid(x)](
        x.contiguous(), plain, flipped, *x.shape, 1.0 / scale,
        LARGEST=torch.finfo(dtype).max, ROUNDS=True, BLOCK=FP8_BLOCK, num_warps=FP8_WARPS,
    )  # fmt: skip
    return plain, flipped


def transposed(x: Tensor) -> Tensor:
    """Return the contiguous transpose (C, R) of a matrix (R, C) of one-byte values."""
    flipped = torch.empty(x.shape[::-1], dtype=torch.uint8, device=x.device)
    as_bytes = x.view(torch.uint8)
    _both_layouts[_grid(x)](
        as_bytes, as_bytes, flipped, *x.shape, 1.0, LARGEST=0.0, ROUNDS=False, BLOCK=FP8_BLOCK, num_warps=FP8_WARPS
    )
    return flipped.view(x.dtype)


def _grid(x: Tensor) -> tuple[int, int]:
    return triton.cdiv(x.size(0), FP8_BLOCK), triton.cdiv(x.size(1), FP8_BLOCK)


@triton.jit
def _both_layouts(  # type: ignore[no-untyped-def]
    x, plain, flipped, rows, columns, factor, LARGEST: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    at = row[:, None] * columns + column[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tile = tl.load(x + at, mask=inside, other=0)
    if ROUNDS:
        tile = tl.minimum(tl.maximum(tile.to(tl.float32) * factor, -LARGEST), LARGEST).to(plain.dtype.element_ty)
        tl.store(plain + at, tile, mask=inside)
    to = column[:, None] * rows + row[None, :]
    tl.store(flipped + to, tl.trans(tile), mask=(column < columns)[:, None] & (row < rows)[None, :])
