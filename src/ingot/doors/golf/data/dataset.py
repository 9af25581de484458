"""One data set of golf's export: shards of both splits, made in a hidden folder that takes the place of the old one.

The first documents are validation, and a block that is encoded at once never holds both splits, so no file does. Beside golf's
own files lie dataset.json and an index of documents, so that everything else of ours reads the same folder.
"""

from __future__ import annotations

import re
import shutil
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.data.hub_files import writing
from ingot.data.prepare.blocks import BLOCK_BYTES, Block
from ingot.data.prepare.workers import local_engine, workers_for
from ingot.data.store.dataset import MANIFEST, Dataset, Manifest
from ingot.data.store.staging import Stage, staged
from ingot.data.store.writer import SAVE_TOKENS, Encoded, Point, SplitWriter, is_sound, where_to_begin, write_manifest
from ingot.doors.golf.data.docs import Docs, Notify, Progress, read_docs
from ingot.doors.golf.data.tokenizers import Built
from ingot.errors import ConfigError, DataError
from ingot.runtime.version import made_by

SPLITS = {"train": "fineweb_train", "val": "fineweb_val"}
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
    try:
        with staged(target, True, work, is_sound) as stage, ExitStack() as files:
            manifest = _make(one, plan, work, stage, files, target, notify, progress)
            _set_aside(target)
        with writing(target):
            _keep_others(target)
    except BaseException:
        with writing(target):
            _bring_back(target)
        raise
    return manifest, True


def _make(
    one: Built,
    plan: Plan,
    work: dict[str, Any],
    stage: Stage,
    files: ExitStack,
    target: Path,
    notify: Notify,
    progress: Progress,
) -> Manifest:
    begin = where_to_begin(stage)
    if begin.documents:
        notify(f"{target}: going on behind document {begin.documents:,}")
    writers = {
        split: SplitWriter(stage.folder, name, one.tokenizer, plan.chunk_tokens, files, begin.splits.get(name))
        for split, name in SPLITS.items()
    }
    _write_documents(one, plan, writers, begin, stage, notify, progress)
    source = {"inputs": [str(plan.docs.path)], "validation": f"the first {plan.val_documents} documents", "golf": work}
    return write_manifest(stage.folder, one.tokenizer, {split: writer.close() for split, writer in writers.items()}, source)


def _finished(target: Path, work: dict[str, Any]) -> Manifest | None:
    """What a folder holds, if it is the whole outcome of the same work."""
    try:
        manifest = Dataset.open(target).manifest
    except DataError:
        return None
    return manifest if isinstance(manifest.source, dict) and manifest.source.get("golf") == work else None


def _write_documents(
    one: Built,
    plan: Plan,
    writers: dict[str, SplitWriter],
    begin: Point,
    stage: Stage,
    notify: Notify,
    progress: Progress,
) -> None:
    name, path, expected = one.spec.dataset, plan.docs.path, plan.docs.documents
    total, done = path.stat().st_size, 0
    waiting: deque[tuple[str, NDArray[np.bool_]]] = deque()  # of each block its split, and which of its documents have text

    def advance(size: int) -> None:
        nonlocal done
        done += size
        progress(f"exporting {name}", done, total)

    def blocks() -> Iterator[Block]:
        documents = read_docs(path, begin.documents, advance)
        for split, texts in _cut(documents, begin.documents, plan.val_documents, plan.batch):
            waiting.append((split, np.array([bool(text) for text in texts])))
            yield [*texts]

    count = begin.documents
    written = saved = sum(writer.tokens for writer in writers.values())
    with local_engine(one.tokenizer, plan.workers or workers_for(one.tokenizer, total)) as encode:
        for encoded in encode(blocks()):
            split, filled = waiting.popleft()
            documents = _with_empty(encoded, filled, one.tokenizer.bos or 0)
            _check_ids(documents.ids, one)
            writers[split].add(documents)
            before, count, written = count, count + len(filled), written + len(documents.ids)
            if count // REPORT_DOCUMENTS > before // REPORT_DOCUMENTS:
                notify(f"{name}: {count:,} of {expected:,} documents")
            if written - saved >= SAVE_TOKENS:
                stage.save(Point(documents=count, splits={SPLITS[s]: w.save() for s, w in writers.items()}).model_dump())
                saved = written
    if count != expected:
        raise DataError(
            f"{path} holds {count:,} documents instead of the {expected:,} that it should; it was changed, or the file beside it "
            "is wrong: fetch both again"
        )


def _cut(documents: Iterator[str], number: int, val_documents: int, batch: int) -> Iterator[tuple[str, list[str]]]:
    """Documents from `number` on a block at a time, with the split of each block."""
    texts: list[str] = []
    size = 0
    for text in documents:
        texts.append(text)
        size, number = size + len(text), number + 1
        if size >= BLOCK_BYTES or len(texts) >= batch or number == val_documents:
            yield "val" if number <= val_documents else "train", texts
            texts, size = [], 0
    if texts:
        yield "val" if number <= val_documents else "train", texts


def _with_empty(encoded: Encoded, filled: NDArray[np.bool_], bos: int) -> Encoded:
    """The documents of a block with those that have no text, which the engine leaves out: their mark alone."""
    if filled.all():
        return encoded
    before = np.append(0, np.cumsum(encoded.tokens))[np.cumsum(filled)[~filled]]
    tokens, sizes, pieces = np.ones(len(filled), np.int64), np.zeros(len(filled), np.int64), np.zeros(len(filled), np.int64)
    tokens[filled], sizes[filled], pieces[filled] = encoded.tokens, encoded.bytes, encoded.piece_bytes
    return Encoded(np.insert(encoded.ids, before, bos), tokens, sizes, pieces, 0)


def _check_ids(ids: NDArray[np.uint16], one: Built) -> None:
    if (largest := int(ids.max(initial=0))) >= one.tokenizer.vocab_size:
        raise DataError(
            f"tokenizer {one.spec.name} gave the id {largest:,}, outside its vocabulary of {one.tokenizer.vocab_size:,}"
        )


def _set_aside(target: Path) -> None:
    """Make room for a complete data set: what lies there goes to a hidden name beside it."""
    if target.resolve().exists():
        target.resolve().rename(_aside(target))


def _bring_back(target: Path) -> None:
    """Undo what a process killed between two renames left: the old folder is back, or gone if the new one is there."""
    if _aside(target).is_dir():
        if target.resolve().exists():
            _keep_others(target)
        else:
            _aside(target).rename(target.resolve())


def _keep_others(target: Path) -> None:
    """Bring files that are no part of an export back from the old folder, and remove the rest of it."""
    if not _aside(target).is_dir():
        return
    for path in _aside(target).iterdir():
        if not OURS.fullmatch(path.name) and not (target / path.name).exists():
            path.rename(target.resolve() / path.name)
    shutil.rmtree(_aside(target))


def _aside(target: Path) -> Path:
    return target.resolve().with_name(f".{target.resolve().name}.replaced")
