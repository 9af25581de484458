"""Golf's export: one text, any number of tokenizers, a folder of shards for each, and the manifest that lists them.

The manifest is written anew after each data set and lists only what is complete, so that at no moment it says anything that is
not so. The same command continues an export that was killed, and keeps data sets that are done.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.compat.golf.data.dataset import PREFIX, Plan, export_dataset
from ingot.compat.golf.data.docs import DECODE_BATCH, Docs, Notify, Progress, docs_from_shards, fetch_docs
from ingot.compat.golf.data.manifest import DOCS, DOCS_SOURCE, PREVIOUS
from ingot.compat.golf.data.placing import sweep
from ingot.compat.golf.data.specs import TIKTOKEN, VERSION, Spec
from ingot.compat.golf.data.tokenizers import Built, build, check_reused
from ingot.data import SHARD_TOKENS
from ingot.data.formats.foreign import MANIFEST
from ingot.data.hub import Hub
from ingot.data.store.dataset import Manifest
from ingot.data.store.shards import MAX_TOKENS
from ingot.data.store.staging import alone_in, writing
from ingot.errors import ConfigError, DataError
from ingot.runtime.files import remove_if_empty, write_atomically

VAL_DOCUMENTS = 50_000
SPECS = "tokenizer_config.export.json"
GPT2_DATASET = f"fineweb{VERSION}_gpt2"
STATS = ("docs", "files", "tokens")


@dataclass(frozen=True)
class Settings:
    """How the work is done, which changes nothing about what comes out."""

    workers: int | None = None  # processes that encode; None: one for each processor
    tiktoken_workers: int | None = None  # the same for GPT-2's tokenizer
    batch: int = 1024  # documents encoded at once, or fewer if they are long
    decode_batch: int | None = None  # documents of GPT-2 shards decoded at once


@dataclass(frozen=True)
class Exported:
    """What an export came to; `kept` are the data sets that were complete before."""

    folder: str
    manifest: dict[str, Any]
    kept: list[str]
    warnings: list[str]
    seconds: float


def export(
    output: Path,
    specs: Sequence[Spec],
    hub: Hub,
    root: str,
    *,
    val_documents: int | None = None,
    chunk_tokens: int = SHARD_TOKENS,
    gpt2_shards: Path | None = None,
    settings: Settings = Settings(),  # noqa: B008 (frozen)
    notify: Notify = lambda line: None,
    progress: Progress = lambda what, done, total: None,
) -> Exported:
    """Fill a folder with the documents, tokenizers and shards of golf's layout."""
    started, warnings, kept = time.monotonic(), list[str](), list[str]()
    root = root.strip("/")
    _check(root, val_documents, chunk_tokens)
    for spec in specs:
        check_reused(spec)

    def tell(line: str) -> None:
        warnings.extend([line.removeprefix("warning: ")] * line.startswith("warning: "))
        notify(line)

    with alone_in(output, tell) as alone, _folders(output):
        if alone:
            sweep([output])
        docs = _docs(output, hub, root, gpt2_shards, settings, tell, progress)
        held_out = _held_out(docs, val_documents)
        built = [build(spec, docs, tell, progress) for spec in specs]
        _write(output / SPECS, {"tokenizers": [spec.given for spec in specs]})
        _keep_previous(output, specs, tell)
        listing = _listing(output, docs, held_out, chunk_tokens, specs)
        for one in built:
            workers = (settings.tiktoken_workers if one.spec.kind == TIKTOKEN else None) or settings.workers
            plan = Plan(docs, held_out, chunk_tokens, workers, settings.batch)
            _place(one, output, tell, replace=False)
            record, new = export_dataset(one, plan, output / "datasets" / one.spec.dataset, tell, progress)
            kept += [] if new else [one.spec.dataset]
            _place(one, output, tell, replace=True)
            listing["tokenizers"].append(_relative(one.entry, output))
            listing["datasets"].append(_dataset_entry(one, record))
            _write(output / MANIFEST, listing)
    return Exported(str(output), listing, kept, warnings, round(time.monotonic() - started, 3))


def _check(root: str, val_documents: int | None, chunk_tokens: int) -> None:
    if root and {".", "..", ""} & set(root.split("/")):
        raise ConfigError(f"--remote-root {root!r} is not a folder of a repository")
    if val_documents is not None and val_documents < 0:
        raise ConfigError(f"--num-val-docs {val_documents} is negative; give 0 or more")
    if not 1 <= chunk_tokens <= MAX_TOKENS:
        raise ConfigError(f"--chunk-tokens {chunk_tokens:,} is out of range; give 1 to {MAX_TOKENS:,}")


@contextmanager
def _folders(output: Path) -> Iterator[None]:
    """Make the folders to fill before the long work does; those that stay empty do not outlive a failure."""
    with ExitStack() as undo:
        for folder in (output / "tokenizers", output / "datasets"):
            if folder.is_dir():
                continue
            if os.path.lexists(folder):
                raise ConfigError(f"{folder} is a file where a folder belongs; remove it or choose another output")
            with writing(folder):
                folder.mkdir()
            undo.callback(remove_if_empty, folder)
        yield
        undo.pop_all()


