"""Values as text: YAML and command-line words to Python values, and back.

The setting decides what an unquoted word means: `123` is a number for training.max_steps and a name for data.path. So YAML is
first read into `Plain` text and converted later, by the same rule as words of the command line and the environment.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ingot.errors import ConfigError

if TYPE_CHECKING:
    import yaml

NULLS = ("null", "none", "~", "")
_WORDS = {"null": None, "none": None, "~": None, "": None, "true": True, "false": False}
_INTEGER = re.compile(r"[-+]?[0-9][0-9_]*")
_NUMBER = re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9_]+)([eE][-+]?[0-9]+)?")
_INFINITE = re.compile(r"[-+]?\.inf|\.nan", re.IGNORECASE)
_UNQUOTED = re.compile(r"[A-Za-z_](?:[\w./+-]|:(?=\w))*", re.ASCII)
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t"}
_AMBIGUOUS = {"null", "none", "true", "false", "yes", "no", "on", "off", "y", "n"}


class Plain(str):
    """Text written without quotes; its setting decides what it means."""


def parse_yaml(text: str, name: str, aliases: bool = False) -> Any:
    """Return the mappings, lists and strings of a YAML document; errors call it `name`, `aliases` (*name) are allowed or not."""
    import yaml

    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        return None if node is None else _Reader(name, aliases).read(node)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{name} is not valid YAML (line {line}): {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{name} is not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{name} is nested too deeply") from None


class _Reader:
    """Converts the nodes of one document to values."""

    def __init__(self, name: str, aliases: bool) -> None:
        self._name, self._aliases = name, aliases
        self._made: dict[int, Any] = {}  # values by node; an alias is the same node again
        self._open: set[int] = set()  # nodes whose children are being read

    def read(self, node: yaml.Node) -> Any:
        if id(node) in self._made or id(node) in self._open:
            if not self._aliases or id(node) in self._open:
                what = "write the value out where it is needed" if not self._aliases else "a value cannot be a part of itself"
                raise ConfigError(f"{self._name} line {node.start_mark.line + 1} is used by an alias (*name); {what}")
            return self._made[id(node)]
        self._open.add(id(node))
        value = self._made[id(node)] = self._value(node)
        self._open.discard(id(node))
        return value

    def _value(self, node: yaml.Node) -> Any:
        import yaml

        if not node.tag.startswith("tag:yaml.org,2002:") or node.tag.startswith("tag:yaml.org,2002:python"):
            line = node.start_mark.line + 1
            raise ConfigError(f"{self._name} line {line}: the tag {node.tag} is not allowed; write a plain value")
        if isinstance(node, yaml.ScalarNode):
            if node.style is not None:
                return str(node.value)
            return None if node.tag.endswith(":null") else Plain(node.value)
        if isinstance(node, yaml.SequenceNode):
            return [self.read(child) for child in node.value]
        mapping: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for key, child in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(f"{self._name} line {line}: a key must be a word")
            if key.value in mapping:
                raise ConfigError(f"{self._name} line {line}: {key.value} is written twice; keep one")
            if self._aliases and key.tag.endswith(":merge"):
                merged |= self._merged(child)
            else:
                mapping[key.value] = self.read(child)
        return {**merged, **mapping}

    def _merged(self, node: yaml.Node) -> dict[str, Any]:
        """Return the mapping that `<<: *name` merges; of several, the first takes precedence."""
        found = self.read(node)
        parts = found if isinstance(found, list) else [found]
        if not all(isinstance(part, dict) for part in parts):
            raise ConfigError(f"{self._name} line {node.start_mark.line + 1}: << needs a mapping")
        return {key: value for part in reversed(parts) for key, value in part.items()}


def scalar(text: str) -> Any:
    """Convert an unquoted word of a setting without a type: null, a boolean, a number, else text."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        if _INTEGER.fullmatch(text):
            return int(text)
        if _NUMBER.fullmatch(text):
            return float(text)
        if _INFINITE.fullmatch(text):
            return float(text.lower().replace(".", ""))
    except ValueError:  # 1__000, or more digits than Python reads
        return str(text)
    return str(text)


def plain_data(value: Any) -> Any:
    """Convert a free-form value to null, booleans, numbers, text, lists and mappings; TypeError for anything else."""
    if isinstance(value, Plain):
        return scalar(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, list | tuple):
        return [plain_data(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): plain_data(item) for key, item in value.items()}
    raise TypeError(f"{type(value).__name__} is neither a number, text, list nor mapping")


def format_value(value: Any) -> str:
    """Format a value as one line of YAML that `parse_yaml` and the setting's type convert back."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return _format_float(value)
    if isinstance(value, list):
        return "[" + ", ".join(map(format_value, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{format_value(str(key))}: {format_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, str) and not (_UNQUOTED.fullmatch(value) and value.lower() not in _AMBIGUOUS):
        return '"' + "".join(map(_escaped, value)) + '"'
    return str(value)


def _escaped(char: str) -> str:
    if char in _ESCAPES or char.isprintable():
        return _ESCAPES.get(char, char)
    return f"\\U{ord(char):08x}"


def _format_float(value: float) -> str:
    if not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    mantissa, mark, exponent = repr(value).partition("e")
    # YAML 1.1 reads 1e-08 as text, 1.0e-08 not.
    return mantissa + (".0" if mark and "." not in mantissa else "") + mark + exponent
