"""Norms of the residual stream, which take it with the branch that is still to be added: the sum goes on, its norm into a layer.

A block hands on the stream and its last branch apart, so that every sum lies before a norm, where a kernel of ours can make both.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ingot.model.kernels.norm import fused_add_norm


class LayerNorm(nn.LayerNorm):
    """torch's, of x and a branch, or of x alone; gives the sum too."""

    fused_norm = False  # whether both are one kernel of ours

    def forward(self, x: Tensor, branch: Tensor | None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        if self.fused_norm and torch.is_grad_enabled():
            return fused_add_norm(x, branch, self.weight, self.bias, self.eps, centred=True)
        x = x if branch is None else x + branch
        return x, super().forward(x)


class RMSNorm(nn.RMSNorm):
    """torch's, of x and a branch, or of x alone; gives the sum too."""

    fused_norm = False  # whether both are one kernel of ours

    def forward(self, x: Tensor, branch: Tensor | None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        if self.fused_norm and torch.is_grad_enabled() and self.eps is not None:
            return fused_add_norm(x, branch, self.weight, None, self.eps, centred=False)
        x = x if branch is None else x + branch
        return x, super().forward(x)
