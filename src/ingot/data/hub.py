"""Repositories on the Hugging Face hub: list and download files at one commit, and select the parquet files of a dataset.

Every request goes through the official client, which retries, resumes and caches; its exceptions become one-line errors here.
An unreachable hub is detected within seconds; the client alone would retry for half a minute. The client verifies the size of
a download but not its hash, so `Hub.fetch` verifies the hash.

The files of a dataset are those listed in its card or, without a list, selected by path. For a dataset without parquet files the
hub's own converted copy is used; a partial copy is an error, because the rest would be silently missing. The selection is
recorded in the hub's cache, so that the same name selects the same files offline.
"""

from __future__ import annotations

import glob
import json
import logging
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import quote, urlsplit
from urllib.request import getproxies

from huggingface_hub import HfApi, constants, errors, get_token, hf_hub_download, snapshot_download
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils.sha import git_hash
from huggingface_hub.utils.tqdm import tqdm

from ingot.errors import ConfigError, DataError, IngotError
from ingot.runtime.files import file_sha256, read_json, reading, write_atomically

log = logging.getLogger(__name__)

T = TypeVar("T")
RepoType = Literal["dataset", "model"]
NetworkError: type[Exception] = errors.HfHubHTTPError.__mro__[1]  # httpx's base class, from which the client's errors derive
ANSWER_SECONDS = 30.0
CONNECT_SECONDS = 3.0
NAME = re.compile(r"hf:(?P<repository>[\w.-]+(?:/[\w.-]+)?)(?:/(?P<config>[^:]+))?(?::(?P<split>[\w.-]+))?")
CONVERTED = "refs/convert/parquet"  # revision with the copy that the hub converted to CONFIG/SPLIT/NUMBER.parquet
SPLITS = (("train", "training"), ("validation", "valid", "val", "dev"), ("test", "testing", "eval", "evaluation"))
WILD = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}  # wildcards of data_files, as regular expressions
EVERY = "*"  # this CONFIG in a dataset name selects the files of all configurations


@dataclass(frozen=True)
class FileInfo:
    """The size of a file on the hub, and a hash of the file's content."""

    size: int | None = None
    sha256: str | None = None
    git_sha1: str | None = None  # small files have this hash instead of a sha256

    def problem(self, path: Path) -> str | None:
        """Return a message if the size or hash of the file at `path` differs from the expected one, else None."""
        with reading(path):
            size = path.stat().st_size
            if self.size is not None and size != self.size:
                return f"expected {self.size:,} bytes, got {size:,}"
            expected = self.sha256 or self.git_sha1
            if expected and (actual := file_sha256(path) if self.sha256 else git_hash(path.read_bytes())) != expected:
                return f"expected hash {expected[:12]}, got {actual[:12]}"
        return None


@dataclass(frozen=True)
class Listing:
    """The files of a repository at one commit; `card` is the metadata of its dataset or model card."""

    commit: str
    files: dict[str, FileInfo]
    card: Any = None


class Missing(DataError):
    """Raised if the repository exists but has no such file or revision."""


class Unreachable(DataError):
    """Raised if the hub cannot be reached; cached files may still be usable."""


