"""Published shards from a Hugging Face dataset repository: any number of train shards, all of validation, the tokenizer.

What is in the folder afterwards is what the repository has at one commit, byte for byte: size, hash and shard header of every
file are checked, whether it was fetched now or lay there. A file gets its name only when it is whole.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock

from ingot.compat.golf.data import PREFIX
from ingot.compat.golf.data.manifest import (
    DOCS,
    DOCS_SOURCE,
    PREVIOUS,
    Plan,
    Source,
    dataset_name,
    plan_files,
    read_source,
    write_manifest,
)
from ingot.compat.golf.data.placing import check_space, disk_of, in_threads, place, sweep
from ingot.data.formats.foreign import MANIFEST, parse_manifest
from ingot.data.hub import FileInfo, Hub, Stopped, client_messages
from ingot.data.store.dataset import MANIFEST as PREPARED
from ingot.data.store.shards import token_count
from ingot.data.store.staging import alone_in, writing
from ingot.errors import ConfigError, DataError
from ingot.runtime.files import reading, write_atomically


@dataclass(frozen=True)
class Progress:
    """How far a download is; bytes and files count what was found whole as well as what was fetched."""

    files: int
    of_files: int
    bytes: int
    of_bytes: int
    fetched: str | None = None  # the file that has just arrived


@dataclass(frozen=True)
class Downloaded:
    """What a download came to."""

    folder: str
    repo: str
    commit: str | None
    variant: str
    dataset: str
    tokenizer: list[str]
    train_shards: int
    val_shards: int
    train_tokens: int
    val_tokens: int
    files: int
    fetched_files: int
    fetched_bytes: int
    warnings: list[str]
    seconds: float


def download(
    output: Path,
    hub: Hub,
    *,
    variant: str = "sp1024",
    train_shards: int | None = None,
    prefix: str = PREFIX,
    revision: str | None = None,
    with_docs: bool = False,
    skip_manifest: bool = False,
    workers: int = 4,
    notify: Callable[[str], None] = lambda line: None,
    progress: Callable[[Progress], None] = lambda progress: None,
) -> Downloaded:
    """Bring the shards and the tokenizer of a published data set into a folder."""
    started = time.monotonic()
    dataset_name(variant)
    for option, value, least in (("--train-shards", train_shards, 0), ("--workers", workers, 1)):
        if value is not None and value < least:
            raise ConfigError(f"{option} {value} is less than {least}")
    if skip_manifest and revision is not None:
        raise ConfigError("--revision and --skip-manifest exclude each other: a manifest that is here has its revision")
    prefix = prefix.strip("/")
    if {".", "..", ""} & set(prefix.split("/")) and prefix:
        raise ConfigError(f"the prefix {prefix!r} is not a folder of a repository")
    with client_messages(notify):
        job = _Job(hub, output, prefix, notify, progress)
        job.find_manifest(revision, skip_manifest)
        plan = job.plan(variant, train_shards, with_docs)
        with alone_in(output, notify) as alone:
            job.fetch(plan, workers, alone)
    return job.result(plan, variant, time.monotonic() - started)


class _Job:
    """One download: where it comes from, what is known of its files, and how far it is."""

    def __init__(
        self, hub: Hub, output: Path, prefix: str, notify: Callable[[str], None], progress: Callable[[Progress], None]
    ) -> None:
        self.hub, self.output, self.prefix = hub, output, prefix
        self.notify, self.progress = notify, progress
        self.commit: str | None = None
        self.facts: dict[str, FileInfo] = {}  # of files on the hub
        self.source: Source | None = None  # of the manifest that lies in the folder
        self.local = False  # whether that manifest is used as it is
        self.content = b""
        self.docs: tuple[str, ...] = ()
        self.done = Progress(0, 0, 0, 0)
        self.fetched_files = self.fetched_bytes = 0
        self._lock = Lock()

    def find_manifest(self, revision: str | None, skip: bool) -> None:
        """Read the manifest: the hub's, or with --skip-manifest and offline the one in the folder."""
        self.source = read_source(self.output)
        self.local = skip or self.hub.offline
        if self.local:
            self._take_local_manifest("--skip-manifest is given" if skip else "HF_HUB_OFFLINE is set")
            return
        self._list(revision)
        if MANIFEST not in self.facts:
            raise DataError(
                f"{self.hub.repo} has no {self._remote(MANIFEST)}; check the repository and the prefix {self.prefix!r}"
            )
        self.content = self.hub.fetch(self._remote(MANIFEST), self.commit, self.facts[MANIFEST]).read_bytes()

    def _take_local_manifest(self, why: str) -> None:
        path = self.output / MANIFEST
        with reading(path):
            if not path.exists():
                raise DataError(f"{why} and there is no {path}; without it the manifest is downloaded")
            self.content = path.read_bytes()
        if self.source is None:
            self.notify(f"using {path}, which does not say where it came from; what is missing is fetched from {self.hub.repo}")
            return
        if (self.source.repo, self.source.prefix) != (self.hub.repo, self.prefix):
            raise DataError(
                f"{why} and {path} came from {self.source.repo} (prefix {self.source.prefix!r}), "
                f"not from {self.hub.repo} (prefix {self.prefix!r}); ask for that one, or download the manifest too"
            )
        self.commit, self.facts = self.source.commit, dict(self.source.files)
        self.notify(f"using {path}, which came from {self.source.repo} at {self.source.commit[:12]}")

    def plan(self, variant: str, train_shards: int | None, with_docs: bool) -> Plan:
        """Decide on the files, and that the hub has them all."""
        where = str(self.output / MANIFEST) if self.local else self._remote(MANIFEST)
        plan = plan_files(parse_manifest(self.content, where), variant, train_shards, self.hub.repo, where)
        if with_docs:
            self.docs = (DOCS_SOURCE, DOCS)
        wanted = [*plan.files, *self.docs]
        if self.local and not self.hub.offline and any(name not in self.facts for name in wanted):
            self._list(self.commit)
        if with_docs and DOCS_SOURCE not in self.facts:
            self.docs = (DOCS,)
        missing = [name for name in wanted if name not in self.facts and name != DOCS_SOURCE]
        if missing and not self.hub.offline:
            more = f" and {len(missing) - 1:,} more of {len(wanted):,} files" if len(missing) > 1 else ""
            raise DataError(
                f"{self.hub.repo} has no {self._remote(missing[0])}{more}, though they are asked for; "
                "choose another variant or repository"
            )
        return plan

    def fetch(self, plan: Plan, workers: int, alone: bool) -> None:
        """Make the folder hold the files of a plan."""
        names = [*plan.files, *self.docs]
        if alone:
            sweep({(self.output / name).parent for name in names})
        self._refuse_own_work(plan)
        self._refuse_strangers(plan, workers)
        check_space(self._needs(names))
        if not self.local or self.source is not None:
            self._write_manifest(names)
        sizes = sum(self.facts.get(name, FileInfo()).size or 0 for name in names)
        self.done = Progress(0, len(names), 0, sizes)
        in_threads(self._ensure, names, workers, self.hub.stop)

    def result(self, plan: Plan, variant: str, seconds: float) -> Downloaded:
        """Count what is there, and compare it with what the manifest says."""
        val = [name for name in plan.val if "_val_bytes_" not in name]
        tokens = {"train": self._tokens(plan.train), "val": self._tokens(val)}
        warnings = []
        for split, complete in (("train", len(plan.train) == plan.train_available), ("val", True)):
            said = plan.stats.get(f"tokens_{split}")
            if complete and isinstance(said, int) and said != tokens[split]:
                warnings.append(f"the {split} shards hold {tokens[split]:,} tokens and the manifest says {said:,}")
        here = len(list((self.output / plan.folder).glob("fineweb_train_*.bin")))
        if here > len(plan.train):
            warnings.append(f"{plan.folder} holds {here:,} train shards, and training reads them all")
        warnings += self._check_docs()
        for warning in warnings:
            self.notify(f"warning: {warning}")
        return Downloaded(
            folder=str(self.output),
            repo=self.hub.repo,
            commit=self.commit,
            variant=variant,
            dataset=str(self.output / plan.folder),
            tokenizer=[str(self.output / name) for name in plan.tokenizer],
            train_shards=len(plan.train),
            val_shards=len(val),
            train_tokens=tokens["train"],
            val_tokens=tokens["val"],
            files=len(plan.files) + len(self.docs),
            fetched_files=self.fetched_files,
            fetched_bytes=self.fetched_bytes,
            warnings=warnings,
            seconds=round(seconds, 3),
        )

    def _list(self, revision: str | None) -> None:
        listing = self.hub.listing(revision)
        start = f"{self.prefix}/" if self.prefix else ""
        self.commit = listing.commit
        self.facts = {name.removeprefix(start): facts for name, facts in listing.files.items() if name.startswith(start)}

    def _remote(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix else name

    def _tokens(self, names: Sequence[str]) -> int:
        return sum(token_count(self.output / name) for name in names)

    def _refuse_own_work(self, plan: Plan) -> None:
        """Keep what was made here and not downloaded: a data set with dataset.json, a tokenizer that no download brought."""
        folder, brought = self.output / plan.folder, self.source.files if self.source else {}
        if (folder / PREPARED).is_file():
            raise DataError(
                f"{folder} was made by an export or a conversion ({PREPARED} is in it) and is not overwritten by a download; "
                "choose another output, or move it away"
            )
        for name in plan.tokenizer:
            if name not in brought and self._problem(name) not in (None, "missing"):
                raise DataError(
                    f"{self.output / name} is not that of {self.hub.repo} and no download brought it, so it is not overwritten; "
                    "choose another output, or move it away"
                )

    def _refuse_strangers(self, plan: Plan, workers: int) -> None:
        """Training reads every shard of the folder, so those that were not asked for must be the repository's too."""
        if self.local and self.source is None:
            return
        here = {f"{plan.folder}/{path.name}" for path in (self.output / plan.folder).glob("fineweb_*.bin")}
        strangers: list[str] = []

        def look(name: str) -> None:
            if (name not in self.facts and not self.local) or self._problem(name) is not None:
                strangers.append(name)

        others = sorted(here - set(plan.files))
        if others:
            self.notify(f"checking {len(others):,} shards of {plan.folder} that were not asked for")
        in_threads(look, others, workers, self.hub.stop)
        if strangers:
            more = f" (and {len(strangers) - 1:,} more)" if len(strangers) > 1 else ""
            raise DataError(
                f"{self.output / min(strangers)}{more} is not what {self.hub.repo} has at {str(self.commit)[:12]}, "
                "and training reads every shard of the folder; remove it, or choose another output"
            )

    def _problem(self, name: str) -> str | None:
        """What is wrong with a file in the folder, or None."""
        path = self.output / name
        if not path.is_file():
            return "missing"
        trusted = not self.local or self.source is not None  # otherwise the hub may have moved on since
        if trusted and (problem := self.facts.get(name, FileInfo()).problem(path)) is not None:
            return problem
        if path.suffix == ".bin":
            try:
                token_count(path)
            except DataError as error:
                return str(error)
        return None if path.stat().st_size else "0 bytes"

    def _needs(self, names: Sequence[str]) -> Iterator[tuple[Path, int]]:
        """The bytes that a fetch takes from the disk of the cache and, if that is another one, from the folder's."""
        two_disks = disk_of(self.hub.cache) != disk_of(self.output)
        for name in names:
            size, path = self.facts.get(name, FileInfo()).size or 0, self.output / name
            if path.is_file() and path.stat().st_size == size:
                continue
            if not self.hub.cached(self._remote(name), self.commit):
                yield self.hub.cache, size
            if two_disks:
                yield self.output, size

    def _write_manifest(self, names: Sequence[str]) -> None:
        """Replace a manifest of other content, and say so; one of unknown origin may be somebody's work and is kept."""
        path, repo = self.output / MANIFEST, self.hub.repo
        self.source = source = read_source(self.output)  # again, now that nobody else writes
        same = source is not None and (source.repo, source.prefix) == (repo, self.prefix)
        with writing(path):
            here = path.read_bytes() if path.is_file() else None
            if here is not None and here != self.content:
                if source is None:
                    write_atomically(self.output / PREVIOUS, here)
                    self.notify(f"{path} is replaced by that of {repo}; the one that was here is kept as {PREVIOUS}")
                elif same:
                    self.notify(f"{path} is replaced: {repo} has changed since {source.commit[:12]}")
                else:
                    self.notify(f"{path} came from {source.repo} and is replaced by that of {repo}")
            files = {
                **(source.files if source and same else {}),
                **{name: self.facts[name] for name in names if name in self.facts},
            }
            digest = hashlib.sha256(self.content).hexdigest()
            origin = Source(repo=repo, prefix=self.prefix, commit=str(self.commit), manifest_sha256=digest, files=files)
            write_manifest(self.output, self.content, origin)

    def _ensure(self, name: str) -> None:
        """Make one file be there and whole."""
        target, facts = self.output / name, self.facts.get(name, FileInfo())
        problem = self._problem(name)
        if problem is None:
            self._count(facts.size or 0, finished=True)
            return
        if problem != "missing":
            self.notify(f"{target} is not the file of {self.hub.repo} ({problem}); fetching it again")
        counted = 0

        def count(size: int) -> None:
            nonlocal counted
            counted += size
            self._count(size)

        blob = self.hub.fetch(self._remote(name), self.commit, facts, count)
        if target.suffix == ".bin":
            try:
                token_count(blob)
            except DataError as error:
                raise DataError(f"{self._remote(name)} of {self.hub.repo} is not a sound shard: {error}") from None
        if self.hub.stop.is_set():
            raise Stopped
        with writing(target):
            place(blob, target)
        size = blob.stat().st_size
        with self._lock:
            self.fetched_files += 1
            self.fetched_bytes += size
        self._count(size - counted, finished=True, fetched=name)

    def _count(self, size: int, finished: bool = False, fetched: str | None = None) -> None:
        with self._lock:
            done = self.done
            self.done = replace(done, bytes=done.bytes + size, files=done.files + finished, fetched=fetched)
            self.progress(self.done)

    def _check_docs(self) -> list[str]:
        if DOCS_SOURCE not in self.docs:
            return []
        said = parse_manifest((self.output / DOCS_SOURCE).read_bytes(), DOCS_SOURCE).get("docs_sha256")
        found = self.facts.get(DOCS, FileInfo()).sha256
        if not said or not found or said == found:
            return []
        return [f"{DOCS} has the sha256 {found[:12]} and {DOCS_SOURCE} says {str(said)[:12]}"]
