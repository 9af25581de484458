"""Measure the cost of a change of stage, in steps of the new stage.

A run of the 124M shape doubles its batch and then its row length (`training.stages`). Every shape is compiled and every kernel
chosen before the clock starts, so the first step of a stage should take no longer than its others. The table shows the step times
around each border; the cost is the extra time of a stage's first steps over the stage's median, in steps.

    python benchmarks/stages.py [--steps 40] [--toy]
"""

from __future__ import annotations

import argparse
import platform
import tempfile
from dataclasses import dataclass
from datetime import date
from itertools import accumulate, pairwise
from statistics import median
from typing import Any

from ingot.config.loading import load_config
from ingot.runs.reporter import BeginReport, Reporter, StepReport
from ingot.train.start import run

AROUND = 3  # steps shown on each side of a border
PAID = 5  # first steps of a stage whose extra time counts, because data read ahead or queued work may delay any of them

LARGE: dict[str, Any] = {
    "data.tokenizer": "gpt2", "data.seq_len": 1024, "training.tokens_per_step": 65536,
}  # fmt: skip
TOY: dict[str, Any] = {
    "model.layers": 1, "model.heads": 2, "model.width": 16, "data.tokenizer": "byte", "data.seq_len": 64,
    "training.tokens_per_step": 256, "training.device": "cpu",
}  # fmt: skip


class Times(Reporter):
    """Records when each step ended."""

    def __init__(self) -> None:
        self.device, self.ends = "", [0.0]

    def begin(self, report: BeginReport) -> None:
        self.device = report.device

    def step(self, report: StepReport, log: bool) -> None:
        self.ends.append(report.elapsed_seconds)


@dataclass(frozen=True)
class Border:
    """A change of stage, with the seconds of each step before and after it."""

    before: list[float]
    after: list[float]

    @property
    def cost(self) -> float:
        """Return the cost of the change in steps of the new stage."""
        usual = median(self.after)
        return sum(self.after[:PAID]) / usual - len(self.after[:PAID])


def measure(values: dict[str, Any], steps: int) -> tuple[str, list[Border]]:
    """Train three stages of `steps` steps each; return the device and the borders between the stages."""
    tokens, seq_len = values["training.tokens_per_step"], values["data.seq_len"]
    stages = [
        {"steps": steps, "seq_len": seq_len // 2},
        {"steps": steps, "seq_len": seq_len // 2, "tokens_per_step": 2 * tokens},
        {"steps": steps, "tokens_per_step": 2 * tokens},
    ]
    with tempfile.TemporaryDirectory() as folder:
        fixed = {
            "training.stages": stages, "training.max_steps": 3 * steps, "training.output_dir": f"{folder}/run",
            "training.save_seconds": 1e9, "evaluation.at_end": False, "artifact.write": False, "optimizer.name": "muon",
        }  # fmt: skip
        times = Times()
        run(load_config(python={**values, **fixed}, environment={}), times)
    seconds = [end - begin for begin, end in pairwise(times.ends)]
    edges = [0, *accumulate(stage["steps"] for stage in stages)]
    parts = [seconds[first:last] for first, last in pairwise(edges)]
    return times.device, [Border(before, after) for before, after in pairwise(parts)]


def table(borders: list[Border]) -> str:
    """Format the step times around each border, in milliseconds, and its cost."""
    lines = ["| border | median before | steps around it (ms) | median after | cost in steps |", "|---|---|---|---|---|"]
    for number, border in enumerate(borders, 1):
        shown = [" ".join(f"{1000 * s:.1f}" for s in part) for part in (border.before[-AROUND:], border.after[:AROUND])]
        usual = [f"{1000 * median(part):.1f}" for part in (border.before, border.after)]
        lines.append(f"| stage {number} to {number + 1} | {usual[0]} | {' / '.join(shown)} | {usual[1]} | {border.cost:+.2f} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="steps per stage")
    parser.add_argument("--toy", action="store_true", help="a tiny model on the CPU: checks the script, measures nothing")
    given = parser.parse_args(arguments)
    device, borders = measure(TOY if given.toy else LARGE, given.steps)
    print(f"{device}, {platform.platform()}, {date.today()}")
    print(table(borders))


if __name__ == "__main__":
    main()