class Hub:
    """A dataset or model repository on the Hugging Face hub, and its files in the local cache."""

    def __init__(
        self, repo: str, repo_type: RepoType = "dataset", *, endpoint: str | None = None, cache: Path | None = None
    ) -> None:
        self.repo, self.repo_type = repo, repo_type
        self.endpoint = endpoint or constants.ENDPOINT
        self.cache = Path(cache or constants.HF_HUB_CACHE)
        self.offline = constants.HF_HUB_OFFLINE
        self._place: dict[str, Any] = {"repo_type": repo_type, "endpoint": self.endpoint, "cache_dir": self.cache}
        self._answers = False

    def listing(self, revision: str | None = None) -> Listing:
        """Return the commit of a revision, and the size and hash of each of its files."""

        def ask() -> Listing:
            try:
                info: Any = HfApi(endpoint=self.endpoint).repo_info(
                    self.repo, repo_type=self.repo_type, revision=revision, files_metadata=True, timeout=ANSWER_SECONDS
                )
            except (KeyError, TypeError, json.JSONDecodeError) as error:
                raise DataError(f"{self.endpoint} does not respond like a Hugging Face hub; check HF_ENDPOINT") from error
            files = {}
            for file in info.siblings or ():
                lfs = file.lfs
                files[file.rfilename] = FileInfo(lfs.size, lfs.sha256) if lfs else FileInfo(file.size, git_sha1=file.blob_id)
            return Listing(info.sha or revision or constants.DEFAULT_REVISION, files, info.card_data)

        return self._ask("the file list", ask)

    def fetch(
        self,
        path: str,
        commit: str | None = None,
        info: FileInfo = FileInfo(),  # noqa: B008 (frozen)
        count: Callable[[int], None] = lambda size: None,
    ) -> Path:
        """Return the path of a file in the client's cache, downloading it if it is missing or does not match `info`.

        `count` is called with the number of bytes received since the last call.
        """

        class Meter(tqdm):
            """A progress bar for the client that prints nothing and only counts bytes."""

            def __init__(self, *_: object, **settings: object) -> None:
                super().__init__(disable=True)  # type: ignore[no-untyped-call]

            def update(self, size: float | None = 1) -> None:
                count(int(size or 0))

            def update_transfer(self, *_: object, **settings: object) -> None:
                """Ignore the bytes transferred: the hub deduplicates identical chunks, so they are fewer than the file size."""

            set_transfer_postfix_str = update_transfer

        request = partial(hf_hub_download, self.repo, path, revision=commit, tqdm_class=Meter, **self._place)
        blob = Path(self._ask(path, partial(request, local_files_only=self.offline), partial(request, local_files_only=True)))
        if (problem := info.problem(blob)) and not self.offline:
            blob = Path(self._ask(path, partial(request, force_download=True)))
            problem = info.problem(blob)
        if problem:
            raise DataError(f"{path} of {self.repo} was damaged in transfer: {problem}; try again, or ask the repository's owner")
        return blob

    def snapshot(self, names: Sequence[str], commit: str | None = None) -> Path:
        """Return the cache folder with the files that match these names or patterns, downloading them if necessary."""
        ask = partial(snapshot_download, self.repo, revision=commit, allow_patterns=list(names), **self._place)
        return Path(self._ask(f"the {self.repo_type}", ask, partial(ask, local_files_only=True)))

    def check_login(self) -> None:
        """Raise ConfigError if the repository's name is not ORG/NAME, or if there is no access token for uploads."""
        if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", self.repo):
            raise ConfigError(f"{self.repo!r} is not a valid repository name; expected ORG/NAME")
        if not get_token():
            raise ConfigError("uploading needs a Hugging Face token; set HF_TOKEN or log in with `hf auth login`")

    def upload(self, folder: Path, names: Sequence[str]) -> str:
        """Upload the files of a folder that have one of these names, creating the repository if needed; return its URL."""

        def send() -> str:
            api = HfApi(endpoint=self.endpoint)
            url = api.create_repo(self.repo, repo_type=self.repo_type, exist_ok=True)
            api.upload_folder(repo_id=self.repo, folder_path=folder, repo_type=self.repo_type, allow_patterns=list(names))
            return str(url)

        return self._ask("the upload", send)

    @property
    def folder(self) -> Path:
        """Return the folder of the repository in the client's cache."""
        return self.cache / repo_folder_name(repo_id=self.repo, repo_type=self.repo_type)

    def _ask(self, what: str, request: Callable[[], T], from_cache: Callable[[], T] | None = None) -> T:
        try:
            if not (self._answers or self.offline):
                connect(self.endpoint)
                self._answers = True
            return request()
        except (NetworkError, OSError, RuntimeError, ValueError) as error:
            with suppress(errors.LocalEntryNotFoundError):
                if from_cache is not None and not (self._answers or self.offline):
                    return from_cache()
            while isinstance(error, errors.LocalEntryNotFoundError | ValueError) and isinstance(error.__cause__, Exception):
                error = error.__cause__  # the client reports "not in the cache either"; use the original exception
            raise self._explained(error, what) from error

    def _explained(self, error: BaseException, what: str) -> IngotError:
        """Convert an exception raised by the client to an Ingot error."""
        status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
        repository = f"{self.repo_type} repository {self.repo} at {self.endpoint}"
        if isinstance(error, errors.HFValidationError):
            return ConfigError(f"{self.repo!r} is not a valid repository name; expected OWNER/NAME")
        if isinstance(error, errors.OfflineModeIsEnabled) or (self.offline and isinstance(error, errors.LocalEntryNotFoundError)):
            absent = f"{what} of {self.repo} is not in the hub's cache {self.cache}"
            return Unreachable(f"HF_HUB_OFFLINE is set and {absent}; unset HF_HUB_OFFLINE to download")
        if isinstance(error, errors.RevisionNotFoundError):
            return Missing(f"{repository} has no such revision")
        if isinstance(error, errors.EntryNotFoundError) and status is not None:
            return Missing(f"{repository} has no {what}")
        if isinstance(error, errors.RepositoryNotFoundError | errors.GatedRepoError) or status in (401, 403, 404):
            advice = "check the name; for a private or gated repository, log in with `hf auth login` or set HF_TOKEN"
            return DataError(f"no access to {repository} (HTTP {status})", advice=advice)
        if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError | TimeoutError):
            advice = "free some disk space or set HF_HOME to a folder on another disk"
            return DataError(f"cannot read or write {error.filename or self.cache}: {error.strerror}", advice=advice)
        reason = f"HTTP {status}" if status else str(error).strip().partition("\n")[0][:200] or type(error).__name__
        return Unreachable(f"gave up on {what} of {self.repo} at {self.endpoint}: {reason}; run the same command to resume")


