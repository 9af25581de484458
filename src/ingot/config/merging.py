"""Values from several sources become one: which model family holds, which value wins, whether it is allowed.

Problems are collected in a list while the rest goes on, so that one run of a command shows all of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

from ingot.config.families import FAMILIES
from ingot.config.fields import DEFAULT_FAMILY, Setting, either, item_at, known, sections, setting_at, settings, suggest
from ingot.config.schema import Config
from ingot.config.text import NULLS, Plain, format_value, plain_data, scalar
from ingot.errors import ConfigError
from ingot.errors import Setting as Named

TEXTS = ("evaluation.sample_prompt",)  # settings that may hold any character; the others name files, devices or projects
Path = tuple[str, ...]
Problem = str | ConfigError  # a sentence that names settings by their paths, or an error that has them as fields


@dataclass(frozen=True)
class Given:
    """One value as somebody wrote it; of equal paths the higher level wins."""

    path: Path
    value: Any
    origin: str
    level: int

    @property
    def name(self) -> str:
        """The dotted path."""
        return ".".join(self.path)


def place(origin: str) -> str:
    """Where to look for a mistake, in words."""
    kind, _, name = origin.partition(" ")
    places = {
        "file": f"in {name}",
        "recipe": f"in {origin}",
        "command": "on the command line",
        "sweep": "in --vary or --arms",
        "python": "in Python",
    }
    return places.get(kind, "in the environment")


def settle_family(given: list[Given], problems: list[Problem]) -> tuple[str, list[Given]]:
    """The model family that holds in the end, and the values that are settings of it.

    A source that chooses a family outdates what sources below it set for another; what it or a source above it sets must fit.
    """
    family, chosen = DEFAULT_FAMILY, Given((), None, "default", -1)
    named_at = {item.level for item in given if item.name == "model.family"}
    for item in given:
        if item.name == "model.family" and item.value not in list(FAMILIES):
            problems.append(_mistake(settings()["model.family"], item.value, item.origin))
        elif item.name == "model.family":
            family, chosen = str(item.value), item
        elif item.name == "model.file" and not _is_null(item.value) and item.level not in named_at:
            family, chosen = "file", item
    kept = [item for item in given if item.name != "model.family" and _fits(item, family, chosen.level, problems)]
    if chosen.path:
        kept.append(Given(("model", "family"), family, chosen.origin, chosen.level))
    return family, kept


def _is_null(value: Any) -> bool:
    return value is None or (isinstance(value, Plain) and value.lower() in NULLS)


def _fits(item: Given, family: str, chosen_at: int, problems: list[Problem]) -> bool:
    families = [name for name in FAMILIES if setting_at(item.path, name)]
    if not families:
        problems.append(_unknown(item))
    elif family not in families and item.level >= chosen_at:
        problems.append(f"{item.name} ({place(item.origin)}) is a setting of model.family={either(*families)}, not of {family}")
    return family in families


def _unknown(item: Given) -> str:
    name, meant = item.name, suggest(item.name)
    if name in sections():
        example = next(path for path in settings() if path.startswith(f"{name}."))
        return f"{name} ({place(item.origin)}) is a section; set one of its settings, such as {example}"
    if item.origin.startswith("environment "):
        name, meant = item.origin.removeprefix("environment "), [f"INGOT_{path.upper().replace('.', '__')}" for path in meant]
    elif item.origin == "command line" and len(item.path) == 1:
        name, meant = f"--{name}", [f"--{path}" for path in meant]
    hint = f"did you mean {either(*meant)}?" if meant else "`ingot config schema` lists all settings"
    return f"unknown setting {name} ({place(item.origin)}); {hint}"


def merge(given: list[Given], family: str, problems: list[Problem]) -> tuple[dict[str, Any], dict[Path, str]]:
    """One tree of values as their settings understand them, and the origin of each."""
    tree: dict[str, Any] = {}
    origins: dict[Path, str] = {}
    for item in sorted(given, key=lambda item: item.level):
        setting = setting_at(item.path, family)
        assert setting is not None, item.path
        try:
            value = _understand(setting, item.value)
            if isinstance(value, str) and not setting.free_form and not _can_be_told(value, item.name):
                raise ConfigError(f"{item.name} holds a NUL or half a character, which no name and no text has")
        except ConfigError as error:
            problems.append(f"{error} ({place(item.origin)})")
            continue
        except TypeError:
            problems.append(_mistake(setting, item.value, item.origin, item.name))
            continue
        branch = tree
        for key in item.path[:-1]:
            if not isinstance(branch.get(key), dict):
                branch[key] = {}
            branch = branch[key]
        if value != {} or not isinstance(branch.get(item.path[-1]), dict):
            branch[item.path[-1]] = value
            origins[item.path] = item.origin
    return tree, origins


def _understand(setting: Setting, value: Any) -> Any:
    if setting.items:
        return _understand_items(setting, value)
    if setting.free_form or isinstance(value, list | Mapping):
        return plain_data(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Plain):
        if "null" in setting.types and value.lower() in NULLS:
            return None
        value = str(value) if setting.takes_any_text or value in setting.choices else scalar(value)
    if isinstance(value, bool) and "boolean" not in setting.types:
        raise TypeError("a truth value is not a number")  # pydantic would take true for 1
    return value


def _can_be_told(text: str, name: str) -> bool:
    try:
        return b"\0" not in os.fsencode(text) or name in TEXTS
    except UnicodeEncodeError:
        return False


def _understand_items(setting: Setting, value: Any) -> list[dict[str, Any]]:
    """A list of mappings, each of whose values means what its own setting makes of it."""
    if not isinstance(value, list | tuple) or not all(isinstance(entry, Mapping) for entry in value):
        raise TypeError("no list of mappings")
    found: list[dict[str, Any]] = []
    for number, entry in enumerate(value):
        name = f"{setting.path}.{number}"
        found.append({})
        for key, item in entry.items():
            if key not in setting.items:
                close = get_close_matches(str(key), setting.items, n=1)
                hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(setting.items)}"
                raise ConfigError(f"unknown setting {name}.{key}; {hint}")
            try:
                found[-1][key] = _understand(setting.items[key], item)
            except TypeError:
                raise ConfigError(
                    f"{{0}}: must be {_allowed(setting.items[key])}", Named(f"{name}.{key}", _shown(item))
                ) from None
    return found


def validate(tree: dict[str, Any], origins: dict[Path, str], family: str, problems: list[Problem]) -> Config:
    """The Config of a merged tree, or a ConfigError with all problems."""
    details: dict[Path, list[Mapping[str, Any]]] = {}
    try:
        config = Config.model_validate(tree)
        if not problems:
            return config
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            path = _path_of(detail)
            path = path[:4] if item_at(path, family) else path[:2]
            details.setdefault(path if detail["type"] != "value_error" else (), []).append(detail)
    together = details.pop((), [])
    for path, found in details.items():
        setting = item_at(path, family) or setting_at(path, family)
        assert setting is not None, found
        given = {of: origin for of, origin in origins.items() if of[:2] == path[:2]}  # several in a mapping
        origin = given.get(_path_of(found[0])[:3]) or given.get(path[:2]) or next(iter(given.values()), "default")
        problems.append(_explain(setting, tree, origin, found))
    if not problems:  # what does not fit together is only worth saying when each value is sound
        problems = [str(detail["ctx"]["error"]) for detail in together]
    raise _together(problems)


def _path_of(detail: Mapping[str, Any]) -> Path:
    """Where in the tree an error is, without the family that a model's errors carry."""
    section, *rest = map(str, detail["loc"] or ("",))
    return (section, *rest[1:]) if section == "model" else (section, *rest)


