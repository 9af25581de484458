"""One data set of golf's export: shards of both splits, made in a hidden folder that takes the place of the old one.

The first documents are validation. Beside golf's own files lie dataset.json and an index of documents, so that everything else of
ours reads the same folder.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ingot.compat.golf.data.docs import Docs, Notify, Progress, read_docs
from ingot.compat.golf.data.tokenizers import Built
from ingot.data.prepare.blocks import EveryText, first_documents, text_blocks
from ingot.data.prepare.pipeline import RuledBlocks, fill_folder, ruled
from ingot.data.prepare.workers import local_engine, workers_for
from ingot.data.store.dataset import MANIFEST, Dataset, Manifest
from ingot.data.store.staging import staged, writing
from ingot.data.store.writer import Point, is_sound
from ingot.data.text.text_files import adding_up
from ingot.errors import ConfigError, DataError
from ingot.runtime.machine import made_by

PREFIX = "fineweb_"  # of the names of shards
OURS = re.compile(r"dataset\.json|fineweb_.*\.bin|fineweb_(train|val)\.index")
REPORT_DOCUMENTS = 100_000


@dataclass(frozen=True)
class Plan:
    """What becomes a data set, and how: `workers` processes (None: one for each processor), `batch` documents at once."""

    docs: Docs
    val_documents: int
    chunk_tokens: int
    workers: int | None
    batch: int


def export_dataset(one: Built, plan: Plan, target: Path, notify: Notify, progress: Progress) -> tuple[Manifest, bool]:
    """Make the folder of one tokenizer's shards; returns what it holds, and whether it was made now."""
    work = {
        "made_by": made_by(),
        "docs_sha256": plan.docs.sha256,
        "val_documents": plan.val_documents,
        "chunk_tokens": plan.chunk_tokens,
        "tokenizer": one.tokenizer.fingerprint(),
    }
    if target.exists() and not target.is_dir():
        raise ConfigError(f"{target} is a file where a folder of shards belongs; remove it or choose another output")
    with writing(target):
        _bring_back(target)
    if (found := _finished(target, work)) is not None:
        notify(f"{target} is complete and stays as it is")
        return found, False
    if any(target.glob("fineweb_*.bin")):
        made = "made here before" if (target / MANIFEST).is_file() else "not made here, but downloaded perhaps"
        notify(f"{target} holds shards that were {made}; they are replaced when those of this export are whole")
    source = {"inputs": [str(plan.docs.path)], "validation": f"the first {plan.val_documents} documents", "golf": work}
    engine = partial(local_engine, one.tokenizer, plan.workers or workers_for(one.tokenizer, plan.docs.path.stat().st_size))
    try:
        with staged(target, True, work, is_sound) as stage:
            manifest, last, _ = fill_folder(
                stage,
                partial(_blocks, plan, f"exporting {one.spec.dataset}", target, notify, progress),
                one.tokenizer,
                engine,
                source=source,
                shard_tokens=plan.chunk_tokens,
                prefix=PREFIX,
                tell=partial(_report, one.spec.dataset, plan.docs.documents, notify),
            )
            if last.documents != plan.docs.documents:
                raise DataError(
                    f"{plan.docs.path} holds {last.documents:,} documents instead of the {plan.docs.documents:,} that it should; "
                    "it was changed, or the file beside it is wrong: fetch both again"
                )
            if target.resolve().exists():
                target.resolve().rename(_aside(target))  # makes room
        with writing(target):
            _keep_others(target)
    except BaseException:
        with writing(target):
            _bring_back(target)
        raise
    return manifest, True


def _blocks(plan: Plan, what: str, target: Path, notify: Notify, progress: Progress, begin: Point) -> RuledBlocks:
    """The documents after those that were written before; those without text are documents too."""
    path = plan.docs.path
    if begin.documents:
        notify(f"{target}: going on after document {begin.documents:,}")
    advance = adding_up(partial(progress, what), path.stat().st_size)
    texts = text_blocks(read_docs(path, begin.documents, advance), documents=plan.batch)
    return ruled(first_documents(plan.val_documents), map(EveryText, texts))


def _report(name: str, expected: int, notify: Notify, written: range) -> None:
    if written.stop // REPORT_DOCUMENTS > written.start // REPORT_DOCUMENTS:
        notify(f"{name}: {written.stop:,} of {expected:,} documents")


def _finished(target: Path, work: dict[str, Any]) -> Manifest | None:
    """What a folder holds, if it is the whole outcome of the same work."""
    try:
        manifest = Dataset.open(target).manifest
    except DataError:
        return None
    return manifest if isinstance(manifest.source, dict) and manifest.source.get("golf") == work else None


def _bring_back(target: Path) -> None:
    """Undo what a process killed between two renames left: the old folder is back, or gone if the new one is there."""
    if _aside(target).is_dir():
        if target.resolve().exists():
            _keep_others(target)
        else:
            _aside(target).rename(target.resolve())


def _keep_others(target: Path) -> None:
    """Bring files that are not part of an export back from the old folder, and remove the rest of it."""
    if not _aside(target).is_dir():
        return
    for path in _aside(target).iterdir():
        if not OURS.fullmatch(path.name) and not (target / path.name).exists():
            path.rename(target.resolve() / path.name)
    shutil.rmtree(_aside(target))


def _aside(target: Path) -> Path:
    """The hidden name beside a data set that the one it replaces has for a moment."""
    return target.resolve().with_name(f".{target.resolve().name}.replaced")
