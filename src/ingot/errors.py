"""The mistakes a user can make and the mishaps a run can meet, each with the exit code its class is known by.

Every message is one line that can be read: what is wrong, where, and what to do. The command line prints it and exits; nobody
sees a traceback. Settings that a message names are fields of it, so that a door can give them the names its users know.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

Rename = Callable[[str], str]
LONGEST, TAIL = 1000, 300  # characters of a message, and of its end where the middle is left out


def shown(text: str, kept: str = "\n\t") -> str:
    """The same text with what no terminal should be sent written as escapes: a name may hold any character."""
    return "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text)


def one_line(text: str) -> str:
    """A message as it is told: in one line of a length that can be read, whatever names and values stand in it."""
    text = " ".join(text.split())
    if len(text) > LONGEST:
        text = f"{text[: LONGEST - TAIL]} [{len(text) - LONGEST:,} characters left out] {text[-TAIL:]}"
    return shown(text)


@dataclass(frozen=True)
class Setting:
    """A setting that an error names, by its dotted path; with a value it reads path=value (where that was set)."""

    path: str
    value: object = None
    origin: str = ""

    def render(self, name: Rename) -> str:
        """The setting in the words of a door."""
        word = name(self.path)
        origin = f" ({self.origin})" if self.origin and word == self.path else ""  # of our settings, not of a door's
        return f"{word}{'' if self.value is None else f'={self.value}'}{origin}"


class IngotError(Exception):
    """Something went wrong that is not a bug of ours.

    In `what` and `advice`, {0} stands for the first of the settings, {1} for the second, and so on.
    """

    exit_code = 1

    def __init__(self, what: str = "", *settings: Setting, advice: str = "", where: str = "") -> None:
        self.what, self.settings, self.advice, self.where = what, settings, advice, where
        super().__init__(self.render())

    def within(self, where: str) -> Self:
        """This error, which says first where it came up."""
        self.where = f"{where}: {self.where}"
        self.args = (self.render(),)
        return self

    def render(self, name: Rename = str, advise: Rename = str) -> str:
        """The sentence, with a door's names for settings and, where it has better advice than ours, with that."""
        words = [setting.render(name) for setting in self.settings]
        what, advice = _fill(self.what, words), _fill(advise(self.advice), words)
        return one_line(self.where + (f"{what}{' ' if what.endswith(':') else '; '}{advice}" if advice else what))


def _fill(sentence: str, words: Sequence[str]) -> str:
    # Not str.format: the names of files are in the sentence too, and may have braces of their own.
    return re.sub(r"\{(\d+)\}", lambda found: words[int(found[1])] if int(found[1]) < len(words) else found[0], sentence)


class ConfigError(IngotError):
    """A setting is unknown, malformed or does not fit the others."""

    exit_code = 2


class DataError(IngotError):
    """Text, shards or a tokenizer are missing, damaged or do not belong together."""

    exit_code = 3


class CheckpointError(IngotError):
    """A run folder or checkpoint cannot be read, written or continued."""

    exit_code = 4


class Unreadable(CheckpointError):
    """A checkpoint that is there and that this process may not read, or the disk does not give: it is not damaged."""

    def __init__(self, path: object, why: str | None) -> None:
        super().__init__(f"{path} cannot be read: {why}", advice="let this user read it, or go on where it can be read")


@dataclass(frozen=True)
class Change:
    """What is not as it was when a checkpoint was saved; {0} in `said` is the setting, {1} and {2} what it was and is."""

    setting: str
    was: object
    now: object
    said: str = "{0} was {1} and is {2}"

    def render(self, name: Rename = str) -> str:
        """The change in the words of a door."""
        return _fill(self.said, [name(self.setting), _shown(self.was), _shown(self.now)])


def _shown(value: object) -> str:
    """A value as it is written in a config; of the entries of a list, what was set."""
    if not isinstance(value, list):
        return str(value)
    entries = [{k: v for k, v in entry.items() if v not in (None, {})} if isinstance(entry, dict) else entry for entry in value]
    return str(entries).replace("'", "")


class CannotContinue(CheckpointError):
    """A checkpoint that is sound, and not of a run with these settings and data."""

    def __init__(self, path: object, changes: Sequence[Change]) -> None:
        self.path, self.changes = path, list(changes)
        super().__init__("", Setting("training.output_dir"), advice="set it back or choose another {0}")

    def render(self, name: Rename = str, advise: Rename = str) -> str:
        told = "; ".join(change.render(name) for change in self.changes)
        what = f"{self.path} cannot be continued: {told}"
        return self.where + IngotError(what, *self.settings, advice=self.advice).render(name, advise)


class RunError(IngotError):
    """Training had to stop: the loss is not finite, or the folder is in use."""

    exit_code = 1


class PeerLost(RunError):
    """Another rank is gone, or fails as this one does; it is the one that says why."""

    def __init__(self, exit_code: int = RunError.exit_code):
        super().__init__("another rank has ended; its message says why")
        self.exit_code = exit_code


class Interrupted(BaseException):
    """This process was asked to stop in the middle of something that the next session can do from its beginning.

    Like KeyboardInterrupt it is no Exception: torch's compiler catches those and makes errors of its own of them.
    """


INTERRUPTED = 130  # exit code after a SIGINT that follows another signal, as shells know it