def _together(problems: Sequence[Problem]) -> ConfigError:
    """One error of all problems, whose settings are fields: checks of values know no errors and name settings by their paths."""
    named: list[Named] = []

    def number(setting: Named) -> str:
        named.append(setting)
        return f"{{{len(named) - 1}}}"

    paths = re.compile(rf"\b({'|'.join(map(re.escape, sorted(known(), key=len, reverse=True)))})(?!\w)")
    told = [
        problem.what.replace("{0}", number(problem.settings[0]))
        if isinstance(problem, ConfigError)
        else paths.sub(lambda found: number(Named(found[0])), problem)
        for problem in problems
    ]
    return ConfigError("; ".join(told), *named)


def _explain(setting: Setting, tree: dict[str, Any], origin: str, details: list[Mapping[str, Any]]) -> Problem:
    section, name, *place_in_list = setting.path.split(".")
    kind, message = details[0]["type"], details[0]["msg"]
    if kind == "missing":
        return f"{setting.path} is not set ({setting.description.rstrip('.')})"
    value = tree[section][name]
    if place_in_list:
        value = value[int(place_in_list[0])][place_in_list[1]]
    if len(details) == 1 and kind.startswith(("greater_", "less_", "finite_")):
        words = (
            message.replace("Input should be ", "")
            .replace("greater than or equal to", "at least")
            .replace("less than or equal to", "at most")
        )
        if isinstance(most := details[0].get("ctx", {}).get("le"), float):
            words = f"at most {most:g}"
        return ConfigError(f"{{0}}: must be {words}", Named(setting.path, _shown(value), origin))
    return _mistake(setting, value, origin)


def _mistake(setting: Setting, value: Any, origin: str, name: str = "") -> ConfigError:
    allowed = "plain data: numbers, text, lists or mappings" if setting.free_form and name else _allowed(setting)
    return ConfigError(f"{{0}}: must be {allowed}", Named(name or setting.path, _shown(value), origin))


def _allowed(setting: Setting) -> str:
    article = {"integer": "an ", "number": "a ", "mapping": "a ", "list": "a "}.get(setting.allowed.split()[0], "")
    return article + setting.allowed


def _shown(value: Any) -> str:
    text = " ".join((value if isinstance(value, Plain) else format_value(value)).split())
    return text if len(text) <= 80 else f"{text[:77]}..."
