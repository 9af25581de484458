"""Published shards from a Hugging Face dataset repository: any number of train shards, all of validation, the tokenizer.

A file gets its name only when it is whole. It is compared with the hub's size and hash once, when it arrives, and then noted in
manifest.source.json. The manifest is a stranger's: every path in it is checked before it is used here.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shlex
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from ingot.compat.golf import DOCS, DOCS_SOURCE, PREFIX, PREFIX_VARIABLE, PREVIOUS, REPO, REPO_VARIABLE
from ingot.console.entry import explained, warn
from ingot.console.output import Parser, print_json
from ingot.console.progress import work_line
from ingot.data.formats.shard_folder import MANIFEST, Record, parse_manifest
from ingot.data.hub import FileInfo, Hub
from ingot.data.store.dataset import MANIFEST as PREPARED
from ingot.data.store.shards import token_count
from ingot.data.store.staging import alone_in, writing
from ingot.errors import ConfigError, DataError
from ingot.runtime.files import fsync_dir, reading, sweep_temporaries, temporary_beside, write_atomically

SOURCE = "manifest.source.json"
TOKENIZER_FILES = ("model_path", "vocab_path", "path")  # keys under which a tokenizer's entry may name its files
TRAIN_SHARDS = 80  # by default
MAX_SHARDS = 1_000_000  # file names have six digits


@dataclass(frozen=True)
class Downloaded:
    """The outcome of a download."""

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


@dataclass(frozen=True)
class Plan:
    """The files of one dataset to download, by names that are the same below the hub's prefix and below the output folder."""

    name: str
    train: tuple[str, ...]
    val: tuple[str, ...]  # with the byte counts of its tokens, if the dataset has them
    tokenizer: tuple[str, ...]
    train_available: int
    stats: Record

    @property
    def folder(self) -> str:
        """The folder of the shards."""
        return f"datasets/{self.name}"


class Source(BaseModel):
    """Where the manifest in a folder came from, and the files that were found to be the hub's."""

    repo: str
    prefix: str
    commit: str
    manifest_sha256: str
    files: dict[str, FileInfo]


def dataset_name(variant: str) -> str:
    """Return the dataset of a variant: byte260, sp1024, or sp8192_anything for derived ones."""
    if not re.fullmatch(r"byte260|sp[0-9]+(_[A-Za-z0-9_]+)?", variant):
        raise ConfigError(f"unknown variant {variant!r}; give byte260, or sp and the size of a vocabulary, such as sp1024")
    return f"fineweb10B_{variant}"


def plan_files(manifest: Record, variant: str, train_shards: int | None, repo: str, where: str) -> Plan:
    """Return the files of a variant; without a number, 80 train shards or as many as there are."""
    name, where = dataset_name(variant), f"{where} of {repo}"
    entry = _entry(manifest, "datasets", name, where)
    stats = entry.get("stats")
    if not isinstance(stats, dict):
        raise DataError(f"{where} has no stats for {name}, so the number of its shards is unknown")
    for key in ("files_train", "files_val"):
        if type(stats.get(key)) is not int or not 0 <= stats[key] <= MAX_SHARDS:
            raise DataError(f"{where} says {key}={stats.get(key)!r}, which is not a number of files")
    available: int = stats["files_train"]
    if train_shards is not None and train_shards > available:
        raise ConfigError(f"{variant} has {available:,} train shards in {repo}, fewer than the {train_shards:,} requested")
    wanted = min(TRAIN_SHARDS, available) if train_shards is None else train_shards
    kinds = ("val", "val_bytes") if entry.get("val_bytes_glob") else ("val",)
    shards = {
        kind: tuple(f"datasets/{name}/fineweb_{kind}_{index:06d}.bin" for index in range(count))
        for kind, count in [("train", wanted), *((kind, stats["files_val"]) for kind in kinds)]
    }
    tokenizer = _entry(manifest, "tokenizers", str(entry.get("tokenizer_name")), where)
    val = tuple(shard for kind in kinds for shard in shards[kind])
    return Plan(name, shards["train"], val, _tokenizer_files(tokenizer, where), available, stats)


