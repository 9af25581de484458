"""Errors that users see, each class with its exit code.

Every message is one readable line: what is wrong, where, and what to do. The command line prints it and exits without a
traceback. Settings in a message are placeholders, so that other front ends can show them under the names their users know.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

Rename = Callable[[str], str]
LONGEST, TAIL = 1000, 300  # limit in characters; longer messages lose their middle, but keep the last TAIL characters


def shown(text: str, kept: str = "\n\t") -> str:
    """Escape non-printable characters, except those in `kept`, so that untrusted text such as a file name can be printed."""
    return "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text)


def one_line(text: str) -> str:
    """Format a message as one line: escape non-printable characters, and leave out the middle of a long message."""
    text = " ".join(text.split())
    if len(text) > LONGEST:
        text = f"{text[: LONGEST - TAIL]} [{len(text) - LONGEST:,} characters left out] {text[-TAIL:]}"
    return shown(text)


@dataclass(frozen=True)
class Setting:
    """A setting mentioned in an error, shown as path=value (or path) and, in parentheses, the origin of the value."""

    path: str
    value: object = None
    origin: str = ""

    def render(self, name: Rename) -> str:
        """Return the setting as shown to the user, with its path renamed by `name`."""
        word = name(self.path)
        origin = f" ({self.origin})" if self.origin and word == self.path else ""  # omitted for a renamed setting
        return f"{word}{'' if self.value is None else f'={self.value}'}{origin}"


class IngotError(Exception):
    """Base class of errors shown to users: problems that are not bugs in Ingot.

    In `what` and `advice`, {0} is a placeholder for the first setting, {1} for the second, and so on.
    """

    exit_code = 1

    def __init__(self, what: str = "", *settings: Setting, advice: str = "", where: str = "") -> None:
        self.what, self.settings, self.advice, self.where = what, settings, advice, where
        super().__init__(self.render())

    def within(self, where: str) -> Self:
        """Prefix the message with the location of the error, and return the error."""
        self.where = f"{where}: {self.where}"
        self.args = (self.render(),)
        return self

    def render(self, name: Rename = str, advise: Rename = str) -> str:
        """Return the message, with its settings renamed by `name` and its advice rewritten by `advise`."""
        words = [setting.render(name) for setting in self.settings]
        what, advice = _fill(self.what, words), _fill(advise(self.advice), words)
        return one_line(self.where + (f"{what}{' ' if what.endswith(':') else '; '}{advice}" if advice else what))


def _fill(sentence: str, words: Sequence[str]) -> str:
    # Not str.format: file names in the message may contain braces.
    return re.sub(r"\{(\d+)\}", lambda found: words[int(found[1])] if int(found[1]) < len(words) else found[0], sentence)


class ConfigError(IngotError):
    """Raised when a setting is unknown, malformed or inconsistent with other settings."""

    exit_code = 2


class DataError(IngotError):
    """Raised when text, shards or a tokenizer are missing, damaged or inconsistent."""

    exit_code = 3


class CheckpointError(IngotError):
    """Raised when a run folder or checkpoint cannot be read, written or resumed."""

    exit_code = 4


class Unreadable(CheckpointError):
    """Raised when a checkpoint cannot be read because of permissions or a disk error, but may be undamaged."""

    def __init__(self, path: object, why: str | None) -> None:
        super().__init__(f"{path} cannot be read: {why}", advice="give this user read permission, or resume as a user who has it")


@dataclass(frozen=True)
class Change:
    """A setting whose value differs from the checkpoint's; in `said`, {0} is the name, {1} the old and {2} the new value."""

    setting: str
    was: object
    now: object
    said: str = "{0} was {1} and is {2}"

    def render(self, name: Rename = str) -> str:
        """Fill in the placeholders of `said`; `name` renames the setting and, when called with SETTING=VALUE, a value."""
        words = [name(self.setting)]
        for value in map(_shown, (self.was, self.now)):
            renamed = name(f"{self.setting}={value}")
            words.append(value if "=" in renamed else renamed)
        return _fill(self.said, words)


def _shown(value: object) -> str:
    """Format a value as in a config; mappings in a list are shown without their null and empty values."""
    if not isinstance(value, list):
        return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))
    entries = [{k: v for k, v in entry.items() if v not in (None, {})} if isinstance(entry, dict) else entry for entry in value]
    return str(entries).replace("'", "")


class CannotContinue(CheckpointError):
    """Raised when a valid checkpoint cannot be resumed because it was saved with different settings or data."""

    def __init__(self, path: object, changes: Sequence[Change]) -> None:
        self.path, self.changes = path, list(changes)
        super().__init__("", Setting("training.output_dir"), advice="undo the changes or choose another {0}")

    def render(self, name: Rename = str, advise: Rename = str) -> str:
        told = "; ".join(change.render(name) for change in self.changes)
        what = f"{self.path} cannot be continued: {told}"
        return self.where + IngotError(what, *self.settings, advice=self.advice).render(name, advise)


class RunError(IngotError):
    """Raised when an operation fails, for example because the loss is not finite, the run folder is in use or memory runs out."""

    exit_code = 1


class PeerLost(RunError):
    """Raised when another rank has failed; that rank's message gives the reason."""

    def __init__(self, exit_code: int = RunError.exit_code):
        super().__init__("another rank has ended; its message says why")
        self.exit_code = exit_code


class NotFinite(RunError):
    """Raised on every rank when the loss or a gradient is not finite, which would happen again after a restart."""


class Interrupted(BaseException):
    """Raised when a stop is requested during work that the next session repeats from the start.

    Like KeyboardInterrupt, this is not a subclass of Exception, because torch's compiler replaces every Exception with its own.
    """


NO_RESTART = 5  # a rank exits with this code instead of 1 after NotFinite, so that the elastic agent does not restart the ranks
INTERRUPTED = 130  # exit code of a program ended by SIGINT, by shell convention
