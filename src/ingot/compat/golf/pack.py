"""A submission: the records folder that the challenge asks for, made of finished runs that differ in their seed.

A claim needs several seeds: the mean is the score, and p is the probability of such scores if the true mean were the reference.
"""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ingot.compat.golf.finished import OF_ONE_RUN, FinishedRun, read_run
from ingot.compat.golf.variables import CODE, as_text
from ingot.errors import ConfigError
from ingot.eval.statistics import one_sample_p
from ingot.runtime.files import replace_folder, to_json, write_atomically, writing_output

REFERENCE = 1.2244  # bits per byte of the challenge's baseline
SUBMISSION, README = "submission.json", "README.md"


@dataclass(frozen=True)
class About:
    """What a submission says that is not in its runs."""

    name: str
    author: str = ""
    github_id: str = ""
    blurb: str = ""
    reference: float = REFERENCE


def pack(paths: Sequence[Path], output: Path, about: About, force: bool = False) -> dict[str, Any]:
    """Write the records folder of some runs and return the content of its submission.json."""
    runs = sorted((read_run(path) for path in paths), key=lambda run: run.seed)
    _check_together(runs)
    _check_size(max(runs, key=lambda run: run.total_bytes))
    submission, best = summarise(runs, about), min(runs, key=lambda run: run.val_bpb)
    files: dict[str, bytes] = {f"train_seed{run.seed}.log": run.log.encode() for run in runs}
    files |= {_artifact_name(run, best): run.artifact for run in runs}
    files |= {CODE: best.code, SUBMISSION: (to_json(submission, indent=2) + "\n").encode()}
    files[README] = readme(runs, best, about, submission).encode()
    if output.exists() and not force:
        raise ConfigError(f"{output} exists; choose another --output, or replace its files with --force")
    with writing_output(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        with replace_folder(output, keep_others=True) as folder:
            for name, content in files.items():
                write_atomically(folder / name, content)
    return submission


def _check_together(runs: Sequence[FinishedRun]) -> None:
    """Refuse runs that differ in more than the seed."""
    first = runs[0]
    for run in runs[1:]:
        if run.by_settings != first.by_settings:
            script, settings = (first, run) if run.by_settings else (run, first)
            raise ConfigError(
                f"{script.path} is a run of train_gpt.py and {settings.path} of ingot train; they do not belong together"
            )
        differ = [
            f"{name} is {as_text(first.values.get(name, 'unset'))} and {as_text(run.values.get(name, 'unset'))}"
            for name in dict.fromkeys([*first.values, *run.values])
            if name not in OF_ONE_RUN and first.values.get(name) != run.values.get(name)
        ]
        for what, here, there in (("data is", first.data, run.data), ("ranks are", (first.ranks,), (run.ranks,))):
            differ += [f"their {what} {a} and {b}" for a, b in zip(here, there, strict=True) if a != b]
        if first.code != run.code and not differ:
            differ.append("they ran different code")
        if differ:
            raise ConfigError(f"{first.path} and {run.path} do not belong together: {'; '.join(differ)}")
    for run, other in zip(runs[1:], runs, strict=False):  # sorted by seed
        if run.seed == other.seed:
            raise ConfigError(f"{other.path} and {run.path} have the same seed, SEED={run.seed}; every run needs its own")


def _check_size(run: FinishedRun) -> None:
    """Refuse a run whose artifact and code exceed the limit, and say what would fit."""
    if not 0 < run.limit < run.total_bytes:
        return
    each, code = len(run.artifact) / run.parameters, len(run.code)
    known = not run.by_settings and not run.values["MODEL_FILE"]  # the size of a custom model's layers is unknown
    fits = [n for n in range(1, run.values["NUM_LAYERS"]) if each * _parameters(run, n) + code <= run.limit] if known else []
    advice = f"about {max(run.limit - code, 0) / each:,.0f} of its {run.parameters:,} parameters would fit"
    if fits:
        advice = f"NUM_LAYERS={fits[-1]} would have about {each * _parameters(run, fits[-1]) + code:,.0f}"
    raise ConfigError(
        f"{run.path} has {run.total_bytes:,} bytes ({len(run.artifact):,} and {code:,} of code), "
        f"{run.total_bytes - run.limit:,} more than {'' if run.by_settings else 'ARTIFACT_LIMIT_BYTES='}{run.limit:,}; {advice}"
    )


def _parameters(run: FinishedRun, layers: int) -> int:
    """Return the number of parameters that the model of a run would have with fewer layers."""
    v = run.values
    d, before = v["MODEL_DIM"], v["NUM_LAYERS"]
    block = 2 * d * d * (1 + v["MLP_MULT"]) + 2 * d * (d // v["NUM_HEADS"]) * v["NUM_KV_HEADS"] + 4 * d + v["NUM_HEADS"]
    return int(run.parameters - (before - layers) * block - (before // 2 - layers // 2) * d)


def summarise(runs: Sequence[FinishedRun], about: About) -> dict[str, Any]:
    """Return the content of submission.json."""
    scores = [run.val_bpb for run in runs]
    mean, std = statistics.fmean(scores), statistics.stdev(scores) if len(scores) > 1 else None
    return {
        "author": about.author,
        "github_id": about.github_id,
        "name": about.name,
        "blurb": about.blurb,
        "date": f"{datetime.fromtimestamp(max(run.ended for run in runs), UTC):%Y-%m-%dT%H:%M:%SZ}",
        "val_loss": statistics.fmean(run.val_loss for run in runs),
        "val_bpb": mean,
        "bytes_total": max(run.total_bytes for run in runs),
        "bytes_code": len(runs[0].code),
        "seeds": [run.seed for run in runs],
        "seed_results": {
            str(run.seed): {
                "val_loss": run.val_loss,
                "val_bpb": run.val_bpb,
                "steps": run.steps,
                "train_seconds": run.train_ms / 1000,
                "bytes_total": run.total_bytes,
            }
            for run in runs
        },
        "mean": mean,
        "std": std,
        "reference": about.reference,
        "p": None if std is None else one_sample_p(scores, about.reference),
        "hardware": "; ".join(dict.fromkeys(f"{run.ranks} x {run.device}" for run in runs)),
        "torch": "; ".join(dict.fromkeys(run.torch for run in runs)),
        "python": "; ".join(dict.fromkeys(run.python for run in runs)),
    }


def _artifact_name(run: FinishedRun, best: FinishedRun) -> str:
    """Return the challenge's name for the best run's artifact; the others have their seed in it."""
    return run.file if run is best else run.file.replace(".", f"_seed{run.seed}.", 1)


def readme(runs: Sequence[FinishedRun], best: FinishedRun, about: About, submission: dict[str, Any]) -> str:
    """Return the page that people read first."""
    heads = ("seed", "steps", "ms per step", "val_loss", "val_bpb", "artifact bytes", "with code")
    scores = [
        (
            r.seed,
            r.steps,
            f"{r.step_ms:.2f}",
            f"{r.val_loss:.8f}",
            f"{r.val_bpb:.8f}",
            f"{len(r.artifact):,}",
            f"{r.total_bytes:,}",
        )
        for r in runs
    ]
    settings = [(name, *both) for name, both in best.changed.items()]
    parts = [
        f"# {about.name}",
        about.blurb,
        _claim(submission),
        _table(heads, scores),
        "Each score is of the artifact after writing it and reading it back, on the whole validation split. Data: "
        f"{best.data[0]}, {best.data[1]}; {best.data[3]}. {best.parameters:,} parameters, {best.train_ms / 1000:.0f} s of "
        f"training, {submission['hardware']}, torch {submission['torch']}, Python {submission['python']}.",
        "## Settings",
        f"Settings that differ from {'the defaults of ingot' if best.by_settings else 'the baseline'}; they are the defaults of "
        f"this `{CODE}`.",
        _table(("variable", "baseline", "here"), settings) if settings else "None.",
        "## Run it",
        "Needs torch, numpy, sentencepiece and pydantic. The first command trains, the second scores the artifact here.",
        _commands(best),
        "## Files",
        _files(runs, best),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in (heads, ["---"] * len(heads), *rows))


def _commands(run: FinishedRun) -> str:
    data, tokenizer = run.places
    where = f"DATA_PATH=data/datasets/{shlex.quote(data)}"
    where += f" TOKENIZER_PATH=data/tokenizers/{shlex.quote(tokenizer)}" if tokenizer is not None else ""
    start = f"torchrun --standalone --nproc_per_node={run.ranks} {CODE}" if run.ranks > 1 else f"python {CODE}"
    score = f"python {CODE}" if run.by_settings else start  # by settings, every process would score the whole split
    return f"```bash\n{where} SEED={run.seed} {start}\n{where} EVAL_ONLY_PATH={run.file} {score}\n```"


def _files(runs: Sequence[FinishedRun], best: FinishedRun) -> str:
    others = [f"`{_artifact_name(run, best)}`" for run in runs if run is not best]
    known = all(run.code_ran for run in runs)
    what = "everything that ran, " if known else ""
    unknown = "" if known else ", and the runs tell neither the version nor the commit of the sources that ran"
    lines = [
        f"`{CODE}`: {what}{len(best.code):,} bytes; the sources ({best.maker}) are packed inside{unknown}",
        f"`{best.file}`: the artifact of seed {best.seed}, the best" + (f"; the others: {', '.join(others)}" if others else ""),
        f"`train_seed{best.seed}.log` and the others: the log of each run",
        f"`{SUBMISSION}`: the numbers for programs",
    ]
    return "\n".join(f"- {line}" for line in lines)


def _claim(s: dict[str, Any]) -> str:
    seeds = f"mean of {len(s['seeds'])} seeds, std {s['std']:.5f}" if s["std"] is not None else f"seed {s['seeds'][0]}"
    against = f"; p = {s['p']:.2g} against {s['reference']:g} (one-sided t-test)" if s["p"] is not None else ""
    return f"**val_bpb {s['val_bpb']:.5f}** ({seeds}{against}), {s['bytes_total']:,} bytes with code at most."
