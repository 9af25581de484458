"""What `--recipe auto` is worth: against the demo recipe in the same seconds, and on a text of 30 KB.

    python benchmarks/auto.py [--seconds 90] [--seeds 1,2,3] [--device cpu] [--output runs/auto-bench]

The two take turns, seed by seed, as processes of their own; the same command goes on where it stood. `demo` is the recipe as it
was when auto was made, whatever it is now.
"""

from __future__ import annotations

import argparse
import json
import lzma
import subprocess
import sys
from pathlib import Path
from statistics import fmean, stdev

from ingot.eval.statistics import welch

DEMO = """
model: {family: gpt2, layers: 2, heads: 4, width: 64, bias: false}
data: {path: "sample:shakespeare", seq_len: 64}
optimizer: {name: muon, learning_rate: 0.015, weight_decay: 0.0, beta2: 0.98, muon_learning_rate: 0.02, muon_momentum: 0.9,
  schedule: budget, decay_fraction: 0.6, floor: 0.0}
training: {tokens_per_step: 2048, save_seconds: 30, save_every: 200}
evaluation: {every: 250, rows: 640, stride: 32, sample_tokens: 400}
tracking: {log_every: 50}
"""
SAMPLE = Path(__file__).parents[1] / "src/ingot/data/samples/shakespeare.jsonl.xz"


def train(folder: Path, *words: str) -> tuple[dict[str, float], str]:
    """Train unless it is done; what result.json says, and what was said of the plan."""
    said = folder.with_name(folder.name + ".txt")
    if not (folder / "result.json").is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "ingot", "train", "--training.output_dir", str(folder), *words]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        said.write_text(done.stderr)
    plan = [line for line in said.read_text().splitlines() if line.startswith(("model:", "batch:", "data:"))]
    return json.loads((folder / "result.json").read_text()), "\n".join(plan)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seconds", type=float, default=90.0)
    options.add_argument("--seeds", default="1,2,3")
    options.add_argument("--device", default="cpu")
    options.add_argument("--output", type=Path, default=Path("runs/auto-bench"))
    given = options.parse_args()
    output: Path = given.output
    output.mkdir(parents=True, exist_ok=True)
    (output / "demo.yaml").write_text(DEMO)
    common = [f"--budget.seconds={given.seconds:g}", f"--training.device={given.device}", "--evaluation.final_rows=null"]
    common += ["--artifact.write=false", "--evaluation.sample_tokens=0"]
    arms = {"demo": ["--config", str(output / "demo.yaml")], "auto": ["--recipe", "auto"]}
    scores: dict[str, list[float]] = {name: [] for name in arms}
    print("arm   seed  val_bpb  steps   tokens/s  seconds  of the budget")
    for seed in given.seeds.split(","):
        for name, words in arms.items():
            seeds = [f"--training.seed={seed}", f"--data.seed={seed}"]
            found, plan = train(output / f"{name}-{seed}", *words, *common, *seeds)
            scores[name].append(found["val_bpb"])
            speed, steps, seconds = found["tokens_per_second"], found["total_steps"], found["training_seconds"]
            share = 100 * seconds / given.seconds
            print(f"{name}  {seed:>4}  {found['val_bpb']:.4f}  {steps:>6,}  {speed:>8,.0f}  {seconds:7.1f}  {share:.1f}%")
            if plan:
                print(plan)
    print(f"auto - demo: {fmean(scores['auto']) - fmean(scores['demo']):+.4f} bits per byte (must be at most -0.03)", end="")
    if len(scores["demo"]) > 1:
        spread = {name: stdev(found) for name, found in scores.items()}
        print(f", std {spread['demo']:.4f} and {spread['auto']:.4f}, p = {welch(scores['demo'], scores['auto']).p:.2g}", end="")
    print("\n\na text of 30 KB:")
    small(output, common)


def small(output: Path, common: list[str]) -> None:
    """What auto says and does with a small text of one's own: 27 KB to train on, 3 KB to be scored by."""
    with lzma.open(SAMPLE, "rt") as lines:
        text = json.loads(next(lines))["text"][:30_000]
    (output / "small.jsonl").write_text("".join(json.dumps({"text": text[i : i + 1000]}) + "\n" for i in range(0, 30_000, 1000)))
    data = output / "small"
    if not data.is_dir():
        words = ["--input", str(output / "small.jsonl"), "--tokenizer", "byte", "--output", str(data)]
        subprocess.run([sys.executable, "-m", "ingot", "data", "prepare", *words], check=True, capture_output=True)
    found, plan = train(output / "small-run", "--recipe", "auto", "--data.path", str(data), *common)
    print(plan)
    print(f"val_bpb {found['val_bpb']:.4f} after {found['total_steps']:,} steps in {found['training_seconds']:.1f} s")


if __name__ == "__main__":
    main()