def _entry(manifest: Record, kind: str, name: str, where: str) -> Record:
    listed = manifest.get(kind)
    entries = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    for entry in entries:
        if entry.get("name") == name:
            return entry
    names = ", ".join(str(entry.get("name")) for entry in entries[:8]) or "none"
    raise DataError(f"no {kind.removesuffix('s')} {name} in {where}; it lists {names}")


def _tokenizer_files(entry: Record, where: str) -> tuple[str, ...]:
    """Return the files of a tokenizer; only names inside tokenizers/ are accepted, so that no other file can be overwritten."""
    names = [entry[key] for key in TOKENIZER_FILES if entry.get(key)]
    if not names:
        raise DataError(f"tokenizer {entry.get('name')} in {where} names no file ({', '.join(TOKENIZER_FILES)})")
    for name in names:
        if not isinstance(name, str) or not re.fullmatch(r"tokenizers(/[^/.\\:\x00-\x1f][^/\\:\x00-\x1f]*)+", name):
            raise DataError(f"{where} names {name!r} as a tokenizer's file; only names inside tokenizers/ are accepted")
    return tuple(dict.fromkeys(names))


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
    notify: Callable[[str], None] = warn,
    progress: Callable[..., None] | None = None,
) -> Downloaded:
    """Download the shards and the tokenizer of a published dataset into a folder.

    `progress` is a status line's; without one, there is a line for each file that arrives.
    """
    started, prefix = time.monotonic(), prefix.strip("/")
    dataset_name(variant)
    if train_shards is not None and train_shards < 0:
        raise ConfigError(f"--train-shards {train_shards} is less than 0")
    if skip_manifest and revision is not None:
        raise ConfigError("--revision and --skip-manifest exclude each other: the manifest in the folder has its own revision")
    if prefix and {".", "..", ""} & set(prefix.split("/")):
        raise ConfigError(f"the prefix {prefix!r} is not a folder of a repository")
    job = _Job(output, hub, prefix, notify, progress)
    if skip_manifest or hub.offline:
        job.use_local_manifest("--skip-manifest is given" if skip_manifest else "HF_HUB_OFFLINE is set")
    else:
        job.list_files(revision)
        if MANIFEST not in job.infos:
            raise DataError(f"{hub.repo} has no {job.remote(MANIFEST)}; check the repository and the prefix {prefix!r}")
        job.manifest = hub.fetch(job.remote(MANIFEST), job.commit, job.infos[MANIFEST]).read_bytes()
    where = str(output / MANIFEST) if job.local else job.remote(MANIFEST)
    plan = plan_files(parse_manifest(job.manifest, where), variant, train_shards, hub.repo, where)
    names = job.check_listed([*plan.tokenizer, *plan.val, *plan.train, *([DOCS_SOURCE, DOCS] if with_docs else [])])
    with alone_in(output, notify) as alone:
        job.refuse_own_work(plan)
        job.refuse_strangers(plan, names)
        job.fetch_all(names, alone)
    val = [name for name in plan.val if "_val_bytes_" not in name]
    tokens = {split: sum(token_count(output / name) for name in some) for split, some in (("train", plan.train), ("val", val))}
    return Downloaded(
        folder=str(output),
        repo=hub.repo,
        commit=job.commit,
        variant=variant,
        dataset=str(output / plan.folder),
        tokenizer=[str(output / name) for name in plan.tokenizer],
        train_shards=len(plan.train),
        val_shards=len(val),
        train_tokens=tokens["train"],
        val_tokens=tokens["val"],
        files=len(names),
        fetched_files=len(job.fetched),
        fetched_bytes=sum(job.fetched),
        warnings=job.warnings(plan, tokens, names),
        seconds=round(time.monotonic() - started, 3),
    )


