"""The loss of rows of logits, and their gradient in their place or beside them, as a Triton kernel; one program per row.

Rows of up to 16,384 words are held in registers: read once, written once. Longer ones are read twice. Their first pass sums by
the largest score of the first block, not by that of the whole row, so that its blocks do not wait for each other; only where the
sum overflows, because a later score is 80 higher, it is made again by the largest score so far.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LONGEST_WHOLE = 16384  # words whose logits one program holds
LONG_BLOCK, LONG_WARPS = 4096, 8  # of rows that are longer: 5.2 ms for 65,536 of 50,304 words on an H200, 6.7 with 8192 and 32


def block_and_warps(vocabulary: int) -> tuple[int, int]:
    """How many words of a row are computed at once, and by how many warps."""
    if vocabulary > LONGEST_WHOLE:
        return LONG_BLOCK, LONG_WARPS
    block = triton.next_power_of_2(vocabulary)
    return block, max(2, block // 1024)  # the fastest of 2 to 32 for 1,024 and for 8,192 words


def losses_of_logits_(
    logits: Tensor,
    targets: Tensor,
    softcap: float | None,
    with_grad: bool,
    shape: tuple[int, int] | None = None,
    into: Tensor | None = None,
    factor: float = 1.0,
) -> Tensor:
    """The loss (N) of each target, 0 where it is ignored; with `with_grad` its gradient takes the place of the logits (N, V).

    With `into`, a tensor that lies as they do, it goes there instead, times `factor` and in that tensor's format.
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
    """A score after the softcap, and the slope there."""
    if CAPPED:
        t = 1.0 - 2.0 / (1.0 + tl.exp(x * (2.0 / softcap)))  # tanh; far out exp is infinite and t is 1
        return softcap * t, 1.0 - t * t
    else:  # noqa: RET505  # Triton compiles what follows a return
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
    places = tl.arange(0, BLOCK)
    if WHOLE:
        inside = places < VOCABULARY
        z, slope = _bent(tl.load(logits + places, mask=inside, other=0.0).to(tl.float32), softcap, CAPPED)
        z = tl.where(inside, z, -float("inf"))
        top = tl.max(z, 0)
        e = tl.exp(z - top)
        total = tl.sum(e, 0)
        if WITH_GRAD:
            grad = (e * (1.0 / total) - tl.where(places == target, 1.0, 0.0)) * slope
            grad = tl.where(counts, grad * factor, 0.0)
            tl.store(grads + places, grad.to(grads.dtype.element_ty), mask=inside)
    else:
        z = _bent(tl.load(logits + places).to(tl.float32), softcap, CAPPED)[0]
        top = tl.max(z, 0)
        sums = tl.exp(z - top)
        for start in range(BLOCK, VOCABULARY, BLOCK):
            at = start + places
            x = tl.load(logits + at, mask=at < VOCABULARY, other=0.0, eviction_policy="evict_last").to(tl.float32)
            z = _bent(x, softcap, CAPPED)[0]
            sums += tl.where(at < VOCABULARY, tl.exp(z - top), 0.0)
        total = tl.sum(sums, 0)
        if total == float("inf"):
            total = 0.0
            for start in range(0, VOCABULARY, BLOCK):
                at = start + places
                x = tl.load(logits + at, mask=at < VOCABULARY, other=0.0).to(tl.float32)
                z = tl.where(at < VOCABULARY, _bent(x, softcap, CAPPED)[0], -float("inf"))
                higher = tl.maximum(top, tl.max(z, 0))
                total = total * tl.exp(top - higher) + tl.sum(tl.exp(z - higher), 0)
                top = higher
        if WITH_GRAD:
            log_total = tl.log(total) + top
            for start in range(0, VOCABULARY, BLOCK):
                at = start + places
                x = tl.load(logits + at, mask=at < VOCABULARY, other=0.0, eviction_policy="evict_first").to(tl.float32)
                z, slope = _bent(x, softcap, CAPPED)
                grad = (tl.exp(z - log_total) - tl.where(at == target, 1.0, 0.0)) * slope
                grad = tl.where(counts, grad * factor, 0.0)
                tl.store(grads + at, grad.to(grads.dtype.element_ty), mask=at < VOCABULARY)
    tl.store(losses + row, tl.where(counts, tl.log(total) + top - hit, 0.0))
