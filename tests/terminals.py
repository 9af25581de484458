"""A terminal to run programs in: a real pty, and as much of a screen as a progress line needs.

A row that grows past the right edge goes on in the next one and is counted in `wrapped`; a resize breaks rows again, as most
terminals do.
"""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from forks import Forked, forks

PATIENCE = 300  # seconds until a program is taken for hung; far more than any needs, on a machine with ten other programs too
ESCAPE = re.compile(r"\x1b\[(\??)([\d;]*)([A-Za-z])")
HALF_ESCAPE = re.compile(r"\x1b(\[\??[\d;]*)?$")


class Screen:
    """Rows of text, a cursor, and every line that was ever shown at the cursor."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.rows = [""]
        self.row = self.column = 0
        self.cursor_visible = True
        self.wrapped = 0
        self.shown: list[str] = []  # the row of the cursor, each time it was about to be written over or left

    def feed(self, text: str) -> None:
        at = 0
        while at < len(text):
            if found := ESCAPE.match(text, at):
                self._escape(*found.groups())
                at = found.end()
                continue
            self._put(text[at])
            at += 1

    def resize(self, columns: int) -> None:
        rows: list[str] = []
        for number, row in enumerate(self.rows):
            rows += [row[i : i + columns] for i in range(0, len(row), columns)] or [""]
            if number == self.row:
                cursor = (len(rows) - 1, self.column - (self.column - 1) // columns * columns if self.column else 0)
        self.rows, self.columns = rows, columns
        self.row, self.column = cursor

    def _put(self, character: str) -> None:
        if character == "\r":
            self._keep()
            self.column = 0
        elif character == "\n":
            self._keep()
            self.row += 1
            if self.row == len(self.rows):
                self.rows.append("")
        else:
            if self.column == self.columns:
                self.wrapped += 1
                self._put("\n")
                self.column = 0
            row = self.rows[self.row].ljust(self.column)
            self.rows[self.row] = row[: self.column] + character + row[self.column + 1 :]
            self.column += 1

    def _escape(self, private: str, number: str, letter: str) -> None:
        if private:
            assert number == "25", number
            self.cursor_visible = letter == "h"
        elif letter == "A":
            self.row = max(0, self.row - int(number or 1))
        elif letter == "K":
            self._keep()
            row = self.rows[self.row]
            self.rows[self.row] = "" if number == "2" else row[: self.column]
        else:
            assert letter == "m", f"unknown escape {letter}"

    def _keep(self) -> None:
        if (row := self.rows[self.row].rstrip()) and (not self.shown or self.shown[-1] != row):
            self.shown.append(row)


class Terminal:
    """A program whose standard streams are a terminal of its own."""

    def __init__(
        self, words: Sequence[str], folder: Path, environment: Mapping[str, str], columns: int, *, fresh: bool = False
    ) -> None:
        """Start `ingot`: a fork of a Python that has loaded everything, unless it shall be fresh."""
        self._main, other = pty.openpty()
        self.screen = Screen(columns)
        self._set_size(columns)
        variables, command = {**environment, "TERM": "xterm-256color"}, ["-m", "ingot", *words]
        self.process: subprocess.Popen[bytes] | Forked
        if fresh:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                stdin=other,
                stdout=other,
                stderr=other,
                cwd=folder,
                env=variables,
                start_new_session=True,
                preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            )
        else:
            self.process = forks(environment["PYTHONPATH"]).start(command, folder, variables, [os.ttyname(other)] * 3)
        os.close(other)
        self._decode = codecs.getincrementaldecoder("utf-8")().decode
        self._rest = ""

    def until(self, condition: Callable[[Screen], bool], what: str) -> None:
        """Feed the screen until it satisfies a condition."""
        deadline = time.monotonic() + PATIENCE
        while not condition(self.screen):
            assert time.monotonic() < deadline, f"never {what}:\n" + "\n".join(self.screen.rows)
            assert self._read(), f"it ended, and never {what}:\n" + "\n".join(self.screen.rows)

    def shows(self, words: str) -> None:
        """Return when the row of the cursor has these words."""
        self.until(lambda screen: words in screen.rows[screen.row], f"showed {words!r}")

    def resize(self, columns: int) -> None:
        while select.select([self._main], [], [], 0)[0] and self._read():
            pass  # what was drawn for the size before is shown in that size
        self._set_size(columns)
        self.screen.resize(columns)

    def press_ctrl_c(self) -> None:
        os.write(self._main, b"\x03")

    def end(self) -> int:
        """The exit code, after the end."""
        deadline = time.monotonic() + PATIENCE
        while self._read():
            assert time.monotonic() < deadline, "it hung:\n" + "\n".join(self.screen.rows)
        return self.process.wait(PATIENCE)

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._main)

    def _read(self) -> bool:
        """Feed what there is, after at most a second; False: the program has closed its terminal."""
        if not select.select([self._main], [], [], 1.0)[0]:
            return True
        try:
            found = os.read(self._main, 65536)
        except OSError:  # Linux's way to say that nobody has the other end open
            return False
        text = self._rest + self._decode(found)
        half = HALF_ESCAPE.search(text)  # the read may end inside one
        self._rest = half[0] if half else ""
        self.screen.feed(text.removesuffix(self._rest))
        return bool(found)

    def _set_size(self, columns: int) -> None:
        fcntl.ioctl(self._main, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
