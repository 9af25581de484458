"""Norms of the residual stream, which take it with the branch that is still to be added: the sum goes on, its norm into a layer.

A block hands on the stream and its last branch apart, so that every sum lies before a norm, where a kernel of ours can make both.
"""

from __future__ import annotations

from torch import Tensor, nn


class LayerNorm(nn.LayerNorm):
    """torch's, of x and a branch, or of x alone; gives the sum too."""

    def forward(self, x: Tensor, branch: Tensor | None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x = x if branch is None else x + branch
        return x, super().forward(x)


class RMSNorm(nn.RMSNorm):
    """torch's, of x and a branch, or of x alone; gives the sum too."""

    def forward(self, x: Tensor, branch: Tensor | None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x = x if branch is None else x + branch
        return x, super().forward(x)
