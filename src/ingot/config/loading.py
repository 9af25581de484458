"""Load one validated Config from a recipe, a file, the environment, the command line, a sweep and Python.

Later sources win: defaults < recipe < file < environment < command line < sweep < Python. Everything is merged first and
validated once, so that one error reports all mistakes, each with its source.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ingot.config.fields import SettingSpec, either, item_at, known, leaf_values, sections, setting_at, settings, suggest
from ingot.config.schema import FAMILIES, Config
from ingot.config.text import NULLS, Plain, format_value, parse_yaml, plain_data, scalar
from ingot.errors import ConfigError, Setting

SettingPath = tuple[str, ...]
Problem = str | ConfigError  # a message whose text contains setting paths, or an error that stores its settings as fields


@dataclass(frozen=True)
class Given:
    """A value that one source sets at a path. If several sources set the same path, the value with the highest level wins."""

    path: SettingPath
    value: Any
    origin: str
    level: int

    @property
    def name(self) -> str:
        return ".".join(self.path)


def settle_family(given: list[Given], problems: list[Problem]) -> tuple[str, list[Given]]:
    """Return the model family and the given values that apply to it; append errors to `problems`.

    A source that selects a family discards values from lower sources for settings that this family does not have, and if it
    replaces the family that a lower source selected, for all settings that are not common to all families. Values from the same
    source or from higher sources must be for settings of the selected family.
    """
    family, chosen, replaced = "gpt2", Given((), None, "default", -1), -1
    named_at = {item.level for item in given if item.name == "model.family"}
    for item in given:
        is_null = item.value is None or (isinstance(item.value, Plain) and item.value.lower() in NULLS)
        if item.name == "model.family" and item.value not in list(FAMILIES):
            problems.append(_mistake(settings()["model.family"], item.value, item.origin))
        elif item.name == "model.family" or (item.name == "model.file" and not is_null and item.level not in named_at):
            selected = str(item.value) if item.name == "model.family" else "file"
            if chosen.path and selected != family:
                replaced = item.level
            family, chosen = selected, item
    kept = [Given(("model", "family"), family, chosen.origin, chosen.level)] if chosen.path else []
    for item in given:
        families = [name for name in FAMILIES if setting_at(item.path, name)]
        if not families and item.name in sections():
            example = next(path for path in settings() if path.startswith(f"{item.name}."))
            problems.append(f"{item.name} ({item.origin}) is a section; set one of its settings, such as {example}")
        elif not families:
            meant = suggest(item.name)
            hint = f"did you mean {either(*meant)}?" if meant else "`ingot config schema` lists all settings"
            problems.append(f"unknown setting {item.name} ({item.origin}); {hint}")
        elif family not in families and item.level >= chosen.level:
            problems.append(f"{item.name} ({item.origin}) is a setting of model.family={either(*families)}, not of {family}")
        elif family in families and item.name != "model.family" and (item.level >= replaced or len(families) == len(FAMILIES)):
            kept.append(item)
    return family, kept


def merge(given: list[Given], family: str, problems: list[Problem]) -> tuple[dict[str, Any], dict[SettingPath, str]]:
    """Return all values, converted, as a nested dict, and the origin of each value by path; append errors to `problems`."""
    tree: dict[str, Any] = {}
    origins: dict[SettingPath, str] = {}
    for item in sorted(given, key=lambda item: item.level):
        setting = setting_at(item.path, family)
        assert setting is not None, item.path
        try:
            value = _convert(setting, item.value)
        except ConfigError as error:
            problems.append(f"{error} ({item.origin})")
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


def _convert(setting: SettingSpec, value: Any) -> Any:
    if setting.items:  # a list of mappings: convert each value according to the setting of its key
        if not isinstance(value, list | tuple) or not all(isinstance(entry, Mapping) for entry in value):
            raise TypeError("not a list of mappings")
        entries: list[dict[str, Any]] = [{} for _ in value]
        for number, key, item in ((number, *pair) for number, entry in enumerate(value) for pair in entry.items()):
            name = f"{setting.path}.{number}.{key}"
            if key not in setting.items:
                close = get_close_matches(str(key), setting.items, n=1)
                hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(setting.items)}"
                raise ConfigError(f"unknown setting {name}; {hint}")
            try:
                entries[number][key] = _convert(setting.items[key], item)
            except TypeError:
                raise _mistake(setting.items[key], item, "", name) from None
        return entries
    if setting.free_form or isinstance(value, list | Mapping):
        return plain_data(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Plain):
        if "null" in setting.types and value.lower() in NULLS:
            return None
        value = str(value) if setting.takes_any_text or value in setting.choices else scalar(value)
    if isinstance(value, bool) and "boolean" not in setting.types:
        raise TypeError("this setting takes no boolean")  # pydantic would convert true to 1
    return value


def validate(tree: dict[str, Any], origins: dict[SettingPath, str], family: str, problems: list[Problem]) -> Config:
    """Validate merged values and return the Config; if there are problems, raise one ConfigError that reports all of them."""
    details: dict[SettingPath, list[Mapping[str, Any]]] = {}
    try:
        config = Config.model_validate(tree)
        if not problems:
            return config
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            section, *rest = map(str, detail["loc"] or ("",))
            path = (section, *(rest[1:] if section == "model" else rest))  # drop the family that pydantic adds to model paths
            setting_path = path[:4] if item_at(path, family) else path[:2]
            details.setdefault(setting_path if detail["type"] != "value_error" else (), []).append({**detail, "path": path})
    across = details.pop((), [])
    for path, mistakes in details.items():
        setting = item_at(path, family) or setting_at(path, family)
        assert setting is not None, mistakes
        within = {of: origin for of, origin in origins.items() if of[:2] == path[:2]}  # keys of one mapping can differ in origin
        origin = within.get(mistakes[0]["path"][:3]) or within.get(path[:2]) or next(iter(within.values()), "default")
        if mistakes[0]["type"] == "missing":
            problems.append(f"{setting.path} is not set ({setting.description.rstrip('.')})")
            continue
        value = tree[path[0]][path[1]]
        if len(path) == 4:
            value = value[int(path[2])][path[3]]
        problems.append(_mistake(setting, value, origin, details=mistakes))
    if not problems:  # report cross-setting errors only if every value is valid on its own
        problems = [str(detail["ctx"]["error"]) for detail in across]
    # Raise one error for all problems, with each setting path in the messages replaced by a placeholder.
    named: list[Setting] = []

    def number(setting: Setting) -> str:
        named.append(setting)
        return f"{{{len(named) - 1}}}"

    paths = re.compile(rf"\b({'|'.join(map(re.escape, sorted(known(), key=len, reverse=True)))})(?!\w)")
    sentences = [
        problem.what.replace("{0}", number(problem.settings[0]))
        if isinstance(problem, ConfigError)
        else paths.sub(lambda path: number(Setting(path[0])), problem)
        for problem in problems
    ]
    raise ConfigError("; ".join(sentences), *named)


def _mistake(
    setting: SettingSpec, value: Any, origin: str, name: str = "", details: Sequence[Mapping[str, Any]] = ()
) -> ConfigError:
    """Return the error for an invalid value; if a number is out of range, the message states the limit that pydantic reports."""
    article = {"integer": "an ", "number": "a ", "mapping": "a ", "list": "a "}.get(setting.allowed.split()[0], "")
    allowed = "plain data: numbers, text, lists or mappings" if setting.free_form and name else article + setting.allowed
    if len(details) == 1 and details[0]["type"].startswith(("greater_", "less_", "finite_")):
        allowed = details[0]["msg"].removeprefix("Input should be ").replace("greater than or equal to", "at least")
        allowed = allowed.replace("less than or equal to", "at most")
        if isinstance(most := details[0].get("ctx", {}).get("le"), float):
            allowed = f"at most {most:g}"
    text = " ".join((value if isinstance(value, Plain) else format_value(value)).split())
    text = text if len(text) <= 80 else f"{text[:77]}..."
    return ConfigError(f"{{0}}: must be {allowed}", Setting(name or setting.path, text, origin))


@dataclass(frozen=True)
class Recipe:
    """A YAML file in the package with settings that differ from their defaults; its first line describes the recipe."""

    name: str
    description: str
    path: Path


def list_recipes() -> list[Recipe]:
    """Return every recipe, sorted by name."""
    root = Path(str(resources.files("ingot.config") / "recipes"))
    recipes = []
    for path in root.rglob("*.yaml"):
        first_line = path.read_text(encoding="utf-8").partition("\n")[0]
        recipes.append(Recipe(path.relative_to(root).with_suffix("").as_posix(), first_line.strip().lstrip("# "), path))
    return sorted(recipes, key=lambda recipe: recipe.name)


def find_recipe(name: str) -> Recipe:
    """Return a recipe by name; the error for an unknown name lists all recipes."""
    recipes = {recipe.name: recipe for recipe in list_recipes()}
    if name in recipes:
        return recipes[name]
    close = get_close_matches(name, recipes, n=1)
    meant = f"; did you mean {close[0]}?" if close else ";"
    if name.endswith((".yaml", ".yml")):
        meant = f"; pass a config file as --config {name};"
    raise ConfigError(f"unknown recipe {name}{meant} the recipes are {', '.join(recipes)}")


_Source = tuple[str, Mapping[str, Any]]  # the name of a source, and the values it sets as a nested mapping


@dataclass(frozen=True)
class ResolvedConfig:
    """A validated config, the origin of each value, a name for the run, and the files that were read."""

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
) -> ResolvedConfig:
    """Merge all sources and validate the result; one ConfigError reports all mistakes."""
    return Sources(recipe, file, overrides, environment, sweep, python).load()


@dataclass(frozen=True)
class Sources:
    """The sources from which a config is merged; if `environment` is None, os.environ is used."""

    recipe: str | None = None
    file: Path | str | None = None
    overrides: Mapping[str, Any] | None = None
    environment: Mapping[str, str] | None = None
    sweep: Mapping[str, Any] | None = None
    python: Mapping[str, Any] | None = None

    def load(self, measured: Mapping[str, Any] | None = None) -> ResolvedConfig:
        """Merge and validate all sources. `measured` (what `--recipe auto` chose) overrides only the recipe and the defaults."""
        documents, name = _documents(self.recipe, self.file, measured or {})
        problems: list[Problem] = []
        family, given = settle_family(self._given(documents, problems), problems)
        tree, origins = merge(given, family, problems)
        config = validate(tree, origins, family, problems)
        by_name = {".".join(path): origins.get(path, "default") for path, _ in leaf_values(config)}
        files = (Path(origin.removeprefix("file ")) for origin, _ in documents if origin.startswith("file "))
        return ResolvedConfig(config, by_name, name, tuple(files))

    def above_recipe(self) -> dict[str, Any]:
        """Return the values that override the recipe, by dotted path. Invalid values are ignored here; `load` reports them."""
        problems: list[Problem] = []
        documents, _ = _documents(self.recipe, self.file, {})
        family, given = settle_family(self._given(documents, problems), problems)
        tree, origins = merge([item for item in given if not item.origin.startswith("recipe ")], family, problems)
        return {f"{path[0]}.{path[1]}": tree[path[0]][path[1]] for path in origins if len(path) == 2}

    def _given(self, documents: list[_Source], problems: list[Problem]) -> list[Given]:
        variables = os.environ if self.environment is None else self.environment
        words = {path: Plain(value) if isinstance(value, str) else value for path, value in (self.overrides or {}).items()}
        levels: list[list[_Source]] = [
            *([document] for document in documents),
            [
                (f"environment {name}", {name.removeprefix("INGOT_").lower().replace("__", "."): Plain(variables[name])})
                for name in sorted(variables)
                if name.startswith("INGOT_") and "__" in name  # for example, INGOT_TRAINING__SEED sets training.seed
            ],
            [("command line", words)],
            [("sweep", self.sweep or {})],
            [("python", self.python or {})],
        ]
        return [
            Given(path, value, origin, level)
            for level, sources in enumerate(levels)
            for origin, tree in sources
            for path, value in _flatten(tree, origin, problems).items()
        ]


def _documents(recipe: str | None, file: Path | str | None, measured: Mapping[str, Any]) -> tuple[list[_Source], str | None]:
    """Return the YAML documents to merge, each after its base, and a name for the run."""
    below = _chain(find_recipe(recipe).path, f"recipe {recipe}") if recipe is not None else []
    below += [(f"recipe {recipe}, measured", measured)] if measured else []
    if file is None:
        return below, recipe
    chain = _chain(Path(file), f"file {file}")
    base = chain[-2][0] if len(chain) > 1 else ""
    if base and recipe is not None:
        raise ConfigError(f"{file} sets `base:` to {base}, so it cannot be combined with the recipe {recipe}; keep one of them")
    return below + chain, recipe or (base.removeprefix("recipe ") if base.startswith("recipe ") else Path(file).stem)


def _chain(path: Path, origin: str, above: tuple[Path, ...] = ()) -> list[_Source]:
    """Return the contents of a YAML file, preceded by those of the recipe or file in its `base:` line, and so on recursively."""
    real = Path(os.path.realpath(path))
    if real in above:
        circle = " -> ".join(step.name for step in (*above, path))
        raise ConfigError(f"the `base:` lines form a cycle: {circle}; remove one of these lines")
    if path.exists() and not path.is_file():  # reading a pipe could block forever
        raise ConfigError(f"{path} cannot be read: it is not a regular file; give a YAML file, such as a run's config.yaml")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"config file {path} does not exist; `ingot init -o {path}` writes one") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; give a YAML file") from None
    tree = parse_yaml(text, str(path)) or {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} is not a config: it needs sections such as `training:` with settings below them")
    base = tree.pop("base", None)
    if base is None:
        return [(origin, tree)]
    if not isinstance(base, str):
        raise ConfigError(f"base ({origin}) must be the name of a recipe or a YAML file")
    if base.endswith((".yaml", ".yml")):
        below, below_origin = path.parent / base, f"file {path.parent / base}"
    else:
        below, below_origin = find_recipe(base).path, f"recipe {base}"
    return [*_chain(below, below_origin, (*above, real)), (origin, tree)]


def _flatten(tree: Mapping[str, Any], origin: str, problems: list[Problem]) -> dict[SettingPath, Any]:
    """Return the values of one source by path, with free-form mappings split into entries; append errors to `problems`."""
    entries: dict[SettingPath, Any] = {}

    def put(path: SettingPath, value: Any) -> None:
        specs = [setting for family in FAMILIES if (setting := setting_at(path, family))]
        free_form, listed = any(setting.free_form for setting in specs), any("array" in setting.types for setting in specs)
        if (free_form or listed) and isinstance(value, Plain) and value[:1] in ("[", "{", "'", '"'):
            value = parse_yaml(value, f"{'.'.join(path)} ({origin})")
        if free_form and isinstance(value, Mapping) and value:
            for key, item in value.items():
                put((*path, str(key)), item)
        elif path in entries:
            problems.append(f"{'.'.join(path)} is set twice ({origin}); keep one")
        else:
            entries[path] = value

    for key, value in tree.items():
        path = tuple(str(key).split("."))
        if len(path) == 1 and (value or key in sections()) and (value is None or isinstance(value, Mapping)):
            for name, item in (value or {}).items():
                put((str(key), str(name)), item)
        else:
            put(path, value)
    return entries
