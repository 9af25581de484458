"""A repository on the Hugging Face hub: list and download its files at one commit.

Every request goes through the official client, which retries, resumes and caches; its exceptions become one-line errors here.
An unreachable hub is detected within seconds, because the client would retry for half a minute. The client verifies the size of
a download but not its hash, so `fetch` verifies the hash, once.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils.sha import git_hash
from huggingface_hub.utils.tqdm import tqdm

from ingot.errors import ConfigError, DataError, IngotError
from ingot.runtime.files import file_sha256, reading

T = TypeVar("T")
RepoType = Literal["dataset", "model"]
NetworkError: type[Exception] = HfHubHTTPError.__mro__[1]  # base class of httpx's exceptions, however the client imports it
ANSWER_SECONDS = 30.0
CONNECT_SECONDS = 3.0


@dataclass(frozen=True)
class FileInfo:
    """The size of a file on the hub, and a hash of its content."""

    size: int | None = None
    sha256: str | None = None
    git_sha1: str | None = None  # small files have a git hash instead

    def problem(self, path: Path) -> str | None:
        """Return a message if a file's size or hash differs from this, else None."""
        with reading(path):
            size = path.stat().st_size
            if self.size is not None and size != self.size:
                return f"{size:,} bytes instead of {self.size:,}"
            expected = self.sha256 or self.git_sha1
            if expected and (actual := file_sha256(path) if self.sha256 else git_hash(path.read_bytes())) != expected:
                return f"hash {actual[:12]} instead of {expected[:12]}"
        return None


@dataclass(frozen=True)
class Listing:
    """The files of a repository at one commit; `card` is the metadata of its page."""

    commit: str
    files: dict[str, FileInfo]
    card: Any = None


class Missing(DataError):
    """Raised if the repository exists but has no such file or revision."""


class Unreachable(DataError):
    """Raised if the hub cannot be reached; cached files may still be usable."""


class Hub:
    """One repository on the hub."""

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
                raise DataError(f"{self.endpoint} does not answer like a Hugging Face hub; check HF_ENDPOINT") from error
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
        """Return a file in the client's cache, downloading it if necessary; if it does not match `info`, download it once more.

        `count` is called with the number of bytes received since the last call.
        """

        class Meter(tqdm):
            """A progress bar for the client that prints nothing and only counts bytes."""

            def __init__(self, *_: object, **settings: object) -> None:
                super().__init__(disable=True)  # type: ignore[no-untyped-call]

            def update(self, size: float | None = 1) -> None:
                count(int(size or 0))

            def update_transfer(self, *_: object, **settings: object) -> None:
                """Ignore bytes on the wire, which are fewer than the file's because the hub deduplicates equal chunks."""

            set_transfer_postfix_str = update_transfer

        request = partial(hf_hub_download, self.repo, path, revision=commit, tqdm_class=Meter, **self._place)
        blob = Path(self._ask(path, partial(request, local_files_only=self.offline), partial(request, local_files_only=True)))
        if (problem := info.problem(blob)) and not self.offline:
            blob = Path(self._ask(path, partial(request, force_download=True)))
            problem = info.problem(blob)
        if problem:
            raise DataError(f"{path} of {self.repo} arrives damaged: {problem}; try again, or ask its owner")
        return blob

    def snapshot(self, names: Sequence[str], commit: str | None = None) -> Path:
        """Return the cache folder with the files that match these names or patterns, downloading them if necessary."""
        ask = partial(snapshot_download, self.repo, revision=commit, allow_patterns=list(names), **self._place)
        return Path(self._ask(f"the {self.repo_type}", ask, partial(ask, local_files_only=True)))

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
            with suppress(LocalEntryNotFoundError):
                if from_cache is not None and not (self._answers or self.offline):
                    return from_cache()
            while isinstance(error, LocalEntryNotFoundError | ValueError) and isinstance(error.__cause__, Exception):
                error = error.__cause__  # the original exception behind the client's "not found in the cache either"
            raise self._explained(error, what) from error

    def _explained(self, error: BaseException, what: str) -> IngotError:
        """Convert an exception of the client into one of ours."""
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        repository = f"{self.repo_type} repository {self.repo} at {self.endpoint}"
        if isinstance(error, HFValidationError):
            return ConfigError(f"{self.repo!r} is not the name of a repository, which is written OWNER/NAME")
        if isinstance(error, OfflineModeIsEnabled) or (self.offline and isinstance(error, LocalEntryNotFoundError)):
            absent = f"{what} of {self.repo} is neither here nor in the hub's cache {self.cache}"
            return Unreachable(f"HF_HUB_OFFLINE is set and {absent}; unset it to download")
        if isinstance(error, RevisionNotFoundError):
            return Missing(f"{repository} has no such revision")
        if isinstance(error, EntryNotFoundError) and status is not None:
            return Missing(f"{repository} has no {what}")
        if isinstance(error, RepositoryNotFoundError | GatedRepoError) or status in (401, 403, 404):
            advice = "check the name, and for a private or gated one log in with `hf auth login` or set HF_TOKEN"
            return DataError(f"no access to {repository} (HTTP {status})", advice=advice)
        if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError | TimeoutError):
            advice = "make room or set HF_HOME to another disk"
            return DataError(f"cannot read or write {error.filename or self.cache}: {error.strerror}", advice=advice)
        reason = f"HTTP {status}" if status else str(error).strip().partition("\n")[0][:200] or type(error).__name__
        return Unreachable(f"gave up on {what} of {self.repo} at {self.endpoint}: {reason}; the same command continues from here")


def connect(endpoint: str) -> None:
    """Raise ConnectionError within seconds if the host accepts no connection."""
    address = urlsplit(endpoint)
    if address.hostname is None or getproxies().get(address.scheme):
        return  # behind a proxy only the client knows how to connect
    try:
        port = address.port or (443 if address.scheme == "https" else 80)
        socket.create_connection((address.hostname, port), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        raise ConnectionError(error.strerror or str(error)) from error
