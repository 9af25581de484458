"""Measure the speed table: Ingot alternately with the original programs, next to required and target values.

Each figure comes from a separate process: ours from step_profile.py, gpt_simple.py and first_step.py, the originals' from their
own programs, which are first copied to a temporary folder so that nothing is written into the folders named by the flags. If a
flag is missing, its original is not run, and the table shows the figure measured earlier. Golf's original gets random tokens and
a tokenizer made by this benchmark.

Each figure is appended to --results as a line of JSON, and figures found in that file are not measured again. With --limit, no
measurement is started that would probably not finish in time. Repeat the command until it reports that nothing is left.
Use another file for results of another commit.

    python benchmarks/speed_h200.py --nanogpt DIR --golf DIR --gpt-simple DIR [--rows golf-393k ...] [--turns 2] [--limit 580]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from first_step import CACHES

HERE = Path(__file__).parent
GOLF_STEPS = 40  # steps of the original after its own 20 warm-up steps
GOLF_SKIPPED = 10  # the first of these steps, which are not timed
SHOWN = 3000  # characters of a failed program's output to show


@dataclass(frozen=True)
class Line:
    """A line of the table: a figure with its required and target value."""

    row: str
    what: str
    key: str
    before: str  # the original's figure on one H200, measured earlier
    must: float
    aim: float

    @property
    def rises(self) -> bool:
        """Return True if larger values are better."""
        return self.key == "tokens_per_second"


LINES = (
    Line("golf-393k", "golf seq4096, 393,216 tokens per step, ms", "ms", "376", 240, 215),
    Line("golf-131k", "the same model at 131,072 tokens, ms", "ms", "127, patched", 80, 73),
    Line("frontier", "golf family 10 x 512, 8,192 pieces, heads of 128, T 2,048, 131,072 tokens, ms", "ms", "-", 92, 85),
    Line("124m-64x1024", "124M, 64 x 1024, ms", "ms", "124.4", 105, 95),
    Line("124m-12x1024", "124M, 12 x 1024, ms", "ms", "25.8", 23, 21),
    Line("gpt-simple", "gpt-simple 124M, packing, counted tokens/s", "tokens_per_second", "424,000", 600_000, 650_000),
    Line("first-step", "`ingot train` to its first step, new shape, s", "new", "37, nanoGPT", 35, 20),
    Line("first-step", "the same, seen shape, s", "seen", "-", 10, 5),
)
ROWS = tuple(dict.fromkeys(line.row for line in LINES))
FIRST_STEP_SHAPE = "124m-64x1024"
SECONDS = {  # estimated seconds per figure
    ("golf-393k", "original"): 150, ("golf-131k", "original"): 120, ("gpt-simple", "original"): 130, ("gpt-simple", "ours"): 90,
    ("first-step", "original"): 90, ("first-step", "ours"): 90,
}  # fmt: skip
OTHER_SECONDS = 60


@dataclass(frozen=True)
class Case:
    """A measurement to make."""

    row: str
    program: str  # ours or original
    turn: int
    settings: tuple[str, ...]  # of our program, in addition to those of the row

    @property
    def name(self) -> str:
        return ", ".join([self.row, self.program, f"turn {self.turn + 1}", *self.settings])


def say(line: str) -> None:
    print(line, flush=True)


def call(command: Sequence[str | Path], folder: Path, environment: dict[str, str] | None = None) -> str:
    """Run a Python program and return its output; raise RuntimeError with the end of that output if it fails."""
    given = {**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})}
    ran = subprocess.run([sys.executable, *command], cwd=folder, env=given, capture_output=True, text=True)
    if ran.returncode:
        raise RuntimeError(f"{command[0]} failed:\n{ran.stdout[-SHOWN:]}\n{ran.stderr[-SHOWN:]}")
    return ran.stdout


def ours(row: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the figures of a row with our program."""
    if row == "gpt-simple":
        return gpt_simple("ours", folder, arguments)
    results, toy = folder / "ours.jsonl", ["--toy"] if arguments.toy else []
    changes = [word for setting in arguments.set for word in ("--set", setting)]
    if row == "first-step":
        shape = [] if arguments.toy else ["--shape", FIRST_STEP_SHAPE]
        call([HERE / "first_step.py", *shape, *toy, *changes, "--results", results], Path.cwd())
        return {line["kind"]: line["total"] for line in read(results)}
    shape = ["--steps", "2"] if arguments.toy else ["--shape", row]
    call([HERE / "step_profile.py", *shape, *toy, *changes, "--results", results], Path.cwd())
    (found,) = read(results)
    if "error" in found:
        raise RuntimeError(found["error"])
    return {name: found[name] for name in ("ms", "tokens_per_second", "choices", "peak_gib", "classes", "ready_seconds")}


