"""`ingot compare`: whether the scores of two groups of runs differ by more than their noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from ingot.cli.options import AsJson, ScoreOption
from ingot.cli.verbs import app
from ingot.console.output import print_columns, print_json
from ingot.errors import ConfigError

if TYPE_CHECKING:
    from ingot.experiments.compare import Comparison, Side

BETWEEN = "--"


class TwoSides(TyperCommand):
    """A verb whose words are two groups with `--` between them; options may stand before the first and after the last."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        second: list[str] = []
        if BETWEEN in args:
            at = args.index(BETWEEN)
            args, rest = args[:at], args[at + 1 :]
            end = next((i for i, word in enumerate(rest) if word.startswith("-")), len(rest))
            second, args = rest[:end], [*args, *rest[end:]]
        ctx.meta[BETWEEN] = second
        return super().parse_args(ctx, args)


@app.command("compare", cls=TwoSides)
def compare(
    ctx: typer.Context,
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN... -- RUN...", help="Finished runs of one arm, two dashes, and those of another.")
    ],
    score: ScoreOption = "val_bpb",
    as_json: AsJson = False,
) -> None:
    """Compare two arms of finished runs: mean, spread, Welch's p, and how many more seeds would settle it."""
    from ingot.experiments.compare import compare as compare_runs

    second = [Path(word) for word in ctx.meta[BETWEEN]]
    if not second:
        raise ConfigError("there is one group of runs; put two dashes between the runs of the two arms: ingot compare a b -- c d")
    found = compare_runs(runs, second, score)
    print_json(_record(found, score)) if as_json else _print(found, score)


def _record(found: Comparison, score: str) -> dict[str, Any]:
    def side(one: Side) -> dict[str, Any]:
        runs = [{"run": str(run.path), "seed": run.seeds[0], score: run.score} for run in one.runs]
        return {"runs": runs, "n": len(runs), "mean": one.mean, "std": one.std}

    def finite(number: float) -> float | None:
        return number if math.isfinite(number) else None

    return {
        "score": score,
        "a": side(found.a),
        "b": side(found.b),
        "difference": found.difference,
        "t": finite(found.test.t),
        "degrees_of_freedom": finite(found.test.freedom),
        "p": found.test.p,
        "more_seeds": list(found.more) if found.more is not None else None,
        "differing": {name: list(values) for name, values in found.differing.items()},
        "notes": list(found.notes),
    }


def _print(found: Comparison, score: str) -> None:
    from ingot.experiments.compare import verdict

    rows: list[Sequence[str]] = [("", "n", score, "std", "runs")]
    for name, side in (("A", found.a), ("B", found.b)):
        rows.append(
            (name, str(len(side.runs)), f"{side.mean:.5f}", f"{side.std:.5f}", " ".join(str(run.path) for run in side.runs))
        )
    print_columns(rows)
    share = f" ({100 * found.difference / found.a.mean:+.2f}%)" if found.a.mean else ""
    print(f"\nB - A  {found.difference:+.5f}{share}, {verdict(found)}")
    for name, values in found.differing.items():
        print(f"differ in {name}: {values[0]} and {values[1]}")
    for note in found.notes:
        print(f"note: {note}")
