"""Triton matmuls with a fused epilogue: the activation, or multiplication by its derivative.

Programs are persistent and compute one tile after another. Operands and results are accessed through tensor descriptors: reads
outside a matrix return zeros and writes are skipped, so sizes need not be multiples of the tile; rows must be 16-byte aligned.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


class Tiles(NamedTuple):
    """The tiling of a matmul: tile shape, step along the inner dimension, pipeline stages, warps, programs per multiprocessor."""

    rows: int
    columns: int
    inner: int
    stages: int
    warps: int
    programs: int  # programs per multiprocessor; with two, one can compute while the other writes


WIDE = Tiles(128, 256, 64, 4, 8, 1)
PAIRED = Tiles(128, 128, 64, 3, 4, 2)
INTERPRETED_PROGRAMS = 3


def forward_tiles(keeps_scores: bool) -> Tiles:
    """Return the tiling of activated_matmul; with two outputs, PAIRED is faster (0.62 instead of 0.68 ms in the 124M model)."""
    return PAIRED if keeps_scores else WIDE


def fits(*operands: Tensor) -> bool:
    """Return True if tensor descriptors support these matrices."""
    return all(
        a.dim() == 2 and a.stride(1) == 1 and a.stride(0) * a.element_size() % 16 == 0 and a.data_ptr() % 16 == 0 and a.numel()
        for a in operands
    )


def activated_matmul(
    x: Tensor, up: Tensor, bias: Tensor | None, activation: str, keeps_scores: bool, tiles: Tiles | None = None
) -> tuple[Tensor, Tensor]:
    """Return y = act(x (M, C) @ up (N, C).T + bias (N)) and the pre-activations or, unless `keeps_scores`, y again."""
    (M, C), N, tiles = x.shape, len(up), tiles or forward_tiles(keeps_scores)
    y = x.new_empty(M, N)
    scores = x.new_empty(M, N) if keeps_scores else y
    _activated_matmul[grid(x, M, N, tiles)](
        descriptor(x, tiles.rows, tiles.inner), descriptor(up, tiles.columns, tiles.inner),
        descriptor(y, tiles.rows, tiles.columns // 4), descriptor(scores, tiles.rows, tiles.columns // 4),
        x if bias is None else bias, M, N=N, C=C, ACTIVATION=activation, BIASED=bias is not None, KEEPS_SCORES=keeps_scores,
        ROWS=tiles.rows, COLUMNS=tiles.columns, INNER=tiles.inner, num_stages=tiles.stages, num_warps=tiles.warps,
    )  # fmt: skip
    return y, scores


def sloped_matmul(
    dy: Tensor, down: Tensor, saved: Tensor, activation: str, biased: bool, tiles: Tiles = PAIRED
) -> tuple[Tensor, Tensor]:
    """Given dy (M, C) and down (C, N), return the gradients of the pre-activations (M, N) and, in float32, of the bias (N).

    `saved` holds the pre-activations or, for squared ReLU, the activations. Unless `biased`, the gradient of the bias is empty.
    """
    (M, C), N = dy.shape, down.size(1)
    d_scores = dy.new_empty(M, N)
    sums = dy.new_empty((triton.cdiv(M, tiles.rows), N) if biased else 0, dtype=torch.float32)  # one partial sum per row of tiles
    _sloped_matmul[grid(dy, M, N, tiles)](
        descriptor(dy, tiles.rows, tiles.inner), descriptor(down, tiles.inner, tiles.columns),
        descriptor(d_scores, tiles.rows, tiles.columns // 4), saved, sums,
        M, N=N, C=C, ACTIVATION=activation, BIASED=biased,
        ROWS=tiles.rows, COLUMNS=tiles.columns, INNER=tiles.inner, num_stages=tiles.stages, num_warps=tiles.warps,
    )  # fmt: skip
    return d_scores, sums.sum(0) if biased else sums


def descriptor(a: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(a, list(a.shape), list(a.stride()), [rows, columns])


def grid(x: Tensor, M: int, N: int, tiles: Tiles) -> tuple[int]:
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else INTERPRETED_PROGRAMS
    return (min(processors * tiles.programs, triton.cdiv(M, tiles.rows) * triton.cdiv(N, tiles.columns)),)


@triton.jit
def inverse(x):  # type: ignore[no-untyped-def]
    """Return 1 / x for x > 0 in two instructions, fewer than a division takes."""
    root = tl.rsqrt(x)
    return root * root


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    if ACTIVATION == "relu2":
        x = tl.maximum(x, 0.0)
        return x * x, 2.0 * x
    elif ACTIVATION == "gelu-tanh":  # noqa: RET505  # Triton compiles code after a return
        square = x * x
        share = inverse(1.0 + tl.exp(x * (-1.5957691216 - 0.0713548162726 * square)))  # (1 + tanh) / 2
        y = x * share
        return y, share + y * (1.0 - share) * (1.5957691216 + 0.2140644488178 * square)
    else:
        # erf by formula 7.1.26 of Abramowitz and Stegun, accurate to 1e-7; its exponential is also part of the derivative.
        t, bell = inverse(1.0 + 0.2316418883 * tl.abs(x)), tl.exp(-0.5 * x * x)
        series = 0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (0.5307027145 * t - 0.7265760135)))
        tail = t * series * bell
        share = tl.where(x < 0, tail, 1.0 - tail)
        return x * share, share + x * bell * 0.3989422804014327


@triton.jit
def _halves(tile):  # type: ignore[no-untyped-def]
    return tl.split(tl.permute(tl.reshape(tile, (tile.shape[0], 2, tile.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def quarters(tile):  # type: ignore[no-untyped-def]
    """Split a tile's columns into four parts; writing one part at a time needs less memory, so that two programs fit on an SM."""
    left, right = _halves(tile)
    first, second = _halves(left)
    third, fourth = _halves(right)
    return first, second, third, fourth


