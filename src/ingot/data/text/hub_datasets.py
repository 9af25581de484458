"""Datasets on the Hugging Face hub, as the parquet files of one configuration and split.

Which files those are the dataset's card says; where it does not, their names do. A dataset without parquet files has the copy
that the hub makes of small ones; a copy of only a part is refused, because the rest would be missing without a word.
What was chosen is noted in the hub's cache, so that the same name means the same files where the hub cannot be asked.
"""

from __future__ import annotations

import errno
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ingot.errors import ConfigError, DataError
from ingot.runtime.files import write_atomically

log = logging.getLogger(__name__)

HUB = "hf:"
NAME = re.compile(r"hf:(?P<repository>[\w.-]+(?:/[\w.-]+)?)(?:/(?P<config>[^:]+))?(?::(?P<split>[\w.-]+))?")
CACHED = re.compile(r"/datasets--(?P<repository>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})/")
COPY = "refs/convert/parquet"  # where the hub keeps its copies, as CONFIG/SPLIT/NUMBER.parquet
OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)  # which no older files may hide
SPLITS = (("train", "training"), ("validation", "valid", "val", "dev"), ("test", "testing", "eval", "evaluation"))


def fetch(name: str) -> list[Path]:
    """The files of hf:ORG/NAME[/CONFIG][:SPLIT], from the hub or its cache; SPLIT is train if it is not given."""
    parts = NAME.fullmatch(name)
    if not parts:
        raise ConfigError(
            f"{name} is no dataset of the Hugging Face hub; write hf:ORG/NAME, hf:ORG/NAME/CONFIG or either with :SPLIT"
        )
    from huggingface_hub import hf_hub_download

    repository = parts["repository"]
    try:
        revision, files, configs = _listing(repository, name)
    except Exception as error:  # the client's errors, and those of the library below it, have changed with its versions
        return _without_hub(name, repository, error)
    chosen = select(files, configs, parts["config"], parts["split"] or "train", name)
    try:
        found = [Path(hf_hub_download(repository, file, repo_type="dataset", revision=revision)) for file in chosen]
    except Exception as error:
        return _without_hub(name, repository, error)
    _write_note(_note(name, repository), json.dumps({"revision": revision, "files": chosen}) + "\n")
    return found


def _without_hub(name: str, repository: str, error: Exception) -> list[Path]:
    """The files fetched before where the hub cannot be asked; what else went wrong is the user's to know."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    if isinstance(error, ConfigError | DataError):
        raise error
    if isinstance(error, GatedRepoError):
        raise DataError(f"{name} is for those who accepted its terms; accept them on the hub and set HF_TOKEN") from None
    if isinstance(error, RepositoryNotFoundError | HFValidationError):
        raise DataError(
            f"there is no dataset {repository} on {constants.ENDPOINT}; check the spelling, and set HF_TOKEN if it is private"
        ) from None
    if isinstance(error, OSError) and error.errno in OF_THE_DISK:
        raise DataError(
            f"cannot fetch {name}: {error.filename or constants.HF_HUB_CACHE}: {error.strerror}; make room, or name a folder you "
            "can write to with HF_HUB_CACHE; HF_HUB_OFFLINE=1 takes what was fetched before"
        ) from error
    where = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} does not answer as it should"
    reason = f"{where} ({' '.join(f'{type(error).__name__}: {error}'.split())[:200]})"
    if before := _fetched_before(name, repository):
        log.warning("%s; using the files of %s that were fetched before", reason, name)
        return before
    raise DataError(f"cannot fetch {name}: {reason}; try again online, or give parquet files as input") from None


def _note(name: str, repository: str) -> Path:
    """Where it is noted which files a name stood for: with the files, so that whoever removes those removes it too."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = repo_folder_name(repo_id=repository, repo_type="dataset")
    return Path(constants.HF_HUB_CACHE) / folder / ".ingot" / f"{quote(name, safe='')}.json"


def _write_note(path: Path, content: str) -> None:
    try:
        if not path.is_file() or path.read_bytes() != content.encode():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, content)
    except OSError as error:
        log.warning("cannot write %s: %s; without the hub these files will not be found", path, error.strerror)


def _fetched_before(name: str, repository: str) -> list[Path] | None:
    """The files that a name stood for when it was last fetched, if all of them are in the cache."""
    from huggingface_hub import try_to_load_from_cache

    try:
        note = json.loads(_note(name, repository).read_bytes())
        revision, files = note["revision"], note["files"]
        if not isinstance(files, list) or not all(isinstance(text, str) for text in (revision, *files)):
            return None
        found = [try_to_load_from_cache(repository, file, repo_type="dataset", revision=revision) for file in files]
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return None
    return [Path(path) for path in found if isinstance(path, str)] if all(isinstance(path, str) for path in found) else None


def commits(files: Iterable[Path]) -> dict[str, str]:
    """Of the datasets whose files are in the hub's cache, the commit they are of."""
    found = (CACHED.search(str(path)) for path in files)
    return {match["repository"].replace("--", "/"): match["commit"] for match in found if match}


def select(files: Sequence[str], configs: Sequence[Mapping[str, Any]], config: str | None, split: str, name: str) -> list[str]:
    """The parquet files of a configuration and a split."""
    if configs:
        patterns, by_split = _patterns(_config(configs, config, name), split)
        files = [file for file in files if any(pattern.fullmatch(file) for pattern in patterns)]
        chosen = files if by_split else _of_split(files, split)
    else:
        inside = [file for file in files if config is None or f"/{config}/" in f"/{file}"]
        if not inside:
            folders = sorted({folder for file in files if (folder := file.rpartition("/")[0])})
            raise DataError(f"{name}: no folder {config!r} with parquet files; there is {_some(folders)}")
        chosen = _of_split(inside, split)
    if not chosen:
        raise DataError(f"{name}: no parquet files for the split {split!r}; name another behind a colon; files: {_some(files)}")
    if partial := next((file for file in chosen if "partial-" in file), None):
        raise DataError(f"{name}: the hub has only a part of it as parquet ({partial}); download its own files and give those")
    return sorted(chosen)


def _listing(repository: str, name: str) -> tuple[str, list[str], list[Mapping[str, Any]]]:
    """The revision, the parquet files and the configurations that the card names."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RevisionNotFoundError

    info = HfApi().dataset_info(repository)
    if files := _parquet(info):
        card = info.card_data.get("configs") if info.card_data else None
        configs = [config for config in card or [] if isinstance(config, dict)]
        return str(info.sha), files, [config for config in configs if "data_files" in config or "data_dir" in config]
    try:
        info = HfApi().dataset_info(repository, revision=COPY)
    except RevisionNotFoundError:
        raise DataError(f"{name} has no parquet files; download its files and give those that hold text") from None
    files = _parquet(info)
    return str(info.sha), files, [{"config_name": c, "data_dir": c} for c in sorted({file.partition("/")[0] for file in files})]


def _parquet(info: Any) -> list[str]:
    return [entry.rfilename for entry in info.siblings or [] if entry.rfilename.endswith(".parquet")]


def _config(configs: Sequence[Mapping[str, Any]], wanted: str | None, name: str) -> Mapping[str, Any]:
    names = {str(config.get("config_name", "default")): config for config in configs}
    if wanted is None:
        marked = [config for config in configs if config.get("default") is True]
        if len(names) == 1 or marked or "default" in names:
            return (marked or [names.get("default", configs[0])])[0]
        raise DataError(f"{name} has several configurations; name one behind a slash: {_some(list(names))}")
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
