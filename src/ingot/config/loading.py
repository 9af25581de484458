"""From a recipe, a file, the environment, the command line, a sweep and Python to one validated Config.

Later sources win: defaults < recipe < file < environment < command line < sweep < Python. Everything is merged first and
validated once, so a mistake is reported with all the others and with the place it came from.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ingot.config.families import FAMILIES
from ingot.config.fields import leaf_values, sections, setting_at
from ingot.config.merging import Given, Problem, merge, place, settle_family, validate
from ingot.config.recipes import find_recipe
from ingot.config.schema import Config
from ingot.config.text import Plain, parse_yaml
from ingot.errors import ConfigError

_Source = tuple[str, Mapping[str, Any]]  # where it came from, and its values as a tree


@dataclass(frozen=True)
class ResolvedConfig:
    """A validated config, where each of its values came from, a name for the run, and the files that took part."""

    config: Config
    origins: dict[str, str]
    recipe: str | None
    files: tuple[Path, ...] = ()


def load_config(
    recipe: str | None = None,
    file: Path | str | None = None,
    overrides: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    sweep: Mapping[str, Any] | None = None,
    python: Mapping[str, Any] | None = None,
    measured: Mapping[str, Any] | None = None,
) -> ResolvedConfig:
    """Merge all sources and validate the result; every mistake found is in the one ConfigError raised.

    `measured` goes above the recipe and below the file.
    """
    documents, name = _documents(recipe, file, measured or {})
    problems: list[Problem] = []
    given = _given(documents, overrides, environment, sweep, python, problems)
    family, given = settle_family(given, problems)
    tree, origins = merge(given, family, problems)
    config = validate(tree, origins, family, problems)
    told = {".".join(path): origins.get(path, "default") for path, _ in leaf_values(config)}
    return ResolvedConfig(config, told, name, tuple(Path(o.removeprefix("file ")) for o, _ in documents if o.startswith("file ")))


@dataclass(frozen=True)
class Sources:
    """What a config that is loaded more than once is made of."""

    recipe: str | None = None
    file: Path | str | None = None
    overrides: Mapping[str, Any] | None = None
    environment: Mapping[str, str] | None = None
    python: Mapping[str, Any] | None = None

    def load(self, measured: Mapping[str, Any] | None = None) -> ResolvedConfig:
        return load_config(self.recipe, self.file, self.overrides, self.environment, python=self.python, measured=measured)

    def above_recipe(self) -> dict[str, Any]:
        """What is set above the recipe, by names, each value as its setting understands it; mistakes are left to `load`."""
        problems: list[Problem] = []
        documents, _ = _documents(self.recipe, self.file, {})
        given = _given(documents, self.overrides, self.environment, None, self.python, problems)
        family, given = settle_family(given, problems)
        tree, origins = merge([item for item in given if not item.origin.startswith("recipe ")], family, problems)
        return {f"{path[0]}.{path[1]}": tree[path[0]][path[1]] for path in origins if len(path) == 2}


def _given(
    documents: list[_Source],
    overrides: Mapping[str, Any] | None,
    environment: Mapping[str, str] | None,
    sweep: Mapping[str, Any] | None,
    python: Mapping[str, Any] | None,
    problems: list[Problem],
) -> list[Given]:
    """Every value of every source, with its place among them."""
    words = {path: Plain(value) if isinstance(value, str) else value for path, value in (overrides or {}).items()}
    variables = _variables(os.environ if environment is None else environment)
    levels: list[list[_Source]] = [
        *([document] for document in documents),
        variables,
        [("command line", words)],
        [("sweep", sweep or {})],
        [("python", python or {})],
    ]
    return [
        Given(path, value, origin, level)
        for level, sources in enumerate(levels)
        for origin, tree in sources
        for path, value in _flatten(tree, origin, problems).items()
    ]


def _documents(recipe: str | None, file: Path | str | None, measured: Mapping[str, Any]) -> tuple[list[_Source], str | None]:
    """The YAML documents that take part, bases first, with what was measured for the recipe, and a name for the run."""
    below = _chain(find_recipe(recipe).path, f"recipe {recipe}") if recipe is not None else []
    below += [(f"recipe {recipe}, measured", measured)] if measured else []
    if file is None:
        return below, recipe
    chain = _chain(Path(file), f"file {file}")
    base = chain[-2][0] if len(chain) > 1 else ""
    if base and recipe is not None:
        raise ConfigError(f"{file} builds on {base} by its `base:`, so the recipe {recipe} cannot be given as well; keep one")
    return below + chain, recipe or (base.removeprefix("recipe ") if base.startswith("recipe ") else Path(file).stem)


def _chain(path: Path, origin: str, above: tuple[Path, ...] = ()) -> list[_Source]:
    """A YAML file after everything it builds on."""
    real = Path(os.path.realpath(path))
    if real in above:
        circle = " -> ".join(step.name for step in (*above, path))
        raise ConfigError(f"the `base:` lines go in a circle: {circle}; take one out")
    tree = _read(path)
    base = tree.pop("base", None)
    if base is None:
        return [(origin, tree)]
    if not isinstance(base, str):
        raise ConfigError(f"base ({place(origin)}) must be the name of a recipe or a YAML file")
    if base.endswith((".yaml", ".yml")):
        below, below_origin = path.parent / base, f"file {path.parent / base}"
    else:
        below, below_origin = find_recipe(base).path, f"recipe {base}"
    return [*_chain(below, below_origin, (*above, real)), (origin, tree)]


def _read(path: Path) -> dict[str, Any]:
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; give a YAML file, such as the config.yaml of a run folder")
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} cannot be read: it is a pipe or a device, not a plain file; give a YAML file")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"there is no config file {path}; `ingot init -o {path}` writes one") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; give a file that can be read") from None
    tree = parse_yaml(text, str(path))
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} is not a config: it needs sections such as `training:` with settings below them")
    return tree


def _variables(environment: Mapping[str, str]) -> list[_Source]:
    """The environment variables that are settings: INGOT_TRAINING__SEED sets training.seed."""
    names = sorted(name for name in environment if name.startswith("INGOT_") and "__" in name)
    return [
        (f"environment {name}", {name.removeprefix("INGOT_").lower().replace("__", "."): Plain(environment[name])})
        for name in names
    ]


def _flatten(tree: Mapping[str, Any], origin: str, problems: list[Problem]) -> dict[tuple[str, ...], Any]:
    """The paths and values of one source; a free-form mapping is taken apart into its entries."""
    entries: dict[tuple[str, ...], Any] = {}

    def put(path: tuple[str, ...], value: Any) -> None:
        found = [setting for family in FAMILIES if (setting := setting_at(path, family))]
        free_form, listed = any(setting.free_form for setting in found), any("array" in setting.types for setting in found)
        if (free_form or listed) and isinstance(value, Plain) and value[:1] in ("[", "{", "'", '"'):
            value = parse_yaml(value, f"{'.'.join(path)} ({origin})")
        if free_form and isinstance(value, Mapping) and value:
            for key, item in value.items():
                put((*path, str(key)), item)
        elif path in entries:
            problems.append(f"{'.'.join(path)} is set twice ({place(origin)}); keep one")
        else:
            entries[path] = value

    for key, value in tree.items():
        path = tuple(str(key).split("."))
        if len(path) > 1 or not (isinstance(value, Mapping) or (value is None and key in sections())):
            put(path, value)
        elif key in sections():
            for name, item in (value or {}).items():
                put((str(key), str(name)), item)
        else:
            close = get_close_matches(str(key), sections(), n=1)
            hint = f"did you mean {close[0]}?" if close else f"the sections are {', '.join(sections())}"
            problems.append(f"unknown section {key} ({place(origin)}); {hint}")
    return entries
