"""Orthogonalising matrices without a decomposition: odd polynomials that push every singular value towards one.

An odd polynomial of a matrix, aX + b(XX')X + c(XX')²X, is that polynomial of its singular values and leaves its directions alone.
The matrix is first divided by its Frobenius norm, so singular values start in 0 .. 1, most of them far below one: what a set of
polynomials is worth is how small a value it can still lift.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ingot.optim.polar_express import Polynomial, polar_express

NEWTON_SCHULZ: Polynomial = (3.4445, -4.7750, 2.0315)  # five times: 0.003 .. 1 comes to 0.68 .. 1.20


def polynomials(coefficients: str, iterations: int) -> tuple[Polynomial, ...]:
    """The polynomials of a number of iterations: newton-schulz repeats one, polar-express has a set for every number."""
    return polar_express(iterations) if coefficients == "polar-express" else (NEWTON_SCHULZ,) * iterations


def orthogonalise(matrices: Tensor, steps: tuple[Polynomial, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Push the singular values of every matrix of an (N, m, n) stack towards one, computing in `dtype`."""
    tall = matrices.size(-2) > matrices.size(-1)
    x = (matrices.mT if tall else matrices).to(dtype)  # the product with its own transpose is then the smaller of the two
    x = x / (torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True) + 1e-7)
    # Five iterations on m x n cost 10n/m + 5 products of m x m, gathered 2n/m + 17: 1:4 took half the time, 1:1 half as much
    # again (2 cores of an ARM Neoverse-N1). Not on CUDA, whose float32 products may be TF32: too coarse to gather in.
    gathers = dtype == torch.float32 and not x.is_cuda and x.size(-1) >= 2 * x.size(-2)
    x = iterate_gathered(x, steps) if gathers else iterate(x, steps)
    return (x.mT if tall else x).to(matrices.dtype)


def iterate(x: Tensor, steps: tuple[Polynomial, ...]) -> Tensor:
    """Apply the polynomials one after the other."""
    for a, b, c in steps:
        # bmm, here and below: `@` looks at the shapes first, which takes a CPU as long as the product of small matrices.
        gram = torch.bmm(x, x.mT)  # (N, m, m)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def iterate_gathered(x: Tensor, steps: tuple[Polynomial, ...], at_once: int = 5) -> Tensor:
    """The same, gathered in the small square: x is multiplied once per `at_once` polynomials, at their end.

    The square of a small singular value is known to float32's 6e-8 and no better, and its error is lifted with it, by the square
    of the slopes: 1e-2 after the four that five iterations build on, and past one, where it diverges, a few more later.
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
