"""Download published shards from a Hugging Face dataset: some train shards, the whole validation split and the tokenizer.

A file appears in the output folder only when it is complete and matches the Hub's hash. It is a hard link to a file in the
Hugging Face cache, so later runs recognise it without hashing again. The manifest is untrusted: its paths are checked before use.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.compat.golf import DOCS, DOCS_SOURCE, PREFIX, PREFIX_VARIABLE, REPO, REPO_VARIABLE
from ingot.console.entry import explained, warn
from ingot.console.output import Parser, print_json
from ingot.console.progress import work_line
from ingot.data.formats.shard_folder import MANIFEST, Record, entries_of, parse_manifest
from ingot.data.hub import FileInfo, Hub
from ingot.data.store.dataset import MANIFEST as PREPARED
from ingot.data.store.shards import open_shard
from ingot.data.store.staging import alone_in, writing
from ingot.errors import ConfigError, DataError
from ingot.runtime.files import fsync_dir, reading, replace_file, temporary_beside, write_atomically

TOKENIZER_FILES = ("model_path", "vocab_path", "path")  # manifest keys that may name a tokenizer's files
TRAIN_SHARDS = 80  # train shards to download by default


@dataclass(frozen=True)
class Plan:
    """The files of a dataset to download, as paths relative to both the Hub prefix and the output folder."""

    train: list[str]
    val: list[str]
    tokenizer: list[str]


def dataset_name(variant: str) -> str:
    """Return the dataset name for a variant, such as byte260, sp1024 or, for a derived variant, sp8192_NAME."""
    if not re.fullmatch(r"byte260|sp[0-9]+(_[A-Za-z0-9_]+)?", variant):
        raise ConfigError(f"unknown variant {variant!r}; give byte260, or sp followed by a vocabulary size, such as sp1024")
    return f"fineweb10B_{variant}"


def plan_files(manifest: Record, variant: str, train_shards: int | None, repo: str) -> Plan:
    """Return the files of a variant to download: tokenizer, val shards and `train_shards` train shards (default: up to 80)."""
    entry = _entry(manifest, "datasets", dataset_name(variant), repo)
    try:
        available, val = (int(entry["stats"][key]) for key in ("files_train", "files_val"))
    except (LookupError, TypeError, ValueError):
        raise DataError(f"the manifest of {repo} does not say how many shards {entry['name']} has") from None
    if train_shards is not None and train_shards > available:
        raise ConfigError(f"{variant} has {available:,} train shards in {repo}, fewer than the {train_shards:,} requested")
    train = min(TRAIN_SHARDS, available) if train_shards is None else train_shards

    def shards(kind: str, count: int) -> list[str]:
        return [f"datasets/{entry['name']}/fineweb_{kind}_{index:06d}.bin" for index in range(count)]

    tokenizer = _entry(manifest, "tokenizers", str(entry.get("tokenizer_name")), repo)
    names = list(dict.fromkeys(tokenizer[key] for key in TOKENIZER_FILES if tokenizer.get(key)))
    for name in names or [None]:  # reject paths outside tokenizers/: no manifest may overwrite other files
        if not isinstance(name, str) or not re.fullmatch(r"tokenizers(/[^/.\\:\x00-\x1f][^/\\:\x00-\x1f]*)+", name):
            raise DataError(f"the manifest of {repo} names {name!r} as a tokenizer file, but it is not inside tokenizers/")
    return Plan(shards("train", train), shards("val", val), names)


def _entry(manifest: Record, kind: str, name: str, repo: str) -> Record:
    entries = {str(entry.get("name")): entry for entry in entries_of(manifest, kind)}
    if name not in entries:
        names = ", ".join(list(entries)[:8]) or "none"
        raise DataError(f"no {kind.removesuffix('s')} {name} in the manifest of {repo}; it lists {names}")
    return entries[name]


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
) -> dict[str, Any]:
    """Download the shards and tokenizer of a published dataset to a folder; return the record that --json prints.

    `progress` updates a status line; without it, each downloaded file is reported on a line of its own.
    """
    started, start = time.monotonic(), f"{prefix.strip('/')}/".lstrip("/")
    dataset = f"datasets/{dataset_name(variant)}"
    folder = output / dataset
    if train_shards is not None and train_shards < 0:
        raise ConfigError(f"--train-shards must be 0 or more, not {train_shards}")
    commit, infos, manifest = None, dict[str, FileInfo](), output / MANIFEST
    if not hub.offline:
        listing = hub.listing(revision)
        commit = listing.commit
        infos = {name.removeprefix(start): info for name, info in listing.files.items() if name.startswith(start)}
    if skip_manifest or hub.offline:
        with reading(manifest):
            content = manifest.read_bytes()
        notify(f"using {manifest} as it is")
    elif MANIFEST not in infos:
        raise DataError(f"{hub.repo} has no {start}{MANIFEST}; check the repository and the prefix {prefix.strip('/')!r}")
    else:
        content = hub.fetch(start + MANIFEST, commit, infos[MANIFEST]).read_bytes()
    plan = plan_files(parse_manifest(content, f"the manifest of {hub.repo}"), variant, train_shards, hub.repo)
    docs = [name for name in (DOCS, DOCS_SOURCE) if with_docs and (name == DOCS or name in infos)]
    names = [*plan.tokenizer, *plan.val, *plan.train, *docs]
    if not hub.offline and (absent := [name for name in names if name not in infos]):
        raise DataError(
            f"{hub.repo} lacks {len(absent):,} of {len(names):,} files that its manifest lists, such as {start}{absent[0]}; "
            "choose another variant or repository"
        )

    def is_here(name: str) -> bool:
        """Return True if the local file matches the one on the Hub or, offline, if it exists."""
        path, info = output / name, infos.get(name)
        if not path.is_file() or info is None:
            return path.is_file() and hub.offline
        blob = hub.folder / "blobs" / (info.sha256 or info.git_sha1 or "")
        return path.stat().st_size == info.size and ((blob.is_file() and blob.samefile(path)) or info.problem(path) is None)

    missing, sizes, total, done = list[str](), list[int](), 0, 0

    def count(size: int) -> None:
        nonlocal done
        done += size
        if progress is not None:
            progress("downloading", done, max(total, done), f"{len(sizes) + 1} of {len(missing)} files")

    with alone_in(output, notify):
        if (folder / PREPARED).is_file():
            raise DataError(
                f"{folder} was made by an export or a conversion (it contains {PREPARED}), so a download does not overwrite it; "
                "choose another output folder, or move this one elsewhere"
            )
        # Training reads every shard in a folder, so shards of other datasets are an error. Never overwrite another tokenizer.
        others = {f"{dataset}/{path.name}" for path in folder.glob("fineweb_*.bin")} - set(names)
        for name in [*sorted(others), *(name for name in plan.tokenizer if (output / name).is_file())]:
            if not is_here(name):
                raise DataError(
                    f"{output / name} differs from {hub.repo} at {str(commit)[:12]} and is not overwritten; move it elsewhere or "
                    "choose another output folder"
                )
        with writing(manifest):
            if not manifest.is_file() or manifest.read_bytes() != content:
                write_atomically(manifest, content)
        missing = [name for name in names if not is_here(name)]
        total = sum(infos[name].size or 0 for name in missing if name in infos)
        for number, name in enumerate(missing, 1):
            if (output / name).is_file():
                notify(f"{output / name} differs from the file in {hub.repo}; downloading it again")
            blob = hub.fetch(start + name, commit, infos.get(name, FileInfo()), count)
            place(blob, output / name)
            sizes.append(blob.stat().st_size)
            done = sum(sizes)
            if progress is None:
                notify(f"{name} ({number} of {len(missing)} files)")
    here = len(list(folder.glob("fineweb_train_*.bin")))
    warnings = [f"{dataset} has {here:,} train shards, more than requested; training reads all"] if here > len(plan.train) else []
    for warning in warnings:
        notify(f"warning: {warning}")
    return {
        "folder": str(output),
        "repo": hub.repo,
        "commit": commit,
        "variant": variant,
        "dataset": str(folder),
        "tokenizer": [str(output / name) for name in plan.tokenizer],
        "train_shards": len(plan.train),
        "val_shards": len(plan.val),
        "train_tokens": sum(len(open_shard(output / name)) for name in plan.train),
        "val_tokens": sum(len(open_shard(output / name)) for name in plan.val),
        "files": len(names),
        "fetched_files": len(sizes),
        "fetched_bytes": sum(sizes),
        "warnings": warnings,
        "seconds": round(time.monotonic() - started, 3),
    }


def place(blob: Path, target: Path) -> None:
    """Hard-link a file from the Hugging Face cache to `target`, or copy it if it cannot be linked."""
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        second = temporary_beside(target)
        try:
            second.hardlink_to(blob.resolve())  # files in the cache are symbolic links to the content
        except OSError:  # the target is on another disk or on a file system without hard links
            with replace_file(target) as file, blob.open("rb") as content:
                shutil.copyfileobj(content, file)
            return
        second.replace(target)
        second.unlink(missing_ok=True)  # still there if `target` already links to the same file
        fsync_dir(target.parent)


def cached_challenge_fineweb(argv: Sequence[str], folder: Path = Path("data")) -> int:
    """Run as the challenge's script cached_challenge_fineweb.py; return the exit code."""
    name = "cached_challenge_fineweb.py"
    parser = Parser(name, description="Download the challenge's FineWeb shards and their tokenizer.")
    add = parser.add_argument
    add("positional", nargs="?", type=int, metavar="N", help=argparse.SUPPRESS)
    add("--train-shards", type=int, default=TRAIN_SHARDS, metavar="N", help=f"number of train shards (default {TRAIN_SHARDS})")
    add("--variant", default="sp1024", help="dataset variant of the repository, such as byte260 (default sp1024)")
    add("--skip-manifest", action="store_true", help=f"use the manifest.json that is already in {folder}/")
    add("--with-docs", action="store_true", help="also download docs_selected.jsonl and its source manifest")
    add("--json", action="store_true", help="print the result as JSON")
    with explained(name, interrupted="interrupted; run the same command again to continue") as outcome:
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
    """Download a dataset and print the result on stdout."""
    with work_line("asking the hub", "bytes") as (notify, show):
        result = download(output, Hub(repo), notify=notify, progress=show, **request)
    if as_json:
        print_json(result)
        return
    for split, title in (("train", "train"), ("val", "validation")):
        shards, tokens = result[f"{split}_shards"], result[f"{split}_tokens"]
        print(f"{result['dataset']}: {shards:,} {title} {'shard' if shards == 1 else 'shards'} of {tokens:,} tokens")
    print(f"tokenizer: {', '.join(result['tokenizer'])}")
    print(
        f"{result['repo']} at {(result['commit'] or 'unknown')[:12]}: {result['files']:,} files, "
        f"{result['fetched_files']:,} fetched now ({result['fetched_bytes'] / 1e6:,.1f} MB), {result['seconds']:.1f} s"
    )
    print(f"train on it with: ingot train --recipe demo --data.path {shlex.quote(result['dataset'])}")
