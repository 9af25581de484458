"""What a run that was killed must have in common with one that nothing happened to, and what neither may leave."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

CLOCK = {"time", "session", "tokens_per_second", "elapsed_seconds", "seconds", "mfu"}  # of a record: what differs from run to run
PLACE = ("step", "sample", "tokens", "loss", "val_bpb", "val_step", "best_step", "best_bpb", "starts", "phases_begun", "places")
FINISHED = {
    ".lock", "config.yaml", "environment.json", "log.txt", "metrics.jsonl", "result.json", "state.json", "samples", "checkpoints",
    "artifact",
}  # fmt: skip


def end_of(run: Path) -> dict[str, Any]:
    """All that a finished run computed: checksums of its last checkpoint and artifact, its record, samples and counters."""
    last = max((run / "checkpoints").glob("step-????????"))
    files = [*sorted(last.glob("*.safetensors")), *sorted((run / "artifact").iterdir())]
    result = json.loads((run / "result.json").read_text())
    return {
        "status": (result["status"], json.loads((run / "state.json").read_text())["status"]),
        "bytes": {str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files},
        "artifact": result["artifact_bpb"],
        "step": last.name,
        "checkpoint": {name: json.loads((last / "checkpoint.json").read_text())["progress"][name] for name in PLACE},
        "record": _records(run, "train"),
        "evaluations": _records(run, "evaluation"),
        "samples": {path.name: path.read_text() for path in sorted((run / "samples").iterdir())},
        "left": sorted(path.name for path in run.iterdir() if path.name not in FINISHED)
        + sorted(
            path.name for path in run.rglob("*") if ".partial" in path.name or ".damaged" in path.name or "tmp" in path.name
        ),
    }


def _records(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if name not in CLOCK} for line in lines if line["kind"] == kind]


def differences(unbroken: dict[str, Any], killed: dict[str, Any]) -> list[str]:
    """The names of what is not equal, with both values where they are short."""
    found = []
    for name, was in unbroken.items():
        if killed[name] != was:
            both = f"{was} and {killed[name]}"
            found.append(f"{name}: {both if len(both) < 400 else 'not equal'}")
    return found