class _Job:
    """One download: where it comes from, and what is known of its files."""

    def __init__(
        self, output: Path, hub: Hub, prefix: str, notify: Callable[[str], None], progress: Callable[..., None] | None
    ) -> None:
        self.output, self.hub, self.prefix, self.notify, self.progress = output, hub, prefix, notify, progress
        self.commit: str | None = None
        self.infos: dict[str, FileInfo] = {}  # what the hub says of the files below the prefix
        self.manifest = b""
        self.source = read_source(output)
        self.local = False  # whether the manifest in the folder is used as it is
        self.fetched: list[int] = []  # the sizes of files that arrived now

    def remote(self, name: str) -> str:
        """Return the name of a file in the repository."""
        return f"{self.prefix}/{name}" if self.prefix else name

    def list_files(self, revision: str | None) -> None:
        """Ask the hub for the files of a revision."""
        listing = self.hub.listing(revision)
        start = self.remote("")
        self.commit = listing.commit
        self.infos = {name.removeprefix(start): info for name, info in listing.files.items() if name.startswith(start)}

    def use_local_manifest(self, why: str) -> None:
        """Use the manifest that is in the folder, and the commit it came from."""
        path, self.local = self.output / MANIFEST, True
        with reading(path):
            if not path.exists():
                raise DataError(f"{why} and there is no {path}; without it the manifest is downloaded")
            self.manifest = path.read_bytes()
        if self.source is None:
            self.notify(f"using {path}, which does not say where it came from; missing files are fetched from {self.hub.repo}")
            return
        if (self.source.repo, self.source.prefix) != (self.hub.repo, self.prefix):
            raise DataError(
                f"{why} and {path} came from {self.source.repo} (prefix {self.source.prefix!r}), not from {self.hub.repo} "
                f"(prefix {self.prefix!r}); name that repository, or download the manifest too"
            )
        self.commit = self.source.commit
        self.infos = dict(self.source.files)
        self.notify(f"using {path}, which came from {self.source.repo} at {self.source.commit[:12]}")

    def check_listed(self, names: list[str]) -> list[str]:
        """Return the names without a sidecar that the repository does not have; refuse if it lacks any other file."""
        if self.local and not self.hub.offline and not all(name in self.infos or self._is_here(name) for name in names):
            self.list_files(self.commit)
        names = [name for name in names if name != DOCS_SOURCE or name in self.infos]
        missing = [name for name in names if name not in self.infos and not (self.local and self._is_here(name))]
        if missing and not self.hub.offline:
            more = f" and {len(missing) - 1:,} more of {len(names):,} files" if len(missing) > 1 else ""
            raise DataError(
                f"{self.hub.repo} has no {self.remote(missing[0])}{more}, though its manifest lists them; choose another variant "
                "or repository"
            )
        return names

    def _is_here(self, name: str) -> bool:
        """Return True for a file in the folder that is the hub's; it is hashed only if it never was."""
        path, info = self.output / name, self.infos.get(name)
        if not path.is_file():
            return False
        if info is None:
            return self.local and path.stat().st_size > 0
        known = self.source is not None and self.source.files.get(name) == info
        return path.stat().st_size == info.size if known else info.problem(path) is None

    def refuse_own_work(self, plan: Plan) -> None:
        """Refuse to overwrite a dataset or a tokenizer that was made here."""
        folder, brought = self.output / plan.folder, self.source.files if self.source else {}
        if (folder / PREPARED).is_file():
            raise DataError(
                f"{folder} was made by an export or a conversion ({PREPARED} is in it) and is not overwritten by a download; "
                "choose another output, or move it away"
            )
        for name in plan.tokenizer:
            if (self.output / name).is_file() and name not in brought and not self._is_here(name):
                raise DataError(
                    f"{self.output / name} is not that of {self.hub.repo} and no download brought it, so it is not overwritten; "
                    "choose another output, or move it away"
                )

    def refuse_strangers(self, plan: Plan, names: Sequence[str]) -> None:
        """Refuse a folder with shards of another dataset: training reads every shard in it."""
        here = {f"{plan.folder}/{path.name}" for path in (self.output / plan.folder).glob("fineweb_*.bin")}
        for name in sorted(here - set(names)):
            if not self._is_here(name):
                raise DataError(
                    f"{self.output / name} is not a shard of {self.hub.repo} at {str(self.commit)[:12]}, and training reads "
                    "every shard of the folder; remove it, or choose another output"
                )

    def fetch_all(self, names: Sequence[str], alone: bool) -> None:
        """Fetch the files that are not here, after the manifest; note those that are the hub's, even if it ends early."""
        if alone:
            for folder in {(self.output / name).parent for name in (*names, MANIFEST)}:
                sweep_temporaries(folder)
        missing = [name for name in names if not self._is_here(name)]
        total = sum(self.infos[name].size or 0 for name in missing if name in self.infos)
        self._check_space(total)
        if not self.local:
            self._write_manifest()
        done = [name for name in names if name not in missing]
        try:
            for number, name in enumerate(missing, 1):
                self._fetch(name, f"{number} of {len(missing)} files", total)
                done.append(name)
        finally:
            if self.commit is not None:
                self._write_source(done)

    def _check_space(self, size: int) -> None:
        for folder in (self.hub.cache.absolute(), self.output.absolute()):  # on one disk they share the files
            existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
            if size > (free := shutil.disk_usage(existing).free):
                raise DataError(f"the download has {size / 1e9:,.1f} GB and the disk of {folder} has {free / 1e9:,.1f} GB free")

    def _write_manifest(self) -> None:
        """Write the hub's manifest; another one of unknown origin may be somebody's work and is kept."""
        path = self.output / MANIFEST
        with writing(path):
            before = path.read_bytes() if path.is_file() else None
            if before not in (None, self.manifest):
                origin = f"that of {self.source.repo}" if self.source else f"yours and is kept as {PREVIOUS}"
                self.notify(f"{path} is replaced by that of {self.hub.repo} at {str(self.commit)[:12]}; it was {origin}")
                if self.source is None:
                    write_atomically(self.output / PREVIOUS, before or b"")
            if before != self.manifest:
                write_atomically(path, self.manifest)

    def _write_source(self, done: Sequence[str]) -> None:
        same = self.source is not None and (self.source.repo, self.source.prefix) == (self.hub.repo, self.prefix)
        files = dict(self.source.files) if self.source and same else {}
        files |= {name: self.infos[name] for name in done if name in self.infos}
        digest = hashlib.sha256(self.manifest).hexdigest()
        source = Source(repo=self.hub.repo, prefix=self.prefix, commit=str(self.commit), manifest_sha256=digest, files=files)
        if source != self.source:
            with writing(self.output / SOURCE):
                write_atomically(self.output / SOURCE, source.model_dump_json(indent=1, exclude_none=True) + "\n")

    def _fetch(self, name: str, which: str, total: int) -> None:
        """Bring one file into the folder."""
        target, done = self.output / name, sum(self.fetched)

        def count(size: int) -> None:
            nonlocal done
            done += size
            if self.progress is not None:
                self.progress("downloading", done, max(total, done), which)

        if target.is_file():
            self.notify(f"{target} is not the file of {self.hub.repo}; fetching it again")
        blob = self.hub.fetch(self.remote(name), self.commit, self.infos.get(name, FileInfo()), count)
        if target.suffix == ".bin":
            try:
                token_count(blob)
            except DataError as error:
                raise DataError(f"{self.remote(name)} of {self.hub.repo} is not a valid shard: {error}") from None
        with writing(target):
            place(blob, target)
        self.fetched.append(blob.stat().st_size)
        if self.progress is None:
            self.notify(f"{name} ({which})")

    def warnings(self, plan: Plan, tokens: dict[str, int], names: Sequence[str]) -> list[str]:
        """Compare the folder with what the manifest says, and return and print what differs."""
        warnings = []
        for split, complete in (("train", len(plan.train) == plan.train_available), ("val", True)):
            listed = plan.stats.get(f"tokens_{split}")
            if complete and isinstance(listed, int) and listed != tokens[split]:
                warnings.append(f"the {split} shards hold {tokens[split]:,} tokens and the manifest says {listed:,}")
        here = len(list((self.output / plan.folder).glob("fineweb_train_*.bin")))
        if here > len(plan.train):
            warnings.append(f"{plan.folder} holds {here:,} train shards, and training reads them all")
        if DOCS_SOURCE in names and DOCS in self.infos:
            listed = parse_manifest((self.output / DOCS_SOURCE).read_bytes(), DOCS_SOURCE).get("docs_sha256")
            sha256 = self.infos[DOCS].sha256
            if listed and sha256 and listed != sha256:
                warnings.append(f"{DOCS} has the sha256 {sha256[:12]} and {DOCS_SOURCE} says {str(listed)[:12]}")
        for warning in warnings:
            self.notify(f"warning: {warning}")
        return warnings


