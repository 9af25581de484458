"""Products whose tiles are activated, gated or multiplied by a slope before they are written, by quack-kernels, for Hopper.

The package comes with FlashAttention 4. Products are its own; what becomes of the numbers of a tile is said here, in functions
that it compiles: `acc` is what a product gave, `c` what lies in a second matrix at the same place; what they return is written.
Of a gate and what it gates, numbers come in pairs. GELU is by its sigmoid: the hardware's tanh is right to 11 bits alone.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from quack.activation import dswiglu, relu_sq, sigmoid, swiglu
from quack.epilogue.frontend import gemm_epilogue
from quack.epilogue.math import pack, unpack
from quack.gemm_config import GemmConfig
from torch import Tensor

# Of 20 cuts by themselves on an H200 the best or within 3% of it, but for the logits and for the slope of a wide squared ReLU,
# which others suit better (docs/experiments.md).
WIDE = GemmConfig(tile_m=128, tile_n=192, pingpong=True, cluster_m=2, cluster_n=1, is_dynamic_persistent=False)
NARROW = GemmConfig(tile_m=128, tile_n=128, pingpong=True, cluster_m=2, cluster_n=1, is_dynamic_persistent=False)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a (M, K) times b (K, N)."""
    return _made(_plain, a, b, None, WIDE)["D"]


def activated_product(x: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """The activation (M, N) of x (M, C) times up (N, C), and what the way back needs: the scores, or the squared ReLU itself."""
    if activation == "relu2":
        y = _made(_relu2, x, up.T, None, NARROW)["D"]
        return y, y
    made = _made(_gelu, x, up.T, None, WIDE)
    return made["y"], made["D"]


def sloped_product(dy: Tensor, down: Tensor, kept: Tensor, activation: str) -> Tensor:
    """The gradient (M, N) of the scores, from dy (M, C), down (C, N) and what was kept."""
    return _made(_relu2_slope if activation == "relu2" else _gelu_slope, dy, down, kept, NARROW)["D"]


def gated_product(x: Tensor, both: Tensor) -> tuple[Tensor, Tensor]:
    """SwiGLU (M, N) of x (M, C) times both (2 N, C), whose rows are a gate's and what it gates in turn; and that product."""
    made = _made(_gate, x, both.T, None, NARROW)
    return made["y"], made["D"]


def gated_slope(dy: Tensor, down: Tensor, inner: Tensor) -> Tensor:
    """The gradient (M, 2 N) of the inner product, from dy (M, C) and down (C, N)."""
    return _made(_gate_slope, dy, down, inner, NARROW)["D"]


def _made(by: Any, a: Tensor, b: Tensor, c: Tensor | None, cut: GemmConfig) -> dict[str, Tensor]:
    found: dict[str, Tensor] = by(a, b, c, config=cut, tuned=False)
    return found


@gemm_epilogue()
def _plain(acc):  # type: ignore[no-untyped-def]
    return {"D": acc}


def _share(x: Any) -> Any:
    """(1 + tanh) / 2, GELU's slope but for what its tanh has of its own."""
    return sigmoid(x * (x * x * 0.0713548162726 + 1.5957691216))


@gemm_epilogue(outputs=("y",))
def _gelu(acc):  # type: ignore[no-untyped-def]
    return {"D": acc, "y": acc * _share(acc)}


@gemm_epilogue()
def _gelu_slope(acc, c):  # type: ignore[no-untyped-def]
    share = _share(c)
    y = c * share
    return {"D": acc * (share + (y - y * share) * (c * c * 0.2140644488178 + 1.5957691216))}


@gemm_epilogue()
def _relu2(acc):  # type: ignore[no-untyped-def]
    return {"D": relu_sq(acc)}


@gemm_epilogue()
def _relu2_slope(acc, c):  # type: ignore[no-untyped-def]
    return {"D": acc * (cute.math.sqrt(c, fastmath=True) * 2.0)}


@gemm_epilogue(outputs=("y",), mode="acc_pair")
def _gate(acc):  # type: ignore[no-untyped-def]
    gate, up = unpack(acc)
    return {"D": pack(gate, up), "y": swiglu(gate, up)}


@gemm_epilogue(mode="packed_cd_b16x2")
def _gate_slope(acc, c):  # type: ignore[no-untyped-def]
    gate, up = unpack(c)
    d_gate, d_up, _ = dswiglu(gate, up, acc)
    return {"D": pack(d_gate, d_up)}
