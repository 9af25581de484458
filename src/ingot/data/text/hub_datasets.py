"""Datasets on the Hugging Face hub, as the parquet files of one configuration and split.

Which files those are the dataset's card says; where it does not, their names do. A dataset without parquet files has the copy
that the hub makes of small ones; a copy of only a part is refused, because the rest would be missing without a word.
What was chosen is noted in the hub's cache, so that the same name means the same files where the hub cannot be asked.
"""

from __future__ import annotations

import glob
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ingot.errors import ConfigError, DataError
from ingot.runtime.files import read_json, write_atomically

if TYPE_CHECKING:
    from ingot.data.hub import Hub

log = logging.getLogger(__name__)

HUB = "hf:"
NAME = re.compile(r"hf:(?P<repository>[\w.-]+(?:/[\w.-]+)?)(?:/(?P<config>[^:]+))?(?::(?P<split>[\w.-]+))?")
CACHED = re.compile(r"/datasets--(?P<repository>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})/")
COPY = "refs/convert/parquet"  # where the hub keeps its copies, as CONFIG/SPLIT/NUMBER.parquet
SPLITS = (("train", "training"), ("validation", "valid", "val", "dev"), ("test", "testing", "eval", "evaluation"))


EVERY = "*"  # in place of a configuration: the files of all of them


def fetch(name: str, instead: str = "give parquet files as input") -> list[Path]:
    """The files of hf:ORG/NAME[/CONFIG][:SPLIT], from the hub or its cache; SPLIT is train if it is not given.

    `instead` is what to do where the hub cannot be asked.
    """
    parts = NAME.fullmatch(name)
    if not parts:
        raise ConfigError(
            f"{name} is not a dataset of the Hugging Face hub; write hf:ORG/NAME, hf:ORG/NAME/CONFIG or either with :SPLIT"
        )
    from ingot.data.hub import Hub, Unreachable

    hub = Hub(parts["repository"], attempts=1)
    try:
        revision, files, configs = _listing(hub, name)
        chosen = select(files, configs, parts["config"], parts["split"] or "train", name)
        folder = hub.snapshot([glob.escape(file) for file in chosen], revision)
        if missing := [file for file in chosen if not (folder / file).is_file()]:  # the client gives what it has if the hub fails
            raise Unreachable(f"{missing[0]} of {hub.repo} did not arrive from {hub.endpoint}")
    except Unreachable as error:
        if before := _fetched_before(name, hub):
            log.warning("%s; using the files of %s that were fetched before", error, name)
            return before
        raise DataError(f"cannot fetch {name}: {error}; try again online, or {instead}") from None
    _write_note(_note(name, hub), json.dumps({"revision": revision, "files": chosen}) + "\n")
    return [folder / file for file in chosen]


def _note(name: str, hub: Hub) -> Path:
    """Where it is noted which files a name stood for: with the files, so that whoever removes those removes it too."""
    return hub.folder / ".ingot" / f"{quote(name, safe='')}.json"


def _write_note(path: Path, content: str) -> None:
    try:
        if not path.is_file() or path.read_bytes() != content.encode():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, content)
    except OSError as error:
        log.warning("cannot write %s: %s; without the hub these files will not be found", path, error.strerror)


def _fetched_before(name: str, hub: Hub) -> list[Path] | None:
    """The files that a name stood for when it was last fetched, if all of them are in the cache."""
    try:
        note = read_json(_note(name, hub))
        revision, files = note["revision"], note["files"]
        if not isinstance(files, list) or not all(isinstance(text, str) for text in (revision, *files)):
            return None
        found = [path for file in files if (path := hub.cached(file, revision)) is not None]
    except (OSError, ValueError, TypeError, LookupError):
        return None
    return found if len(found) == len(files) else None


def folder_of(path: Path) -> str:
    """The first folder of a file in its repository: the configuration, where a dataset has one folder for each."""
    return CACHED.split(path.as_posix())[-1].partition("/")[0]


def commits(files: Iterable[Path]) -> dict[str, str]:
    """The commit of each dataset whose files are in the hub's cache."""
    found = (CACHED.search(str(path)) for path in files)
    return {match["repository"].replace("--", "/"): match["commit"] for match in found if match}