def gpt_simple(program: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure gpt-simple's 124M setting with our gpt-simple, or with the original from the folder of its package."""
    results = folder / "gpt-simple.jsonl"
    steps = ["--steps", "40", "--original-steps", "8", "--skip", "4"] if arguments.toy else ["--steps", "150"]
    site = ["--site", arguments.gpt_simple.resolve()] if arguments.gpt_simple else []
    toy = ["--toy"] if arguments.toy else []
    words = [*steps, *site, *toy, "--recompute", "--turns", "1", "--program", program, "--results", results]
    call([HERE / "gpt_simple.py", *map(str, words)], Path.cwd())
    (found,) = read(results)
    return found


def nanogpt(row: str, source: Path, folder: Path) -> dict[str, Any]:
    """Run nanoGPT's bench.py, or its train.py to the first iteration, twice with the same caches."""
    for script in source.glob("*.py"):
        shutil.copy(script, folder)
    if row == "first-step":
        return {kind: nanogpt_first_step(folder) for kind in ("new", "seen")}
    rows = re.fullmatch(r"124m-(\d+)x1024", row)
    assert rows is not None
    printed = call(["bench.py", f"--batch_size={rows[1]}", "--real_data=False"], folder)
    return {"ms": float(re.findall(r"time per iteration: ([\d.]+)ms", printed)[-1])}


def nanogpt_first_step(folder: Path) -> float:
    """Return the seconds until train.py logs its first iteration, on random tokens, with 1 evaluation batch instead of 200."""
    data = folder / "data" / "random"
    data.mkdir(parents=True, exist_ok=True)
    for split in ("train", "val"):
        np.random.default_rng(0).integers(0, 50257, 1_000_000, np.uint16).tofile(data / f"{split}.bin")
    options = ["dataset=random", "batch_size=64", "gradient_accumulation_steps=1", "eval_iters=1", "log_interval=1"]
    caches = {name: str(folder / place) for name, place in CACHES.items()}
    began = time.perf_counter()
    command = [sys.executable, "train.py", *(f"--{option}" for option in options)]
    said = []
    with subprocess.Popen(
        command, cwd=folder, env={**os.environ, "PYTHONUNBUFFERED": "1", **caches}, stdout=-1, stderr=-2, text=True
    ) as train:
        try:
            for line in train.stdout or ():
                if line.startswith("iter 0:"):
                    return time.perf_counter() - began
                said.append(line)
        finally:
            train.kill()
    raise RuntimeError(f"train.py ended before its first iteration:\n{''.join(said)[-SHOWN:]}")


def golf(row: str, source: Path, folder: Path) -> dict[str, Any]:
    """Measure golf's own train_gpt.py with its long-context settings, on random tokens."""
    shutil.copy(source / "train_gpt.py", folder)
    make_golf_data(folder)
    settings = {
        "TRAIN_SEQ_LEN": 4096, "TRAIN_BATCH_TOKENS": {"golf-393k": 393216, "golf-131k": 131072}[row], "ITERATIONS": GOLF_STEPS,
        "TRAIN_LOG_EVERY": 10, "VAL_LOSS_EVERY": 0, "MAX_WALLCLOCK_SECONDS": 0, "DATA_PATH": folder / "data",
        "TOKENIZER_PATH": folder / "random.model", "RUN_ID": "speed",
    }  # fmt: skip
    printed = call(["train_gpt.py"], folder, {name: str(value) for name, value in settings.items()})
    ends = {int(step): float(ms) for step, ms in re.findall(r"step:(\d+)/\d+ train_loss:\S+ train_time:([\d.]+)ms", printed)}
    return {"ms": (ends[max(ends)] - ends[GOLF_SKIPPED]) / (max(ends) - GOLF_SKIPPED)}


def make_golf_data(folder: Path) -> None:
    """Write shards of random tokens and a tokenizer of 1,024 tokens, which train_gpt.py needs to count bytes."""
    import sentencepiece

    from ingot.data.store.shards import TokenWriter

    draw = np.random.default_rng(0)
    (folder / "data").mkdir()
    for split, count in (("train", 8_000_000), ("val", 300_000)):
        with ExitStack() as files:
            writer = TokenWriter(folder / "data" / f"fineweb_{split}_000000.bin", files, header=True)
            writer.append(draw.integers(0, 1024, count, np.uint16))
            writer.close()
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = ("".join(word) for word in letters[draw.integers(0, 26, (20_000, 6))])
    lines = (" ".join(part) for part in zip(*[iter(words)] * 10, strict=True))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines, model_prefix=str(folder / "random"), vocab_size=1024, model_type="bpe", minloglevel=2,
    )  # fmt: skip


