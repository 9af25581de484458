"""Products of a gated MLP as Triton kernels: two inner layers and the gate between them in one tile, and so their gradients."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ingot.model.kernels.triton_mlp import Tiles, described, fits, inverse, programs, quarters, read

FORWARD = Tiles(128, 128, 64, 3, 8, 1)
BACKWARD = Tiles(128, 128, 64, 4, 8, 1)


def fits_gated(x: Tensor, both: Tensor, down: Tensor, columns: int = FORWARD.columns) -> bool:
    """Whether descriptors can be made of these, and tiles of one inner layer do not reach into the other."""
    return len(both) % (2 * columns) == 0 and fits(x, down) and (both.stride(0) == 1 or fits(both))


def gated_product(x: Tensor, both: Tensor, tiles: Tiles = FORWARD) -> tuple[Tensor, Tensor]:
    """The gated (M, N) of x (M, C) and both inner layers (2 N, C), and what these give, side by side (M, 2 N)."""
    (M, C), N = x.shape, len(both) // 2
    y, inner = x.new_empty(M, N), x.new_empty(M, 2 * N)
    _gated_product[programs(x, M, N, tiles)](
        described(x, tiles.rows, tiles.inner), described(both, tiles.columns, tiles.inner),
        described(y, tiles.rows, tiles.columns // 4), described(inner, tiles.rows, tiles.columns // 4), M, N=N, C=C,
        ROWS=tiles.rows, COLUMNS=tiles.columns, INNER=tiles.inner, num_stages=tiles.stages, num_warps=tiles.warps,
    )  # fmt: skip
    return y, inner


def gated_slope(dy: Tensor, down: Tensor, inner: Tensor, tiles: Tiles = BACKWARD) -> Tensor:
    """The gradients (M, 2 N) of both inner layers, from dy (M, C) and down (C, N)."""
    (M, C), N = dy.shape, down.size(1)
    d_inner = inner.new_empty(M, 2 * N)
    _gated_slope[programs(dy, M, N, tiles)](
        described(dy, tiles.rows, tiles.inner), described(down, tiles.inner, tiles.columns),
        described(d_inner, tiles.rows, tiles.columns // 4), inner, M, N=N, C=C,
        ROWS=tiles.rows, COLUMNS=tiles.columns, INNER=tiles.inner, num_stages=tiles.stages, num_warps=tiles.warps,
    )  # fmt: skip
    return d_inner


@triton.jit
def _write_gated(up, gate, row, column, y, inner, N: tl.constexpr):  # type: ignore[no-untyped-def]
    up, gate = up.to(inner.dtype), gate.to(inner.dtype)
    inner.store([row, column], up)
    inner.store([row, column + N], gate)
    wide = gate.to(tl.float32)  # what the backward pass makes it of
    y.store([row, column], (up.to(tl.float32) * wide * inverse(1.0 + tl.exp(-wide))).to(y.dtype))


@triton.jit
def _gated_product(  # type: ignore[no-untyped-def]
    x, both, y, inner, M, N: tl.constexpr, C: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    QUARTER: tl.constexpr = COLUMNS // 4
    ACROSS: tl.constexpr = N // COLUMNS
    STEPS: tl.constexpr = (C + INNER - 1) // INNER
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, ROWS) * ACROSS, tl.num_programs(0)):
        row, column = tile // ACROSS * ROWS, tile % ACROSS * COLUMNS
        up = tl.zeros((ROWS, COLUMNS), tl.float32)
        gate = tl.zeros((ROWS, COLUMNS), tl.float32)
        for step in range(STEPS):
            part = x.load([row, step * INNER])
            up = tl.dot(part, both.load([column, step * INNER]).T, up)
            gate = tl.dot(part, both.load([column + N, step * INNER]).T, gate)
        a, b, c, d = quarters(up)
        e, f, g, h = quarters(gate)
        _write_gated(a, e, row, column, y, inner, N)
        _write_gated(b, f, row, column + QUARTER, y, inner, N)
        _write_gated(c, g, row, column + 2 * QUARTER, y, inner, N)
        _write_gated(d, h, row, column + 3 * QUARTER, y, inner, N)


@triton.jit
def _write_slopes(part, inner, row, column, d_inner, M, N: tl.constexpr):  # type: ignore[no-untyped-def]
    up = read(inner, row, column, M, 2 * N, part.shape[0], part.shape[1]).to(tl.float32)
    gate = read(inner, row, column + N, M, 2 * N, part.shape[0], part.shape[1]).to(tl.float32)
    share = inverse(1.0 + tl.exp(-gate))
    d_inner.store([row, column], (part * gate * share).to(d_inner.dtype))
    d_inner.store([row, column + N], (part * up * share * (1.0 + gate * (1.0 - share))).to(d_inner.dtype))


@triton.jit
def _gated_slope(  # type: ignore[no-untyped-def]
    dy, down, d_inner, inner, M, N: tl.constexpr, C: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    QUARTER: tl.constexpr = COLUMNS // 4
    ACROSS: tl.constexpr = N // COLUMNS
    STEPS: tl.constexpr = (C + INNER - 1) // INNER
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, ROWS) * ACROSS, tl.num_programs(0)):
        row, column = tile // ACROSS * ROWS, tile % ACROSS * COLUMNS
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for step in range(STEPS):
            total = tl.dot(dy.load([row, step * INNER]), down.load([step * INNER, column]), total)
        a, b, c, d = quarters(total)
        _write_slopes(a, inner, row, column, d_inner, M, N)
        _write_slopes(b, inner, row, column + QUARTER, d_inner, M, N)
        _write_slopes(c, inner, row, column + 2 * QUARTER, d_inner, M, N)
        _write_slopes(d, inner, row, column + 3 * QUARTER, d_inner, M, N)
