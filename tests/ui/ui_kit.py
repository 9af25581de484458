"""Run folders for tests of the page, and a reader of its events."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from web import Web

from ingot.config.loading import load_config
from ingot.config.render import dump_yaml
from ingot.runs.state import this_process, utc_now


def line(step: int, **more: Any) -> str:
    record = {
        "kind": "train",
        "session": 1,
        "step": step,
        "tokens": step * 100,
        "elapsed_seconds": step / 10,
        "loss": 3 + 1 / step,
    }
    return json.dumps({**record, "grad_norm": 1.0, "learning_rate": 0.1, "tokens_per_second": 1000.0, **more}) + "\n"


def make_run(folder: Path, steps: int = 20, status: str = "completed", when: float | None = None, **settings: Any) -> Path:
    """A run folder that no process stands for but this one."""
    folder.mkdir(parents=True)
    sections: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        section, _, key = name.partition("__")
        sections.setdefault(section, {})[key] = value
    resolved = load_config(recipe="demo", environment={}, python=sections)
    (folder / "config.yaml").write_text(dump_yaml(resolved.config, resolved.origins))
    host, pid, boot = this_process()
    state = {"status": status, "host": host, "pid": pid, "boot_id": boot, "started_at": utc_now(), "updated_at": utc_now()}
    (folder / "state.json").write_text(json.dumps({**state, "step": steps, "max_steps": 100, "loss": 3.1, "val_bpb": 2.5}))
    judged = json.dumps({"kind": "evaluation", "session": 1, "step": steps, "tokens": 7, "elapsed_seconds": 1.0, "val_bpb": 2.5})
    (folder / "metrics.jsonl").write_text("".join(line(step) for step in range(1, steps + 1)) + judged + "\n")
    if when is not None:
        os.utime(folder / "metrics.jsonl", (when, when))
    return folder


class Events:
    """The events of an open page; a context."""

    def __init__(self, web: Web) -> None:
        self._answer = web.open("/api/events")
        self.bytes = 0
        self.runs: dict[str, dict[str, Any]] = {}  # what was said of runs, by name
        self.order: list[str] = []  # ids
        self.bins: list[dict[str, Any]] = []

    def __enter__(self) -> Events:
        return self

    def __exit__(self, *_: object) -> None:
        self._answer.close()

    def until(self, enough: Callable[[], bool]) -> Events:
        """Read until something is so; the socket's own limit of time is the patience."""
        while not enough():
            raw = self._answer.readline()
            assert raw, "the stream has ended"
            self.bytes += len(raw)
            for message in json.loads(raw[6:]) if raw.startswith(b"data: ") else ():
                if message["type"] == "run":
                    self.runs[message["name"]] = message
                elif message["type"] == "runs":
                    self.order = message["ids"]
                elif message["type"] == "bins":
                    self.bins.append(message)
        return self

    def loaded(self, count: int) -> Events:
        """Read until so many runs are loaded, with their settings and their numbers."""

        def is_loaded(run: dict[str, Any]) -> bool:
            return bool(run["loaded"] and run["arm"]) and any(bins["id"] == run["id"] for bins in self.bins)

        return self.until(lambda: sum(map(is_loaded, self.runs.values())) >= count)
