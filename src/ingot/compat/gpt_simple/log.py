"""What the programs of this door say while they work: whole lines on stderr, as many kinds of them as -v and -q ask for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ingot.console.entry import warn


@dataclass(frozen=True)
class Log:
    """Lines for people. -q leaves the warnings, -v adds what is waited for."""

    verbose: bool = False
    quiet: bool = False
    write: Callable[[str], None] = warn

    def info(self, line: str) -> None:
        """A line that tells how it goes."""
        if not self.quiet:
            self.write(line)

    def warn(self, line: str) -> None:
        """A line that somebody should read."""
        self.write(line)

    def debug(self, line: str) -> None:
        """A line for those who asked for more."""
        if self.verbose:
            self.write(line)
