"""Compare the losses of a run with default (fast) settings with those of the plain path, for one seed and one text.

The plain path is not compiled and uses none of our kernels. Both are separate processes that train on the bundled sample with
byte tokens and log every step. --again runs the plain path twice, which shows how much two equal runs differ on this machine.

    python benchmarks/same_losses.py [--steps 200] [--set model.bias=false ...] [--again] [--toy]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import torch

SHAPE = [
    "model.vocab_size=50304", "model.bias=false", "data.path=sample:shakespeare", "data.tokenizer=byte",
    "training.tokens_per_step=65536",
]  # fmt: skip
TOY = [
    "model.vocab_size=null", "model.layers=1", "model.heads=2", "model.width=16", "data.path=sample:shakespeare",
    "data.tokenizer=byte", "data.seq_len=16", "training.tokens_per_step=64", "training.device=cpu",
]  # fmt: skip
ALWAYS = [
    "tracking.log_every=1",
    "evaluation.every=0",
    "evaluation.final_rows=8",
    "artifact.write=false",
    "training.save_seconds=3600",
]
PLAIN = ["training.compile=false", "training.kernels=off"]
SHOWN = 20  # steps between lines of the table


def losses(settings: Sequence[str], steps: int, folder: Path) -> list[float]:
    """Train a run and return the loss of every step."""
    words = [f"training.max_steps={steps}", f"training.output_dir={folder}", *settings, *ALWAYS]
    options = [word for setting in words for word in (f"--{setting.partition('=')[0]}", setting.partition("=")[2])]
    ran = subprocess.run([sys.executable, "-m", "ingot", "train", "--recipe", "gpt2", *options], capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(f"a run failed:\n{ran.stdout[-2000:]}\n{ran.stderr[-2000:]}")
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["kind"] == "train"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of both runs; may be repeated")
    parser.add_argument("--again", action="store_true", help="run the plain path twice")
    parser.add_argument("--toy", action="store_true", help="a tiny model on the CPU")
    arguments = parser.parse_args()
    shape = [*(TOY if arguments.toy else SHAPE), *arguments.set]
    runs = {"plain": PLAIN, "fast": [], **({"plain again": PLAIN} if arguments.again else {})}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() and not arguments.toy else "cpu"
    print(f"{date.today()}, {device}, torch {torch.__version__}: gpt2, {' '.join(shape)}", flush=True)
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, settings in runs.items():
            began = time.perf_counter()
            found[name] = losses([*shape, *settings], arguments.steps, Path(folder) / name.replace(" ", "-"))
            print(f"{name}: {len(found[name])} steps, {time.perf_counter() - began:.0f} s", flush=True)
    print("\n| step | " + " | ".join(found) + " |\n|---|" + "---|" * len(found))
    for step in range(0, arguments.steps, SHOWN):
        print(f"| {step + 1} | " + " | ".join(f"{values[step]:.5f}" for values in found.values()) + " |")
    plain = found.pop("plain")
    for name, values in found.items():
        apart = [abs(a - b) for a, b in zip(plain, values, strict=True)]
        far = max(apart)
        print(f"{name}: at most {far:.1e} from plain, at step {apart.index(far) + 1}; mean {sum(apart) / len(apart):.1e}")


if __name__ == "__main__":
    main()
