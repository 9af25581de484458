"""Ablations of the gpt2 family with byte tokens: change one setting at a time and train as many steps as fit in 90 s of CPU.

The number of steps follows from step times measured on two CPU cores; the training itself uses the available device and takes
seconds on a GPU. Each printed line is the mean final val_bpb over the seeds.

    python benchmarks/demo_choices.py [--seeds 2] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import torch

import ingot
from ingot.backends.open import find_device

# name: (milliseconds per step on two Neoverse-N1 cores, changed settings)
CHOICES: dict[str, tuple[float, dict[str, Any]]] = {
    "as it is": (69, {}),
    "AdamW, 4e-3": (61, {"optimizer": {"name": "adamw", "learning_rate": 4e-3, "weight_decay": 0.1}}),
    "momentum 0.95": (69, {"optimizer": {"muon_momentum": 0.95}}),
    "Muon 0.02": (69, {"optimizer": {"muon_learning_rate": 0.02}}),
    "Muon 0.01": (69, {"optimizer": {"muon_learning_rate": 0.01}}),
    "warm-up of 20 steps": (69, {"optimizer": {"warmup_steps": 20}}),
    "decay over all of it": (69, {"optimizer": {"decay_fraction": 1.0}}),
    "decay over the last 0.3": (69, {"optimizer": {"decay_fraction": 0.3}}),
    "1,024 tokens a step": (43, {"training": {"tokens_per_step": 1024}}),
    "4,096 tokens a step": (123, {"training": {"tokens_per_step": 4096}}),
    "width 96": (108, {"model": {"width": 96}}),
    "3 layers": (103, {"model": {"layers": 3}}),
    "4 layers, width 128": (290, {"model": {"layers": 4, "width": 128}}),
    "rows of 128": (77, {"data": {"seq_len": 128}}),
    "2 heads": (65, {"model": {"heads": 2}}),
    "biases": (69, {"model": {"bias": True}}),
    "rows judged without overlap": (69, {"evaluation": {"stride": None}}),
}


def train(milliseconds: float, changes: dict[str, Any], seed: int, folder: Path) -> float:
    """Train once and return the final val_bpb."""
    sections: dict[str, dict[str, Any]] = {
        "budget": {"seconds": None},
        "evaluation": {"every": 0, "sample_tokens": 0, "micro_batch": 512},
        "training": {"max_steps": int(90_000 / milliseconds), "seed": seed, "output_dir": str(folder), "save_every": 0},
        "data": {"seed": seed, "tokenizer": "byte"},
        "artifact": {"write": False},
        "model": {"family": "gpt2", "heads": 4, "bias": False},
        "optimizer": {"learning_rate": 0.015},
    }
    for name, values in changes.items():
        sections[name] = {**sections.get(name, {}), **values}
    sections["training"] |= {"compile": False, "precision": "fp32"}
    result = ingot.train(recipe="demo", **sections)
    assert result.val_bpb is not None
    return result.val_bpb


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=list(CHOICES), choices=list(CHOICES), metavar="NAME")
    arguments = parser.parse_args()
    print(f"{date.today()}, {find_device('auto').name}, torch {torch.__version__}, n = {arguments.seeds}")
    print("| choice | steps | val_bpb | std |\n|---|---|---|---|")
    for name in arguments.only:
        milliseconds, changes = CHOICES[name]
        with tempfile.TemporaryDirectory() as folder:
            found = [train(milliseconds, changes, seed, Path(folder) / str(seed)) for seed in range(1, arguments.seeds + 1)]
        std = f"{statistics.stdev(found):.4f}" if len(found) > 1 else "-"
        print(f"| {name} | {int(90_000 / milliseconds):,} | {statistics.mean(found):.4f} | {std} |", flush=True)


if __name__ == "__main__":
    main()
