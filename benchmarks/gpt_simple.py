"""Compare gpt-simple's 124M setting in the original, our gpt-simple and a bare loop of the same model, run alternately.

Each is a separate process on the same data: random tokens in packed documents of uneven length. The original's steps are timed
by a hook after its optimizer; it reads the loss from the GPU in every step, so host time equals GPU time. Our steps are timed by
the wall clock of metrics.jsonl, saves included: every `--save` steps the state and gpt-simple's own files are written. The bare
loop steps our model on one batch that stays on the device: no data, no log, no saves. Steps before `--skip` are left out because
they compile. The original is imported from --site (`make test` puts it into .venv/gpt-simple); if missing, its row is omitted.

    python benchmarks/gpt_simple.py [--turns 2] [--steps 250] [--original-steps 70] [--save 100] [--site DIR] [--toy]
        [--recompute] [--program ours ...] [--results gpt-simple.jsonl]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from datetime import date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from ingot.data.formats.gpt_simple_folder import index_bytes

END = "<|endoftext|>"
LARGE: dict[str, Any] = {"layers": 12, "heads": 12, "width": 768, "length": 1024, "rows": 64, "ids": 50257, "precision": "bf16"}
TOY: dict[str, Any] = {"layers": 2, "heads": 4, "width": 64, "length": 64, "rows": 4, "ids": 257, "precision": "no"}

PROGRAMS = ("original", "ours", "ours keeping", "ours saving", "bare loop")

ORIGINAL = """
import json, sys, time
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from gpt_simple.cli import main
ends = []
register_optimizer_step_post_hook(lambda *a: ends.append(time.perf_counter()))
sys.argv = ["gpt-simple", "train", "--config", "original.yaml", "--skip-runtime-probe"]
try:
    main.main()
except SystemExit as end:
    if end.code:
        raise
state = max(json.load(open(p))["tokens_trained"] for p in __import__("glob").glob("original/checkpoints/*/trainer_state.json"))
print("FOUND" + json.dumps({"ends": ends, "tokens": state / len(ends)}))
"""
BARE = """
import json, sys, time
import torch
from ingot.model.llama import Llama
shape = json.loads(sys.argv[1])
steps = int(sys.argv[2])
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.set_float32_matmul_precision("high")
vocabulary = -(-(shape["ids"] + 1) // 128) * 128
torch.manual_seed(0)
model = Llama(vocabulary, shape["length"], layers=shape["layers"], heads=shape["heads"], width=shape["width"]).to(device)
decay = [p for p in model.parameters() if p.dim() >= 2]
rest = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=True)
run = torch.compile(model) if device.type == "cuda" else model
tokens = torch.randint(shape["ids"], (shape["rows"], shape["length"]), device=device)
ends = []
for _ in range(steps):
    with torch.autocast(device.type, torch.bfloat16, enabled=shape["precision"] == "bf16"):
        loss = run(tokens, tokens)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if len(ends) % 10 == 9 and device.type == "cuda":
        torch.cuda.synchronize()
    ends.append(time.perf_counter())
print("FOUND" + json.dumps({"ends": ends, "tokens": shape["rows"] * shape["length"]}))
"""


def make_data(folder: Path, shape: dict[str, Any], steps: int) -> None:
    """Write tok/tokenizer.json and data/SPLIT/main: documents of random tokens, a fifth more than the steps read."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {END: 0, **{f"w{i}": i for i in range(1, shape["ids"])}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=END))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([END])
    (folder / "tok").mkdir()
    tokenizer.save(str(folder / "tok" / "tokenizer.json"))
    draw = np.random.default_rng(0)
    for split, wanted in (("train", 1.2 * steps * shape["rows"] * shape["length"]), ("val", 8 * shape["rows"] * shape["length"])):
        place = folder / "data" / split / "main"
        place.mkdir(parents=True)
        for number in range(2):
            lengths: list[int] = []
            while sum(lengths) < wanted / 2:
                lengths += (
                    np.clip(draw.lognormal(np.log(shape["length"] / 3), 0.8, 4096), 8, shape["length"]).astype(int).tolist()
                )
            tokens = draw.integers(1, shape["ids"], sum(lengths)).astype("<u2")
            ends = np.cumsum(lengths)
            tokens[ends - 1] = 0
            tokens.tofile(place / f"{number}.bin")
            (place / f"{number}.idx").write_bytes(index_bytes([0, *ends.tolist()], [0] * len(lengths), 2))


def write_config(folder: Path, name: str, shape: dict[str, Any], steps: int, save: int, log: int, recompute: bool) -> None:
    config = {
        "model": {"n_embd": shape["width"], "n_layer": shape["layers"], "n_head": shape["heads"], "n_positions": shape["length"]},
        "data": {"path": "data", "tokenizer": "tok", "max_length": shape["length"], "overlap_size": 0, "num_workers": 2},
        "optimizer": {"warmup_steps": 10},
        "training": {
            "per_device_batch_size": shape["rows"], "gradient_accumulation_steps": 1, "max_steps": steps,
            "gradient_checkpointing": recompute, "compile": shape is not TOY, "logging_steps": log, "eval_steps": 100_000,
            "save_steps": save, "output_dir": name, "mixed_precision": shape["precision"],
        },
    }  # fmt: skip
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))


