"""Folders of finished runs with known scores, and what `ingot` says of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ingot.cli.main import run
from ingot.runs.state import State, this_process, utc_now


def write_finished(folder: Path, score: float | None, seed: int = 1, status: str = "completed", **known: Any) -> Path:
    """A run folder as a run of the demo leaves it; `settings` are its own, the rest is what result.json says."""
    folder.mkdir(parents=True)
    settings = known.pop("settings", {})
    lines = [f"{name}: {value}" for name, value in {"training.seed": seed, "data.seed": seed, **settings}.items()]
    (folder / "config.yaml").write_text("\n".join(["base: demo", *lines]) + "\n")
    host, pid, boot_id = this_process()
    now = {"host": host, "pid": pid, "boot_id": boot_id, "started_at": utc_now(), "updated_at": utc_now()}
    (folder / "state.json").write_text(json.dumps({**vars(State(status=status, **now))}))
    text_bytes = known.pop("bytes", 1000)
    record = {"kind": "evaluation", "step": 9, "val_bpb": score, "bytes": text_bytes}
    (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    told = {"status": status, "val_bpb": score, "val_rows": 7, "val_rows_of": 7, "data_fingerprint": "f" * 64, **known}
    (folder / "result.json").write_text(json.dumps(told))
    return folder


def said(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """What `ingot` says in this process: its exit code, stdout and stderr."""
    with pytest.raises(SystemExit) as ended:
        run([str(word) for word in words])
    return (int(ended.value.code or 0), *capsys.readouterr())
