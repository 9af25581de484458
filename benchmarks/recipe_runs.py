"""Train a recipe for several seeds, resumably: completed runs are skipped, and interrupted ones are resumed by the next command.

Each run is a separate process, so it measures what a user gets. Each completed run appends a line of JSON to the results file.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

LEARNED_FROM = 18_000  # documents that a tokenizer is learned from: 78 of 321 MB, half a minute on one core


@dataclass(frozen=True)
class Case:
    """The parameters that identify a run."""

    label: str
    recipe: str
    seed: int
    seconds: float
    settings: tuple[str, ...]

    @property
    def name(self) -> str:
        changed = f"-{zlib.crc32(repr(self.settings).encode()):08x}" if self.settings else ""
        return f"{self.label}-{self.seconds:g}s-seed{self.seed}{changed}"


def say(line: str) -> None:
    print(line, flush=True)


def add_options(parser: argparse.ArgumentParser, name: str, seconds: float) -> None:
    """Add the options shared by these benchmarks; `name` is the prefix of their files."""
    parser.add_argument("--corpus", type=Path, help="folder with train-00, train-01 and val as .jsonl.xz")
    parser.add_argument("--data", type=Path, default=Path(f"{name}-data"), help="folder of the prepared data; created if missing")
    parser.add_argument("--runs", type=Path, default=Path(f"{name}-runs"), help="parent of the run folders")
    parser.add_argument("--results", type=Path, default=Path(f"{name}-h200.jsonl"), help="append results to this file")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--seconds", type=float, default=seconds, help="training seconds per run")
    parser.add_argument("--limit", type=float, default=math.inf, help="total seconds; a later call resumes unfinished runs")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting for all runs; may be repeated")
    parser.add_argument("--keep", action="store_true", help="keep the checkpoints of complete runs")
    parser.add_argument("--toy", action="store_true", help="a tiny model on the bundled text")


def learn_tokenizer(corpus: Path, pieces: int, output: Path) -> None:
    """Learn a vocabulary with marks for capitals from the first documents of the training text."""
    began = time.perf_counter()
    settings = ["--kind", "sentencepiece", "--vocab-size", str(pieces), "--documents", str(LEARNED_FROM), "--mark-capitals"]
    words = ["data", "train-tokenizer", str(corpus / "train-00.jsonl.xz"), "--output", str(output), "--force", *settings]
    subprocess.run(_ingot(*words), check=True, stdout=subprocess.DEVNULL)
    say(f"{output} learned in {time.perf_counter() - began:.0f} s")


def prepare(corpus: Path, tokenizer: str, data: Path) -> None:
    """Tokenize the corpus on all CPU cores unless the prepared data exists."""
    if (data / "dataset.json").exists():
        return
    began = time.perf_counter()
    train, val = [corpus / f"train-0{part}.jsonl.xz" for part in (0, 1)], corpus / "val.jsonl.xz"
    words = ["data", "prepare", *map(str, train), "--val-input", str(val), "--output", str(data), "--tokenizer", tokenizer]
    subprocess.run(_ingot(*words), check=True, stdout=subprocess.DEVNULL)
    say(f"{data} prepared in {time.perf_counter() - began:.0f} s")


def run_all(
    cases: Sequence[Case],
    arguments: argparse.Namespace,
    summary: Callable[[Case, dict[str, Any]], dict[str, Any]],
    toy: Sequence[str],
    worth_starting: float,
    began: float,
) -> bool:
    """Train the runs missing from the results file; return True if all are complete.

    `summary` extracts result fields from a result.json; a run is started only if `worth_starting` seconds are left.
    """
    whole = True
    for case in cases:
        if (known := {r["name"]: r["at"] for r in finished(arguments.results)}.get(case.name)) is not None:
            say(f"{case.name} | already in {arguments.results}, finished {known}")
            continue
        left = arguments.limit - (time.perf_counter() - began)
        if left < (0 if arguments.toy else worth_starting):
            say(f"{case.name} | not begun: {left:.0f} s are left")
            whole = False
            continue
        say(f"{datetime.now(UTC).isoformat(timespec='seconds')} {case.name}")
        record = _train(case, arguments, toy if arguments.toy else [f"data.path={arguments.data}", "data.tokenizer=null"], left)
        if record is None:
            whole = False
            continue
        kept = {**_facts(case, record, arguments), **summary(case, record)}
        with arguments.results.open("a") as file:
            file.write(json.dumps(kept) + "\n")
        say(json.dumps({name: value for name, value in kept.items() if name != "environment"}))
        if not arguments.keep:
            shutil.rmtree(arguments.runs / case.name / "checkpoints")
    return whole


def finished(results: Path) -> list[dict[str, Any]]:
    """Return the records of a results file, or [] if it does not exist."""
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def step_records(folder: Path) -> list[dict[str, Any]]:
    """Return the training-step records of a run's metrics."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "train"]


