"""`ingot sweep`: runs that differ in a setting or a seed, taking turns, and one table of what they came to."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ingot.cli.options import AsJson, ConfigFile, RecipeName, ScoreOption, SettingsCommand, StopExitCode, given_settings
from ingot.cli.showing import draw
from ingot.cli.verbs import app
from ingot.console.entry import warn
from ingot.console.output import columns, print_json
from ingot.console.progress import duration, is_terminal
from ingot.errors import RunError

if TYPE_CHECKING:
    from ingot.config.loading import ResolvedConfig
    from ingot.experiments.sweep import ArmSummary, Trial


@app.command("sweep", cls=SettingsCommand)
def sweep(
    ctx: typer.Context,
    config: ConfigFile = None,
    recipe: RecipeName = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            "--vary", metavar="SETTING=VALUE,VALUE", help="A setting and its values; several are combined each with each."
        ),
    ] = None,
    arms: Annotated[
        Path | None, typer.Option("--arms", metavar="FILE", help="YAML file with the name of each arm and its settings.")
    ] = None,
    seeds: Annotated[str, typer.Option("--seeds", metavar="N,N", help="Seeds, each of which every arm is run with.")] = "1,2,3",
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Where the runs go, as ARM/seed-N; a sweep there goes on.")
    ] = Path("runs/sweep"),
    score: ScoreOption = "val_bpb",
    stop_exit_code: StopExitCode = 0,
    as_json: AsJson = False,
) -> int:
    """Run every arm with every seed, in turns, and compare their scores with those of the first arm."""
    from ingot.config.loading import load_config
    from ingot.experiments.sweep import make_arms, plan_trials, read_seeds, refuse_fixed, run_trials, summarise

    given = given_settings(ctx)
    refuse_fixed(given, "a sweep")

    def resolve(settings: Mapping[str, Any]) -> ResolvedConfig:
        found = load_config(recipe, config, given, sweep=settings)
        unasked = _unasked(found, score)
        return load_config(recipe, config, given, sweep={**unasked, **settings}) if unasked else found

    trials = plan_trials(make_arms(vary or [], arms), read_seeds(seeds), output, resolve, score)
    shown = _Table(trials, score, as_json)
    try:
        errors = run_trials(trials, shown.tick, shown.tell)
    except KeyboardInterrupt:
        warn("its run has saved and stopped; the same command goes on with the sweep")
        raise
    found = summarise(trials, score, errors)
    if as_json:
        print_json({"output": str(output), "score": score, "arms": [asdict(arm) for arm in found]})
    else:
        shown.end(found)
    if errors:
        folder, error = next(iter(errors.items()))
        raise RunError(f"{len(errors)} of {len(trials)} runs failed, {folder} because {error}; the same command tries them again")
    left = sum(one.status != "completed" for arm in found for one in arm.trials)
    if left:
        warn(f"{left} of {len(trials)} runs are not complete; the same command goes on with them")
    return stop_exit_code if left else 0


def _unasked(found: ResolvedConfig, score: str) -> dict[str, Any]:
    """What a sweep sets in an arm that does not say otherwise."""
    config, origins, own = found.config, found.origins, dict[str, Any]()
    given = origins["evaluation.final_rows"] in ("command line", "sweep")
    if config.evaluation.final_rows == "auto" and not given:
        own["evaluation.final_rows"] = None  # or a slow arm would be judged by a part of the text
    if origins["artifact.write"] == "default" and config.budget.artifact_bytes is None and score != "artifact_bpb":
        own["artifact.write"] = False  # it takes seconds of a run that is there for another score
    return own


class _Table:
    """The table of a sweep: in its place on a terminal, else a line for every run and the whole at the end."""

    def __init__(self, trials: Sequence[Trial], score: Any, as_json: bool) -> None:
        self._trials, self._score, self._drawn = trials, score, 0
        self._in_place = is_terminal(sys.stdout) and not as_json
        self._current: Trial | None = None
        self._began = 0.0

    def tick(self, trial: Trial) -> None:
        """Time has passed while a trial runs."""
        if trial is not self._current:
            self._current, self._began = trial, time.monotonic()
        if self._in_place:
            from ingot.experiments.sweep import summarise

            self._drawn = draw(columns(table(summarise(self._trials, self._score))), self._drawn)

    def tell(self, trial: Trial, error: str | None) -> None:
        """A trial is over."""
        if self._in_place:
            return
        from ingot.experiments.sweep import summarise

        number, took = self._trials.index(trial) + 1, time.monotonic() - self._began
        one = summarise([trial], self._score)[0].trials[0]
        came = error or (f"{self._score} {one.score:.4f}" if one.score is not None else one.status)
        warn(f"{number}/{len(self._trials)}  {trial.arm}  seed {trial.seed}  {came}  ({took:.1f} s)")

    def end(self, found: Sequence[ArmSummary]) -> None:
        """Everything is over."""
        if self._in_place:
            draw([], self._drawn)  # the last table is shown whole, however high the terminal is
        print("\n".join(columns(table(found))))


def table(found: Sequence[ArmSummary]) -> list[Sequence[str]]:
    """The rows of the table, with what an arm does at the moment at their end."""

    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    rows: list[Sequence[str]] = [("arm", "n", "mean", "std", "vs first", "p", "tok/s", "")]
    for arm in found:
        speeds = [one.tokens_per_second for one in arm.trials if one.tokens_per_second]
        speed = number(sum(speeds) / len(speeds) if speeds else None, ",.0f")
        counted = f"{arm.n}/{len(arm.trials)}"
        against = (number(arm.difference, "+.4f"), number(arm.p, ".2g"))
        rows.append((arm.arm, counted, number(arm.mean, ".4f"), number(arm.std, ".4f"), *against, speed, _now(arm)))
    return rows


def _now(arm: ArmSummary) -> str:
    running = [f"seed {one.seed}: {duration(one.training_seconds)}" for one in arm.trials if one.status == "running"]
    other = [f"seed {one.seed}: {one.status}" for one in arm.trials if one.status not in ("running", "completed", "waiting")]
    return ", ".join([*running, *other, *(["<- best"] if arm.best else [])])
