"""Findings of the checks before a run. Each has a code that never changes its meaning; docs/validate.md explains them.

An error or a budget finding keeps a run from starting. Codes that begin with data. or curriculum. then raise a data error, those
that begin with resume. a checkpoint error, and all others a config error.
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
    """One finding. {0} in its message stands for the first of its settings, as in an error."""

    code: str
    severity: Severity
    message: str
    advice: str = ""
    settings: tuple[Setting, ...] = ()
    cause: IngotError | None = None  # the error that the finding reports, if it comes from one

    @classmethod
    def of(cls, code: str, error: IngotError, severity: Severity = "error") -> Finding:
        """Return an error as a finding."""
        return cls(code, severity, error.what, error.advice, error.settings, error)

    @property
    def setting(self) -> str:
        """Return the dotted path of its first setting; empty if there is none."""
        return self.settings[0].path if self.settings else ""

    @property
    def blocks(self) -> bool:
        return self.severity in BLOCKING

    def render(self, name: Rename = str, advise: Rename = str) -> str:
        """Return the sentence, with settings renamed by `name` and advice replaced by `advise`."""
        error = self.cause or IngotError(self.message, *self.settings, advice=self.advice)
        return error.render(name, advise)

    def error(self) -> IngotError:
        """Return the error that keeps the run from starting."""
        kinds: dict[str, type[IngotError]] = {"data": DataError, "curriculum": DataError, "resume": CheckpointError}
        kind = kinds.get(self.code.partition(".")[0], ConfigError)
        if isinstance(self.cause, kind):
            return self.cause
        return kind(self.message, *self.settings, advice=self.advice, where=self.cause.where if self.cause else "")

    def record(self, name: Rename = str, advise: Rename = str) -> dict[str, Any]:
        """Return the finding as a JSON object."""
        told = self.render(name, advise)
        return {"code": self.code, "severity": self.severity, "message": told, "setting": name(self.setting)}


class Findings(list[Finding]):
    """The findings of a run's checks so far, in order."""

    def add(self, code: str, severity: Severity, message: str, *settings: Setting, advice: str = "") -> None:
        """Add a finding about some settings."""
        self.append(Finding(code, severity, message, advice, settings))

    @contextmanager
    def noting(self, code: str, kind: type[IngotError] = IngotError) -> Iterator[None]:
        """Turn an error of `kind` in a block into a finding."""
        try:
            yield
        except kind as error:
            self.append(Finding.of(code, error))

    @property
    def blocked(self) -> bool:
        """Return True if one of them keeps a run from starting."""
        return any(finding.blocks for finding in self)


def exit_code(findings: Sequence[Finding], strict: bool = False) -> int:
    """Return the exit code of `validate`."""
    if any(finding.blocks for finding in findings):
        return BLOCKED
    if any(finding.severity == "warning" for finding in findings):
        return BLOCKED if strict else WARNED
    return CLEAN


def refuse(findings: Sequence[Finding]) -> None:
    """Raise the first finding that keeps a run from starting."""
    for finding in findings:
        if finding.blocks:
            raise finding.error()
