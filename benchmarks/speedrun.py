"""Check whether `speedrun/124m` reaches in --seconds the loss that nanoGPT's own recipe reaches in 300 s on one H200.

That loss is 3.9009 nats per token, the mean over the whole validation split in non-overlapping rows of 1,024 tokens; nanoGPT's
own evaluation estimates it from random rows of that length. The learning rate falls to zero at the last second, so each run
answers one question: is its loss low enough after --seconds? Each run is `ingot train` as a user would start it. Repeat the
command until it reports that nothing is left.

    python benchmarks/speedrun.py --corpus DIR --seconds 40 --seeds 1 2 3 --limit 580

The corpus (train-00, train-01 and val as .jsonl.xz) is prepared into --data once. --arm 'a.b=1 c.d=2' is a variant of the recipe
and may be repeated; --arm '' is the unchanged recipe and the default. Every arm is run with every seed, seed by seed. --toy
trains a tiny model on the bundled text, for a CPU.
"""

from __future__ import annotations

import argparse
import math
import shlex
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipe_runs import Case, add_options, finished, prepare, run_all, say, step_records

RECIPE = "speedrun/124m"
GOAL = 3.9009  # nats per token
MUST, AIM = 75.0, 50.0  # required and target seconds
START_AND_SCORE = 120.0  # seconds of a run in addition to its training, with cold compiler caches
TOY = [
    "data.path=sample:shakespeare", "data.tokenizer=byte", "data.seq_len=64", "model.context=64", "model.vocab_size=null",
    "model.layers=2", "model.heads=4", "model.kv_heads=2", "model.width=32", "training.tokens_per_step=256",
    "evaluation.final_rows=8",
]  # fmt: skip


def summary(case: Case, record: dict[str, Any], runs: Path) -> dict[str, Any]:
    """Return the result fields specific to this benchmark."""
    steps = step_records(runs / case.name)[10:]  # the first ten are always logged
    known = [step["mfu"] for step in steps if step["mfu"]]
    return {
        "arm": shlex.join(case.settings),
        "mfu": statistics.median(known) if known else None,
        "rows": [record["val_rows"], record["val_rows_of"]],
        "curve": [[round(step["elapsed_seconds"], 1), round(step["loss"], 4)] for step in steps],
    }


def table(results: Sequence[dict[str, Any]]) -> str:
    """Format the runs arm by arm, with the mean of each arm."""
    lines = [
        "\n| seconds | seed | steps | M tokens | M tokens/s | MFU | GiB | train nats | val nats | val_bpb | above the goal |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for arm in dict.fromkeys((r["arm"], r["seconds"]) for r in results):
        found = [r for r in results if (r["arm"], r["seconds"]) == arm]
        lines += [_row(r) for r in sorted(found, key=lambda r: r["seed"])]
        losses = [r["val_nats"] for r in found]
        spread = statistics.stdev(losses) if len(losses) > 1 else math.nan
        mean = statistics.fmean(losses)
        every = sum(loss <= GOAL for loss in losses)
        lines.append(
            f"{arm[0] or RECIPE}, {arm[1]:g} s: mean {mean:.4f}, std {spread:.4f}, n {len(losses)}; {every} of {len(losses)} "
            f"runs reach {GOAL}; must {MUST:g} s, aim {AIM:g} s"
        )
    return "\n".join(lines)


def _row(r: dict[str, Any]) -> str:
    mfu = "-" if r["mfu"] is None else f"{r['mfu']:.1%}"
    return (
        f"| {r['training_seconds']:.1f} | {r['seed']} | {r['steps']:,} | {r['tokens'] / 1e6:.1f} | "
        f"{r['tokens_per_second'] / 1e6:.3f} | {mfu} | {r['memory_gib']:.1f} | "
        f"{r['train_nats']:.4f} | {r['val_nats']:.4f} | {r['val_bpb']:.4f} | {r['val_nats'] - GOAL:+.4f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "speedrun", 40.0)
    parser.add_argument(
        "--arm", action="append", default=[], metavar="SETTINGS", help="settings of an arm: 'KEY=VALUE ...'; may be repeated"
    )
    arguments = parser.parse_args()
    began = time.perf_counter()
    if not arguments.toy:
        if not (arguments.data / "dataset.json").exists() and not arguments.corpus:
            parser.error("pass --corpus, a prepared --data folder, or --toy")
        prepare(arguments.corpus, "gpt2", arguments.data)
    arms = [(*arguments.set, *shlex.split(arm)) for arm in arguments.arm or [""]]
    cases = [Case("speedrun", RECIPE, seed, arguments.seconds, arm) for seed in arguments.seeds for arm in arms]
    worth_starting = arguments.seconds + START_AND_SCORE
    whole = run_all(cases, arguments, lambda case, record: summary(case, record, arguments.runs), TOY, worth_starting, began)
    names = {case.name for case in cases}
    if found := [r for r in finished(arguments.results) if r["name"] in names]:
        say(table(found))
    say("\nnothing is left" if whole else "\nsome runs are left: repeat the command")


if __name__ == "__main__":
    main()