@triton.jit
def _write_activated(  # type: ignore[no-untyped-def]
    part, row, column, y, scores, bias, N: tl.constexpr, ACTIVATION: tl.constexpr, BIASED: tl.constexpr,
    KEEPS_SCORES: tl.constexpr,
):  # fmt: skip
    if BIASED:
        at = column + tl.arange(0, part.shape[1])
        part += tl.load(bias + at, mask=at < N, other=0.0).to(tl.float32)[None, :]
    if KEEPS_SCORES:
        rounded = part.to(scores.dtype)
        scores.store([row, column], rounded)
        part = rounded.to(tl.float32)  # use the rounded value, as the backward pass does
    y.store([row, column], _activated(part, ACTIVATION)[0].to(y.dtype))


@triton.jit
def _activated_matmul(  # type: ignore[no-untyped-def]
    x, up, y, scores, bias, M, N: tl.constexpr, C: tl.constexpr,
    ACTIVATION: tl.constexpr, BIASED: tl.constexpr, KEEPS_SCORES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    QUARTER: tl.constexpr = COLUMNS // 4
    ACROSS: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    STEPS: tl.constexpr = (C + INNER - 1) // INNER
    tiles = tl.cdiv(M, ROWS) * ACROSS
    count = tl.num_programs(0)
    written = tl.program_id(0) - count  # a separate counter for writes, so that reads need not wait for them
    for tile in tl.range(tl.program_id(0), tiles, count, flatten=True):
        row, column = tile // ACROSS * ROWS, tile % ACROSS * COLUMNS
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for step in range(STEPS):
            total = tl.dot(x.load([row, step * INNER]), up.load([column, step * INNER]).T, total)
        written += count
        row, column = written // ACROSS * ROWS, written % ACROSS * COLUMNS
        a, b, c, d = quarters(total)
        _write_activated(a, row, column, y, scores, bias, N, ACTIVATION, BIASED, KEEPS_SCORES)
        _write_activated(b, row, column + QUARTER, y, scores, bias, N, ACTIVATION, BIASED, KEEPS_SCORES)
        _write_activated(c, row, column + 2 * QUARTER, y, scores, bias, N, ACTIVATION, BIASED, KEEPS_SCORES)
        _write_activated(d, row, column + 3 * QUARTER, y, scores, bias, N, ACTIVATION, BIASED, KEEPS_SCORES)


@triton.jit
def read(saved, row, column, M, N: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    rows, columns = row + tl.arange(0, ROWS), column + tl.arange(0, WIDTH)
    at = rows.to(tl.int64)[:, None] * N + columns[None, :]
    return tl.load(saved + at, mask=(rows < M)[:, None] & (columns < N)[None, :], other=0.0)


@triton.jit
def _write_sloped(  # type: ignore[no-untyped-def]
    part, saved, row, column, d_scores, sums, N: tl.constexpr, ACTIVATION: tl.constexpr, BIASED: tl.constexpr
):  # fmt: skip
    saved = saved.to(tl.float32)
    part *= 2.0 * tl.sqrt(saved) if ACTIVATION == "relu2" else _activated(saved, ACTIVATION)[1]  # relu2: sqrt(saved) is the ReLU
    d_scores.store([row, column], part.to(d_scores.dtype))
    if BIASED:
        at = column + tl.arange(0, part.shape[1])
        tl.store(sums + row // part.shape[0] * N + at, tl.sum(part, 0), mask=at < N)


@triton.jit
def _sloped_matmul(  # type: ignore[no-untyped-def]
    dy, down, d_scores, saved, sums, M, N: tl.constexpr, C: tl.constexpr, ACTIVATION: tl.constexpr, BIASED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    QUARTER: tl.constexpr = COLUMNS // 4
    ACROSS: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    STEPS: tl.constexpr = (C + INNER - 1) // INNER
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, ROWS) * ACROSS, tl.num_programs(0)):
        row, column = tile // ACROSS * ROWS, tile % ACROSS * COLUMNS
        # Load the saved values before the matmul, so that they are in registers when it ends.
        first = read(saved, row, column, M, N, ROWS, QUARTER)
        second = read(saved, row, column + QUARTER, M, N, ROWS, QUARTER)
        third = read(saved, row, column + 2 * QUARTER, M, N, ROWS, QUARTER)
        fourth = read(saved, row, column + 3 * QUARTER, M, N, ROWS, QUARTER)
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for step in range(STEPS):
            total = tl.dot(dy.load([row, step * INNER]), down.load([step * INNER, column]), total)
        a, b, c, d = quarters(total)
        _write_sloped(a, first, row, column, d_scores, sums, N, ACTIVATION, BIASED)
        _write_sloped(b, second, row, column + QUARTER, d_scores, sums, N, ACTIVATION, BIASED)
        _write_sloped(c, third, row, column + 2 * QUARTER, d_scores, sums, N, ACTIVATION, BIASED)
        _write_sloped(d, fourth, row, column + 3 * QUARTER, d_scores, sums, N, ACTIVATION, BIASED)
