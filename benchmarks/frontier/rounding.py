"""What an artifact of the weights would weigh and lose, without writing one: rounded by row, counted by entropy.

Scale = k * std(row) / (2^(bits - 1) - 1): then only step / std decides both size and loss. Bytes are the empirical entropy of
each tensor's integers, which an order-0 rANS coder reaches to a few kilobytes. Plain rounding: GPTQ halves the loss.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor


class Plan(NamedTuple):
    """Bits and clipping of the matrices; embeddings are int8 with k 20, everything small is 16 bits."""

    bits: int
    k: float


PLANS = (Plan(6, 6.0), Plan(6, 8.0), Plan(6, 10.0), Plan(5, 8.0))
EMBEDDINGS = Plan(8, 20.0)
SMALL = 16_384  # weights: smaller tensors are not worth a table


def integers(weight: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """A matrix as integers and the scale of each row."""
    most = 2 ** (plan.bits - 1) - 1
    std = weight.std(dim=1, keepdim=True, unbiased=False)
    scale = torch.where(std > 0, plan.k * std / most, 1.0).half().float()  # stored in 16 bits
    return (weight / scale.clamp_min(1e-7)).round().clamp(-most, most), scale


def entropy_bits(values: Tensor) -> float:
    """Bits of all values under their own frequencies."""
    counts = torch.unique(values, return_counts=True)[1].double()
    return float((counts * (counts.sum() / counts).log2()).sum())


@torch.no_grad()
def round_weights(named: Iterable[tuple[str, Tensor]], plan: Plan) -> tuple[int, float]:
    """Round all weights in place; the bytes they would need, and the bits per weight of the matrices."""
    bits, matrix_bits, matrix_weights = 0.0, 0.0, 0
    for name, weight in named:
        if weight.dim() != 2 or weight.numel() < SMALL:
            weight.copy_(weight.half().float())
            bits += 16 * weight.numel()
            continue
        embedding = name.rpartition(".")[2] in ("embedding", "head", "value_table")
        values, scale = integers(weight, EMBEDDINGS if embedding else plan)
        weight.copy_(values * scale)
        coded = entropy_bits(values)
        bits += coded + 16 * scale.numel()
        if not embedding:
            matrix_bits, matrix_weights = matrix_bits + coded, matrix_weights + weight.numel()
    return round(bits / 8), matrix_bits / max(1, matrix_weights)
