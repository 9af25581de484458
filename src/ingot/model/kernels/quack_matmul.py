"""Matmuls with a fused epilogue (activation, gating, or multiplication by a derivative), using quack-kernels, for Hopper GPUs.

quack-kernels is installed with FlashAttention 4. It provides the matmuls and compiles the epilogues, which are functions below:
`acc` is the result of the matmul, `c` the value of a second matrix at the same position, and the returned values are written to
memory. In gated matmuls, each gate is next to the value it multiplies. The tanh in GELU is computed with a sigmoid, because the
hardware's tanh is only accurate to 11 bits.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from quack.activation import dswiglu, relu_sq, sigmoid, swiglu
from quack.epilogue.frontend import gemm_epilogue
from quack.epilogue.math import pack, unpack
from quack.gemm_config import GemmConfig
from torch import Tensor

# Tilings, chosen from 20 candidates that were timed on an H200. For most matmuls, they are within 3% of the fastest candidate.
# The exceptions are the logits and the derivative of a wide squared ReLU (docs/experiments.md).
WIDE = GemmConfig(tile_m=128, tile_n=192, pingpong=True, cluster_m=2, cluster_n=1, is_dynamic_persistent=False)
NARROW = GemmConfig(tile_m=128, tile_n=128, pingpong=True, cluster_m=2, cluster_n=1, is_dynamic_persistent=False)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return a (M, K) @ b (K, N)."""
    return _run(_plain, a, b, None, WIDE)["D"]


def activated_matmul(x: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Return act(x (M, C) @ up (N, C).T) and what backward needs: the pre-activations or, for squared ReLU, the output."""
    if activation == "relu2":
        y = _run(_relu2, x, up.T, None, NARROW)["D"]
        return y, y
    outputs = _run(_gelu, x, up.T, None, WIDE)
    return outputs["y"], outputs["D"]


def sloped_matmul(dy: Tensor, down: Tensor, saved: Tensor, activation: str) -> Tensor:
    """Return the gradient (M, N) of the pre-activations, given dy (M, C), down (C, N) and activated_matmul's second output."""
    return _run(_relu2_slope if activation == "relu2" else _gelu_slope, dy, down, saved, NARROW)["D"]


def gated_matmul(x: Tensor, both: Tensor) -> tuple[Tensor, Tensor]:
    """Return the SwiGLU (M, N) of x (M, C) @ both (2 N, C).T, and that product; gate and up rows alternate in `both`."""
    outputs = _run(_gate, x, both.T, None, NARROW)
    return outputs["y"], outputs["D"]


def gated_slope(dy: Tensor, down: Tensor, inner: Tensor) -> Tensor:
    """Given dy (M, C) and down (C, N), return the gradient of `inner` (M, 2 N), the product that gated_matmul returned."""
    return _run(_gate_slope, dy, down, inner, NARROW)["D"]


def _run(epilogue: Any, a: Tensor, b: Tensor, c: Tensor | None, config: GemmConfig) -> dict[str, Tensor]:
    outputs: dict[str, Tensor] = epilogue(a, b, c, config=config, tuned=False)
    return outputs


@gemm_epilogue()
def _plain(acc):  # type: ignore[no-untyped-def]
    return {"D": acc}


def _share(x: Any) -> Any:
    """Return the factor that multiplies x in GELU, (1 + tanh(...)) / 2."""
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
