"""NorMuon: neurons that were moved far move less, because Muon's updates leave some rows longer than others, step after step."""

from __future__ import annotations

from torch import Tensor


def even_out(updates: Tensor, squares: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """NorMuon: each row of (P, m, n) updates divided by its running root mean square, the length of the whole unchanged.

    Of wide matrices the columns, the side that has more. `squares` are the running means, which come back as they are after this.
    """
    now = updates.square().mean(-1 if updates.size(-2) >= updates.size(-1) else -2, keepdim=True)
    squares = squares.lerp(now, 1 - beta)
    scale, whole = squares.clamp_min(1e-10).rsqrt(), (-2, -1)
    length = now.sum(whole, keepdim=True) / (now * scale.square()).sum(whole, keepdim=True).clamp_min(1e-20)
    return updates * scale * length.sqrt(), squares
