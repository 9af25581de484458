"""What is wrong with a file of token data: a line in the list of an audit, or the error of whoever opens the data."""

from __future__ import annotations

from dataclasses import dataclass

from ingot.errors import DataError, one_line

AGAIN = "copy the folder again or prepare the data again"
TITLES = {
    "shard-missing": "missing shard or one that cannot be read:",
    "shard-header": "unexpected header in",
    "shard-size": "size mismatch in",
}


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong. Codes never change their meaning; docs/data-audit.md explains each."""

    code: str
    file: str
    problem: str
    advice: str = AGAIN
    place: str = ""

    @property
    def line(self) -> str:
        """All of it in one line."""
        where = f"{self.file}, {self.place}" if self.place else self.file
        return one_line(f"{self.code}: {where}: {self.problem}; {self.advice}")

    def error(self) -> DataError:
        """The same for whoever cannot go on."""
        where = f"{TITLES[self.code]} {self.file}:" if self.code in TITLES else self.file
        return DataError(f"{where} {self.problem}; {self.advice}")
