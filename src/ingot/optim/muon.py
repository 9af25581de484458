"""Muon: SGD with momentum, in which each update is replaced by the nearest semi-orthogonal matrix.

The matmuls that orthogonalise one small matrix are too small to fill a device, so matrices of the same shape are stacked and
processed together, with the same result. The state stays stacked between steps: each parameter's state is a view of the stack.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ingot.config.schema import OptimizerSection

Polynomial = tuple[float, float, float]  # the coefficients a, b, c of ax + bx³ + cx⁵

LOWEST = 1e-3  # smallest singular value that five iterations of Polar Express map near one
# Rounding may push a singular value above the interval, where polynomials diverge; this factor widens all intervals but the last.
SAFETY = 1.01
# Polynomials are fitted only above this fraction of the upper bound; they multiply smaller values by their slope at zero.
# The best polynomial for a wider interval would come close to zero inside the interval, where rounding errors dominate.
CUSHION = 0.024


@lru_cache
def polar_express(iterations: int) -> tuple[Polynomial, ...]:
    """Return a polynomial per iteration: the one closest to 1 on the range of the previous polynomial (Amsel et al., 2025).

    Five iterations map 0.001 .. 1 to 0.87 .. 1.13. An iteration multiplies small values by about four, so the lower bound of
    0.001 is raised fourfold for each iteration fewer than five: four iterations map 0.004 .. 1 to 0.86 .. 1.14. The first four of
    the five polynomials would map it to 0.43 .. 1.57.
    """
    low, high = LOWEST * 4.0 ** max(0, 5 - iterations), 1.0
    polynomials = []
    for i in range(iterations):
        (a, b, c), error = nearest_to_one(max(low, CUSHION * high), high)
        s = SAFETY if i < iterations - 1 else 1.0
        a, b, c = a / s, b / s**3, c / s**5
        polynomials.append((a, b, c))
        low, high = min(a * low + b * low**3 + c * low**5, 1 - error), 1 + error
    return tuple(polynomials)


def nearest_to_one(low: float, high: float) -> tuple[Polynomial, float]:
    """Return the odd quintic polynomial that is nearest to one on low .. high, and its largest error (Remez algorithm)."""
    if low > 0.99 * high:  # the interval is too narrow for the solver; the Taylor polynomial is accurate to 1e-6
        m = (low + high) / 2
        a, b, c = 1.875 / m, -1.25 / m**3, 0.375 / m**5
        return (a, b, c), max(abs(a * x + b * x**3 + c * x**5 - 1) for x in (low, high))
    inner, outer = (3 * low + high) / 4, (low + 3 * high) / 4
    for _ in range(20):  # more than enough: convergence is quadratic
        x = np.array([low, inner, outer, high])
        # The best polynomial has equal errors of alternating sign at the ends of the interval and at its two extrema inside.
        a, b, c, error = (float(v) for v in np.linalg.solve(np.stack([x, x**3, x**5, [1, -1, 1, -1]], axis=1), np.ones(4)))
        root = math.sqrt(9 * b * b - 20 * a * c)
        inner, outer = math.sqrt((-3 * b - root) / (10 * c)), math.sqrt((-3 * b + root) / (10 * c))
    return (a, b, c), abs(error)


NEWTON_SCHULZ: Polynomial = (3.4445, -4.7750, 2.0315)  # five iterations map 0.003 .. 1 to 0.68 .. 1.20


def polynomials(coefficients: str, iterations: int) -> tuple[Polynomial, ...]:
    """Return the polynomial of each iteration: always the same for `newton-schulz`, different ones for `polar-express`."""
    return polar_express(iterations) if coefficients == "polar-express" else (NEWTON_SCHULZ,) * iterations


def orthogonalise(matrices: Tensor, steps: tuple[Polynomial, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Move the singular values of each matrix in an (N, m, n) stack towards one, computing in `dtype`."""
    tall = matrices.size(-2) > matrices.size(-1)
    x = (matrices.mT if tall else matrices).to(dtype)  # x @ x.mT is then the smaller of the two Gram matrices
    x = x / (torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True) + 1e-7)
    # Five iterations on m x n cost as much as 10n/m + 5 matmuls of m x m, or 2n/m + 17 with iterate_gathered. On an ARM CPU,
    # iterate_gathered takes half as long if n = 4m, but 1.5 times as long if n = m. On CUDA, TF32 is too imprecise for it.
    gathers = dtype == torch.float32 and not x.is_cuda and x.size(-1) >= 2 * x.size(-2)
    x = iterate_gathered(x, steps) if gathers else iterate(x, steps)
    return (x.mT if tall else x).to(matrices.dtype)