def call(command: list[str], folder: Path, path: str) -> str:
    """Run a child process and return its output; exit with that output if it fails."""
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "COLUMNS": "400"}
    ran = subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(f"{command[:3]} failed:\n{ran.stdout[-3000:]}\n{ran.stderr[-3000:]}")
    return ran.stdout


def found(output: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(output.rpartition("FOUND")[2])
    return result


def original(folder: Path, site: Path) -> dict[str, Any]:
    return found(call(["-c", ORIGINAL], folder, os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])))


def ours(folder: Path, name: str) -> dict[str, Any]:
    call(["-m", "ingot.compat.gpt_simple", "-q", "train", "--config", f"{name}.yaml", "--skip-runtime-probe"], folder,
         os.environ.get("PYTHONPATH", ""))  # fmt: skip
    records = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["kind"] == "train"]
    ends = {step["step"]: datetime.fromisoformat(step["time"]).timestamp() for step in steps}
    return {"ends": ends, "tokens": steps[-1]["tokens"] / steps[-1]["step"]}


def save_costs(ends: dict[int, float], skip: int, save: int) -> list[float]:
    """Return the seconds that each save adds until the next one; the baseline is the median ten-step window before any save."""
    steps = [step for step in sorted(ends) if step >= skip]
    windows = {end: (ends[end] - ends[begin]) / (end - begin) for begin, end in itertools.pairwise(steps)}
    quiet = statistics.median(each for end, each in windows.items() if end <= save)
    return [
        sum((each - quiet) * 10 for end, each in windows.items() if begin < end <= begin + save)
        for begin in range(save, steps[-1], save)
    ]


def bare(folder: Path, shape: dict[str, Any], steps: int) -> dict[str, Any]:
    return found(call(["-c", BARE, json.dumps(shape), str(steps)], folder, os.environ.get("PYTHONPATH", "")))


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--steps", type=int, default=250, help="steps of our gpt-simple and of the bare loop")
    parser.add_argument("--original-steps", type=int, default=70)
    parser.add_argument("--skip", type=int, default=30)
    parser.add_argument("--save", type=int, default=100, help="steps between saves of our gpt-simple")
    parser.add_argument("--site", type=Path, default=Path(sys.prefix) / "gpt-simple")
    parser.add_argument("--program", action="append", choices=PROGRAMS, help="may be repeated (default: all programs)")
    parser.add_argument(
        "--recompute", action="store_true", help="gradient_checkpointing: true, gpt-simple's default; `ours keeping` ignores it"
    )
    parser.add_argument("--results", type=Path, help="append a line of JSON per program and turn to this file")
    parser.add_argument("--toy", action="store_true", help="a tiny model whose steps take milliseconds on a CPU")
    return parser.parse_args()


def print_table(rows: dict[str, list[float]], counted: dict[str, float]) -> None:
    print(f"\n{date.today()}, {platform.processor() or platform.machine()}, {' '.join(sys.argv[1:])}\n")
    first = "bare loop" if "bare loop" in rows else next(iter(rows))
    base = statistics.median(rows[first])
    print(f"| program | ms per step, each turn | counted tokens/s (median) | against {first} |\n|---|---|---|---|")
    for program, times in rows.items():
        middle = statistics.median(times)
        shown = ", ".join(f"{1000 * t:.2f}" for t in times)
        print(f"| {program} | {shown} | {counted[program] / middle:,.0f} | {middle / base:.3f} |")


def main() -> None:
    arguments = read_arguments()
    shape = TOY if arguments.toy else LARGE
    rows: dict[str, list[float]] = {}
    counted: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_data(folder, shape, arguments.steps)
        for turn in range(arguments.turns):
            for program in arguments.program or PROGRAMS:
                steps = arguments.original_steps if program == "original" else arguments.steps
                if program == "original":
                    if not (arguments.site / "gpt_simple").is_dir():
                        continue
                    write_config(folder, "original", shape, steps, 100_000, 100_000, arguments.recompute)
                    subprocess.run(["rm", "-rf", folder / "original"], check=True)
                    result = original(folder, arguments.site.resolve())
                elif program == "bare loop":
                    result = bare(folder, shape, steps)
                else:
                    run = f"{program.replace(' ', '-')}-{turn}"
                    save = arguments.save if "saving" in program else 100_000
                    write_config(folder, run, shape, steps, save, 10, arguments.recompute and program != "ours keeping")
                    result = ours(folder, run)
                ends = result["ends"]
                if isinstance(ends, dict):
                    chosen = [step for step in sorted(ends) if step >= arguments.skip]
                    each = (ends[chosen[-1]] - ends[chosen[0]]) / (chosen[-1] - chosen[0])
                else:
                    each = (ends[-1] - ends[arguments.skip]) / (len(ends) - 1 - arguments.skip)
                rows.setdefault(program, []).append(each)
                counted[program] = result["tokens"]
                line = f"turn {turn + 1}: {program}: {1000 * each:.2f} ms, {result['tokens'] / each:,.0f} tokens/s"
                if arguments.results:
                    with arguments.results.open("a") as file:
                        kept = {"program": program, "ms": 1000 * each, "tokens_per_second": result["tokens"] / each}
                        file.write(json.dumps(kept) + "\n")
                if program == "ours saving":
                    costs = save_costs(ends, arguments.skip, arguments.save)
                    line += f"; a save costs {', '.join(f'{cost:+.3f}' for cost in costs)} s"
                print(line, flush=True)
    print_table(rows, counted)


if __name__ == "__main__":
    main()
