"""Both columns of the frontier through the engine: `ingot train --recipe golf/frontier` and `--recipe frontier`, for some seeds.

Column 1 has a limit of 16,000,000 bytes, code included, column 2 none. Each run is a program of its own, so what is measured is
what a user gets. A line of JSON per run is appended to --results as soon as it is complete, and what the file has is not run
again; with --limit a run that would not end in time saves and stops, and the same command goes on with it. So a command is simply
repeated until it says that nothing is left.

    python benchmarks/frontier_h200.py --corpus DIR --tokenizer fineweb_8192_bpe.model --seeds 1 2 3 --limit 580

The corpus (train-00, train-01 and val as .jsonl.xz) is prepared into --data once. With --own-tokenizer 8192 a vocabulary of so
many pieces, capitals as marks, is learned from its training text; it is a part of the artifact and so of its bytes. --set
section.key=value changes a setting of every run and counts as another result, as --seconds does. --toy is a tiny model on the
bundled text, for a CPU.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from recipe_runs import Case, add_options, finished, learn_tokenizer, prepare, run_all, say, step_records

from ingot.compat.golf.pack import packed_code
from ingot.config.loading import load_config
from ingot.experiments.statistics import one_sample_p

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


def case_of(column: int, seed: int, seconds: float, settings: tuple[str, ...]) -> Case:
    """The run of a column."""
    return Case(f"column{column}", RECIPES[column], seed, seconds, settings)


def summary(case: Case, record: dict[str, Any], runs: Path) -> dict[str, Any]:
    """What is kept of a run besides what is kept of any."""
    code = code_bytes(case.recipe, case.settings)
    steps = step_records(runs / case.name)
    return {
        "column": next(column for column, recipe in RECIPES.items() if recipe == case.recipe),
        "artifact_bpb": record["artifact_bpb"],
        "bytes": (record["artifact_bytes"] or 0) + code,
        "code_bytes": code,
        # A sixth, a half and five sixths of the run: in the middle of each of three stages.
        "rates": [round(steps[len(steps) * part // 6]["tokens_per_second"]) for part in (1, 3, 5)],
        "export": record.get("export", {}),
    }


def code_bytes(recipe: str, settings: Sequence[str]) -> int:
    """What `ingot golf pack` makes of a run: one file that trains and scores."""
    overrides = dict(setting.split("=", 1) for setting in settings)
    return len(packed_code(load_config(recipe, overrides=overrides, environment={}).config))


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "frontier", 300.0)
    parser.add_argument("--tokenizer", type=Path, help="a SentencePiece model that is given, and so does not count")
    parser.add_argument("--own-tokenizer", type=int, metavar="PIECES", help="learn one, with marks for capitals")
    parser.add_argument("--columns", type=int, nargs="+", choices=(1, 2), default=[1, 2])
    arguments = parser.parse_args()
    began = time.perf_counter()
    if not arguments.toy:
        made = (arguments.data / "dataset.json").exists()
        if not made and not (arguments.corpus and (arguments.tokenizer or arguments.own_tokenizer)):
            parser.error("give --corpus and --tokenizer or --own-tokenizer, a --data that was made, or --toy")
        if made and arguments.own_tokenizer and not arguments.data.with_suffix(".model").exists():
            parser.error(f"{arguments.data} was not made with --own-tokenizer; name another --data")
        if not made and arguments.own_tokenizer:
            arguments.tokenizer = arguments.data.with_suffix(".model")
            learn_tokenizer(arguments.corpus, arguments.own_tokenizer, arguments.tokenizer)
        prepare(arguments.corpus, str(arguments.tokenizer), arguments.data)
    settings = tuple(arguments.set)
    if arguments.own_tokenizer:
        settings += ("artifact.tokenizer=true", f"model.vocab_size={arguments.own_tokenizer}")
    cases = [case_of(column, seed, arguments.seconds, settings) for seed in arguments.seeds for column in arguments.columns]
    whole = run_all(cases, arguments, partial(summary, runs=arguments.runs), TOY, WORTH_STARTING, began)
    names = {case.name for case in cases}
    for column in arguments.columns:
        if found := [r for r in finished(arguments.results) if r["name"] in names and r["column"] == column]:
            say(table(found, column))
    say("\nnothing is left" if whole else "\nsome runs are left: repeat the command")


if __name__ == "__main__":
    main()
