"""A submission: the records folder that the challenge requires, built from finished runs that differ only in their seeds.

To claim a record, pack several seeds: submission.json then has a p-value (one-sided t-test of the mean against the reference).
The folder of a train_gpt.py run contains its code. For an `ingot train` run of the frontier family, the code is generated:
a `train_gpt.py` with the run's settings as its defaults (by_settings.py).
"""

from __future__ import annotations

import json
import math
import re
import shlex
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import ingot
from ingot.artifact.container import read_artifact
from ingot.compat.golf.bundle import BY_SETTINGS, bundle
from ingot.compat.golf.variables import CODE, LIMIT_BYTES, LOG, PACKED, as_text, differing, read_variables
from ingot.config.fields import settings, value_of
from ingot.config.schema import Config
from ingot.errors import CheckpointError, ConfigError
from ingot.experiments.statistics import one_sample_p
from ingot.runs.checkpoints import read_index
from ingot.runs.state import RESULT
from ingot.runs.view import Run
from ingot.runtime.files import readable, replace_folder, to_json, write_atomically, writing_output
from ingot.runtime.machine import NOT_INSTALLED, made_by
from ingot.train.resume import NOT_DECISIVE

REFERENCE = 1.2244  # bits per byte of the challenge's baseline
FAMILY = "frontier"
SOURCES = Path(ingot.__file__).parent
# Settings that depend on the user or the machine, and seeds: a submission leaves them out.
LOCAL = {*NOT_DECISIVE, "data.path", "data.tokenizer", "data.seed", "training.seed", "training.device", "training.threads"}


@dataclass(frozen=True)
class FinishedRun:
    """A completed run, with everything that a submission needs from it."""

    path: Path  # the run folder
    result: dict[str, Any]  # result.json
    environment: dict[str, Any]  # environment.json
    log: str
    program: str  # train_gpt.py or ingot train
    changed: dict[str, tuple[str, str]]  # non-default settings: (default, value in the run) by name
    seed: int  # the only difference allowed between the runs of a submission
    limit: int  # size limit for artifact and code in bytes; 0 for none
    file: str  # file name of the artifact
    artifact: bytes
    code: bytes
    val_loss: float
    parameters: int
    ranks: int
    device: str
    data: tuple[str, ...]  # descriptions of the data; the first one is the name of the data's folder
    tokenizer: str | None  # file name of the tokenizer

    @property
    def total_bytes(self) -> int:
        """Return the size in bytes that the limit applies to: artifact plus code."""
        return len(self.artifact) + len(self.code)

    @property
    def val_bpb(self) -> float:
        """Return the artifact's bits per byte, rounded as in the log."""
        return round(float(self.result["artifact_bpb"]), 8)


