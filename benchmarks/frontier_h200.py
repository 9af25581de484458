"""Both columns of the frontier through the engine: `ingot train --recipe golf/frontier` and `--recipe frontier`, for some seeds.

Column 1 has a limit of 16,000,000 bytes, code included, column 2 none. Each run is a program of its own, so what is measured is
what a user gets. A line of JSON per run is appended to --results as soon as it is complete, and what the file has is not run
again; with --limit a run that would not end in time saves and stops, and the same command goes on with it. So a command is simply
repeated until it says that nothing is left.

    python benchmarks/frontier_h200.py --corpus DIR --tokenizer fineweb_8192_bpe.model --seeds 1 2 3 --limit 580

The corpus (train-00, train-01 and val as .jsonl.xz) is prepared into --data once. --set section.key=value changes a setting of
every run and counts as another result, as --seconds does. --toy is a tiny model on the bundled text, for a CPU.
"""

from __future__ import annotations

import argparse
import bz2
import inspect
import json
import math
import shutil
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ingot.artifact import container, rans
from ingot.doors.golf.bundle import bundle
from ingot.eval.statistics import one_sample_p
from ingot.model import frontier, frontier_settings

RECIPES = {1: "golf/frontier", 2: "frontier"}
RIVALS = {
    1: (1.3537, "golf seq4096, the original"),
    2: (1.1594, "autoresearch, its own code"),
}  # 300 s on one H200, the same text
GOALS = {1: (1.150, 1.135, 1.12), 2: (1.130, 1.115, 1.10)}  # must, aim, moonshot
LIMIT_BYTES = 16_000_000
WORTH_STARTING = 240.0  # seconds that must be left for a run to be begun: it compiles before it learns
TOY = [
    "data.path=sample:shakespeare", "data.tokenizer=byte", "data.seq_len=64", "model.layers=2", "model.heads=4",
    "model.kv_heads=2", "model.width=32", "model.window=8", "training.tokens_per_step=256", "evaluation.final_rows=8",
    "training.stages=[{share: 0.5, seq_len: 16}, {share: 0.5, seq_len: 64}]",
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A run to be made: what tells it from every other."""

    column: int
    seed: int
    seconds: float
    settings: tuple[str, ...]

    @property
    def name(self) -> str:
        changed = f"-{zlib.crc32(repr(self.settings).encode()):08x}" if self.settings else ""
        return f"column{self.column}-{self.seconds:g}s-seed{self.seed}{changed}"


def say(line: str) -> None:
    print(line, flush=True)


def ingot(*words: str) -> list[str]:
    return [sys.executable, "-m", "ingot", *words]


def prepare(arguments: argparse.Namespace) -> None:
    """Make the tokens of the corpus, unless they are there."""
    if (arguments.data / "dataset.json").exists():
        return
    began = time.perf_counter()
    train, val = [arguments.corpus / f"train-0{part}.jsonl.xz" for part in (0, 1)], arguments.corpus / "val.jsonl.xz"
    words = ["data", "prepare", *map(str, train), "--val-input", str(val), "--output", str(arguments.data)]
    subprocess.run(ingot(*words, "--tokenizer", str(arguments.tokenizer)), check=True, stdout=subprocess.DEVNULL)
    say(f"{arguments.data} made in {time.perf_counter() - began:.0f} s")


def train(case: Case, arguments: argparse.Namespace, left: float) -> dict[str, Any] | None:
    """The result of a run, None where it has to go on later; what it printed stands beside its folder."""
    folder = arguments.runs / case.name
    data = [] if arguments.toy else [f"data.path={arguments.data}", "data.tokenizer=null"]
    fixed = [f"training.seed={case.seed}", f"data.seed={case.seed}", f"budget.seconds={case.seconds}"]
    limit = [] if math.isinf(left) else [f"training.max_runtime_seconds={left:.0f}"]
    where = [f"training.output_dir={folder}"]
    settings = [*data, *fixed, *where, *limit, *(TOY if arguments.toy else []), *case.settings]
    words = [word for setting in settings for word in (f"--{setting.partition('=')[0]}", setting.partition("=")[2])]
    began = time.perf_counter()
    out = folder.with_suffix(".out")
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a") as file:
        code = subprocess.run(ingot("train", "--recipe", RECIPES[case.column], *words), stdout=file, stderr=file).returncode
    wall = time.perf_counter() - began
    record = json.loads((folder / "result.json").read_text()) if (folder / "result.json").exists() else {}
    if record.get("status") == "completed" and code == 0:
        return {**record, "wall_seconds": round(wall, 1)}
    if record.get("status") == "stopped":
        say(f"{case.name} | stopped after {wall:.0f} s at step {record['total_steps']:,}; the same command goes on with it")
        return None
    say(f"{case.name} | FAILED with exit code {code} after {wall:.0f} s; the end of {out}:")
    say("\n".join(out.read_text().splitlines()[-25:]))
    return None


def summary(case: Case, record: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """What is kept of a run."""
    folder = arguments.runs / case.name
    environment = json.loads((folder / "environment.json").read_text())
    tokens = 0 if arguments.toy else dataset_tokens(arguments.data)
    code = code_bytes()
    return {
        "name": case.name,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "column": case.column,
        "seed": case.seed,
        "seconds": case.seconds,
        "settings": list(case.settings),
        "steps": record["total_steps"],
        "tokens_per_second": round(record["total_tokens"] / max(record["training_seconds"], 1e-9)),
        "training_seconds": round(record["training_seconds"], 2),
        "wall_seconds": record["wall_seconds"],
        "passes": round(record["total_tokens"] / tokens, 3) if tokens else None,
        "train_nats": record["final_loss"],
        "val_nats": record["val_loss"],
        "val_bpb": record["val_bpb"],
        "artifact_bpb": record["artifact_bpb"],
        "bytes": (record["artifact_bytes"] or 0) + code,
        "code_bytes": code,
        "choices": choices(folder / record["checkpoint_path"]),
        "rates": rates(folder / "metrics.jsonl"),
        "environment": environment,
        "export": record.get("export", {}),
    }


def choices(checkpoint: Path) -> Any:
    """What was found out on the machine: micro-batch and attention of each stage."""
    return json.loads((checkpoint / "checkpoint.json").read_text())["progress"]["choices"]


def rates(metrics: Path) -> list[int]:
    """Tokens per second at a sixth, a half and five sixths of the run: in the middle of each of three stages."""
    steps = [line for line in map(json.loads, metrics.read_text().splitlines()) if line["kind"] == "train"]
    return [round(steps[len(steps) * part // 6]["tokens_per_second"]) for part in (1, 3, 5)]


def code_bytes() -> int:
    """What reading the artifact and scoring it takes: golf's one file, and the family and the readers that it does not have."""
    more = "".join(inspect.getsource(module) for module in (frontier, frontier_settings, container, rans))
    return len(bundle()) + len(bz2.compress(more.encode()))


def dataset_tokens(folder: Path) -> int:
    """Training tokens of a prepared folder."""
    return int(json.loads((folder / "dataset.json").read_text())["splits"]["train"]["tokens"])


def table(results: Sequence[dict[str, Any]], column: int) -> str:
    """The runs of a column, and what they come to."""
    score = "artifact_bpb" if column == 1 else "val_bpb"
    lines = [
        f"\ncolumn {column}: {RECIPES[column]}",
        "| run | steps | M tokens/s | passes | train / val nats | val_bpb | artifact | MB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        lines.append(
            f"| {r['name']} | {r['steps']:,} | {r['tokens_per_second'] / 1e6:.3f} | {r['passes']} | {r['train_nats']:.3f} / "
            f"{r['val_nats']:.3f} | {r['val_bpb']:.4f} | {r['artifact_bpb'] or math.nan:.4f} | {r['bytes'] / 1e6:.3f} |"
        )
    values = [r[score] for r in results if r[score] is not None]
    rival, name = RIVALS[column]
    spread = statistics.stdev(values) if len(values) > 1 else math.nan
    p = one_sample_p(values, rival) if len(values) > 1 else math.nan
    must, aim, moonshot = GOALS[column]
    mean = statistics.fmean(values) if values else math.nan
    reached = "moonshot" if mean <= moonshot else "aim" if mean <= aim else "must" if mean <= must else "not reached"
    lines.append(
        f"{score}: mean {mean:.4f}, std {spread:.4f}, n {len(values)}; against {rival} ({name}) p = "
        f"{p:.2g}; must {must}, aim {aim}, moonshot {moonshot}: {reached}"
    )
    if column == 1 and (large := [r["name"] for r in results if r["bytes"] > LIMIT_BYTES]):
        lines.append(f"above {LIMIT_BYTES:,} bytes with the code: {', '.join(large)}")
    return "\n".join(lines)


def finished(results: Path) -> list[dict[str, Any]]:
    """What a results file has."""
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def run_all(arguments: argparse.Namespace, cases: Sequence[Case], began: float) -> bool:
    """Make the runs that the results do not have, in turns over the columns; whether all of them are there."""
    whole = True
    for case in cases:
        if case.name in {r["name"] for r in finished(arguments.results)}:
            continue
        left = arguments.limit - (time.perf_counter() - began)
        if left < (0 if arguments.toy else WORTH_STARTING):
            say(f"{case.name} | not begun: {left:.0f} s are left")
            whole = False
            continue
        say(f"{datetime.now(UTC).isoformat(timespec='seconds')} {case.name}")
        record = train(case, arguments, left)
        if record is None:
            whole = False
            continue
        kept = summary(case, record, arguments)
        with arguments.results.open("a") as file:
            file.write(json.dumps(kept) + "\n")
        say(json.dumps({name: value for name, value in kept.items() if name not in ("environment", "settings")}))
        if not arguments.keep:
            shutil.rmtree(arguments.runs / case.name / "checkpoints")
    return whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, help="folder with train-00, train-01 and val as .jsonl.xz")
    parser.add_argument("--tokenizer", type=Path, help="a SentencePiece model")
    parser.add_argument("--data", type=Path, default=Path("frontier-data"), help="folder of the tokens; made if it is not there")
    parser.add_argument("--runs", type=Path, default=Path("frontier-runs"), help="folder of the run folders")
    parser.add_argument("--results", type=Path, default=Path("frontier-h200.jsonl"), help="file that results are appended to")
    parser.add_argument("--columns", type=int, nargs="+", choices=(1, 2), default=[1, 2])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--seconds", type=float, default=300.0, help="of training, in each run")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds in all; what is not ready by then goes on later")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of every run; may be repeated")
    parser.add_argument("--keep", action="store_true", help="keep the checkpoints of complete runs")
    parser.add_argument("--toy", action="store_true", help="a tiny model on the bundled text")
    arguments = parser.parse_args()
    began = time.perf_counter()
    if not arguments.toy:
        if not (arguments.data / "dataset.json").exists() and not (arguments.corpus and arguments.tokenizer):
            parser.error("give --corpus and --tokenizer, a --data that was made, or --toy")
        prepare(arguments)
    cases = [
        Case(column, seed, arguments.seconds, tuple(arguments.set)) for seed in arguments.seeds for column in arguments.columns
    ]
    whole = run_all(arguments, cases, began)
    names = {case.name for case in cases}
    for column in arguments.columns:
        if found := [r for r in finished(arguments.results) if r["name"] in names and r["column"] == column]:
            say(table(found, column))
    say("\nnothing is left" if whole else "\nsome runs are left: repeat the command")


if __name__ == "__main__":
    main()
