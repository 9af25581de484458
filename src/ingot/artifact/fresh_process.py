"""Score an artifact in a new process that gets only the file."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ingot.errors import RunError
from ingot.runtime.processes import python_command
from ingot.runtime.ranks import without_ranks

RUN_INGOT = "from ingot.runtime.processes import end_with_parent; end_with_parent(); from ingot.cli.main import run; run()"
SCORING = "scoring the artifact"  # name of this phase in progress reports
ROWS = re.compile(r"rows (\d+) of (\d+)")  # progress lines that the process prints to stderr
LOOK_SECONDS = 0.25  # poll interval for `stop`; the process prints nothing while it loads the model or during a long batch


def score_in_fresh_process(
    path: Path,
    data: str | None = None,
    device: str = "auto",
    rows: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Run `ingot eval --artifact` in a child process and return its result; raise RunError with its last line if it fails.

    `stop` is polled a few times a second and terminates the child. The child never outlives this process, however that ends.
    """
    command = python_command(RUN_INGOT, "eval", "--artifact", str(path), "--json", "--tell-rows", "--device", device)
    command += ["--data", data] if data is not None else []
    command += ["--rows", str(rows)] if rows is not None else []
    progress(0, 0)
    heard: list[str] = []
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, env=without_ranks(os.environ), **pipes) as child:
        assert child.stdout is not None and child.stderr is not None
        for line in _lines(child.stderr.fileno()):
            if told := ROWS.fullmatch(line):
                progress(int(told[1]), int(told[2]))
            elif line:
                heard.append(line)
            if stop():
                child.kill()
        printed = child.stdout.read()  # a few lines, which fit in the pipe's buffer
    try:
        said = dict(json.loads(printed))
    except (ValueError, TypeError):
        last = heard[-1] if heard else "`ingot eval` printed no JSON"
        said = {"error": f"the process that read it ended with code {child.returncode}: {last}"}
    if "error" in said:
        raise RunError(f"{path} was written, but scoring it failed: {said['error']}")
    return said


def _lines(pipe: int) -> Iterator[str]:
    """Yield the lines read from a pipe, and an empty string whenever none arrives in time."""
    rest = b""
    while True:
        if not select.select([pipe], [], [], LOOK_SECONDS)[0]:
            yield ""
        elif chunk := os.read(pipe, 65536):
            *lines, rest = (rest + chunk).split(b"\n")
            yield from (line.decode(errors="replace").strip() for line in lines)
        else:
            yield rest.decode(errors="replace").strip()
            return
