"""Compare `--recipe auto` with the demo recipe of commit 6b06fd6 in equal training time, and try it on a text of 30 KB.

    python benchmarks/auto.py [--seconds 90] [--seeds 1,2,3] [--device cpu] [--output runs/auto-bench]

The two recipes alternate, seed by seed, each run in its own process; repeating an interrupted command resumes it. `demo` is the
code and recipe of that commit, taken from this repository's history, with today's split of the text; today's demo recipe is also
trained with the first seed (`now`). Three seeds of 90 s take about 13 minutes.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from ingot.experiments.statistics import welch

OLD = "6b06fd6"
ROOT = Path(__file__).parents[1]
SAMPLE = Path("src/ingot/data/samples/shakespeare.jsonl.xz")
LEAD = 0.03  # bits per byte by which auto must beat demo
SPENT = 0.05  # allowed difference between the seconds used and the budget, as a fraction of the budget


def old_code(folder: Path) -> Path:
    """Extract the packages of the old commit, with today's sample text."""
    source = folder / "src"
    if not (source / "ingot").is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        packed = subprocess.run(["git", "-C", str(ROOT), "archive", OLD, "src"], capture_output=True)
        if packed.returncode:
            sys.exit(f"commit {OLD} is not in the history of {ROOT}: {packed.stderr.decode().strip()}")
        subprocess.run(["tar", "-x", "-C", str(folder)], input=packed.stdout, check=True)
        (folder / SAMPLE).write_bytes((ROOT / SAMPLE).read_bytes())
    return source


def train(folder: Path, words: Sequence[str], environment: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    """Train unless already done; return the final output of `ingot train --json` and the printed plan."""
    result, said = (folder.with_name(folder.name + suffix) for suffix in (".json", ".txt"))
    if not result.is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "ingot", "train", "--json", "--training.output_dir", str(folder), *words]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
        if done.returncode:
            sys.exit(done.stderr)
        said.write_text(done.stderr)
        result.write_text(done.stdout)
    plan = [line for line in said.read_text().splitlines() if line.startswith(("model:", "batch:", "data:"))]
    return json.loads(result.read_text()), "\n".join(plan)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seconds", type=float, default=90.0)
    options.add_argument("--seeds", default="1,2,3")
    options.add_argument("--device", default="cpu")
    options.add_argument("--output", type=Path, default=Path("runs/auto-bench"))
    given = options.parse_args()
    output, began = given.output.resolve(), time.monotonic()
    common = [f"--budget.seconds={given.seconds:g}", f"--training.device={given.device}"]
    common += ["--artifact.write=false", "--evaluation.sample_tokens=0", "--evaluation.every=0"]
    old = {"PYTHONPATH": str(old_code(output / "old")), "INGOT_CACHE": str(output / "old/cache")}
    # The old code has no evaluation.final_rows and scores the whole validation text.
    arms: dict[str, tuple[list[str], Mapping[str, str]]] = {
        "demo": (["--recipe", "demo"], old),
        "auto": (["--recipe", "auto", "--evaluation.final_rows=null"], {}),
        "now": (["--recipe", "demo", "--evaluation.final_rows=null"], {}),
    }
    seeds = given.seeds.split(",")
    scores: dict[str, list[float]] = {name: [] for name in arms}
    shares: list[float] = []
    print(f"demo is that of {OLD}; both are judged by the whole validation text")
    print("arm   seed  val_bpb   steps   tokens/s  seconds  of the budget")
    turns = [(seed, name) for seed in seeds for name in arms if name != "now" or seed == seeds[0]]
    for seed, name in turns:
        words, environment = arms[name]
        drawn = [f"--training.seed={seed}", f"--data.seed={seed}"]
        found, plan = train(output / f"{name}-{seed}", [*words, *common, *drawn], environment)
        scores[name].append(found["val_bpb"])
        speed, steps, seconds = found["tokens_per_second"], found["total_steps"], found["training_seconds"]
        share = seconds / given.seconds
        shares += [share] if name == "auto" else []
        print(
            f"{name:<4}  {seed:>4}  {found['val_bpb']:.4f}  {steps:>6,}  {speed:>9,.0f}  {seconds:7.1f}  {share:.1%}", flush=True
        )
        if plan:
            print(plan, flush=True)
    report(scores, shares)
    small(output, common)
    print(f"{time.monotonic() - began:.0f} s in all")


def report(scores: Mapping[str, list[float]], shares: Sequence[float]) -> None:
    """Print both goals and whether they are met."""
    lead = fmean(scores["demo"]) - fmean(scores["auto"])
    print(f"auto is {lead:+.4f} bits per byte better than demo (must be {LEAD}): {_reached(lead >= LEAD)}", end="")
    if len(scores["demo"]) > 1:
        spread = {name: stdev(scores[name]) for name in ("demo", "auto")}
        print(f"; std {spread['demo']:.4f} and {spread['auto']:.4f}, p = {welch(scores['demo'], scores['auto']).p:.2g}", end="")
    off = max(abs(share - 1) for share in shares)
    print(f"\nits seconds are at most {off:.1%} off the budget (must be {SPENT:.0%}): {_reached(off <= SPENT)}")


def _reached(good: bool) -> str:
    return "reached" if good else "NOT reached"


def small(output: Path, common: list[str]) -> None:
    """Print the plan and score of auto on a small custom text: 27 KB for training, 3 KB for validation."""
    with lzma.open(ROOT / SAMPLE, "rt") as lines:
        text = json.loads(next(lines))["text"][:30_000]
    mine = output / "mine.jsonl"
    if not mine.is_file():  # the prepared data is cached by the file's modification time
        mine.write_text("".join(json.dumps({"text": text[i : i + 1000]}) + "\n" for i in range(0, 30_000, 1000)))
    found, plan = train(output / "small", ["--recipe", "auto", "--data.path", str(mine), *common], {})
    print(f"\na text of 30 KB:\n{plan}")
    print(f"val_bpb {found['val_bpb']:.4f} after {found['total_steps']:,} steps in {found['training_seconds']:.1f} s")


if __name__ == "__main__":
    main()
