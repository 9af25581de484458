"""Run both columns of the frontier table, `ingot train --recipe golf/frontier` and `--recipe frontier`, for several seeds.

Column 1 limits the artifact to 16,000,000 bytes including code; column 2 has no limit. Each run is a separate process, so it
measures what a user gets. Each completed run appends a line of JSON to --results, and runs found in that file are skipped. With
--limit, a run that would not finish in time saves a checkpoint and stops; the same command resumes it. Repeat the command until
it reports that nothing is left.

    python benchmarks/frontier_h200.py --corpus DIR --tokenizer fineweb_8192_bpe.model --seeds 1 2 3 --limit 580

The corpus (train-00, train-01 and val as .jsonl.xz) is prepared into --data once. --own-tokenizer 8192 learns a vocabulary of
that size, with marks for capitals, from the training text; it counts towards the artifact's bytes. --set section.key=value
changes a setting of every run; like --seconds, it makes a separate result. --toy trains a tiny model on the bundled text (CPU).
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
}  # for 300 s on one H200 with the same text
GOALS = {1: (1.150, 1.135, 1.12), 2: (1.130, 1.115, 1.10)}  # required, target, stretch target
LIMIT_BYTES = 16_000_000
WORTH_STARTING = 240.0  # a run is started only if this many seconds are left, because it compiles before it trains
TOY = [
    "data.path=sample:shakespeare", "data.tokenizer=byte", "data.seq_len=64", "model.layers=2", "model.heads=4",
    "model.kv_heads=2", "model.width=32", "model.window=8", "training.tokens_per_step=256", "evaluation.final_rows=8",
    "training.stages=[{share: 0.5, seq_len: 16}, {share: 0.5, seq_len: 64}]",
]  # fmt: skip


def case_of(column: int, seed: int, seconds: float, settings: tuple[str, ...]) -> Case:
    """Return the run of a column with its settings."""
    return Case(f"column{column}", RECIPES[column], seed, seconds, settings)


def summary(case: Case, record: dict[str, Any], runs: Path) -> dict[str, Any]:
    """Return the result fields specific to this benchmark."""
    code = code_bytes(case.recipe, case.settings)
    steps = step_records(runs / case.name)
    return {
        "column": next(column for column, recipe in RECIPES.items() if recipe == case.recipe),
        "artifact_bpb": record["artifact_bpb"],
        "bytes": (record["artifact_bytes"] or 0) + code,
        "code_bytes": code,
        # At a sixth, a half and five sixths of the run, which are the middles of its three stages.
        "rates": [round(steps[len(steps) * part // 6]["tokens_per_second"]) for part in (1, 3, 5)],
        "export": record.get("export", {}),
    }


def code_bytes(recipe: str, settings: Sequence[str]) -> int:
    """Return the size of the single script that `ingot golf pack` writes for a run."""
    overrides = dict(setting.split("=", 1) for setting in settings)
    return len(packed_code(load_config(recipe, overrides=overrides, environment={}).config))


def table(results: Sequence[dict[str, Any]], column: int) -> str:
    """Format the runs of a column and their mean."""
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
    parser.add_argument("--tokenizer", type=Path, help="a given SentencePiece model, not counted in the artifact's bytes")
    parser.add_argument("--own-tokenizer", type=int, metavar="PIECES", help="learn a tokenizer with marks for capitals")
    parser.add_argument("--columns", type=int, nargs="+", choices=(1, 2), default=[1, 2])
    arguments = parser.parse_args()
    began = time.perf_counter()
    if not arguments.toy:
        made = (arguments.data / "dataset.json").exists()
        if not made and not (arguments.corpus and (arguments.tokenizer or arguments.own_tokenizer)):
            parser.error("pass --corpus with --tokenizer or --own-tokenizer, a prepared --data folder, or --toy")
        if made and arguments.own_tokenizer and not arguments.data.with_suffix(".model").exists():
            parser.error(f"{arguments.data} was not prepared with --own-tokenizer; choose another --data")
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
