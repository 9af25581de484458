"""The commands of a reader, each in a terminal and as a fork of one process that has loaded all of Ingot."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from forks import Forked, Forks

PATIENCE = 300  # seconds until a command is taken for hung; far more than any needs
COLUMNS = 100
PYTHON = {"ingot": ["-m", "ingot"], "gpt-simple": ["-m", "ingot.compat.gpt_simple"], "python": []}


class Forking:
    """The process that forks; a call runs one command to its end."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        self._forks = Forks(self._environment)
        self.close = self._forks.close

    def __call__(self, words: Sequence[str], folder: Path, variables: Mapping[str, str]) -> tuple[int, str]:
        """The exit code of a command and all that stood on its terminal."""
        name, *rest = words
        if name in ("cp", "mkdir"):
            (folder / rest[-1]).parent.mkdir(parents=True, exist_ok=True)
            return subprocess.run([name, "-r" if name == "cp" else "-p", *rest], cwd=folder, check=True).returncode, ""
        terminal, other = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 40, COLUMNS, 0, 0))
        streams = [os.ttyname(other)] * 3
        process = self._forks.start([*PYTHON[name], *rest], folder, {**self._environment, **variables}, streams)
        os.close(other)
        shown, code = _read(process, terminal), process.wait()
        os.close(terminal)  # whoever still has it then gets a SIGHUP
        return code, shown


def _read(process: Forked, terminal: int) -> str:
    shown, deadline = b"", time.monotonic() + PATIENCE
    while True:
        if not select.select([terminal], [], [], max(0, deadline - time.monotonic()))[0]:
            process.kill()
            shown += b"\nIT HUNG\n"
            deadline = time.monotonic() + PATIENCE
        try:
            part = os.read(terminal, 65536)
        except OSError:  # the other end is closed
            part = b""
        if not part:
            return shown.decode(errors="replace")
        shown += part