def _ingot(*words: str) -> list[str]:
    return [sys.executable, "-m", "ingot", *words]


def _train(case: Case, arguments: argparse.Namespace, data: Sequence[str], left: float) -> dict[str, Any] | None:
    """Train a run and return its result, or None if it stopped early or failed; its output is saved next to its folder."""
    folder = arguments.runs / case.name
    fixed = [f"training.seed={case.seed}", f"data.seed={case.seed}", f"budget.seconds={case.seconds}"]
    limit = [] if math.isinf(left) else [f"training.max_runtime_seconds={left:.0f}"]
    settings = [*fixed, f"training.output_dir={folder}", *limit, *data, *case.settings]
    words = [word for setting in settings for word in (f"--{setting.partition('=')[0]}", setting.partition("=")[2])]
    began = time.perf_counter()
    out = folder.with_suffix(".out")
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a") as file:
        code = subprocess.run(_ingot("train", "--recipe", case.recipe, *words), stdout=file, stderr=file).returncode
    wall = time.perf_counter() - began
    record = json.loads((folder / "result.json").read_text()) if (folder / "result.json").exists() else {}
    if record.get("status") == "completed" and code == 0:
        return {**record, "wall_seconds": round(wall, 1)}
    if record.get("status") == "stopped":
        say(f"{case.name} | stopped after {wall:.0f} s at step {record['total_steps']:,}; the same command resumes it")
        return None
    say(f"{case.name} | FAILED with exit code {code} after {wall:.0f} s; the end of {out}:")
    say("\n".join(out.read_text().splitlines()[-25:]))
    return None


def _facts(case: Case, record: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the result fields common to all benchmarks."""
    folder = arguments.runs / case.name
    tokens = 0 if arguments.toy else dataset_tokens(arguments.data)
    return {
        "name": case.name,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": case.seed,
        "seconds": case.seconds,
        "settings": list(case.settings),
        "steps": record["total_steps"],
        "tokens": record["total_tokens"],
        "tokens_per_second": round(record["total_tokens"] / max(record["training_seconds"], 1e-9)),
        "training_seconds": round(record["training_seconds"], 2),
        "wall_seconds": record["wall_seconds"],
        "passes": round(record["total_tokens"] / tokens, 3) if tokens else None,
        "train_nats": record["final_loss"],
        "val_nats": record["val_loss"],
        "val_bpb": record["val_bpb"],
        "memory_gib": round(record["peak_memory_bytes"] / 2**30, 2),
        "choices": json.loads((folder / record["checkpoint_path"] / "checkpoint.json").read_text())["progress"]["choices"],
        "environment": json.loads((folder / "environment.json").read_text()),
    }


def dataset_tokens(folder: Path) -> int:
    """Return the number of training tokens in a folder of prepared data."""
    return int(json.loads((folder / "dataset.json").read_text())["splits"]["train"]["tokens"])
