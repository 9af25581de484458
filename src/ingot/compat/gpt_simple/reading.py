"""From a file and a command line to a Config of gpt-simple's: everything is merged first and checked once, overrides included.

Also here: whether a YAML file is gpt-simple's or ours. Both have the sections model, data, optimizer and training, so the keys
that only one of the two has decide.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ingot.compat.gpt_simple.config import SECTIONS, Config, all_keys
from ingot.compat.gpt_simple.names import THEIRS
from ingot.config.fields import known
from ingot.config.text import Plain, parse_yaml
from ingot.errors import ConfigError
from ingot.runtime.files import open_to_read, readable

Values = dict[str, tuple[Any, str]]  # of keys by their dotted paths, each with where it was set


def read_config(path: str | Path, overrides: Mapping[str, Any] | None = None) -> Config:
    """The config of a file, with what a command line sets besides; every mistake found is in the one ConfigError raised.

    A command line may also have settings of ours that are not keys there, such as training.device.
    """
    tree, problems = read_tree(path), list[str]()
    if found := [section for section in OURS if section in tree]:
        raise ConfigError(
            f"{path} has the section {found[0]}, which is Ingot's: `ingot train --config {path}` takes it; gpt-simple's settings "
            "of a run are in the config.json beside its config.yaml"
        )
    values = _flatten(tree, f"in {path}", problems)
    settings: dict[str, Any] = {}
    for name, value in (overrides or {}).items():
        if name in known() and name not in all_keys() and name not in THEIRS:
            settings[name] = value
        else:
            values[name] = (Plain(value) if isinstance(value, str) else value, "on the command line")
    return _build(values, settings, problems)


def read_tree(path: str | Path) -> dict[str, Any]:
    """The sections of a file as they are written there: JSON by its suffix, else YAML."""
    file = Path(path)
    with readable(file, ConfigError):
        try:
            with open_to_read(file) as opened:
                text = opened.read().decode("utf-8-sig")
        except FileNotFoundError:
            raise ConfigError(f"there is no config file {file}; `gpt-simple init -o {file}` writes one") from None
    if file.suffix == ".json":
        try:
            tree = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{file} is not valid JSON: {error}") from None
    else:
        tree = parse_yaml(text, str(file), aliases=True)
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{file} is not a config: it needs sections such as `training:` with keys below them")
    return tree


def is_gpt_simple(path: str | Path) -> bool:
    """Whether the keys of a file are gpt-simple's and not ours; ConfigError where it has keys of both kinds."""
    tree = read_tree(path)
    found = [f"{section}.{name}" for section, keys in tree.items() if isinstance(keys, Mapping) for name in keys]
    theirs = [name for name in found if name in all_keys() and name not in known()]
    ours = [name for name in found if name in known() and name not in all_keys()]
    ours += [str(section) for section in tree if section in OURS]
    if theirs and ours:
        raise ConfigError(f"{path} has keys of both kinds: {theirs[0]} is gpt-simple's and {ours[0]} is Ingot's; keep one kind")
    return bool(theirs)


OURS = ("base", "budget", "evaluation", "artifact", "tracking")  # what only a config file of ours has at its top


def _flatten(tree: Mapping[str, Any], where: str, problems: list[str]) -> Values:
    found: Values = {}
    for section, keys in tree.items():
        if section not in SECTIONS:
            problems.append(f"unknown section {section} ({where}); {_hint(str(section), SECTIONS)}")
        elif keys is not None and not isinstance(keys, Mapping):
            problems.append(f"{section} ({where}) must be a section with keys below it")
        else:
            found |= {f"{section}.{name}": (value, where) for name, value in (keys or {}).items()}
    return found


def _build(values: Values, settings: dict[str, Any], problems: list[str]) -> Config:
    sections: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for path, (value, where) in values.items():
        if path not in all_keys():
            problems.append(f"unknown key {path} ({where}); {_suggestion(path)}")
            continue
        section, _, name = path.partition(".")
        try:
            sections[section][name] = all_keys()[path].understand(value)
        except ConfigError as error:
            problems.append(f"{error} ({where})")
    if not problems:  # what does not fit together is only worth saying when each value is sound
        try:
            made = {name: section(**sections[name]) for name, section in SECTIONS.items()}
            return Config(**made, given=frozenset(values), settings=settings)  # type: ignore[arg-type]
        except ConfigError as error:
            problems.append(str(error))
    raise ConfigError("; ".join(problems))


def _suggestion(path: str) -> str:
    """What an unknown key may have meant: the name of ours for one of its keys, a name in another section, or a misspelt one."""
    if path in THEIRS:
        return f"gpt-simple calls it {THEIRS[path]}"
    if path in known():
        return "it is a setting of Ingot's; a file with its settings is for `ingot train --config`"
    section, _, name = path.rpartition(".")
    same = [one for one in all_keys() if one.partition(".")[2] == name]
    if same:
        return f"did you mean {same[0]}?"
    return _hint(path, [one for one in all_keys() if one.startswith(f"{section}.")] or all_keys())


def _hint(word: str, words: Iterable[str]) -> str:
    listed = list(words)
    close = get_close_matches(word, listed, n=1)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(one.rpartition('.')[2] for one in listed)}"
