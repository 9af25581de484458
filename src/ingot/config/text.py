"""Conversion of values from text (YAML, command line, environment) to Python and back.

The type of a setting determines how an unquoted scalar is parsed: `123` is a number for training.max_steps and a name for
data.path. YAML scalars are therefore read as `Plain` text first and converted later, like command-line and environment values.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from typing import Any

from ingot.errors import ConfigError

NULLS = ("null", "none", "~", "")
_WORDS = {"null": None, "none": None, "~": None, "": None, "true": True, "false": False}
_INTEGER = re.compile(r"[-+]?[0-9][0-9_]*")
_NUMBER = re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9_]+)([eE][-+]?[0-9]+)?")
_INFINITE = re.compile(r"[-+]?\.inf|\.nan", re.IGNORECASE)
_UNQUOTED = re.compile(r"[A-Za-z_](?:[\w./+-]|:(?=\w))*", re.ASCII)
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t"}
_AMBIGUOUS = {"null", "none", "true", "false", "yes", "no", "on", "off", "y", "n"}


class Plain(str):
    """An unquoted scalar, which is converted according to the type of its setting."""


def parse_yaml(text: str, name: str, aliases: bool = False) -> Any:
    """Parse a YAML document into mappings, lists and strings; errors mention `name`, and `aliases` allows YAML aliases (*x)."""
    import yaml

    class Loader(yaml.SafeLoader):
        """PyYAML's loader without type conversion: unquoted scalars stay text. Duplicate keys are errors."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            if not aliases and self.check_event(yaml.AliasEvent):
                line = self.get_mark().line + 1
                raise ConfigError(f"{name} line {line}: aliases (*name) are not supported; write the value out")
            return super().compose_node(parent, index)

        def compose_mapping_node(self, anchor: Any) -> Any:
            node, keys = super().compose_mapping_node(anchor), set()
            for key, _ in node.value:
                if key.value in keys:
                    raise ConfigError(f"{name} line {key.start_mark.line + 1}: {key.value} is written twice; keep one")
                keys.add(key.value if isinstance(key, yaml.ScalarNode) else key)
            return node

    Loader.yaml_implicit_resolvers = {  # of the implicit types, keep only null and the merge key `<<`
        first: [(tag, pattern) for tag, pattern in resolvers if tag.endswith((":null", ":merge"))]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    Loader.add_constructor("tag:yaml.org,2002:str", lambda _, node: str(node.value) if node.style else Plain(node.value))  # type: ignore[attr-defined]
    try:
        loader = Loader(text)
        node = loader.get_single_node()
        return None if node is None else loader.construct_object(node, deep=True)  # type: ignore[no-untyped-call]
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{name} is not valid YAML (line {line}): {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a malformed number or date with an explicit tag
        raise ConfigError(f"{name} is not valid YAML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{name} is nested too deeply") from None


def scalar(text: str) -> Any:
    """Parse an unquoted scalar of an untyped setting as null, a boolean or a number if possible, else as a string."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        if _INTEGER.fullmatch(text):
            return int(text)
        if _NUMBER.fullmatch(text):
            return float(text)
        if _INFINITE.fullmatch(text):
            return float(text.lower().replace(".", ""))
    except ValueError:  # for example 1__000, or more digits than int() accepts
        return str(text)
    return str(text)


def plain_data(value: Any) -> Any:
    """Convert a free-form value to None, booleans, numbers, strings, lists and dicts; raise TypeError for anything else."""
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
    raise TypeError(f"{type(value).__name__} is not a number, string, list or mapping")


def format_value(value: Any) -> str:
    """Format a value as one line of YAML that loads back to the same value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        if not math.isfinite(value):
            return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
        # YAML 1.1 parsers read 1e-08 as a string, but 1.0e-08 as a number.
        return re.sub(r"^(-?\d+)e", r"\1.0e", repr(value))
    if isinstance(value, list):
        return "[" + ", ".join(map(format_value, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{format_value(str(key))}: {format_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, str) and not (_UNQUOTED.fullmatch(value) and value.lower() not in _AMBIGUOUS):
        return '"' + "".join(_ESCAPES.get(c) or (c if c.isprintable() else f"\\U{ord(c):08x}") for c in value) + '"'
    return str(value)
