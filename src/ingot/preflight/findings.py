"""Findings of the checks before a run. Each has a code that never changes its meaning; docs/validate.md explains them.

An error or a budget finding keeps a run from starting. Codes that begin with data. or curriculum. then raise a data error, those
that begin with resume. a checkpoint error, and all others a config error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from ingot.errors import CheckpointError, ConfigError, DataError, IngotError, Rename, Setting

Severity = Literal["error", "budget", "warning", "info"]
KINDS: dict[str, type[IngotError]] = {"data": DataError, "curriculum": DataError, "resume": CheckpointError}
CLEAN, BLOCKED, WARNED = 0, 1, 2  # exit codes of `validate`


@dataclass(frozen=True)
class Finding:
    """One finding; its `cause` holds the message, as the error that `train` raises if the finding keeps a run from starting."""

    code: str
    severity: Severity
    cause: IngotError

    @property
    def blocks(self) -> bool:
        return self.severity in ("error", "budget")

    def render(self, name: Rename = str, advise: Rename = str) -> str:
        """Return the message, with settings renamed by `name` and advice replaced by `advise`."""
        return self.cause.render(name, advise)

    def record(self, name: Rename = str, advise: Rename = str) -> dict[str, Any]:
        """Return the finding as a JSON object; `setting` is the first one that the message names."""
        setting = name(self.cause.settings[0].path) if self.cause.settings else ""
        return {"code": self.code, "severity": self.severity, "message": self.render(name, advise), "setting": setting}


class Findings(list[Finding]):
    """The findings of a run's checks so far, in order."""

    def add(self, code: str, severity: Severity, message: str, *settings: Setting, advice: str = "") -> None:
        """Add a finding about some settings; {0} in its message stands for the first of them, as in an error."""
        self.append(Finding(code, severity, IngotError(message, *settings, advice=advice)))

    @contextmanager
    def noting(self, code: str, kind: type[IngotError] = IngotError) -> Iterator[None]:
        """Turn an error of `kind` raised in the block into a finding."""
        try:
            yield
        except kind as error:
            self.append(Finding(code, "error", error))

    @property
    def blocked(self) -> bool:
        """Return True if any finding keeps a run from starting."""
        return any(finding.blocks for finding in self)

    def exit_code(self, strict: bool = False) -> int:
        """Return the exit code of `validate`."""
        if self.blocked:
            return BLOCKED
        return (BLOCKED if strict else WARNED) if any(finding.severity == "warning" for finding in self) else CLEAN

    def refuse(self) -> None:
        """Raise the first finding that keeps a run from starting."""
        for finding in self:
            if finding.blocks:
                kind, cause = KINDS.get(finding.code.partition(".")[0], ConfigError), finding.cause
                if isinstance(cause, kind):
                    raise cause
                raise kind(cause.what, *cause.settings, advice=cause.advice, where=cause.where)
