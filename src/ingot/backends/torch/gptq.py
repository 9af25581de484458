"""Low-bit quantisation of weights: a row's step size is proportional to its rms, and GPTQ compensates for rounding errors.

A row's step size is k * rms(row) / (2^(bits - 1) - 1), so k and the number of bits determine both the size after entropy
coding and the increase in loss. GPTQ rounds a matrix column by column and adjusts the remaining columns to compensate, using the
second moments of the matrix's inputs on training text; the loss increases only a seventh as much as with plain rounding.
Matrices of the same shape are rounded together, because on a GPU the time depends on the number of columns, not rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ingot.backends.base import Rounding
from ingot.backends.torch.state import model_tensors, record
from ingot.errors import CheckpointError, RunError
from ingot.runtime.tensors import SCALE, SMALL, TensorRecord

DAMPING = 0.01  # fraction of the mean diagonal entry that is added to the diagonal of the second-moment matrix
BLOCK_COLUMNS = 128  # number of columns that are rounded before their errors are propagated to the remaining columns
HALF = torch.finfo(torch.float16)


class Moments:
    """Second moments (C, C) of the inputs of every matrix of a model, summed over forward passes."""

    def __init__(self) -> None:
        self.found: dict[int, Tensor] = {}  # maps id(weight) to the moments of its inputs

    @torch.no_grad()
    def note(self, weight: Tensor, x: Tensor) -> None:
        """Add the second moments of x (..., C), the input of the matrix `weight`."""
        rows = x.detach().flatten(0, -2).float()
        with torch.autocast(rows.device.type, enabled=False):
            more = rows.T @ rows
        self.found[id(weight)] = self.found[id(weight)] + more if id(weight) in self.found else more

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Sum the second moments of every nn.Linear's inputs in the `with` block; call `note` for the inputs of a tied head."""
        with ExitStack() as stack:
            for module in model.modules():
                if isinstance(module, nn.Linear):
                    hook = module.register_forward_pre_hook(lambda module, given: self.note(module.weight, given[0]))
                    stack.callback(hook.remove)
            yield


@dataclass
class _Stack:
    """Matrices of the same shape and kind that are rounded together."""

    names: list[str]
    targets: list[Tensor]  # the tensors of the model, (R, C) each, which `round` overwrites
    weights: Tensor  # (N, C, R), before rounding; columns are sorted in the order of rounding
    rms: Tensor  # (N, R)
    order: Tensor  # (N, C)
    upper: Tensor | None  # (N, C, C), distributes rounding errors over later columns; None: round to nearest
    embedding: bool
    codes: Tensor | None = None  # (N, C, R)
    scale: Tensor | None = None  # (N, R)


class TorchRounder:
    """The torch implementation of Rounder (base.py), for a model's large matrices and embedding tables."""

    def __init__(self, model: nn.Module, moments: Mapping[int, Tensor]):
        tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        tables |= {id(getattr(model, "head", None))}
        matrices = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
        alike: dict[tuple[Any, ...], list[tuple[str, Tensor]]] = {}
        for name, weight in model_tensors(model):
            if id(weight) in tables | matrices and weight.numel() > SMALL:
                if not bool(weight.isfinite().all()):
                    raise CheckpointError(f"the weight {name} contains values that are not finite; use an earlier checkpoint")
                kind = (tuple(weight.shape), id(weight) in tables, id(weight) in moments)
                alike.setdefault(kind, []).append((name, weight))
        self._stacks = []
        for (_, embedding, _), members in alike.items():
            names, targets = [name for name, _ in members], [weight.detach() for _, weight in members]
            on_mps = targets[0].device.type == "mps"  # MPS has no Cholesky decomposition
            device = torch.device("cpu") if on_mps else targets[0].device
            weights = torch.stack([w.to(device).float() for w in targets])  # (N, R, C)
            input_moments = [moments[id(w)].to(device) for _, w in members if id(w) in moments]
            order = torch.arange(weights.size(2), device=device).expand(len(names), -1)
            upper = None
            if input_moments:
                h = torch.stack(input_moments)  # (N, C, C)
                order = h.diagonal(dim1=1, dim2=2).argsort(dim=1, descending=True)
                take = partial(torch.take_along_dim, indices=order[:, :, None])
                upper = _upper(take(take(h, dim=1).mT, dim=1), names)
            columns = torch.take_along_dim(weights.mT, order[:, :, None], dim=1).contiguous()
            self._stacks.append(_Stack(names, targets, columns, weights.square().mean(2).sqrt(), order, upper, embedding))

    @torch.no_grad()
    def estimate(self, rounding: Rounding, embedding: bool) -> float:
        """Return the entropy-coded size in bytes with plain rounding to the nearest code, which is faster than GPTQ."""
        total = 0.0
        for stack in self._stacks:
            if stack.embedding == embedding:
                scale = _scale(stack.rms, rounding)
                total += _bytes(_nearest(stack.weights, scale[:, None], rounding.most), scale)
        return total

    @torch.no_grad()
    def round(self, matrices: Rounding, embeddings: Rounding) -> float:
        total = 0.0
        for stack in self._stacks:
            rounding = embeddings if stack.embedding else matrices
            stack.scale = _scale(stack.rms, rounding)
            if stack.upper is None:
                stack.codes = _nearest(stack.weights, stack.scale[:, None], rounding.most)
            else:
                stack.codes = _gptq(stack.weights.clone(), stack.scale, rounding.most, stack.upper)
            total += _bytes(stack.codes, stack.scale)
            back = stack.order.argsort()
            for i, target in enumerate(stack.targets):
                target.copy_((stack.codes[i] * stack.scale[i])[back[i]].T)
        return total

    def codes(self) -> dict[str, list[TensorRecord]]:
        stored = {}
        for stack in self._stacks:
            assert stack.codes is not None and stack.scale is not None
            back = stack.order.argsort()
            for i, name in enumerate(stack.names):
                codes = stack.codes[i][back[i]].T.to(torch.int8)
                stored[name] = [record(name, codes), record(name + SCALE, _stored(stack.scale[i]))]
        return stored


