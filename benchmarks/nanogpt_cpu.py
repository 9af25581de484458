"""Measure the overhead of our train.py over a bare loop, for the CPU run of nanoGPT's README.

The bare loop draws batches from the file, steps the same model with the same optimizer, and prints a line: no evaluation, no
checkpoints, no read-ahead. The two alternate in blocks of iterations, and the medians of the blocks are compared. train.py is
timed by its own clock, which pauses while it evaluates and copies its state, because the bare loop does neither.

    python benchmarks/nanogpt_cpu.py [--data data/shakespeare_char] [--blocks 5] [--iterations 200]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from datetime import date
from pathlib import Path

import numpy as np
import torch

from ingot.backends.open import find_device
from ingot.compat.nanogpt.keys import fresh_settings, read_arguments, settle, translate, vocabulary
from ingot.compat.nanogpt.prepare import shakespeare_char
from ingot.compat.nanogpt.train import main as train
from ingot.model.gpt2 import GPT2
from ingot.optim.schedules import learning_rate_scale
from ingot.runs.view import Run

README = {
    "dataset": "words", "device": "cpu", "compile": False, "block_size": 64, "batch_size": 12, "n_layer": 4, "n_head": 4,
    "n_embd": 128, "dropout": 0.0, "gradient_accumulation_steps": 1, "learning_rate": 1e-3, "min_lr": 1e-4, "beta2": 0.99,
    "warmup_iters": 100, "lr_decay_iters": 2000, "eval_interval": 1000000, "eval_iters": 1, "mfu_peak": 312e12,
}  # fmt: skip


def bare_loop(folder: Path, vocab_size: int) -> Callable[[int], float]:
    """Return a function that trains for some iterations and returns the seconds they took."""
    v = settle(read_arguments("train.py", [f"--{name}={value}" for name, value in README.items()], lambda line: None))
    torch.manual_seed(1337)
    model = GPT2(vocab_size, v["block_size"], layers=v["n_layer"], heads=v["n_head"], width=v["n_embd"], bias=False, gelu="erf")
    optimizer = torch.optim.AdamW(
        decayed(model, v["weight_decay"]), lr=v["learning_rate"], betas=(v["beta1"], v["beta2"]), fused=True
    )
    size, rows = v["block_size"], v["batch_size"]

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        data = np.memmap(folder / "train.bin", dtype=np.uint16, mode="r")
        return random_rows(data, size, rows)

    config = translate(v, fresh_settings(v, vocab_size)).config

    def rate(iteration: int) -> float:
        return config.optimizer.learning_rate * learning_rate_scale(config, iteration, seconds=0.0)

    return timed_loop(model, optimizer, batch, rate, v["grad_clip"])


def timed_loop(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Callable[[], tuple[torch.Tensor, torch.Tensor]],
    rate: Callable[[int], float],
    clip: float,
) -> Callable[[int], float]:
    """Return a function that runs some steps, prints a line for each and returns the seconds they took."""

    def loop(iterations: int) -> float:
        began = before = time.perf_counter()
        for it in range(iterations):
            for group in optimizer.param_groups:
                group["lr"] = rate(it)
            loss = model(*batch())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            now = time.perf_counter()
            print(f"iter {it}: loss {loss.item():.4f}, time {1000 * (now - before):.2f}ms")
            before = now
        return time.perf_counter() - began

    return loop


def decayed(model: torch.nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Return AdamW's parameter groups: weight decay applies to matrices but not to vectors."""
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": decay, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]


def random_rows(tokens: np.ndarray, size: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of tokens from random positions and their next-token targets."""
    starts = torch.randint(len(tokens) - size, (rows,)).tolist()
    x = torch.stack([torch.from_numpy(tokens[i : i + size].astype(np.int64)) for i in starts])
    y = torch.stack([torch.from_numpy(tokens[i + 1 : i + 1 + size].astype(np.int64)) for i in starts])
    return x, y


def ours(iterations: int, out: Path) -> float:
    """Run train.py for some iterations and return their seconds by its own clock."""
    keys = {**README, "max_iters": iterations - 1, "out_dir": out}
    if train([f"--{name}={value}" for name, value in keys.items()]):
        raise SystemExit("train.py failed")
    return Run(out).series.read().curves("seconds").loss[-1][0]


@contextmanager
def quiet() -> Iterator[None]:
    """Discard standard output; printing remains part of the time of both loops."""
    with Path(os.devnull).open("w") as nothing, redirect_stdout(nothing):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with train.bin, val.bin and meta.pkl (default: the bundled text)")
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=200)
    given = parser.parse_args()
    data = given.data.resolve() if given.data else None
    with tempfile.TemporaryDirectory() as work:
        os.chdir(work)
        Path("data").mkdir()
        with quiet():
            if data is not None:
                Path("data/words").symlink_to(data)
            elif shakespeare_char(Path("data/words"), ["--bundled"]):
                raise SystemExit("the data could not be prepared")
            ids = vocabulary({"dataset": "words", "tokenizer": None, "trust_tokens": False})
            bare = bare_loop(Path("data/words"), ids or 50304)
            bare(20), ours(20, Path("warm-up"))
            turns = [(bare(given.iterations), ours(given.iterations, Path(f"block-{i}"))) for i in range(given.blocks)]
    tell(turns, given.iterations, "train.py")


def tell(turns: list[tuple[float, float]], iterations: int, ours: str) -> None:
    """Print the seconds of the bare loop and of our loop, block by block."""
    times = [[1000 * seconds / iterations for seconds in lane] for lane in zip(*turns, strict=True)]
    medians = [statistics.median(lane) for lane in times]
    ratio = statistics.median(b / a for a, b in zip(*times, strict=True))
    machine = f"{find_device('cpu').name}, torch {torch.__version__}"
    print(f"{date.today()}, {machine}: {len(turns)} x {iterations} iterations")
    print("\n| loop | ms per iteration, median | blocks |\n|---|---|---|")
    for name, median, lane in zip(("bare", ours), medians, times, strict=True):
        print(f"| {name} | {median:.2f} | {', '.join(f'{value:.2f}' for value in lane)} |")
    print(f"\n{ours} takes {medians[1] / medians[0]:.3f} x the bare loop (median of the ratios of the blocks: {ratio:.3f})")


if __name__ == "__main__":
    main()
