"""What a key of gpt-simple's YAML may be, and what a value means that somebody wrote for it.

The keys themselves are the fields of the four sections in config.py. A word without quotes means what its key makes of it, so
`learning_rate: 3e-4` is a number and `mixed_precision: no` the word, both of which YAML alone reads otherwise.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ingot.config.fields import either
from ingot.config.text import NULLS, Plain, format_value, scalar
from ingot.errors import ConfigError

META = "key"  # under which a field of a section keeps its Rule
TRUTHS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}  # YAML 1.1 reads these so
KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text", "list": "a list of phases"}


@dataclass(frozen=True)
class Rule:
    """What a key may be: its meaning, and the words or the range its value must be in."""

    meaning: str
    words: tuple[str, ...] = ()
    low: float | None = None  # the least value
    above: float | None = None
    high: float | None = None  # the largest
    below: float | None = None


@dataclass(frozen=True)
class Key:
    """One of the 59 keys."""

    path: str
    kind: str  # a key of KINDS
    optional: bool  # whether it may be null
    default: Any
    rule: Rule

    @property
    def allowed(self) -> str:
        """What a value may be, in words."""
        r = self.rule
        bounds = [(">=", r.low), (">", r.above), ("<=", r.high), ("<", r.below)]
        limits = " and ".join(f"{sign} {value:g}" for sign, value in bounds if value is not None)
        words = r.words or (f"{KINDS[self.kind]} {limits}".strip(),)
        return either(*words, *(["null"] if self.optional else []))

    def understand(self, value: Any) -> Any:
        """What a value means for this key; ConfigError where it means nothing."""
        found = self._typed(value)
        if found is None and not self.optional:
            raise self._refused(value)
        return self._in_range(found, value) if found is not None else None

    def _typed(self, value: Any) -> Any:
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        if value is None or (isinstance(value, Plain) and value.lower() in NULLS):
            return "" if self.kind == "str" and not self.optional else None
        match self.kind:
            case "str":
                return self._text(value)
            case "bool":
                found = TRUTHS.get(value.lower(), value) if isinstance(value, str) else value
                if not isinstance(found, bool):
                    raise self._refused(value)
                return found
            case "list":
                return value
        found = scalar(value) if isinstance(value, str) else value
        if self.kind == "int" and isinstance(found, float) and found.is_integer():
            found = int(found)
        if isinstance(found, bool) or not isinstance(found, int if self.kind == "int" else int | float):
            raise self._refused(value)
        return found if self.kind == "int" else float(found)

    def _text(self, value: Any) -> str:
        if isinstance(value, list | Mapping):
            raise self._refused(value)
        if "no" in self.rule.words and TRUTHS.get(str(value).lower()) is False:
            return "no"  # YAML's own reading of an unquoted no is the truth value
        return str(value)

    def _in_range(self, found: Any, value: Any) -> Any:
        r = self.rule
        if r.words and found not in r.words:
            raise self._refused(value)
        if isinstance(found, int | float) and not isinstance(found, bool):
            small = (r.low is not None and found < r.low) or (r.above is not None and found <= r.above)
            large = (r.high is not None and found > r.high) or (r.below is not None and found >= r.below)
            if small or large or not math.isfinite(found):
                raise self._refused(value)
        return found

    def _refused(self, value: Any) -> ConfigError:
        text = " ".join((value if isinstance(value, str) else format_value(value)).split())
        return ConfigError(f"{self.path}={text if len(text) <= 80 else text[:77] + '...'} must be {self.allowed}")


def key(default: Any, meaning: str, *words: str, **bounds: float) -> Any:
    """A field of a section that is a key."""
    return field(default=default, metadata={META: Rule(meaning, words, **bounds)})
