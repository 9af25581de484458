"""Time 50 steps of `train_gpt_mlx.py` on the bundled text.

The benchmark makes a tokenizer of 1,024 ids and shards from the bundled Shakespeare, with one play for validation. The script
then trains a model of 2 layers and width 72 (the smallest whose embedding is quantised), validates it three times and scores the
file that it wrote. CPU seconds are printed next to wall time because the machine may be doing other work.

    python benchmarks/mlx_toy.py [--steps 50]

The script reads its other settings from the environment, as always: `MODEL_DIM=512 python benchmarks/mlx_toy.py` on a Mac.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import resource
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXT = ROOT / "src/ingot/data/samples/shakespeare.jsonl.xz"
TOY = {
    "RUN_ID": "toy", "VAL_LOSS_EVERY": "25", "MAX_WALLCLOCK_SECONDS": "0", "TRAIN_LOG_EVERY": "10", "WARMUP_STEPS": "2",
    "WARMDOWN_ITERS": "20", "NUM_LAYERS": "2", "MODEL_DIM": "72", "NUM_HEADS": "2", "NUM_KV_HEADS": "1", "MLP_MULT": "2",
    "TRAIN_SEQ_LEN": "128", "TRAIN_BATCH_TOKENS": "4096", "GRAD_ACCUM_STEPS": "2", "MLX_MAX_MICROBATCH_TOKENS": "1024",
    "VAL_BATCH_SIZE": "4096", "DATA_PATH": "data/datasets/bard", "TOKENIZER_PATH": "bard.model",
}  # fmt: skip


def ingot(*words: str) -> None:
    """Run an ingot command."""
    subprocess.run([sys.executable, "-c", "from ingot.cli.main import run; run()", *words], check=True, capture_output=True)


def prepare() -> None:
    """Make a tokenizer and shards from the bundled text in the current folder."""
    vocabulary = ("--kind", "sentencepiece", "--vocab-size", "1024")
    ingot("data", "train-tokenizer", "--input", str(TEXT), *vocabulary, "--output", "bard.model")
    one_play = ("--val-fraction", "0.02", "--tokenizer", "bard.model")
    ingot("data", "prepare", "--input", str(TEXT), *one_play, "--output", "data/bard")
    ingot("data", "convert", "data/bard", "--to", "shards", "--output", "data/datasets/bard")


def found(pattern: str, log: str) -> str:
    """Return the last match of a pattern in a log."""
    return str(re.findall(pattern, log, re.MULTILINE)[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=50)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        prepare()
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        environment = TOY | {"ITERATIONS": str(steps)} | dict(os.environ)
        ran = subprocess.run([sys.executable, str(ROOT / "train_gpt_mlx.py")], env=environment, capture_output=True, text=True)
        seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        if "final_int8_zlib_roundtrip_exact" not in ran.stdout:
            sys.exit(ran.stderr)
        os.chdir(ROOT)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    device = found(r"^note: run folder \S+, (.*), \d+ rows at once$", ran.stdout)
    print(f"{date.today()}, {os.cpu_count()} cores, {platform.machine()}, {device}")
    print("| parameters | steps | train seconds | tokens/s | all seconds | of the processor | val_bpb | file | its val_bpb |")
    print("|---|---|---|---|---|---|---|---|---|")
    parameters = int(found(r"^model_params:(\d+)", ran.stdout))
    milliseconds = int(found(r"val_loss:.* train_time:(\d+)ms", ran.stdout))
    size = int(found(r"^serialized_model_int8_zlib:(\d+)", ran.stdout))
    row = [
        f"{parameters:,}",
        str(steps),
        f"{milliseconds / 1000:.1f}",
        f"{int(environment['TRAIN_BATCH_TOKENS']) * steps * 1000 / milliseconds:.0f}",
        f"{seconds:.1f}",
        f"{processor:.1f}",
        found(r"^step:\S+ val_loss:\S+ val_bpb:(\S+)", ran.stdout),
        f"{size:,} bytes",
        found(r"^final_int8_zlib_roundtrip val_loss:\S+ val_bpb:(\S+)", ran.stdout),
    ]
    print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