def pack(
    paths: Sequence[Path],
    output: Path,
    *,
    name: str,
    author: str = "",
    github_id: str = "",
    blurb: str = "",
    reference: float = REFERENCE,
    force: bool = False,
) -> dict[str, Any]:
    """Write the records folder of a submission, built from the given runs, and return the content of its submission.json."""
    runs = sorted((read_run(path) for path in paths), key=lambda run: run.seed)
    for before, run in zip([runs[0], *runs], runs, strict=False):  # runs are sorted by seed, so equal seeds are adjacent
        if differ := _differences(runs[0], run):
            raise ConfigError(f"{runs[0].path} and {run.path} cannot be packed together: {'; '.join(differ)}")
        if run is not before and run.seed == before.seed:
            raise ConfigError(f"{before.path} and {run.path} have the same seed, SEED={run.seed}; seeds must be unique")
        if 0 < run.limit < run.total_bytes:
            fit = max(run.limit - len(run.code), 0) / len(run.artifact) * run.parameters
            raise ConfigError(
                f"{run.path} has {run.total_bytes:,} bytes (artifact {len(run.artifact):,}, code {len(run.code):,}), "
                f"{run.total_bytes - run.limit:,} more than the limit of {run.limit:,}; "
                f"about {fit:,.0f} of its {run.parameters:,} parameters would fit"
            )
    best = min(runs, key=lambda run: run.val_bpb)
    submission = {"author": author, "github_id": github_id, "name": name, "blurb": blurb, **summarise(runs, reference)}
    files: dict[str, bytes] = {f"train_seed{run.seed}.log": run.log.encode() for run in runs}
    files |= {_artifact_name(run, best): run.artifact for run in runs}
    files |= {CODE: best.code, "submission.json": (to_json(submission, indent=2) + "\n").encode()}
    files |= {"README.md": readme(runs, best, submission).encode()}
    if output.exists() and not force:
        raise ConfigError(f"{output} exists; choose another --output, or replace its files with --force")
    with writing_output(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        with replace_folder(output) as folder:
            for file, content in files.items():
                write_atomically(folder / file, content)
    return submission


def _differences(a: FinishedRun, b: FinishedRun) -> list[str]:
    if a.program != b.program:
        return [f"they are runs of {a.program} and {b.program}"]
    facts = [
        (f"{name} is", *(run.changed.get(name, (both[0],) * 2)[1] for run in (a, b)))
        for name, both in {**a.changed, **b.changed}.items()
    ]
    facts += [("their data is", x, y) for x, y in zip(a.data, b.data, strict=True)]
    facts += [("their ranks are", str(a.ranks), str(b.ranks))]
    differ = [f"{what} {x} and {y}" for what, x, y in facts if x != y]
    return differ or (["they ran different code"] if a.code != b.code else [])


def summarise(runs: Sequence[FinishedRun], reference: float) -> dict[str, Any]:
    """Return the part of submission.json that is computed from the runs."""
    scores = [run.val_bpb for run in runs]
    mean, std = statistics.fmean(scores), statistics.stdev(scores) if len(scores) > 1 else None
    ended = max(datetime.fromisoformat(run.result["ended_at"]) for run in runs)

    def each(values: Iterable[object]) -> str:
        return "; ".join(dict.fromkeys(map(str, values)))

    return {
        "date": f"{ended.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}",
        "val_loss": statistics.fmean(run.val_loss for run in runs),
        "val_bpb": mean,
        "bytes_total": max(run.total_bytes for run in runs),
        "bytes_code": len(runs[0].code),
        "seeds": [run.seed for run in runs],
        "seed_results": {
            str(run.seed): {
                "val_loss": run.val_loss,
                "val_bpb": run.val_bpb,
                "steps": int(run.result["total_steps"]),
                "train_seconds": round(run.result["training_seconds"], 3),
                "bytes_total": run.total_bytes,
            }
            for run in runs
        },
        "mean": mean,
        "std": std,
        "reference": reference,
        "p": None if std is None else one_sample_p(scores, reference),
        "hardware": each(f"{run.ranks} x {run.device}" for run in runs),
        "torch": each(run.environment["packages"]["torch"] for run in runs),
        "python": each(run.environment["python"] for run in runs),
    }


def _artifact_name(run: FinishedRun, best: FinishedRun) -> str:
    return run.file if run is best else run.file.replace(".", f"_seed{run.seed}.", 1)


def readme(runs: Sequence[FinishedRun], best: FinishedRun, s: Mapping[str, Any]) -> str:
    """Return the submission's README.md; `s` is the content of submission.json."""
    seeds = f"mean of {len(s['seeds'])} seeds, std {s['std']:.5f}" if s["std"] is not None else f"seed {s['seeds'][0]}"
    against = f"; p = {s['p']:.2g} against {s['reference']:g} (one-sided t-test)" if s["p"] is not None else ""
    scores = [
        f"| {seed} | {r['steps']} | {1000 * r['train_seconds'] / max(r['steps'], 1):.2f} | {r['val_loss']:.8f} "
        f"| {r['val_bpb']:.8f} | {r['bytes_total'] - s['bytes_code']:,} | {r['bytes_total']:,} |"
        for seed, r in s["seed_results"].items()
    ]
    changed = [f"| {setting} | {baseline} | {here} |" for setting, (baseline, here) in best.changed.items()]
    where = f"DATA_PATH=data/datasets/{shlex.quote(best.data[0])}"
    where += f" TOKENIZER_PATH=data/tokenizers/{shlex.quote(best.tokenizer)}" if best.tokenizer is not None else ""
    start = f"torchrun --standalone --nproc_per_node={best.ranks} {CODE}" if best.ranks > 1 else f"python {CODE}"
    score = start if best.program == CODE else f"python {CODE}"  # one process: each rank would score the whole split
    others = ", ".join(f"`{_artifact_name(run, best)}`" for run in runs if run is not best)
    return f"""# {s["name"]}

{s["blurb"]}

**val_bpb {s["val_bpb"]:.5f}** ({seeds}{against}), at most {s["bytes_total"]:,} bytes including the code.

| seed | steps | ms per step | val_loss | val_bpb | artifact bytes | with code |
| --- | --- | --- | --- | --- | --- | --- |
{chr(10).join(scores)}

Scores are measured on the whole validation split, with the artifact read back from its file.
Data: {"; ".join(best.data)}. {best.parameters:,} parameters, {best.result["training_seconds"]:.0f} s of training,
{s["hardware"]}, torch {s["torch"]}, Python {s["python"]}.

## Settings

These defaults of `{CODE}` differ from {"the baseline" if best.program == CODE else "ingot's defaults"}:

| variable | baseline | here |
| --- | --- | --- |
{chr(10).join(changed)}

## Run it

`{CODE}` needs torch, numpy, sentencepiece and pydantic. The first command trains, the second scores the artifact in this folder.

```bash
{where} SEED={best.seed} {start}
{where} EVAL_ONLY_PATH={best.file} {score}
```

## Files

- `{CODE}`: the whole program, {len(best.code):,} bytes, with its sources packed inside
- `{best.file}`: the artifact of seed {best.seed}, the best run{f"; artifacts of the other runs: {others}" if others else ""}
- `train_seed*.log`: the log of each run
- `submission.json`: the results in machine-readable form
"""


def read_run(folder: Path) -> FinishedRun:
    """Read a completed run from its folder, such as logs/RUN_ID."""
    view = Run.open(folder)
    result, status = view.result(), view.status().status
    if result is None or result["status"] != "completed" or status != "completed":
        raise CheckpointError(
            f"{folder} is not finished: its status is {status}; resume it with the same command and RUN_ID={folder.name}"
        )
    try:
        environment, export = json.loads(_read(folder / "environment.json")), result["export"]
        facts = _script_facts(folder, export) if "variables" in export else _settings_facts(folder, result, environment)
        log = _read(folder / (LOG if "variables" in export else "log.txt")).decode("utf-8", "replace")
        run = FinishedRun(path=folder, result=result, environment=environment, log=log, **facts)
        summarise([run], REFERENCE)  # fail now if any other required value is missing
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{folder / RESULT} or environment.json is incomplete or damaged ({type(error).__name__}: {error}); copy the "
            "run again, or repeat it with another RUN_ID"
        ) from None
    code_bytes = export.get("code_bytes", len(run.code))
    for what, content, expected in (("artifact", run.artifact, result["artifact_bytes"]), ("code", run.code, code_bytes)):
        if len(content) != expected:
            raise CheckpointError(
                f"the {what} in {folder} has {len(content):,} bytes, but result.json says {expected:,}; the file was modified"
            )
    return run