def _upper(h: Tensor, names: list[str]) -> Tensor:
    """Return the upper Cholesky factors of the inverses of h (N, C, C), increasing the damping until all of them exist."""
    mean = h.diagonal(dim1=1, dim2=2).mean(1).clamp_min(1e-8)[:, None, None]
    eye = torch.eye(h.size(1), device=h.device)
    damping = DAMPING
    while damping <= 1:
        factor, failed = torch.linalg.cholesky_ex(h + damping * mean * eye)
        if not bool(failed.any()):
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(factor), upper=True)
            if not bool(failed.any()):
                return upper
        damping *= 10
    raise RunError(f"cannot quantise {names[0]}: the inputs to this or another matrix of the same shape are not finite")


def _scale(rms: Tensor, rounding: Rounding) -> Tensor:
    """Return the step size of each row (N, R), rounded to the dtype in which it will be stored."""
    steps = torch.where(rms > 0, rounding.k * rms / rounding.most, 1.0)
    return torch.stack([_stored(row_steps).float() for row_steps in steps])


def _stored(scale: Tensor) -> Tensor:
    """Return the scales of a matrix in float16 if all are within the range of normal float16 numbers, else in float32."""
    return scale.half() if bool(((scale >= HALF.tiny) & (scale <= HALF.max)).all()) else scale


def _nearest(w: Tensor, scale: Tensor, most: int) -> Tensor:
    return (w / scale).round_().clamp_(-most, most)


def _gptq(left: Tensor, scale: Tensor, most: int, upper: Tensor) -> Tensor:
    """Round weights (N, C, R) with GPTQ, which minimises the error of the outputs; return the codes. `left` is overwritten."""
    codes, columns = torch.empty_like(left), left.size(1)
    for begin in range(0, columns, BLOCK_COLUMNS):
        end = min(begin + BLOCK_COLUMNS, columns)
        errors = torch.empty_like(left[:, begin:end])
        for column in range(begin, end):
            w = left[:, column]  # (N, R)
            codes[:, column] = _nearest(w, scale, most)
            error = (w - codes[:, column] * scale) / upper[:, column, column, None]
            left[:, column:end] -= upper[:, column, column:end, None] * error[:, None]
            errors[:, column - begin] = error
        left[:, end:] -= upper[:, begin:end, end:].mT @ errors
    return codes


def _bytes(codes: Tensor, scale: Tensor) -> float:
    """Return the total size of all matrices in bytes: the codes after entropy coding plus the scales."""
    matrices = torch.arange(len(codes), device=codes.device)[:, None, None]
    counts = torch.bincount((codes + 128 + 256 * matrices).long().flatten(), minlength=256 * len(codes)).view(-1, 256).double()
    bits = (counts * (counts.sum(1, keepdim=True) / counts.clamp_min(1)).log2()).sum()
    return float(bits) / 8 + scale.numel() * _stored(scale).element_size()