def original(row: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the figures of a row with the original program."""
    if row == "gpt-simple":
        return gpt_simple("original", folder, arguments)
    if row.startswith("golf"):
        return golf(row, arguments.golf, folder)
    return nanogpt(row, arguments.nanogpt, folder)


def has_original(row: str, arguments: argparse.Namespace) -> bool:
    """Return True if the folder of a row's original program was given."""
    owner = {"gpt-simple": "gpt_simple", "golf-393k": "golf", "golf-131k": "golf", "frontier": None}.get(row, "nanogpt")
    return owner is not None and getattr(arguments, owner) is not None


def read(results: Path) -> list[dict[str, Any]]:
    """Return the records of a results file, or [] if it does not exist."""
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def cases(arguments: argparse.Namespace) -> Iterator[Case]:
    """Yield all measurements in order, alternating between the original and ours."""
    for turn in range(arguments.turns):
        for row in arguments.rows:
            if has_original(row, arguments):
                yield Case(row, "original", turn, ())
            yield Case(row, "ours", turn, tuple(arguments.set))


def measure_all(arguments: argparse.Namespace, began: float) -> bool:
    """Make the measurements missing from the results file; return True if all are complete."""
    whole = True
    programs: dict[str, Callable[..., dict[str, Any]]] = {"ours": ours, "original": original}
    for case in cases(arguments):
        if case.name in {line["name"] for line in read(arguments.results)}:
            continue
        left = arguments.limit - (time.perf_counter() - began)
        if left < SECONDS.get((case.row, case.program), OTHER_SECONDS):
            say(f"{case.name} | not begun: {left:.0f} s are left")
            whole = False
            continue
        start = time.perf_counter()
        try:
            with tempfile.TemporaryDirectory() as folder:
                found = programs[case.program](case.row, Path(folder), arguments)
        except (RuntimeError, OSError, LookupError, ValueError) as error:  # continue with the other measurements
            say(f"{case.name} | FAILED: {type(error).__name__}: {error}")
            whole = False
            continue
        taken = round(time.perf_counter() - start, 1)
        kept = {"name": case.name, "row": case.row, "program": case.program, "took": taken, **found}
        with arguments.results.open("a") as file:
            file.write(json.dumps({**kept, "at": datetime.now(UTC).isoformat(timespec="seconds")}) + "\n")
        told = ", ".join(f"{key} {value:,.2f}" for key, value in found.items() if isinstance(value, int | float))
        say(f"{case.name} | {told}; took {taken:.0f} s")
    return whole


def table(results: Sequence[dict[str, Any]], rows: Sequence[str]) -> str:
    """Format the table: medians over the turns, and which goals are reached."""
    lines = ["| work, one H200 | original | ours | must | aim | reached | micro-batch, GiB |", "|---|---|---|---|---|---|---|"]

    def middle(line: Line, program: str) -> float | None:
        values = [r[line.key] for r in results if r["row"] == line.row and r["program"] == program and line.key in r]
        return statistics.median(values) if values else None

    def shown(value: float | None, otherwise: str) -> str:
        return otherwise if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"

    for line in (line for line in LINES if line.row in rows):
        mine, theirs = middle(line, "ours"), middle(line, "original")
        reached = "-"
        if mine is not None:
            reached = next((name for name in ("aim", "must") if _reaches(mine, getattr(line, name), line.rises)), "no")
        chosen = next((r for r in reversed(results) if r["row"] == line.row and "choices" in r), None)
        memory = f"{chosen['choices']['micro_batch']}, {chosen['peak_gib']:.1f}" if chosen else ""
        lines.append(
            f"| {line.what} | {shown(theirs, f'({line.before})')} | {shown(mine, '-')} | {shown(line.must, '')} "
            f"| {shown(line.aim, '')} | {reached} | {memory} |"
        )
    return "\n".join(lines)


def _reaches(value: float, goal: float, rises: bool) -> bool:
    return value >= goal if rises else value <= goal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=Path, help="folder with nanoGPT's bench.py and train.py")
    parser.add_argument("--golf", type=Path, help="folder with golf's train_gpt.py")
    parser.add_argument("--gpt-simple", type=Path, help="folder with the package gpt_simple")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of our program, except for gpt-simple's row"
    )
    parser.add_argument("--limit", type=float, default=math.inf, help="total seconds; measurements that do not fit are left")
    parser.add_argument("--results", type=Path, default=Path("speed-h200.jsonl"), help="append figures to this file")
    parser.add_argument("--toy", action="store_true", help="tiny models on the CPU")
    arguments = parser.parse_args()
    whole = measure_all(arguments, time.perf_counter())
    say(f"\n{datetime.now(UTC).date()}, figures in brackets were measured earlier\n")
    names = {case.name for case in cases(arguments)}
    say(table([line for line in read(arguments.results) if line["name"] in names], arguments.rows))
    say("\nnothing is left" if whole else "\nsome figures are left: repeat the command")


if __name__ == "__main__":
    main()
