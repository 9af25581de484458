"""Small stand-ins for a batch system and a job controller: they start what the examples tell them to, and end it as they do."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

PATIENCE = 300  # seconds until a job is taken for hung

# `sbatch` and `scancel` for a script: a submission is a line of the queue.
SBATCH = """#!{python}
import json, os, sys
words = sys.argv[1:]
options = [words.pop(0) for _ in range(len(words)) if words[0].startswith("--")]
given = dict(option[2:].partition("=")[::2] for option in options)
exported = dict(part.split("=", 1) for part in given.pop("export", "ALL").split(",")[1:])
with open({queue!r}, "a+") as queue:
    queue.seek(0)
    number = len(queue.readlines()) + 1
    queue.write(json.dumps({{"id": number, "options": given, "environment": exported, "command": words}}) + "\\n")
print(number)
"""
SCANCEL = """#!{python}
import sys
with open({cancelled!r}, "a") as file:
    file.write(sys.argv[1] + "\\n")
"""

Ended = Callable[[subprocess.Popen[bytes]], None]  # what happens to a job while it runs


class Cluster:
    """A batch system with one node: runs what was submitted, one job after the other, as dependencies allow."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder, self._queue, self._cancelled = folder, folder / "queue", folder / "cancelled"
        programs = folder / "bin"
        programs.mkdir(parents=True)
        names = {"python": sys.executable, "queue": str(self._queue), "cancelled": str(self._cancelled)}
        ingot = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m ingot "$@"\n'
        for name, text in {"sbatch": SBATCH.format(**names), "scancel": SCANCEL.format(**names), "ingot": ingot}.items():
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        self.environment = {**environment, "PATH": f"{programs}:{os.environ['PATH']}"}
        self.codes: dict[int, int] = {}

    def submit(self, *words: object, **environment: str) -> None:
        """What a user does."""
        subprocess.run(
            ["sbatch", *map(str, words)], env={**self.environment, **environment}, check=True, stdout=subprocess.DEVNULL
        )

    def run_next(self, happens: Ended | None = None, **environment: str) -> int | None:
        """Run the oldest job that may begin, and return its exit code; None where there is none."""
        cancelled = self._cancelled.read_text().split() if self._cancelled.exists() else []
        for job in map(json.loads, self._queue.read_text().splitlines()):
            number = job["id"]
            if number in self.codes or str(number) in cancelled or not self._may_begin(job["options"].get("dependency")):
                continue
            own = {**self.environment, **environment, **job["environment"], "SLURM_JOB_ID": str(number)}
            self.codes[number] = run(["bash", *job["command"]], own, self.folder, happens)
            return self.codes[number]
        return None

    def _may_begin(self, dependency: str | None) -> bool:
        if dependency is None:
            return True
        kind, _, number = dependency.partition(":")
        assert kind == "afternotok", dependency
        return self.codes.get(int(number), 0) != 0


def run_job(path: Path, mounts: Mapping[str, Path], own: Mapping[str, str], cluster: Cluster, happens: list[Ended | None]) -> str:
    """Play the controller of a Kubernetes Job: start pods until it is complete or has failed, by its podFailurePolicy.

    `own` takes the place of the variables that the pod sets, `happens` says what happens to each pod.
    """
    job = yaml.safe_load(path.read_text())["spec"]
    [container] = job["template"]["spec"]["containers"]
    assert job["template"]["spec"]["restartPolicy"] == "Never"  # or there is no podFailurePolicy
    variables = {**{one["name"]: one["value"] for one in container["env"]}, **own}
    command = [_mounted(_expanded(word, variables), mounts) for word in container["command"]]
    failures = 0
    for what in happens:
        code = run(command, {**cluster.environment, **variables}, cluster.folder, what)
        if code == 0:
            return "Complete"
        action = _action(job["podFailurePolicy"]["rules"], code)
        failures += action == "Count"
        if action == "FailJob" or failures > job["backoffLimit"]:
            return "Failed"
    return "Running"


def _action(rules: list[dict[str, Any]], code: int) -> str:
    for rule in rules:
        if code in rule.get("onExitCodes", {}).get("values", []):
            return str(rule["action"])
    return "Count"


def _expanded(word: str, variables: Mapping[str, str]) -> str:
    for name, value in variables.items():
        word = word.replace(f"$({name})", value)
    return word


def _mounted(word: str, mounts: Mapping[str, Path]) -> str:
    return next((str(folder) + word.removeprefix(mount) for mount, folder in mounts.items() if word.startswith(mount)), word)


def run(command: list[str], environment: Mapping[str, str], folder: Path, happens: Ended | None = None) -> int:
    """Run a command in a process group of its own, let something happen to it, and return its exit code."""
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(command, env=environment, cwd=folder, stdout=log, stderr=log, start_new_session=True)
    try:
        if happens is not None:
            happens(process)
        return process.wait(PATIENCE)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def at_step(run: Path, beyond: int, then: Ended) -> Ended:
    """Let something happen when the run has gone beyond a step."""

    def wait(process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + PATIENCE
        while True:
            assert process.poll() is None and time.monotonic() < deadline, "it ended or hung before that step"
            try:
                told = json.loads((run / "state.json").read_text())
            except (OSError, ValueError):
                told = {}
            if told.get("status") == "running" and told["step"] > beyond:
                return then(process)
            time.sleep(0.02)

    return wait


def killed(process: subprocess.Popen[bytes]) -> None:
    """kill -9 of all that a job started, as when a node is lost; ranks die with their launcher."""
    os.killpg(process.pid, signal.SIGKILL)


def told_to_end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the program that was started, as when a job has to make room."""
    process.send_signal(signal.SIGTERM)