def select(files: Sequence[str], configs: Sequence[Mapping[str, Any]], config: str | None, split: str, name: str) -> list[str]:
    """The parquet files of a configuration and a split."""
    if config == EVERY and configs:
        chosen = [file for one in configs for file in select(files, [one], None, split, name)]
    elif configs:
        patterns, by_split = _patterns(_config(configs, config, name), split)
        files = [file for file in files if any(pattern.fullmatch(file) for pattern in patterns)]
        chosen = files if by_split else _of_split(files, split)
    else:
        inside = [file for file in files if config in (None, EVERY) or f"/{config}/" in f"/{file}"]
        if not inside:
            folders = sorted({folder for file in files if (folder := file.rpartition("/")[0])})
            raise DataError(f"{name}: no folder {config!r} with parquet files; there is {_some(folders)}")
        chosen = _of_split(inside, split)
    if not chosen:
        raise DataError(f"{name}: no parquet files for the split {split!r}; name another after a colon; files: {_some(files)}")
    if partial := next((file for file in chosen if "partial-" in file), None):
        raise DataError(f"{name}: the hub has only a part of it as parquet ({partial}); download its own files and give those")
    return sorted(chosen)


def _listing(hub: Hub, name: str) -> tuple[str, list[str], list[Mapping[str, Any]]]:
    """The revision, the parquet files and the configurations that the card names."""
    from ingot.data.hub import Missing

    found = hub.listing()
    if files := [file for file in found.files if file.endswith(".parquet")]:
        card = found.card.get("configs") if found.card else None
        configs = [config for config in card or [] if isinstance(config, dict)]
        return found.commit, files, [config for config in configs if "data_files" in config or "data_dir" in config]
    try:
        found = hub.listing(COPY)
    except Missing:
        raise DataError(f"{name} has no parquet files; download its files and give those that hold text") from None
    files = [file for file in found.files if file.endswith(".parquet")]
    return found.commit, files, [{"config_name": c, "data_dir": c} for c in sorted({file.partition("/")[0] for file in files})]


def _config(configs: Sequence[Mapping[str, Any]], wanted: str | None, name: str) -> Mapping[str, Any]:
    names = {str(config.get("config_name", "default")): config for config in configs}
    if wanted is None:
        marked = [config for config in configs if config.get("default") is True]
        if len(names) == 1 or marked or "default" in names:
            return (marked or [names.get("default", configs[0])])[0]
        raise DataError(f"{name} has several configurations; name one after a slash: {_some(list(names))}")
    if wanted not in names:
        raise DataError(f"{name}: no configuration {wanted!r}; there is {_some(list(names))}")
    return names[wanted]


def _patterns(config: Mapping[str, Any], split: str) -> tuple[list[re.Pattern[str]], bool]:
    """What the files of a configuration are called, and whether that is already those of the split."""
    folder = str(config.get("data_dir") or "").strip("/")
    entries = config.get("data_files", "**")
    entries = entries if isinstance(entries, list) else [entries]
    by_split = all(isinstance(entry, dict) for entry in entries)
    paths: list[Any] = [entry.get("path") for entry in entries if entry.get("split") in _words(split)] if by_split else entries
    flat = [path for entry in paths for path in (entry if isinstance(entry, list) else [entry])]
    return [_glob((folder and f"{folder}/") + str(path).removeprefix("./")) for path in flat], by_split


def _glob(pattern: str) -> re.Pattern[str]:
    parts = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.compile("".join(parts.get(part, re.escape(part)) for part in re.split(r"(\*\*/|\*\*|\*|\?)", pattern)))


def _of_split(files: Sequence[str], split: str) -> list[str]:
    """The files whose path has the split's name in it as a word; where no path names any split, all of them are train."""
    words = {file: set(re.split(r"[^a-z0-9]+", file.lower())) for file in files}
    if split == "train" and not any(words[file] & set(known) for file in files for known in SPLITS):
        return list(files)
    return [file for file in files if words[file] & _words(split) or f"/{split}/" in f"/{file}"]


def _words(split: str) -> set[str]:
    """The split's name and other names for the same."""
    return next((set(names) for names in SPLITS if split in names), {split})


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "") if names else "none"
