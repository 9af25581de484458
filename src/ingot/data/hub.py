"""A repository on the Hugging Face hub: what it holds at one commit, and its files.

Every request goes through the official client. It retries some requests by itself and keeps its own cache; what it finally raises
becomes one sentence here and nowhere else. A name that a user gave (`attempts=1`) is answered within seconds where there is no
network: the client would try for half a minute and print each attempt. A file whose checksum is known is not trusted: a cache may
hold the remains of a full disk.
"""

from __future__ import annotations

import json
import logging
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download, try_to_load_from_cache
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
NetworkError: type[Exception] = HfHubHTTPError.__mro__[1]  # the base of what httpx raises, under whichever name the client has it
TRANSIENT = (408, 429, 500, 502, 503, 504)
LONGEST_WAIT = 30.0  # seconds between two attempts, unless the hub asks for more
LONGEST_ASKED_WAIT = 300.0
ANSWER_SECONDS = 30.0
CONNECT_SECONDS = 3.0  # to find somebody who answers at all
TRANSFERS = 3  # of a file that arrives damaged


@dataclass(frozen=True)
class FileInfo:
    """What is known of a file before it is read."""

    size: int | None = None
    sha256: str | None = None
    git_sha1: str | None = None  # of small files the hub knows git's hash instead

    def problem(self, path: Path) -> str | None:
        """How a file differs from what is known, or None."""
        with reading(path):
            size = path.stat().st_size
            if self.size is not None and size != self.size:
                return f"{size:,} bytes instead of {self.size:,}"
            if self.sha256 is not None and (found := file_sha256(path)) != self.sha256:
                return f"sha256 {found[:12]} instead of {self.sha256[:12]}"
            if self.git_sha1 is not None and (found := git_hash(path.read_bytes())) != self.git_sha1:
                return f"git hash {found[:12]} instead of {self.git_sha1[:12]}"
        return None


@dataclass(frozen=True)
class Listing:
    """A repository at one commit; `card` is what its page says of it."""

    commit: str
    files: dict[str, FileInfo]
    card: Any = None


class Stopped(Exception):
    """No error of this thread: another has one, or the user interrupts, and it drops what it has."""


class Missing(DataError):
    """The repository is there and has no such file or revision."""


class Unreachable(DataError):
    """The hub cannot be asked; what was fetched before may do."""


