"""`gpt-simple` in this process, as its tests call it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from ingot.compat.gpt_simple.main import main


@dataclass(frozen=True)
class Said:
    """What a command came to."""

    code: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """The one line of an error."""
        lines = self.err.splitlines()
        assert len(lines) == 1 and lines[0].startswith("gpt-simple: error: ") and not self.out, self.err + self.out
        return lines[0]


class Cli:
    """Runs commands of the cli."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd

    def __call__(self, *words: object, code: int | None = 0) -> Said:
        self._capfd.readouterr()
        found = main(list(map(str, words)))
        said = Said(found, *self._capfd.readouterr())
        assert code is None or found == code, f"exit code {found} instead of {code}:\n{said.err}"
        return said