def _read(path: Path) -> bytes:
    with readable(path, CheckpointError):
        return path.read_bytes()


def _script_facts(folder: Path, facts: dict[str, Any]) -> dict[str, Any]:
    values, baseline = read_variables(facts["variables"]), read_variables({})
    shards, scored = f"{facts['train_shards']} training shards", f"{facts['scored_tokens']} tokens scored"
    return {
        "program": CODE,
        "changed": {name: (as_text(baseline[name]), value) for name, value in differing(values).items()},
        "seed": values["SEED"],
        "limit": values["ARTIFACT_LIMIT_BYTES"],
        "file": PACKED.name,
        "artifact": _read(folder / "artifact" / PACKED),
        "code": _read(folder / CODE),
        "val_loss": round(facts["val_loss"], 8),
        **{name: facts[name] for name in ("parameters", "ranks", "device")},
        "data": (facts["dataset"], shards, scored, facts["validation"]),
        "tokenizer": Path(values["TOKENIZER_PATH"]).name,
    }


# Runs of `ingot train`.


def packed_code(config: Config) -> bytes:
    """Build a `train_gpt.py` that trains and scores a model with this config."""
    own = {f"INGOT_{name.upper().replace('.', '__')}": value for name, (_, value) in _changed(config).items()}
    return bundle(own, entry=BY_SETTINGS)


