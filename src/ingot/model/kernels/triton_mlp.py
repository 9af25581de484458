"""Products whose tiles are activated, or multiplied by the activation's slope, before they are written, as Triton kernels.

A program computes one tile after the other. Operands come and results go by descriptors, which fill what lies outside of a matrix
with zeros and do not write there, so no size has to be a multiple of a tile's; rows have to begin at multiples of 16 bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


class Tiles(NamedTuple):
    """How a product is cut: the tile of a program, what it reads of the inner dimension at once, and its share of a processor."""

    rows: int
    columns: int
    inner: int
    stages: int
    warps: int
    programs: int  # on one multiprocessor at a time: with two, one computes while the other writes


WIDE = Tiles(128, 256, 64, 4, 8, 1)
PAIRED = Tiles(128, 128, 64, 3, 4, 2)
INTERPRETED_PROGRAMS = 3


def forward_tiles(keeps_scores: bool) -> Tiles:
    """Where a tile is written twice, one program writes while the other computes: 0.62 instead of 0.68 ms for the 124M's GELU."""
    return PAIRED if keeps_scores else WIDE


def fits(*operands: Tensor) -> bool:
    """Whether descriptors can be made of these matrices."""
    return all(
        a.dim() == 2 and a.stride(1) == 1 and a.stride(0) * a.element_size() % 16 == 0 and a.data_ptr() % 16 == 0 and a.numel()
        for a in operands
    )


