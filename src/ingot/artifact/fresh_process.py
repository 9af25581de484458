"""Score an artifact in a new process, which knows nothing of the model except what the file contains."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ingot.errors import RunError
from ingot.runtime.processes import python_command
from ingot.runtime.ranks import without_ranks

RUN_INGOT = "from ingot.runtime.processes import end_with_parent; end_with_parent(); from ingot.cli.main import run; run()"
SCORING = "scoring the artifact"  # name of this phase in progress reports
ROWS = re.compile(r"^rows (\d+) of (\d+)$", re.MULTILINE)  # progress lines that the child prints to stderr
LOOK_SECONDS = 0.25  # interval between calls to `stop`, even while the child prints nothing, such as during model loading


def score_in_fresh_process(
    path: Path,
    data: str | None = None,
    device: str = "auto",
    rows: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Run `ingot eval --artifact` in a child process and return its result; on failure, raise RunError with its last message.

    `stop` is polled a few times a second; if it returns True, the child is killed. The child never outlives this process.
    """
    command = python_command(RUN_INGOT, "eval", "--artifact", str(path), "--json", "--tell-rows", "--device", device)
    command += ["--data", data] if data is not None else []
    command += ["--rows", str(rows)] if rows is not None else []
    progress(0, 0)
    shown, heard = "", b""
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, env=without_ranks(os.environ), **pipes) as child:
        assert child.stdin is not None
        with child.stdin:  # the child exits when this pipe closes
            child.stdin = None  # hide the pipe from `communicate`, which would close it
            while child.returncode is None:
                try:
                    printed, heard = child.communicate(timeout=LOOK_SECONDS)
                except subprocess.TimeoutExpired as waiting:
                    heard = waiting.stderr or b""
                    if stop():
                        child.kill()
                told = [*ROWS.finditer(heard.decode(errors="replace"))][-1:]
                if told and told[0][0] != shown:
                    shown = told[0][0]
                    progress(int(told[0][1]), int(told[0][2]))
    try:
        said = dict(json.loads(printed))
    except (ValueError, TypeError):
        lines = [line for line in heard.decode(errors="replace").splitlines() if line.strip() and not ROWS.fullmatch(line)]
        last = lines[-1].strip() if lines else "`ingot eval` printed no JSON"
        said = {"error": f"the process that read the file exited with code {child.returncode}: {last}"}
    if "error" in said:
        raise RunError(f"{path} was written, but scoring it failed: {said['error']}")
    return said
