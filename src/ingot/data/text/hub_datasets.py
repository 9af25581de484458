"""Datasets on the Hugging Face hub, as the parquet files of one configuration and split.

The files are those listed in the dataset card or, without a list, selected by path. For a dataset without parquet files the hub's
own converted copy is used; a partial copy is an error, because the rest would be missing silently. The selection is recorded in
the hub's cache, so that the same name means the same files offline.
"""

from __future__ import annotations

import glob
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ingot.errors import ConfigError, DataError
from ingot.runtime.files import read_json, write_atomically

log = logging.getLogger(__name__)

HUB = "hf:"
NAME = re.compile(r"hf:(?P<repository>[\w.-]+(?:/[\w.-]+)?)(?:/(?P<config>[^:]+))?(?::(?P<split>[\w.-]+))?")
CACHED = re.compile(r"/datasets--(?P<repository>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})/")
CONVERTED = "refs/convert/parquet"  # revision with the hub's converted copy: CONFIG/SPLIT/NUMBER.parquet
SPLITS = (("train", "training"), ("validation", "valid", "val", "dev"), ("test", "testing", "eval", "evaluation"))
WILD = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}  # wildcards of data_files, as regular expressions
EVERY = "*"  # as the configuration: selects the files of all configurations


def fetch(name: str, instead: str = "give parquet files as input") -> list[Path]:
    """Return the files of hf:ORG/NAME[/CONFIG][:SPLIT], from the hub or its cache; SPLIT defaults to train.

    `instead` is the advice to print if the hub cannot be reached.
    """
    parts = NAME.fullmatch(name)
    if not parts:
        raise ConfigError(f"{name} is not a dataset on the Hugging Face hub; write hf:ORG/NAME[/CONFIG][:SPLIT]")
    from ingot.data.hub import Hub, Missing, Unreachable

    hub = Hub(parts["repository"])
    note = hub.folder / ".ingot" / f"{quote(name, safe='')}.json"  # in the cache, deleted with it
    try:
        listing = hub.listing()
        card = (listing.card.get("configs") if listing.card else None) or []
        configs = [config for config in card if isinstance(config, dict) and ("data_files" in config or "data_dir" in config)]
        if not (files := [file for file in listing.files if file.endswith(".parquet")]):
            try:
                listing = hub.listing(CONVERTED)
            except Missing:
                raise DataError(f"{name} has no parquet files; download its files and give those that hold text") from None
            files = [file for file in listing.files if file.endswith(".parquet")]
            configs = [{"config_name": c, "data_dir": c} for c in sorted({file.partition("/")[0] for file in files})]
        revision = listing.commit
        chosen = select(files, configs, parts["config"], parts["split"] or "train", name)
        folder = hub.snapshot([glob.escape(file) for file in chosen], revision)
        if missing := [file for file in chosen if not (folder / file).is_file()]:  # the client does not raise every failure
            raise Unreachable(f"{missing[0]} of {hub.repo} did not arrive from {hub.endpoint}")
    except Unreachable as error:
        with suppress(OSError, ValueError, TypeError, LookupError, AttributeError):  # no recorded selection, or a damaged one
            record = read_json(note)
            paths = [hub.folder / "snapshots" / record["revision"] / file for file in record["files"]]
            if paths and all(path.is_file() for path in paths):
                log.warning("%s; using the files of %s that were fetched before", error, name)
                return paths
        raise DataError(f"cannot fetch {name}: {error}; try again online, or {instead}") from None
    with suppress(OSError):  # a read-only cache
        note.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(note, json.dumps({"revision": revision, "files": chosen}) + "\n")
    return [folder / file for file in chosen]


def folder_of(path: Path) -> str:
    """Return the top-level folder of a file's path in its repository, which is often the configuration's name."""
    return CACHED.split(path.as_posix())[-1].partition("/")[0]


def commits(files: Iterable[Path]) -> dict[str, str]:
    """Return the commit of each dataset, read from the paths of its files in the hub's cache."""
    matches = (CACHED.search(str(path)) for path in files)
    return {match["repository"].replace("--", "/"): match["commit"] for match in matches if match}


def select(files: Sequence[str], configs: Sequence[Mapping[str, Any]], config: str | None, split: str, name: str) -> list[str]:
    """Return the parquet files of a configuration and a split."""
    if config == EVERY and configs:
        chosen = [file for each in configs for file in select(files, [each], None, split, name)]
    elif configs:
        selected = _config(configs, config, name)
        folder = str(selected.get("data_dir") or "").strip("/")
        entries = selected.get("data_files", "**")
        entries = entries if isinstance(entries, list) else [entries]
        by_split = all(isinstance(entry, dict) for entry in entries)  # else the split is selected by path
        paths = [entry.get("path") for entry in entries if entry.get("split") in _words(split)] if by_split else entries
        patterns = []
        for path in chain.from_iterable(path if isinstance(path, list) else [path] for path in paths):
            pieces = re.split(r"(\*\*/|\*\*|\*|\?)", (folder and f"{folder}/") + str(path).removeprefix("./"))
            patterns.append(re.compile("".join(WILD.get(piece, re.escape(piece)) for piece in pieces)))
        files = [file for file in files if any(pattern.fullmatch(file) for pattern in patterns)]
        chosen = files if by_split else _of_split(files, split)
    else:
        inside = [file for file in files if config in (None, EVERY) or f"/{config}/" in f"/{file}"]
        if not inside:
            folders = sorted({folder for file in files if (folder := file.rpartition("/")[0])})
            raise DataError(f"{name}: no folder {config!r} with parquet files; there are: {_some(folders)}")
        chosen = _of_split(inside, split)
    if not chosen:
        raise DataError(f"{name}: no parquet files for the split {split!r}; name another after a colon; files: {_some(files)}")
    if partial := next((file for file in chosen if "partial-" in file), None):
        raise DataError(f"{name}: the hub has only part of it as parquet ({partial}); download its original files and give those")
    return sorted(chosen)


def _config(configs: Sequence[Mapping[str, Any]], wanted: str | None, name: str) -> Mapping[str, Any]:
    names = {str(config.get("config_name", "default")): config for config in configs}
    if wanted is None:
        marked = [config for config in configs if config.get("default") is True]
        if len(names) > 1 and not marked and "default" not in names:
            raise DataError(f"{name} has several configurations; name one after a slash: {_some(list(names))}")
        return marked[0] if marked else names.get("default", configs[0])
    if wanted not in names:
        raise DataError(f"{name}: no configuration {wanted!r}; there are: {_some(list(names))}")
    return names[wanted]


def _of_split(files: Sequence[str], split: str) -> list[str]:
    """Return the files whose path contains the split's name as a word; if no path names a split, all files are train."""
    words = {file: set(re.split(r"[^a-z0-9]+", file.lower())) for file in files}
    if split == "train" and not any(words[file] & set(names) for file in files for names in SPLITS):
        return list(files)
    return [file for file in files if words[file] & _words(split) or f"/{split}/" in f"/{file}"]


def _words(split: str) -> set[str]:
    """Return the split's name and its synonyms."""
    return next((set(names) for names in SPLITS if split in names), {split})


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "") if names else "none"
