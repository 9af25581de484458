"""What an artifact of the weights would weigh and lose, without writing one: rounded by row, counted by entropy.

Scale = k * std(row) / (2^(bits - 1) - 1): then only step / std decides both size and loss. Bytes are the empirical entropy of
each tensor's integers, which an order-0 rANS coder reaches to a few kilobytes. With GPTQ the columns are rounded one after the
other and those not yet rounded make up for the error, as far as the inputs of training text (their second moments) let them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from frontier import model as model_module

SMALL = 16_384  # weights: smaller tensors are not worth a table
DAMPING = 0.01  # of the mean of the second moments, added to each
COLUMNS = 128  # that are rounded before the error moves on to the others

Moments = Mapping[int, Tensor]  # of the inputs of a matrix, by the id of its parameter


class Plan(NamedTuple):
    """Bits and clipping of the matrices and of embeddings, head and tables; 0 bits: not rounded. Everything small is 16 bits."""

    bits: int
    k: float
    embedding_bits: int = 8
    embedding_k: float = 12.0
    gptq: bool = False


PLANS = (
    Plan(6, 8.0, embedding_bits=0),  # what the matrices cost alone,
    Plan(0, 0.0, embedding_k=20.0),  # and the embedding
    Plan(0, 0.0, embedding_k=12.0),
    Plan(0, 0.0, embedding_bits=7, embedding_k=12.0),
    Plan(6, 8.0),
    Plan(7, 16.0),  # the same steps without clipping
    Plan(6, 8.0, embedding_bits=0, gptq=True),
    Plan(6, 8.0, gptq=True),
    Plan(6, 10.0, gptq=True),
    Plan(6, 12.0, gptq=True),
    Plan(7, 16.0, gptq=True),
    Plan(7, 20.0, gptq=True),
    Plan(7, 20.0, embedding_bits=7, embedding_k=12.0, gptq=True),
    Plan(5, 5.0, gptq=True),
)


def scales(weight: Tensor, bits: int, k: float) -> tuple[Tensor, int]:
    """The step of each row, as 16 bits hold it, and the largest integer."""
    most = 2 ** (bits - 1) - 1
    std = weight.std(dim=1, keepdim=True, unbiased=False)
    return torch.where(std > 0, k * std / most, 1.0).half().float().clamp_min(1e-7), most


def integers(weight: Tensor, bits: int, k: float) -> tuple[Tensor, Tensor]:
    """A matrix as the nearest integers, and the scale of each row."""
    scale, most = scales(weight, bits, k)
    return (weight / scale).round().clamp(-most, most), scale


def gptq_integers(weight: Tensor, bits: int, k: float, moments: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix as integers whose products with inputs of these second moments differ least, column by column."""
    scale, most = scales(weight, bits, k)
    diagonal = moments.diagonal()
    order = diagonal.argsort(descending=True)
    left = weight[:, order].clone()
    h = moments[order][:, order] + DAMPING * diagonal.mean().clamp_min(1e-8) * torch.eye(len(moments), device=weight.device)
    upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(h)), upper=True)
    found = torch.empty_like(left)
    for begin in range(0, left.size(1), COLUMNS):
        end = min(begin + COLUMNS, left.size(1))
        errors = torch.empty_like(left[:, begin:end])
        for column in range(begin, end):
            found[:, column] = (left[:, column] / scale[:, 0]).round().clamp(-most, most)
            error = (left[:, column] - found[:, column] * scale[:, 0]) / upper[column, column]
            left[:, column:end] -= error[:, None] * upper[column, column:end]
            errors[:, column - begin] = error
        left[:, end:] -= errors @ upper[begin:end, end:]
    return found[:, order.argsort()], scale


@torch.no_grad()
def input_moments(model: model_module.Frontier, batches: Iterable[Tensor]) -> dict[int, Tensor]:
    """The second moments of the inputs of every large matrix over some rows of training text."""
    found: dict[int, Tensor] = {}

    def note(x: Tensor, weight: Tensor) -> None:
        if weight.numel() >= SMALL:
            rows = x.flatten(0, -2).float()
            found[id(weight)] = found.get(id(weight), 0) + rows.T @ rows

    with _watched(note, model):
        for tokens in batches:
            model.logits(tokens)
    return found


@contextlib.contextmanager
def _watched(note: model_module.Note, model: model_module.Frontier) -> Iterator[None]:
    """Show every product to `note`; nothing is compiled meanwhile."""
    call, model.call = model.call, lambda function: function
    model_module.NOTES.append(note)
    try:
        yield
    finally:
        model_module.NOTES.pop()
        model.call = call


def entropy_bits(values: Tensor) -> float:
    """Bits of all values under their own frequencies."""
    counts = torch.unique(values, return_counts=True)[1].double()
    return float((counts * (counts.sum() / counts).log2()).sum())


@torch.no_grad()
def round_weights(named: Iterable[tuple[str, Tensor]], plan: Plan, moments: Moments) -> tuple[int, float]:
    """Round all weights in place; the bytes they would need, and the bits per weight of the matrices."""
    total, matrix_bits, matrix_weights = 0.0, 0.0, 0
    for name, weight in named:
        if weight.dim() != 2 or weight.numel() < SMALL:
            weight.copy_(weight.half().float())
            total += 16 * weight.numel()
            continue
        embedding = name.rpartition(".")[2] in ("embedding", "head", "value_table")
        bits, k = (plan.embedding_bits, plan.embedding_k) if embedding else (plan.bits, plan.k)
        if not bits:
            total += 16 * weight.numel()
            continue
        known = moments.get(id(weight)) if plan.gptq else None
        values, scale = integers(weight, bits, k) if known is None else gptq_integers(weight, bits, k, known)
        weight.copy_(values * scale)
        coded = entropy_bits(values)
        total += coded + 16 * scale.numel()
        if not embedding:
            matrix_bits, matrix_weights = matrix_bits + coded, matrix_weights + weight.numel()
    return round(total / 8), matrix_bits / max(1, matrix_weights)