def iterate(x: Tensor, steps: tuple[Polynomial, ...]) -> Tensor:
    """Apply the polynomials to the singular values of x (N, m, n), one after another."""
    for a, b, c in steps:
        # bmm instead of `@`, here and below: on a CPU the shape checks of `@` take as long as a matmul of small matrices.
        gram = torch.bmm(x, x.mT)  # (N, m, m)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def iterate_gathered(x: Tensor, steps: tuple[Polynomial, ...], at_once: int = 5) -> Tensor:
    """Like `iterate`, but apply the polynomials to the small Gram matrix, and multiply by x once per `at_once` polynomials.

    Rounding in float32 leaves an error of about 6e-8 in the small eigenvalues of the Gram matrix. Each iteration multiplies it by
    the square of the polynomial's slope at zero: after four iterations it is at most 1e-2, but a few more would diverge.
    """
    for start in range(0, len(steps), at_once):
        gram = torch.bmm(x, x.mT)  # (N, m, m)
        product: Tensor | None = None
        part = steps[start : start + at_once]
        for i, (a, b, c) in enumerate(part, 1):
            factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            factor.diagonal(dim1=-2, dim2=-1).add_(a)
            product = factor if product is None else torch.bmm(factor, product)
            if i < len(part):
                gram = torch.bmm(torch.bmm(factor, gram), factor)
        if product is not None:
            x = torch.bmm(product, x)
    return x


