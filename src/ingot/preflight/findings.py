"""What a check before a run has to say: each finding has a code that never changes its meaning, and docs/validate.md explains it.

An error or a budget finding keeps a run from starting. What begins with data. or curriculum. is then an error of the data, what
begins with resume. one of the checkpoint, and everything else one of the settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from ingot.errors import CheckpointError, ConfigError, DataError, IngotError, Rename, Setting

Severity = Literal["error", "budget", "warning", "info"]
BLOCKING = ("error", "budget")
CLEAN, BLOCKED, WARNED = 0, 1, 2  # exit codes of `validate`


@dataclass(frozen=True)
class Finding:
    """One thing. {0} in its words stands for the first of the settings it is about, as in an error."""

    code: str
    severity: Severity
    message: str
    advice: str = ""
    settings: tuple[Setting, ...] = ()
    cause: IngotError | None = None  # an error that says all of it

    @classmethod
    def of(cls, code: str, error: IngotError, severity: Severity = "error") -> Finding:
        """What an error says, as a finding."""
        return cls(code, severity, error.what, error.advice, error.settings, error)

    @property
    def setting(self) -> str:
        """The setting that it is about, by its dotted path; empty where there is none."""
        return self.settings[0].path if self.settings else ""

    @property
    def blocks(self) -> bool:
        return self.severity in BLOCKING

    def render(self, name: Rename = str, advise: Rename = str) -> str:
        """The sentence, with a door's names for settings."""
        error = self.cause or IngotError(self.message, *self.settings, advice=self.advice)
        return error.render(name, advise)

    def error(self) -> IngotError:
        """The finding as the error of a run that cannot start."""
        kinds: dict[str, type[IngotError]] = {"data": DataError, "curriculum": DataError, "resume": CheckpointError}
        kind = kinds.get(self.code.partition(".")[0], ConfigError)
        if isinstance(self.cause, kind):
            return self.cause
        return kind(self.message, *self.settings, advice=self.advice, where=self.cause.where if self.cause else "")

    def record(self, name: Rename = str, advise: Rename = str) -> dict[str, Any]:
        """The finding as JSON."""
        told = self.render(name, advise)
        return {"code": self.code, "severity": self.severity, "message": told, "setting": name(self.setting)}


class Findings(list[Finding]):
    """What the checks of a run have found so far, in their order."""

    def add(self, code: str, severity: Severity, message: str, *settings: Setting, advice: str = "") -> None:
        """Add a finding about some settings."""
        self.append(Finding(code, severity, message, advice, settings))

    @contextmanager
    def noting(self, code: str, kind: type[IngotError] = IngotError) -> Iterator[None]:
        """A block whose error of a kind becomes a finding."""
        try:
            yield
        except kind as error:
            self.append(Finding.of(code, error))

    @property
    def blocked(self) -> bool:
        """Whether one of them keeps a run from starting."""
        return any(finding.blocks for finding in self)


def exit_code(findings: Sequence[Finding], strict: bool = False) -> int:
    """What `validate` ends with."""
    if any(finding.blocks for finding in findings):
        return BLOCKED
    if any(finding.severity == "warning" for finding in findings):
        return BLOCKED if strict else WARNED
    return CLEAN


def refuse(findings: Sequence[Finding]) -> None:
    """Raise what keeps a run from starting, the first of them."""
    for finding in findings:
        if finding.blocks:
            raise finding.error()
