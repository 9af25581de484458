"""Triton kernels, forward and backward, that normalise heads, rotate them and apply gains, keeping whole heads in registers."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

SHAPE = 2048, 4  # values and warps per program: 16 values per thread


def rotation(
    x: Tensor, cos: Tensor, sin: Tensor, gain: Tensor | None, epsilon: float | None, shape: tuple[int, int] = SHAPE
) -> Tensor:
    """Normalise heads (B, T, H, D), apply the rotary embedding and the gains, and return the result as a contiguous tensor."""
    x = _with_contiguous_heads(x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    arguments, settings = _launch(x, cos, sin, gain, epsilon, shape)
    _forward[_grid(x, settings)](x, y, *arguments, *x.stride()[:3], **settings)
    return y


def rotation_backward(
    dy: Tensor,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    gain: Tensor | None,
    epsilon: float | None,
    shape: tuple[int, int] = SHAPE,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of x (in `out` if given) and each token's gradients of the gains (B, T, H), undefined without gains."""
    x, dy = _with_contiguous_heads(x), _with_contiguous_heads(dy)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    d_gain = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    arguments, settings = _launch(x, cos, sin, gain, epsilon, shape)
    strides = (*x.stride()[:3], *dy.stride()[:3], *dx.stride()[:3])
    _backward[_grid(x, settings)](x, dy, dx, d_gain, *arguments, *strides, **settings)
    return dx, d_gain


def _with_contiguous_heads(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _launch(
    x: Tensor, cos: Tensor, sin: Tensor, gain: Tensor | None, epsilon: float | None, shape: tuple[int, int]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    (B, T, H, D), half = x.shape, cos.size(-1)
    arguments = (cos.contiguous(), sin.contiguous(), gain if gain is not None else cos, B * T * H, T, H, epsilon or 0.0)
    settings = {
        "D": D, "HALF": half, "REST": D - 2 * half, "NORMALISED": epsilon is not None, "GAINED": gain is not None,
        "HALF_BLOCK": triton.next_power_of_2(half), "REST_BLOCK": triton.next_power_of_2(max(1, D - 2 * half)),
        "ROWS": max(1, shape[0] // triton.next_power_of_2(D)), "num_warps": shape[1],
    }  # fmt: skip
    return arguments, settings


def _grid(x: Tensor, settings: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(x.numel() // x.size(-1), settings["ROWS"]),)


@triton.jit
def _indices(  # type: ignore[no-untyped-def]
    rows, length, heads, HALF: tl.constexpr, REST: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Return the heads of this program (index, batch row, position, head number), and the indices and masks of their values."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = (row < rows)[:, None]
    token = row // heads
    i = tl.arange(0, HALF_BLOCK)[None, :]
    j = tl.arange(0, REST_BLOCK)[None, :]
    batch = (token // length).to(tl.int64)
    return row.to(tl.int64), batch, token % length, row % heads, i, j, there & (i < HALF), there & (j < REST)


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    x, y, cos, sin, gain, rows, length, heads, epsilon, x_batch, x_token, x_head,
    D: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, NORMALISED: tl.constexpr, GAINED: tl.constexpr,
    HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row, batch, position, head, i, j, half, rest = _indices(rows, length, heads, HALF, REST, HALF_BLOCK, REST_BLOCK, ROWS)
    at = x + (batch * x_batch + position * x_token + head * x_head)[:, None]
    first = tl.load(at + i, mask=half, other=0.0).to(tl.float32)
    second = tl.load(at + HALF + i, mask=half, other=0.0).to(tl.float32)
    table = position[:, None] * HALF + i
    c = tl.load(cos + table, mask=half, other=0.0).to(tl.float32)
    s = tl.load(sin + table, mask=half, other=0.0).to(tl.float32)
    square = tl.sum(first * first + second * second, 1)
    if REST:
        third = tl.load(at + 2 * HALF + j, mask=rest, other=0.0).to(tl.float32)
        square += tl.sum(third * third, 1)
    scale = tl.rsqrt(square / D + epsilon) if NORMALISED else square * 0.0 + 1.0
    if GAINED:
        scale *= tl.load(gain + head).to(tl.float32)
    scale = scale[:, None]
    to = y + (row * D)[:, None]
    kind = y.dtype.element_ty
    tl.store(to + i, ((first * c - second * s) * scale).to(kind), mask=half)
    tl.store(to + HALF + i, ((first * s + second * c) * scale).to(kind), mask=half)
    if REST:
        tl.store(to + 2 * HALF + j, (third * scale).to(kind), mask=rest)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    x, dy, dx, d_gain, cos, sin, gain, rows, length, heads, epsilon,
    x_batch, x_token, x_head, dy_batch, dy_token, dy_head, dx_batch, dx_token, dx_head,
    D: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, NORMALISED: tl.constexpr, GAINED: tl.constexpr,
    HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row, batch, position, head, i, j, half, rest = _indices(rows, length, heads, HALF, REST, HALF_BLOCK, REST_BLOCK, ROWS)
    table = position[:, None] * HALF + i
    c = tl.load(cos + table, mask=half, other=0.0).to(tl.float32)
    s = tl.load(sin + table, mask=half, other=0.0).to(tl.float32)
    of = dy + (batch * dy_batch + position * dy_token + head * dy_head)[:, None]
    d_first = tl.load(of + i, mask=half, other=0.0).to(tl.float32)
    d_second = tl.load(of + HALF + i, mask=half, other=0.0).to(tl.float32)
    back_first, back_second = d_first * c + d_second * s, d_second * c - d_first * s
    if REST:
        back_third = tl.load(of + 2 * HALF + j, mask=rest, other=0.0).to(tl.float32)
    if NORMALISED or GAINED:  # otherwise the gradient only has to be rotated back
        at = x + (batch * x_batch + position * x_token + head * x_head)[:, None]
        first = tl.load(at + i, mask=half, other=0.0).to(tl.float32)
        second = tl.load(at + HALF + i, mask=half, other=0.0).to(tl.float32)
        square = tl.sum(first * first + second * second, 1)
        product = tl.sum(first * back_first + second * back_second, 1)
        if REST:
            third = tl.load(at + 2 * HALF + j, mask=rest, other=0.0).to(tl.float32)
            square += tl.sum(third * third, 1)
            product += tl.sum(third * back_third, 1)
        inverse = tl.rsqrt(square / D + epsilon) if NORMALISED else square * 0.0 + 1.0
        scale = inverse
        if GAINED:
            tl.store(d_gain + row, product * inverse, mask=row < rows)
            scale *= tl.load(gain + head).to(tl.float32)
        scale = scale[:, None]
        pull = (product * inverse * inverse / D if NORMALISED else square * 0.0)[:, None]  # makes the gradient orthogonal to x
        back_first, back_second = (back_first - first * pull) * scale, (back_second - second * pull) * scale
        if REST:
            back_third = (back_third - third * pull) * scale
    to = dx + (batch * dx_batch + position * dx_token + head * dx_head)[:, None]
    kind = dx.dtype.element_ty
    tl.store(to + i, back_first.to(kind), mask=half)
    tl.store(to + HALF + i, back_second.to(kind), mask=half)
    if REST:
        tl.store(to + 2 * HALF + j, back_third.to(kind), mask=rest)