def normalise_neurons(updates: Tensor, squares: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Apply NorMuon: divide rows of (P, m, n) updates by their running root mean squares, without changing the matrix norms.

    In wide matrices, columns are divided instead. Return the new updates and the updated `squares`, the running mean squares.
    """
    now = updates.square().mean(-1 if updates.size(-2) >= updates.size(-1) else -2, keepdim=True)
    squares = squares.lerp(now, 1 - beta)
    scale, whole = squares.clamp_min(1e-10).rsqrt(), (-2, -1)
    length = now.sum(whole, keepdim=True) / (now * scale.square()).sum(whole, keepdim=True).clamp_min(1e-20)
    return updates * scale * length.sqrt(), squares


Number = float | Tensor


def equal_rows(updates: Tensor) -> Tensor:
    """Scale all rows of each (m, n) update to the same norm without changing the matrix norm; rows of zeros stay zero.

    After orthogonalisation, the rows of a tall matrix (more rows than columns) have different norms, so that some neurons
    learn many times faster than others. In a wide matrix the norms of the rows are already nearly equal.
    """
    rows = F.normalize(updates, dim=-1)
    whole = (-2, -1)
    return rows * (updates.norm(dim=whole, keepdim=True) / rows.norm(dim=whole, keepdim=True).clamp_min(1e-7))


class Exchange(Protocol):
    """Communication of a Muon step between ranks, each of which orthogonalises its share of P matrices of one shape."""

    def shape(self, p: Tensor) -> tuple[int, int]:
        """Return the shape of the whole matrix of which `p` is this rank's part."""

    def own(self, stack: Tensor) -> Tensor:
        """Return this rank's share of a stack (P, ...) that is equal on all ranks."""

    def all(self, share: Tensor, count: int) -> Tensor:
        """Gather the shares of all ranks, and return the whole stack of `count` entries."""

    def whole(self, parts: Tensor, rows: int) -> Tensor:
        """Given this rank's rows (P, r, n) of all matrices, return the whole matrices (k, rows, n) of this rank's share."""

    def parts(self, share: Tensor, shape: torch.Size) -> Tensor:
        """Given the whole matrices of this rank's share, return this rank's rows of all matrices, of `shape` (P, r, n)."""


class Options(NamedTuple):
    """Options of a Muon step, which rarely change; a compiled step has one graph per combination of options."""

    nesterov: bool
    dtype: torch.dtype  # dtype of the orthogonalisation
    steps: tuple[Polynomial, ...]
    normalise_rows: bool
    beta2: float | None
    decays: bool
    cautious: bool


def update_matrices(
    params: Tensor,
    grads: Tensor,
    momentum_before: Tensor,
    squares_before: Tensor | None,
    lr: Number,
    momentum: Number,
    weight_decay: Number,
    skip: Tensor | None,
    o: Options,
    exchange: Exchange | None = None,
    shape: tuple[int, int] | None = None,
) -> Tensor:
    """Return the parameters (P, m, n) after a step; update momentum and squares in place. If `skip` is one, change nothing.

    With `exchange`, the ranks share the work: each orthogonalises some of the P matrices. `shape` is the shape of a whole matrix,
    of which `params` may hold only this rank's rows.
    """
    rows, columns = shape or params.shape[1:]
    after = momentum_before * momentum + grads
    direction = grads + momentum * after if o.nesterov else after
    squares = squares_before
    if exchange is not None:
        direction, squares = exchange.whole(direction, rows), None if squares is None else exchange.own(squares)
    update = orthogonalise(direction, o.steps, o.dtype)
    if o.normalise_rows:
        update = equal_rows(update)
    if o.beta2 is not None and squares is not None:
        update, squares = normalise_neurons(update, squares, o.beta2)
    if exchange is not None:
        update = exchange.parts(update, params.shape)
        squares = None if squares is None or squares_before is None else exchange.all(squares, len(squares_before))
    # Rows of a square orthogonal matrix have norm 1, but rows of a tall semi-orthogonal matrix are shorter; this compensates.
    update = update * (lr * math.sqrt(max(1.0, rows / columns)))
    decay = lr * weight_decay
    if skip is not None:
        stays = skip.bool()
        update, after = torch.where(stays, 0.0, update), torch.where(stays, momentum_before, after)
        squares = None if squares is None or squares_before is None else torch.where(stays, squares_before, squares)
        decay = decay * (1.0 - skip)
    if o.decays:
        # `cautious` decays only the weights that the update also moves towards zero.
        params = params * (1.0 - decay * (params * update >= 0) if o.cautious else 1.0 - decay)
    momentum_before.copy_(after)
    if squares_before is not None and squares is not None:
        squares_before.copy_(squares)
    return params - update


class Muon(torch.optim.Optimizer):
    """The Muon optimizer, for two-dimensional parameters; all other parameters must use AdamW.

    `settings` provides the defaults of all groups; group options may change between steps, as `lr` and `momentum` do. If
    `compiled`, a step takes a few fused kernels; otherwise it takes dozens, each of which reads and writes all matrices. With
    `exchange`, the ranks divide the matrices among them, and parameters may be parts of matrices.
    """

    def __init__(
        self, params: Iterable[Any], settings: OptimizerSection, compiled: bool = False, exchange: Exchange | None = None
    ):
        names = ("momentum", "nesterov", "iterations", "weight_decay", "cautious", "beta2", "coefficients", "normalise_rows")
        defaults = {name: getattr(settings, f"muon_{name}") for name in (*names, "precision")}
        super().__init__(params, {"lr": settings.muon_learning_rate, **defaults})
        compiled = compiled and exchange is None  # the compiler would break the graph at every exchange
        self._compiled, self._exchange = compiled, exchange
        self._update_matrices = torch.compile(update_matrices, dynamic=False) if compiled else update_matrices
        self._stacks: dict[tuple[str, int], tuple[Tensor, list[Tensor]]] = {}  # keyed by state name and id(first parameter)
        for group in self.param_groups:
            for p in group["params"]:
                if p.dim() != 2:
                    raise ValueError(f"Muon only updates matrices; a parameter of shape {tuple(p.shape)} must use AdamW")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        # The backend may set the tensor `found_inf`, as for fused AdamW: 1 skips the update. The host never reads the value.
        skip: Tensor | None = getattr(self, "found_inf", None)
        for group in self.param_groups:
            by_shape: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    by_shape[(p.size(0), p.size(1)) if self._exchange is None else self._exchange.shape(p)].append(p)
            for (rows, columns), params in by_shape.items():
                # bf16 matmuls are many times faster on GPUs but not on CPUs; orthogonalisation tolerates the rounding.
                half = group["precision"] == "bf16" or (group["precision"] == "auto" and params[0].is_cuda)
                options = Options(
                    nesterov=group["nesterov"],
                    dtype=torch.bfloat16 if half else torch.float32,
                    steps=polynomials(group["coefficients"], group["iterations"]),
                    normalise_rows=group["normalise_rows"],
                    beta2=group["beta2"],
                    # Always True in a compiled step, which would need a second graph if a schedule lowered the decay to 0.
                    decays=bool(group["weight_decay"]) or self._compiled,
                    cautious=group["cautious"],
                )
                grads = torch.stack([p.grad for p in params])  # type: ignore[misc]  # (P, m, n)
                momentum = self._state_stack(params, "momentum", (params[0].size(0), columns))
                squares = None
                if options.beta2 is not None:
                    squares = self._state_stack(params, "squares", (rows, 1) if rows >= columns else (1, columns))
                lr, beta, decay = group["lr"], group["momentum"], group["weight_decay"]
                if self._compiled:  # tensors, because every new float value would trigger a recompilation
                    lr, beta, decay = (torch.full((), float(number), device=grads.device) for number in (lr, beta, decay))
                exchange = (self._exchange, (rows, columns)) if self._exchange is not None else ()
                stack = torch.stack(params)
                new = self._update_matrices(stack, grads, momentum, squares, lr, beta, decay, skip, options, *exchange)
                torch._foreach_copy_(params, list(new.unbind(0)))

    def _state_stack(self, params: list[Tensor], name: str, shape: tuple[int, int]) -> Tensor:
        """Return the state called `name` of `params` as a stack (P, ...), which is initially zero.

        The stack of the previous step is reused unless that step updated other parameters or a state has been loaded since.
        """
        stack, parts = self._stacks.get((name, id(params[0])), (None, []))
        kept = [self.state[p].get(name) for p in params]
        if stack is None or len(kept) != len(parts) or any(state is not part for state, part in zip(kept, parts, strict=True)):
            stack = torch.stack([p.new_zeros(shape) if state is None else state for p, state in zip(params, kept, strict=True)])
            parts = list(stack.unbind(0))
            for p, part in zip(params, parts, strict=True):
                self.state[p][name] = part
            self._stacks[name, id(params[0])] = stack, parts
        return stack