def activated_product(
    x: Tensor, up: Tensor, bias: Tensor | None, activation: str, keeps_scores: bool, tiles: Tiles | None = None
) -> tuple[Tensor, Tensor]:
    """The activation (M, N) of x (M, C) times up (N, C), and the scores before it where they are kept."""
    (M, C), N, tiles = x.shape, len(up), tiles or forward_tiles(keeps_scores)
    y = x.new_empty(M, N)
    scores = x.new_empty(M, N) if keeps_scores else y
    _activated_product[programs(x, M, N, tiles)](
        described(x, tiles.rows, tiles.inner), described(up, tiles.columns, tiles.inner),
        described(y, tiles.rows, tiles.columns // 4), described(scores, tiles.rows, tiles.columns // 4),
        x if bias is None else bias, M, N=N, C=C, ACTIVATION=activation, BIASED=bias is not None, KEEPS_SCORES=keeps_scores,
        ROWS=tiles.rows, COLUMNS=tiles.columns, INNER=tiles.inner, num_stages=tiles.stages, num_warps=tiles.warps,
    )  # fmt: skip
    return y, scores


def sloped_product(
    dy: Tensor, down: Tensor, kept: Tensor, activation: str, biased: bool, tiles: Tiles = PAIRED
) -> tuple[Tensor, Tensor]:
    """The gradient (M, N) of the scores, from dy (M, C) and down (C, N), and its sum (N) for a bias, in float32.

    `kept` are the scores, or what the squared ReLU made of them.
    """
    (M, C), N = dy.shape, down.size(1)
    d_scores = dy.new_empty(M, N)
    sums = dy.new_empty((triton.cdiv(M, tiles.rows), N) if biased else 0, dtype=torch.float32)  # of each row of tiles
    _sloped_product[programs(dy, M, N, tiles)](
        described(dy, tiles.rows, tiles.inner), described(down, tiles.inner, tiles.columns),
        described(d_scores, tiles.rows, tiles.columns // 4), kept, sums,
        M, N=N, C=C, ACTIVATION=activation, BIASED=biased,
        ROWS=tiles.rows, COLUMNS=tiles.columns, INNER=tiles.inner, num_stages=tiles.stages, num_warps=tiles.warps,
    )  # fmt: skip
    return d_scores, sums.sum(0) if biased else sums


def described(a: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(a, list(a.shape), list(a.stride()), [rows, columns])


def programs(x: Tensor, M: int, N: int, tiles: Tiles) -> tuple[int]:
    there = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else INTERPRETED_PROGRAMS
    return (min(there * tiles.programs, triton.cdiv(M, tiles.rows) * triton.cdiv(N, tiles.columns)),)


@triton.jit
def inverse(x):  # type: ignore[no-untyped-def]
    """1 / x, for x > 0, in two instructions: a division has more, for every number of a tile."""
    root = tl.rsqrt(x)
    return root * root


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scores after the activation, and its slope there."""
    if ACTIVATION == "relu2":
        x = tl.maximum(x, 0.0)
        return x * x, 2.0 * x
    elif ACTIVATION == "gelu-tanh":  # noqa: RET505  # Triton compiles what follows a return
        square = x * x
        share = inverse(1.0 + tl.exp(x * (-1.5957691216 - 0.0713548162726 * square)))  # (1 + tanh) / 2
        y = x * share
        return y, share + y * (1.0 - share) * (1.5957691216 + 0.2140644488178 * square)
    else:
        # Abramowitz and Stegun 7.1.26, right to 1e-7: its exponential is the slope's too.
        t, bell = inverse(1.0 + 0.2316418883 * tl.abs(x)), tl.exp(-0.5 * x * x)
        series = 0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (0.5307027145 * t - 0.7265760135)))
        tail = t * series * bell
        share = tl.where(x < 0, tail, 1.0 - tail)
        return x * share, share + x * bell * 0.3989422804014327


@triton.jit
def _halves(tile):  # type: ignore[no-untyped-def]
    """The left and the right columns of a tile."""
    return tl.split(tl.permute(tl.reshape(tile, (tile.shape[0], 2, tile.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def quarters(tile):  # type: ignore[no-untyped-def]
    """Columns of a tile that are written one after the other: two programs then find room on a multiprocessor."""
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
        kept = part.to(scores.dtype)
        scores.store([row, column], kept)
        part = kept.to(tl.float32)  # what the backward pass makes it of
    y.store([row, column], _activated(part, ACTIVATION)[0].to(y.dtype))


@triton.jit
def _activated_product(  # type: ignore[no-untyped-def]
    x, up, y, scores, bias, M, N: tl.constexpr, C: tl.constexpr,
    ACTIVATION: tl.constexpr, BIASED: tl.constexpr, KEEPS_SCORES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    QUARTER: tl.constexpr = COLUMNS // 4
    ACROSS: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    STEPS: tl.constexpr = (C + INNER - 1) // INNER
    tiles = tl.cdiv(M, ROWS) * ACROSS
    count = tl.num_programs(0)
    written = tl.program_id(0) - count  # counted apart: what a tile reads does not wait until the one before is written
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
def read(kept, row, column, M, N: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    rows, columns = row + tl.arange(0, ROWS), column + tl.arange(0, WIDTH)
    at = rows.to(tl.int64)[:, None] * N + columns[None, :]
    return tl.load(kept + at, mask=(rows < M)[:, None] & (columns < N)[None, :], other=0.0)


@triton.jit
def _write_sloped(  # type: ignore[no-untyped-def]
    part, known, row, column, d_scores, sums, N: tl.constexpr, ACTIVATION: tl.constexpr, BIASED: tl.constexpr
):  # fmt: skip
    known = known.to(tl.float32)
    part *= 2.0 * tl.sqrt(known) if ACTIVATION == "relu2" else _activated(known, ACTIVATION)[1]  # its root is the ReLU
    d_scores.store([row, column], part.to(d_scores.dtype))
    if BIASED:
        at = column + tl.arange(0, part.shape[1])
        tl.store(sums + row // part.shape[0] * N + at, tl.sum(part, 0), mask=at < N)


@triton.jit
def _sloped_product(  # type: ignore[no-untyped-def]
    dy, down, d_scores, kept, sums, M, N: tl.constexpr, C: tl.constexpr, ACTIVATION: tl.constexpr, BIASED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    QUARTER: tl.constexpr = COLUMNS // 4
    ACROSS: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    STEPS: tl.constexpr = (C + INNER - 1) // INNER
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, ROWS) * ACROSS, tl.num_programs(0)):
        row, column = tile // ACROSS * ROWS, tile % ACROSS * COLUMNS
        # Asked for before the product, into registers, so that they are there when it is.
        first = read(kept, row, column, M, N, ROWS, QUARTER)
        second = read(kept, row, column + QUARTER, M, N, ROWS, QUARTER)
        third = read(kept, row, column + 2 * QUARTER, M, N, ROWS, QUARTER)
        fourth = read(kept, row, column + 3 * QUARTER, M, N, ROWS, QUARTER)
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for step in range(STEPS):
            total = tl.dot(dy.load([row, step * INNER]), down.load([step * INNER, column]), total)
        a, b, c, d = quarters(total)
        _write_sloped(a, first, row, column, d_scores, sums, N, ACTIVATION, BIASED)
        _write_sloped(b, second, row, column + QUARTER, d_scores, sums, N, ACTIVATION, BIASED)
        _write_sloped(c, third, row, column + 2 * QUARTER, d_scores, sums, N, ACTIVATION, BIASED)
        _write_sloped(d, fourth, row, column + 3 * QUARTER, d_scores, sums, N, ACTIVATION, BIASED)
