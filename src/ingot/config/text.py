"""Values as text: YAML and command-line words to Python values, and back.

The setting decides what an unquoted word means: `123` is a number for training.max_steps and a name for data.path. So YAML is
first read into `Plain` text and converted later, by the same rule as words of the command line and the environment.
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
    """Text written without quotes; its setting decides what it means."""


def parse_yaml(text: str, name: str, aliases: bool = False) -> Any:
    """Return the mappings, lists and strings of a YAML document called `name` in errors; `aliases` allows YAML's *name."""
    import yaml

    class Loader(yaml.SafeLoader):
        """PyYAML's loader without types: unquoted words stay text. It refuses a key that is written twice."""

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

    Loader.yaml_implicit_resolvers = {  # `null` and `<<` keep their meaning
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
    except ValueError:  # 1__000, or more digits than Python converts
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
        if not math.isfinite(value):
            return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
        # YAML 1.1 reads 1e-08 as text, but 1.0e-08 as a number.
        return re.sub(r"^(-?\d+)e", r"\1.0e", repr(value))
    if isinstance(value, list):
        return "[" + ", ".join(map(format_value, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{format_value(str(key))}: {format_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, str) and not (_UNQUOTED.fullmatch(value) and value.lower() not in _AMBIGUOUS):
        return '"' + "".join(_ESCAPES.get(c) or (c if c.isprintable() else f"\\U{ord(c):08x}") for c in value) + '"'
    return str(value)