def _changed(config: Config) -> dict[str, tuple[str, str]]:
    """Return the non-default settings of a submission: (default, value) by name, as text for environment variables."""
    texts = {}
    for name, setting in settings(config.model.family).items():
        default, value = (v if isinstance(v, str) else json.dumps(v) for v in (setting.default, value_of(config, setting)))
        if (value != default or name == "model.family") and not name.startswith("tracking.") and name not in LOCAL:
            texts[name] = default, value
    return texts


def _settings_facts(folder: Path, result: Mapping[str, Any], environment: Mapping[str, Any]) -> dict[str, Any]:
    if result["checkpoint_path"] is None:
        raise CheckpointError(f"{folder} has no checkpoint of its last step to read the config from; repeat the run and keep it")
    progress = read_index(folder / result["checkpoint_path"])["progress"]
    config = Config.model_validate(progress["config"])
    of_a_part = result["artifact_rows"] is not None or result["val_rows"] != result["val_rows_of"]
    for unfit, why in (
        (config.model.family != FAMILY, f"is neither a run of {CODE} nor one of ingot train with model.family={FAMILY}"),
        ((progress["tokenizer"] or {}).get("kind") != "sentencepiece", "has no SentencePiece tokenizer, which golf requires"),
        (result["artifact_bpb"] is None, "has no score of its artifact; repeat the run with artifact.score=true"),
        (of_a_part, "was scored on a part of the validation split; repeat the run with evaluation.final_rows=null"),
        (config.stride != config.data.seq_len, "was scored with sliding windows; repeat the run with evaluation.stride=null"),
    ):
        if unfit:
            raise CheckpointError(f"{folder} {why}")
    for session in (environment, *environment.get("earlier", [])):
        check_sources(folder, session)
    artifact, rows = folder / result["artifact_path"], f"{result['val_rows']:,} rows of {config.data.seq_len:,} tokens"
    return {
        "program": "ingot train",
        "changed": _changed(config),
        "seed": config.training.seed,
        "limit": LIMIT_BYTES,
        "file": artifact.name,
        "artifact": _read(artifact),
        "code": packed_code(config),
        # Loss and bits per byte are proportional for given targets, so their ratio is the same for the artifact as for the run.
        "val_loss": result["artifact_bpb"] * result["val_loss"] / result["val_bpb"],
        "parameters": sum(math.prod(tensor.shape) for tensor in read_artifact(artifact).tensors.values()),
        "ranks": progress["choices"]["world_size"],
        "device": progress["choices"]["device"],
        "data": (Path(config.data.path).name, f"fingerprint {progress['data_fingerprint'][:12]}", f"validation: {rows}"),
        "tokenizer": Path(config.data.tokenizer).name if config.data.tokenizer else None,
    }


def check_sources(folder: Path, session: Mapping[str, Any], sources: Path = SOURCES) -> None:
    """Raise CheckpointError if the version or commit of a session shows that it ran other sources than those being packed."""
    version = session.get("made_by", NOT_INSTALLED).partition(",")[0]  # a submission's train_gpt.py adds ", one file"
    if NOT_INSTALLED not in (version, made_by()) and version != made_by():
        raise CheckpointError(f"{folder} was run by {version}, but this is {made_by()}; pack it with {version}")
    commit = str(session.get("git_commit"))
    with suppress(OSError):  # git is not installed
        command = ["git", "diff", "--quiet", commit, "HEAD", "--", "."]  # exits with 1 for changes, above 1 for an unknown commit
        recorded = re.fullmatch("[0-9a-f]{40,64}", commit)
        if recorded and subprocess.run(command, cwd=sources, capture_output=True, stdin=subprocess.DEVNULL).returncode == 1:
            raise CheckpointError(
                f"{folder} was run at commit {commit[:12]}, but the current sources differ; check out that commit to pack it"
            )
