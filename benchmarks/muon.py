"""Measure the time of a Muon step and how close it brings singular values to 1.

The matrices are those of a golf model of the requested shape, with random gradients. The optimizers alternate; each row is the
median over the rounds. The last column is the range of the singular values of the update, for a gradient whose singular values
fall from 1 to 1e-3.

    python benchmarks/muon.py [--device cuda] [--layers 9] [--width 512]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from datetime import date

import torch
from torch import Tensor

from ingot.backends.open import find_device
from ingot.config.schema import OptimizerSection
from ingot.model.golf import Golf
from ingot.optim.groups import block_matrices, muon
from ingot.optim.muon import orthogonalise, polynomials

SETTINGS = [("newton-schulz", 5), ("polar-express", 5), ("polar-express", 4)]
PRECISIONS = {"bf16": torch.bfloat16, "fp32": torch.float32}


def matrices(arguments: argparse.Namespace) -> list[torch.nn.Parameter]:
    """Return the block matrices of a golf model with random gradients."""
    with torch.device(arguments.device):
        model = Golf(vocab_size=1024, context=1024, layers=arguments.layers, width=arguments.width)
        params = [p for _, p in block_matrices(model)]
        for p in params:
            p.grad = torch.randn_like(p)
    return params


def seconds(step: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a step, including its work on the device."""
    began = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def falling(width: int, device: torch.device) -> Tensor:
    """Return a stack with one square matrix whose singular values fall from 1 to 1e-3."""
    u, v = (torch.linalg.qr(torch.randn(width, width, dtype=torch.float64))[0] for _ in range(2))
    return ((u * torch.logspace(0, -3, width, dtype=torch.float64)) @ v).float().to(device)[None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", type=torch.device)
    parser.add_argument("--layers", default=9, type=int)
    parser.add_argument("--width", default=512, type=int)
    parser.add_argument("--turns", default=20, type=int)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    params, device = matrices(arguments), arguments.device
    lanes: dict[str, Callable[[], object]] = {"torch.optim.Muon, one by one": torch.optim.Muon(params).step}
    values: dict[str, str] = {}
    x = falling(arguments.width, device)
    for coefficients, iterations in SETTINGS:
        for precision, dtype in PRECISIONS.items():
            for normalise_rows in (False, True) if (coefficients, iterations) == SETTINGS[0] else (False,):
                name = f"{coefficients} {iterations}, {precision}" + (", equal rows" if normalise_rows else "")
                settings = OptimizerSection(muon_iterations=iterations, muon_coefficients=coefficients, muon_precision=precision)
                optimizer = muon(params, settings)
                optimizer.param_groups[0]["normalise_rows"] = normalise_rows
                lanes[name] = optimizer.step
                found = torch.linalg.svdvals(orthogonalise(x, polynomials(coefficients, iterations), dtype)[0].cpu().double())
                values[name] = f"{found.min():.2f} .. {found.max():.2f}"
    lanes["fused AdamW, for comparison"] = torch.optim.AdamW(params, fused=True).step
    turns: dict[str, list[float]] = {name: [] for name in lanes}
    for _ in range(arguments.turns + 2):
        for name, step in lanes.items():
            turns[name].append(seconds(step, device))
    shapes = f"{len(params)} matrices, {sum(p.numel() for p in params):,} weights"
    print(f"{date.today()}, {find_device(str(device)).name}, torch {torch.__version__}: {shapes}\n")
    print("| step | milliseconds | singular values |\n|---|---|---|")
    for name, taken in turns.items():
        print(f"| {name} | {1000 * statistics.median(taken[2:]):.2f} | {values.get(name, '')} |")


if __name__ == "__main__":
    main()