def _docs(output: Path, hub: Hub, root: str, shards: Path | None, settings: Settings, notify: Notify, progress: Progress) -> Docs:
    """The text of the shards that are named; else of the repository; else of GPT-2 shards in the output, if a batch is set."""
    if shards is None:
        if (docs := fetch_docs(output, hub, root, notify, progress)) is not None:
            return docs
        shards = output / "datasets" / GPT2_DATASET
        if settings.decode_batch is None or not shards.is_dir():
            raise DataError(
                f"dataset repository {hub.repo} has no {f'{root}/{DOCS}' if root else DOCS}, the text to export; check --repo-id "
                "and --remote-root, or make it of GPT-2 tokens with --from-gpt2-shards"
            )
        notify(f"{hub.repo} has no documents; taking those of {shards}")
    return docs_from_shards(shards, output, settings.decode_batch or DECODE_BATCH, notify, progress)


def _held_out(docs: Docs, given: int | None) -> int:
    count = next(count for count in (given, docs.val_documents, VAL_DOCUMENTS) if count is not None)
    if count > docs.documents:
        raise ConfigError(
            f"{count:,} documents are to be validation and {docs.path} has {docs.documents:,}; give fewer with --num-val-docs"
        )
    return count


def _place(one: Built, output: Path, notify: Notify, replace: bool) -> None:
    """Write a tokenizer's files; those of a data set that still lies there are not replaced before it is."""
    for name, content in one.files.items():
        path = output / "tokenizers" / name
        with writing(path):
            there = path.exists()
            if not there or (replace and path.read_bytes() != content):
                write_atomically(path, content)
                if there:
                    notify(f"{path} was another tokenizer and is replaced by that of this export")


def _listing(output: Path, docs: Docs, held_out: int, chunk: int, specs: Sequence[Spec]) -> dict[str, Any]:
    """The manifest, before any data set is in it."""
    sidecar = docs.sidecar
    meta = {
        "remote_repo_id": docs.repo,
        "remote_root": docs.root,
        "num_docs": docs.documents,
        "docs_sha256": docs.sha256,
        "source_manifest": None if sidecar is None else DOCS_SOURCE,
    }
    return {
        "version": VERSION,
        "num_docs": docs.documents,
        "num_val_docs": held_out,
        "shuffle_seed": (sidecar or {}).get("shuffle_seed"),
        "shard_size": chunk,
        "append_eos": False,
        "docs_jsonl": DOCS,
        "docs_meta": meta if sidecar is None else {**meta, "source_sidecar": _relative(sidecar, output)},
        "tokenizer_specs": [_relative(spec.given, output) for spec in specs],
        "tokenizers": [],
        "datasets": [],
    }


def _dataset_entry(one: Built, record: Manifest) -> dict[str, Any]:
    path = f"datasets/{one.spec.dataset}"
    counts = {name: [split.documents, len(split.shards), split.tokens] for name, split in record.splits.items()}
    counts["total"] = [sum(column) for column in zip(*counts.values(), strict=True)]
    return {
        "name": one.spec.dataset,
        "tokenizer_name": one.spec.name,
        "tokenizer_kind": one.spec.kind,
        "path": path,
        "train_glob": f"{path}/{PREFIX}train_*.bin",
        "val_glob": f"{path}/{PREFIX}val_*.bin",
        **{key: one.entry[key] for key in ("vocab_size", "bos_id", "eos_id", "recommended_bigram_vocab_size")},
        "stats": {f"{what}_{name}": counts[name][n] for n, what in enumerate(STATS) for name in ("total", "val", "train")},
    }


def _keep_previous(output: Path, specs: Sequence[Spec], notify: Notify) -> None:
    """Keep a manifest that lists data sets which this export does not make, under another name."""
    path = output / MANIFEST
    with writing(path):
        content = path.read_bytes() if path.is_file() else b"{}"
        try:
            listed = {entry["name"] for entry in json.loads(content).get("datasets", ())}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            listed = {"?"}
        if listed - {spec.dataset for spec in specs}:
            write_atomically(output / PREVIOUS, content)
            notify(f"{path} lists other data sets and is replaced by that of this export; it is kept as {PREVIOUS}")


def _relative(value: Any, output: Path) -> Any:
    """A JSON value whose absolute paths below the output are relative to it."""
    if isinstance(value, dict):
        return {key: _relative(item, output) for key, item in value.items()}
    if isinstance(value, list):
        return [_relative(item, output) for item in value]
    if isinstance(value, str) and value.startswith("/"):
        for root in (output.absolute(), output.resolve()):
            if Path(value).is_relative_to(root):
                return Path(value).relative_to(root).as_posix()
    return value


def _write(path: Path, record: Any) -> None:
    with writing(path):
        write_atomically(path, json.dumps(record, indent=2, ensure_ascii=False) + "\n")