class Hub:
    """One repository, asked patiently."""

    def __init__(
        self,
        repo: str,
        repo_type: RepoType = "dataset",
        *,
        endpoint: str | None = None,
        cache: Path | None = None,
        attempts: int = 5,
        first_wait: float = 1.0,
        notify: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.repo, self.repo_type = repo, repo_type
        self.endpoint = endpoint or constants.ENDPOINT
        self.cache = Path(cache or constants.HF_HUB_CACHE)
        self.offline = constants.HF_HUB_OFFLINE
        self._place: dict[str, Any] = {"repo_type": repo_type, "endpoint": self.endpoint, "cache_dir": self.cache}
        self.stop = Event()
        self._api = HfApi(endpoint=endpoint)
        self._attempts, self._first_wait = attempts, first_wait
        self._seen = attempts > 1 or self.offline  # whether to ask without looking first if anybody is there
        self._notify = notify

    def listing(self, revision: str | None = None) -> Listing:
        """The commit of a revision and what is known of each of its files."""

        def ask() -> Listing:
            try:
                info: Any = self._api.repo_info(
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

    def fetch(self, path: str, commit: str | None, info: FileInfo, count: Callable[[int], None] = lambda size: None) -> Path:
        """A file in the client's cache, the same as the hub's; count is told of every stretch of bytes as it comes."""
        problem: str | None = None
        for transfer in range(TRANSFERS):
            request = partial(self._request, path, commit, count, again=transfer > 0)
            blob, counted = self._ask(path, request, partial(request, local=True))
            if (problem := info.problem(blob)) is None:
                return blob
            count(-counted)
            if self.offline:
                break
            self._notify(f"{path}: it arrived with {problem}; fetching it again")
        raise DataError(f"{path} of {self.repo} is damaged in the cache or on the way: {problem}; try again, or ask its owner")

    def snapshot(self, names: Sequence[str], commit: str | None = None) -> Path:
        """The folder in the client's cache that holds the files of these names or patterns, several fetched at once."""
        ask = partial(snapshot_download, self.repo, revision=commit, allow_patterns=list(names), **self._place)
        return Path(self._ask(f"the {self.repo_type}", ask, partial(ask, local_files_only=True)))

    @property
    def folder(self) -> Path:
        """Where the client's cache keeps the repository."""
        return self.cache / repo_folder_name(repo_id=self.repo, repo_type=self.repo_type)

    def cached(self, path: str, commit: str | None) -> Path | None:
        """A file in the client's cache."""
        found = try_to_load_from_cache(self.repo, path, cache_dir=self.cache, revision=commit, repo_type=self.repo_type)
        return Path(found) if isinstance(found, str) else None

    def cached_commit(self, path: str) -> str | None:
        """The commit of which the client's cache has a file, the latest to arrive; None without one."""
        found = [snapshot for snapshot in self.folder.glob("snapshots/*") if (snapshot / path).is_file()]
        return max(found, key=lambda snapshot: snapshot.stat().st_mtime).name if found else None

    def _request(
        self, path: str, commit: str | None, count: Callable[[int], None], again: bool, local: bool = False
    ) -> tuple[Path, int]:
        counted = 0

        def add(size: int) -> None:
            nonlocal counted
            if self.stop.is_set():
                raise Stopped
            counted += size
            count(size)

        try:
            found = hf_hub_download(
                self.repo,
                path,
                revision=commit,
                force_download=again,
                local_files_only=self.offline or local,
                tqdm_class=_meter(add),
                **self._place,
            )
        except BaseException:
            count(-counted)
            raise
        return Path(found), counted

    def _ask(self, what: str, request: Callable[[], T], from_cache: Callable[[], T] | None = None) -> T:
        if not self._seen:
            try:
                connect(self.endpoint)
            except ConnectionError as error:
                with suppress(LocalEntryNotFoundError):
                    if from_cache is not None:
                        return from_cache()
                raise self._given_up(what, str(error)) from error
        self._seen, reason = True, ""
        for attempt in range(1, self._attempts + 1):
            if self.stop.is_set():
                raise Stopped
            try:
                with client_messages(self._notify) if self._attempts == 1 else nullcontext():
                    return request()
            except (NetworkError, OSError, RuntimeError, ValueError) as error:
                cause = _cause(error)
                if (refusal := self._refusal(cause, what)) is not None:
                    raise refusal from error
                reason = _reason(cause)
            if attempt < self._attempts and not self.stop.is_set():
                wait = max(min(self._first_wait * 2 ** (attempt - 1), LONGEST_WAIT), _asked_wait(cause))
                self._notify(f"{what}: {reason}; attempt {attempt + 1} of {self._attempts} in {wait:.0f} s")
                self.stop.wait(wait)
        raise self._given_up(what, reason)

    def _given_up(self, what: str, reason: str) -> Unreachable:
        tries = "attempt" if self._attempts == 1 else "attempts"
        return Unreachable(
            f"gave up on {what} of {self.repo} at {self.endpoint} after {self._attempts} {tries}: {reason}; "
            "the same command continues from here"
        )

    def _refusal(self, error: BaseException, what: str) -> IngotError | None:
        """What no further attempt would change, as a sentence."""
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        if isinstance(error, HFValidationError):
            return ConfigError(f"{self.repo!r} is not the name of a repository, which is written OWNER/NAME")
        if isinstance(error, OfflineModeIsEnabled) or (self.offline and isinstance(error, LocalEntryNotFoundError)):
            return Unreachable(
                f"HF_HUB_OFFLINE is set and {what} of {self.repo} is neither here nor in the hub's cache {self.cache}; "
                "unset it to download"
            )
        if isinstance(error, RevisionNotFoundError):
            return Missing(f"{self.repo_type} repository {self.repo} at {self.endpoint} has no such revision")
        if isinstance(error, EntryNotFoundError) and status is not None:
            return Missing(f"{self.repo_type} repository {self.repo} at {self.endpoint} has no {what}")
        if isinstance(error, RepositoryNotFoundError | GatedRepoError) or status in (401, 403, 404):
            return DataError(
                f"no access to {self.repo_type} repository {self.repo} at {self.endpoint} (HTTP {status}); check the name, "
                "and for a private or gated one log in with `hf auth login` or set HF_TOKEN"
            )
        if status is not None and status not in TRANSIENT:
            return DataError(f"{self.endpoint} refuses {what} of {self.repo}: HTTP {status}")
        if (seconds := _asked_wait(error)) > LONGEST_ASKED_WAIT:
            return DataError(
                f"{self.endpoint} asks for {seconds:,.0f} s of patience ({_reason(error)}); run the same command then"
            )
        if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError | TimeoutError):
            return DataError(
                f"cannot read or write {error.filename or self.cache}: {error.strerror}; make room or set HF_HOME to another disk"
            )
        return None


def connect(endpoint: str, patience: float = CONNECT_SECONDS) -> None:
    """Raise a ConnectionError where nobody takes a connection; in a thread, because finding the address knows no timeout."""
    asked = urlsplit(endpoint)
    if asked.hostname is None or getproxies().get(asked.scheme):
        return  # only the client knows the way
    found: list[str] = []

    def try_once() -> None:
        try:
            port = asked.port or (443 if asked.scheme == "https" else 80)
            socket.create_connection((asked.hostname, port), timeout=patience).close()
            found.append("")
        except (TimeoutError, BlockingIOError):
            return  # it was not to take longer
        except OSError as error:
            found.append(error.strerror or str(error))

    thread = Thread(target=try_once, daemon=True)
    thread.start()
    thread.join(patience)
    if not found or found[0]:
        raise ConnectionError(found[0] if found else f"no connection within {patience:.0f} s")


@contextmanager
def client_messages(notify: Callable[[str], None]) -> Iterator[None]:
    """Lines of the client's log become ours: its own handler would write across a progress bar."""

    class Forward(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            line = " ".join(record.getMessage().split())
            notify("hub: " + re.sub(r"[?]\S*", "", line))  # signed addresses are long

    logger = logging.getLogger("huggingface_hub")
    kept = logger.handlers[:]
    logger.handlers[:] = [Forward()]
    try:
        yield
    finally:
        logger.handlers[:] = kept


def _meter(count: Callable[[int], None]) -> type[Any]:
    """A progress bar of the client that shows nothing and counts."""

    class Meter(tqdm):
        def __init__(self, *_: object, **settings: object) -> None:
            super().__init__(disable=True)  # type: ignore[no-untyped-call]

        def update(self, size: float | None = 1) -> None:
            count(int(size or 0))

        def update_transfer(self, size: float) -> None:
            """Bytes on the wire, which are fewer than those of the file where the hub stores equal stretches once."""

        def set_transfer_postfix_str(self, *_: object, **settings: object) -> None:
            """Their speed, which nobody is shown."""

    return Meter


def _cause(error: BaseException) -> BaseException:
    """What lies behind the client's "not found in the cache either"."""
    while isinstance(error, LocalEntryNotFoundError | ValueError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _reason(error: BaseException) -> str:
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        return f"HTTP {status}" + (", too many requests" if status == 429 else "")
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


def _asked_wait(error: BaseException) -> float:
    asked = error.response.headers.get("Retry-After", "") if isinstance(error, HfHubHTTPError) else ""
    return float(asked) if asked.isdecimal() else 0.0
