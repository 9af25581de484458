"""Programs in a terminal, started by forking one process that has loaded all of Ingot: a command takes its own time only.

The process that forks has computed nothing, so it has no threads that a child would miss.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import runpy
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PATIENCE = 120  # seconds until a command is taken for hung; far more than any needs
COLUMNS = 100


class Forking:
    """The process that forks; a call runs one command to its end."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self._environment
        )

    def __call__(self, words: Sequence[str], folder: Path, variables: Mapping[str, str]) -> tuple[int, str]:
        """The exit code of a command and all that stood on its terminal."""
        assert self._process.stdin is not None and self._process.stdout is not None
        asked = {"words": list(words), "folder": str(folder), "environment": {**self._environment, **variables}}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        code, shown = json.loads(self._process.stdout.readline())
        return code, shown

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def serve() -> None:
    """Answer each line of stdin, a command, with a line on stdout."""
    import ingot.backends.torch.backend
    import ingot.doors.cli.main
    import ingot.doors.gpt_simple.main
    import ingot.train.start  # noqa: F401 (all of them only to be loaded)

    for line in sys.stdin:
        asked = json.loads(line)
        pid, terminal = pty.fork()
        if not pid:
            _become(**asked)
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 40, COLUMNS, 0, 0))
        shown = _read(pid, terminal)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(json.dumps([code, shown]), flush=True)


def _read(pid: int, terminal: int) -> str:
    shown, deadline = b"", time.monotonic() + PATIENCE
    while True:
        if not select.select([terminal], [], [], max(0, deadline - time.monotonic()))[0]:
            os.kill(pid, signal.SIGKILL)
            shown += b"\nIT HUNG\n"
            deadline = time.monotonic() + PATIENCE
        try:
            part = os.read(terminal, 65536)
        except OSError:  # the other end is closed
            part = b""
        if not part:
            os.close(terminal)
            return shown.decode(errors="replace")
        shown += part


def _become(words: list[str], folder: str, environment: dict[str, str]) -> None:
    """Be the program that a command names, in a child that has just been forked."""
    code: Any = 70
    try:
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115 (those of this process were pipes)
        code = _run(words)
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


def _run(words: list[str]) -> int:
    from ingot.doors.cli.main import run
    from ingot.doors.gpt_simple.main import main

    name, *rest = words
    sys.argv = words
    if name == "ingot":
        run(rest)
        return 0
    if name == "gpt-simple":
        return main(rest)
    if name in ("cp", "mkdir"):
        Path(rest[-1]).parent.mkdir(parents=True, exist_ok=True)
        return subprocess.run([name, "-r" if name == "cp" else "-p", *rest], check=True).returncode
    assert name == "python", words
    sys.argv, sys.path[0] = rest, str(Path(rest[0]).absolute().parent)
    runpy.run_path(rest[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    serve()