def read_source(folder: Path) -> Source | None:
    """Return where the manifest in a folder came from; None if that is unknown or the manifest was changed since."""
    try:
        source = Source.model_validate_json((folder / SOURCE).read_bytes())
        digest = hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
    except (OSError, ValueError):
        return None
    return source if source.manifest_sha256 == digest else None


def place(blob: Path, target: Path) -> None:
    """Give a file of the client's cache a second name in our folder, or copy it to another disk."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = temporary_beside(target)
    try:
        try:
            part.hardlink_to(blob.resolve())  # a name in the cache is a symbolic link to the content
        except OSError:  # another disk, or one without hard links
            shutil.copyfile(blob, part)
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)  # also after a rename: onto another name of the same content it does nothing
    fsync_dir(target.parent)


def cached_challenge_fineweb(argv: Sequence[str], folder: Path = Path("data")) -> int:
    """Run the challenge's script cached_challenge_fineweb.py and return its exit code."""
    name = "cached_challenge_fineweb.py"
    parser = Parser(name, description="Download the challenge's FineWeb shards and their tokenizer.")
    parser.add_argument("positional", nargs="?", type=int, metavar="N", help=argparse.SUPPRESS)
    parser.add_argument(
        "--train-shards", type=int, default=TRAIN_SHARDS, metavar="N", help=f"train shards to download ({TRAIN_SHARDS})"
    )
    parser.add_argument("--variant", default="sp1024", help="sp1024, byte260 or another that the repository has (sp1024)")
    parser.add_argument("--skip-manifest", action="store_true", help="use the manifest.json that is in the folder")
    parser.add_argument("--with-docs", action="store_true", help="download docs_selected.jsonl and its source manifest too")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    with explained(name, interrupted="interrupted; the same command continues") as outcome:
        args = parser.parse_args(list(argv))
        download_and_print(
            folder,
            args.json,
            repo=os.environ.get(REPO_VARIABLE, REPO),
            variant=args.variant,
            train_shards=args.train_shards if args.positional is None else args.positional,
            prefix=os.environ.get(PREFIX_VARIABLE, PREFIX),
            with_docs=args.with_docs,
            skip_manifest=args.skip_manifest,
        )
    return outcome.code


def download_and_print(output: Path, as_json: bool, repo: str, **request: Any) -> None:
    """Download and print the outcome on stdout."""
    with work_line("asking the hub", "bytes") as (notify, show):
        result = download(output, Hub(repo), notify=notify, progress=show, **request)
    if as_json:
        print_json(result)
        return
    for split, shards, tokens in (
        ("train", result.train_shards, result.train_tokens),
        ("validation", result.val_shards, result.val_tokens),
    ):
        print(f"{result.dataset}: {shards:,} {split} {'shard' if shards == 1 else 'shards'} of {tokens:,} tokens")
    commit = result.commit[:12] if result.commit else "an unknown commit"
    print(f"tokenizer: {', '.join(result.tokenizer)}")
    print(
        f"{result.repo} at {commit}: {result.files:,} files, {result.fetched_files:,} fetched now "
        f"({result.fetched_bytes / 1e6:,.1f} MB), {result.seconds:.1f} s"
    )
    print(f"train on it with: ingot train --recipe demo --data.path {shlex.quote(result.dataset)}")