def connect(endpoint: str) -> None:
    """Raise ConnectionError within seconds if the host does not accept a connection."""
    address = urlsplit(endpoint)
    if address.hostname is None or getproxies().get(address.scheme):
        return  # skip the check: behind a proxy, only the client knows how to connect
    try:
        port = address.port or (443 if address.scheme == "https" else 80)
        socket.create_connection((address.hostname, port), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        raise ConnectionError(error.strerror or str(error)) from error


def fetch(name: str, instead: str = "give parquet files as input") -> list[Path]:
    """Return the parquet files of hf:ORG/NAME[/CONFIG][:SPLIT], downloading them if necessary; SPLIT defaults to train.

    `instead` is the alternative that the error message suggests if the hub cannot be reached.
    """
    parts = NAME.fullmatch(name)
    if not parts:
        raise ConfigError(f"{name} is not a valid name of a Hugging Face dataset; expected hf:ORG/NAME[/CONFIG][:SPLIT]")
    hub = Hub(parts["repository"])
    note = hub.folder / ".ingot" / f"{quote(name, safe='')}.json"  # stored in the hub's cache, so that both are deleted together
    try:
        listing = hub.listing()
        card = (listing.card.get("configs") if listing.card else None) or []
        configs = [config for config in card if isinstance(config, dict) and ("data_files" in config or "data_dir" in config)]
        if not (files := [file for file in listing.files if file.endswith(".parquet")]):
            try:
                listing = hub.listing(CONVERTED)
            except Missing:
                raise DataError(f"{name} has no parquet files; download it and give its text files as input") from None
            files = [file for file in listing.files if file.endswith(".parquet")]
            configs = [{"config_name": c, "data_dir": c} for c in sorted({file.partition("/")[0] for file in files})]
        revision = listing.commit
        chosen = select(files, configs, parts["config"], parts["split"] or "train", name)
        folder = hub.snapshot([glob.escape(file) for file in chosen], revision)
        if missing := [file for file in chosen if not (folder / file).is_file()]:  # the client may fail without raising an error
            raise Unreachable(f"{missing[0]} of {hub.repo} was not downloaded from {hub.endpoint}")
    except Unreachable as error:
        with suppress(OSError, ValueError, TypeError, LookupError, AttributeError):  # the record may be missing or damaged
            record = read_json(note)
            paths = [hub.folder / "snapshots" / record["revision"] / file for file in record["files"]]
            if paths and all(path.is_file() for path in paths):
                log.warning("%s; using the files of %s that were downloaded earlier", error, name)
                return paths
        raise DataError(f"cannot fetch {name}: {error}; try again when online, or {instead}") from None
    with suppress(OSError):  # the record is optional, and the cache may be read-only
        note.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(note, json.dumps({"revision": revision, "files": chosen}) + "\n")
    return [folder / file for file in chosen]


def select(files: Sequence[str], configs: Sequence[Mapping[str, Any]], config: str | None, split: str, name: str) -> list[str]:
    """Return the `files` that belong to a configuration and a split; raise an error if there are none."""
    if config == EVERY and configs:
        chosen = [file for each in configs for file in select(files, [each], None, split, name)]
    elif configs:
        selected = _config(configs, config, name)
        folder = str(selected.get("data_dir") or "").strip("/")
        entries = selected.get("data_files", "**")
        entries = entries if isinstance(entries, list) else [entries]
        by_split = all(isinstance(entry, dict) for entry in entries)  # if False, the split is inferred from the paths
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
            raise DataError(f"{name}: no parquet files in a folder {config!r}; folders with parquet files: {_some(folders)}")
        chosen = _of_split(inside, split)
    if not chosen:
        raise DataError(f"{name}: no parquet files for the split {split!r}; choose a split named in these paths: {_some(files)}")
    if partial := next((file for file in chosen if "partial-" in file), None):
        raise DataError(f"{name}: the hub has only part of the dataset as parquet ({partial}); download the original files")
    return sorted(chosen)


def _config(configs: Sequence[Mapping[str, Any]], wanted: str | None, name: str) -> Mapping[str, Any]:
    names = {str(config.get("config_name", "default")): config for config in configs}
    if wanted is None:
        marked = [config for config in configs if config.get("default") is True]
        if len(names) > 1 and not marked and "default" not in names:
            raise DataError(f"{name} has several configurations; name one after a slash: {_some(list(names))}")
        return marked[0] if marked else names.get("default", configs[0])
    if wanted not in names:
        raise DataError(f"{name}: no configuration {wanted!r}; choose one of {_some(list(names))}")
    return names[wanted]


def _of_split(files: Sequence[str], split: str) -> list[str]:
    """Return the files whose path has the split's name or a synonym as a word; if no path names a split, all belong to train."""
    words = {file: set(re.split(r"[^a-z0-9]+", file.lower())) for file in files}
    if split == "train" and not any(words[file] & set(names) for file in files for names in SPLITS):
        return list(files)
    return [file for file in files if words[file] & _words(split) or f"/{split}/" in f"/{file}"]


def _words(split: str) -> set[str]:
    """Return the split's name and its synonyms."""
    return next((set(names) for names in SPLITS if split in names), {split})


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "") if names else "none"
