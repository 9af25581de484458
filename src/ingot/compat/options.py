"""Tables of the options of other programs: nanoGPT's keys, gpt-simple's keys and golf's environment variables.

A table maps names to Options. Type and range checks, help, documentation, did-you-mean hints and the setting names in error
messages are all derived from it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from textwrap import wrap
from typing import Any, Literal

from ingot.config.fields import either
from ingot.errors import ConfigError, Rename

Kind = Literal["int", "float", "bool", "flag", "str", "list"]
KINDS: dict[Kind, tuple[str, tuple[type, ...]]] = {
    "int": ("a whole number", (int,)), "float": ("a number", (float,)), "bool": ("true or false", (bool,)),
    "flag": ("0 or 1", (bool,)), "str": ("text", (str,)), "list": ("a list", (list, tuple)),
}  # fmt: skip
BOUNDS = (("low", ">=", operator.ge), ("above", ">", operator.gt), ("high", "<=", operator.le), ("below", "<", operator.lt))
HELP_COLUMN = 34
LONGEST_VALUE = 80  # error messages truncate invalid values to this many characters


@dataclass(frozen=True)
class Option:
    """An option of another program: its type, default, meaning, range, and the Ingot setting that it maps to."""

    name: str
    kind: Kind
    default: Any
    help: str
    choices: tuple[str, ...] = ()
    low: float | None = None  # smallest allowed value
    high: float | None = None  # largest allowed value; math.inf allows infinity
    above: float | None = None  # exclusive lower bound
    below: float | None = None  # exclusive upper bound
    null: str = ""  # how the program writes "no value", such as None or null; empty if a value is required
    sets: str = ""  # the Ingot setting that this option maps to
    computed: bool = False  # translate() computes the Ingot setting instead of copying the value to it
    added: bool = False  # True if Ingot has this option but the original program does not

    @property
    def allowed(self) -> str:
        """Return a description of the allowed values, such as `a whole number >= 1 or null`."""
        bounds = [(sign, getattr(self, name)) for name, sign, _ in BOUNDS]
        limits = " and ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound not in (None, math.inf))
        words = self.choices or (f"{KINDS[self.kind][0]} {limits}".strip(),)
        return either(*words, *([self.null] if self.null else []))

    def check(self, value: Any, where: str = "") -> Any:
        """Convert a value to this option's type; raise ConfigError if it is not allowed. `where` is the value's origin.

        Whole numbers are accepted for floats, and floats without a fractional part for integers.
        """
        if value is None and self.null:
            return None
        checked = value
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300:
            if self.kind == "float":
                checked = float(value)
            elif self.kind == "int" and value == int(value):
                checked = int(value)
        valid = type(checked) in KINDS[self.kind][1] and checked in (self.choices or (checked,))
        if valid and self.kind in ("int", "float"):
            bounds = [(compare, getattr(self, name)) for name, _, compare in BOUNDS]
            finite = math.isfinite(checked) or checked == self.high
            valid = finite and all(bound is None or compare(checked, bound) for compare, bound in bounds)
        if not valid:
            text = " ".join(str(value).split())
            text = text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 3] + "..."
            raise ConfigError(f"{self.name}={text} must be {self.allowed}{f' ({where})' if where else ''}")
        return checked


def table(*options: Option) -> dict[str, Option]:
    """Return a dict that maps each option's name to the option."""
    return {option.name: option for option in options}


def defaults(options: Mapping[str, Option]) -> dict[str, Any]:
    """Return the default of every option."""
    return {name: option.default for name, option in options.items()}


def copied(options: Mapping[str, Option]) -> dict[str, str]:
    """Map each option whose value is copied unchanged to the Ingot setting that receives the value."""
    return {name: option.sets for name, option in options.items() if option.sets and not option.computed}


def names_of_settings(options: Mapping[str, Option], others: Mapping[str, str] | None = None) -> Rename:
    """Return a function that maps an Ingot setting's path to its name in the other program; `others` adds or replaces names."""
    names = {option.sets: name for name, option in options.items() if option.sets} | dict(others or {})
    return lambda path: names.get(path, path)


def closest(word: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the name closest to a misspelt word, or None if no name is similar enough."""
    return next(iter(get_close_matches(word, list(names), n=1, cutoff=cutoff)), None)


def help_lines(options: Iterable[Option], prefix: str = "--", show: Callable[[Any], str] = repr) -> list[str]:
    """Format options as help text: name, default, meaning and allowed values."""
    lines = []
    for option in options:
        head = f"  {prefix}{option.name}={show(option.default)}"
        body = wrap(f"{option.help} ({option.allowed}{', added by Ingot' if option.added else ''})", 76)
        if len(head) >= HELP_COLUMN:
            lines.append(head)
            head = ""
        lines.append(f"{head:<{HELP_COLUMN}}{body[0]}")
        lines += [f"{'':{HELP_COLUMN}}{line}" for line in body[1:]]
    return lines
