"""Resume runs started by the original gpt-simple: convert the checkpoint to Ingot's format, then resume from the copy.

Weights, AdamW state, step, tokens, phase and the W&B run carry over. A file in the run folder lists the documents already trained
on, so that they are skipped. The files of the original run are not modified. Tensors are loaded with weights_only, and the data
position, which is a pickle of custom objects, is read into plain dicts, so no file can execute code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.artifact.gpt_simple import MODEL, WEIGHTS, Saved, read_model, refuse_other_shapes, saved_checkpoints
from ingot.backends.open import find_device, on_first_rank
from ingot.backends.torch.state import adamw_memory, load_saved, state_records
from ingot.compat.gpt_simple.config import GptSimpleConfig
from ingot.compat.gpt_simple.files import OPTIMIZER, in_their_order, optimizer_groups
from ingot.compat.gpt_simple.translate import ALREADY_READ, DATA_SEED, resume_setting, tokens_per_step, translate
from ingot.config.schema import Config
from ingot.data.formats.gpt_simple_folder import read_index
from ingot.data.loading.data_path import open_dataset
from ingot.data.loading.rows import Mask, read_already_read, write_already_read
from ingot.errors import CheckpointError
from ingot.preflight.validate import foreign_checkpoint
from ingot.runs.checkpoints import save_checkpoint
from ingot.runs.folder import WANDB_ID, RunFolder
from ingot.runs.state import RunLock
from ingot.runs.tracking import write_id
from ingot.runtime.files import user_path, writing
from ingot.runtime.ranks import Ranks
from ingot.runtime.tensors import TensorRecord
from ingot.train.resume import Progress, facts_of

Say = Callable[[str], None]
CURSOR_VERSION = 2
ALL_ROWS = -1  # special row count: the whole file was read
PACK_BUFFER = 256  # the original gpt-simple packs this many documents at a time


def adopt_on_all_ranks(config: GptSimpleConfig, ranks: Ranks, say: Say, warn: Say) -> None:
    """Convert a checkpoint of the original gpt-simple, if one is to be resumed. All ranks call this; only the first converts."""
    device = find_device(translate(config, ranks.world_size).config.training.device, ranks.local_rank)
    on_first_rank(device, ranks, lambda: {"adopted": adopt(config, say, warn) is not None})


def adopt(config: GptSimpleConfig, say: Say, warn: Say) -> Path | None:
    """Convert the checkpoint to be resumed from gpt-simple's to Ingot's format; return its new path, or None if there is none."""
    saved = foreign_checkpoint(resume_setting(config), Path(config.training.output_dir))
    if saved is None:
        return None
    weights, memory, settings, problem = read_training_state(saved)
    world_size = max(1, len(list((saved.path / "rng").glob("rank_*.pkl"))))  # one file of random states per rank
    resolved, out = translate(config, world_size).config, Path(config.training.output_dir)
    refuse_other_shapes(saved.path, settings, resolved.model.model_dump())
    missing = [] if (saved.path / "rng").is_dir() else ["the random states"]
    missing += [f"the AdamW state ({problem})"] if problem is not None else []
    missing += ["the gradient scale"] if config.training.mixed_precision == "fp16" else []
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    with RunLock(out), writing(out):
        if (problem := _list_documents(config, resolved, saved)) is not None:
            missing.append(f"the position in the data ({problem})")
        resolved = translate(config, world_size, tokens_per_step(config, world_size)).config  # uses the list of documents
        dataset = open_dataset(resolved.data.path, resolved.data.tokenizer, resolved.data.trust_tokens)
        folder = RunFolder(out).checkpoints
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {"model": list(weights.values()), "optimizer": list(memory.values())}
        progress = {**asdict(_progress(saved)), "choices": {}, **facts_of(resolved, dataset)}
        if config.training.resume != "auto":
            progress["resumed_from"] = str(saved.path.resolve())
        path = save_checkpoint(folder, saved.step, tensors, progress, saved.kind)
        if isinstance(run_id := saved.state.get("wandb_run_id"), str):
            write_id(out / WANDB_ID, run_id)
    say(f"resuming from gpt-simple's {saved.path} at step {saved.step}")
    if missing:
        warn(f"{saved.path} lacks {', '.join(missing)}: training continues, but will not exactly match an uninterrupted run")
    return path


def _list_documents(config: GptSimpleConfig, resolved: Config, saved: Saved) -> str | None:
    """Write a list of the documents already read, using all checkpoints of the run; if the list is incomplete, return the reason.

    The newest checkpoint is not enough: in each new phase, gpt-simple rereads its files from the start and resets the counts.
    """
    if config.data.format != "pretokenized":
        return "the original gpt-simple does not save it for .jsonl files"
    cursors, newest = dict[str, dict[int, int]](), -1
    for checkpoint in saved_checkpoints(saved.run) if saved.run is not None else [saved]:
        if checkpoint.step > saved.step:
            break
        count_rows(cursors, rows := read_cursors(checkpoint.path))
        newest = checkpoint.step if rows else newest
    if not cursors:
        return "the run was stopped before its first batch"
    masks = documents_read(user_path(config.data.path), cursors, config.data.max_length, config.data.packing)
    path = Path(config.training.output_dir) / ALREADY_READ
    if path.exists():  # Ingot has resumed this run before: keep the list of documents written then
        dataset = open_dataset(resolved.data.path, resolved.data.tokenizer, resolved.data.trust_tokens)
        for name, mask in read_already_read(str(path), dataset).items():
            masks[name] = mask | masks.get(name, mask)
    write_already_read(path, masks)
    return None if newest == saved.step else f"known only up to step {newest}"


def _progress(saved: Saved) -> Progress:
    """Return the progress from which to resume, at row 0 of an epoch that skips the documents already read."""
    state, phase = saved.state, saved.state.get("curriculum") or {}
    try:
        progress = Progress(saved.step, tokens=int(state.get("tokens_trained", 0)))
        progress.phases_begun = int(phase.get("phase_idx", 0)) + 1 if phase.get("current_mix") else 0
        seconds = float((state.get("timing") or {}).get("wallclock_seconds_elapsed", 0.0))
        loss = float((state.get("metrics") or {}).get("loss", math.inf))
    except (TypeError, ValueError, AttributeError, OverflowError):
        raise CheckpointError(f"{saved.path / 'trainer_state.json'} is damaged: some of its values are not numbers") from None
    progress.elapsed_seconds = seconds if math.isfinite(seconds) else 0.0
    progress.loss = loss if math.isfinite(loss) else None
    return progress


def read_training_state(saved: Saved) -> tuple[dict[str, TensorRecord], dict[str, TensorRecord], dict[str, Any], str | None]:
    """Return the weights, the AdamW state, the config's `model` section and, if there is no usable AdamW state, the reason."""
    path = saved.path / MODEL / WEIGHTS
    weights = state_records(load_saved(path), path)
    settings = read_model(saved.path)
    if not (saved.path / OPTIMIZER).exists():
        return weights, {}, settings, f"there is no {OPTIMIZER}"
    orders = [optimizer_groups(weights, order) for order in (list(weights), in_their_order(weights))]
    memory, problem = adamw_memory(load_saved(saved.path / OPTIMIZER), orders, weights)
    return weights, memory, settings, problem


class _Record(dict[str, Any]):
    """A stand-in for an unpickled instance of a gpt-simple class: a dict of the instance's attributes."""

    __setstate__ = dict.update


CLASSES = {f"gpt_simple.data.{name}": _Record for name in ("WorkerDataState", "PerBucketCursor")}


def read_cursors(path: Path) -> dict[str, dict[int, int]]:
    """Return the number of rows read from each file, by bucket and file index, or {} if the checkpoint has no data position.

    As in gpt-simple, each count is the maximum over all ranks; ALL_ROWS means that the whole file was read.
    """
    rows_read: dict[str, dict[int, int]] = {}
    for file in sorted((path / "dataloader_state").glob("rank_*.pkl")):
        state = load_saved(file, CLASSES)
        with suppress(AttributeError, TypeError, ValueError, KeyError):
            if state["schema_version"] != CURSOR_VERSION:
                continue
            for worker in state["worker_states"].values():
                for bucket, cursor in worker["bucket_cursors"].items():
                    progress = {int(number): int(rows) for number, rows in cursor["file_progress"].items()}
                    count_rows(rows_read, {str(bucket): progress})
            continue
        raise CheckpointError(f"{file} is damaged: it contains no valid position in the data")
    return rows_read


def count_rows(total: dict[str, dict[int, int]], more: Mapping[str, Mapping[int, int]]) -> None:
    """Merge the row counts `more` into `total`, keeping the larger count for each file; ALL_ROWS is larger than any number."""
    for bucket, files in more.items():
        counts = total.setdefault(bucket, {})
        for number, rows in files.items():
            before = counts.get(number, 0)
            counts[number] = ALL_ROWS if ALL_ROWS in (before, rows) else max(before, rows)


def documents_read(data: Path, cursors: Mapping[str, Mapping[int, int]], max_length: int, packing: bool) -> dict[str, Mask]:
    """Return, for each bucket, a mask of the documents contained in the rows read so far."""
    masks = {}
    for bucket, files in cursors.items():
        paths = sorted((data / "train" / bucket).glob("*.bin"))
        if unknown := [number for number in files if not 0 <= number < len(paths)]:
            raise CheckpointError(
                f"the run has read file number {unknown[0] + 1} in {data / 'train' / bucket}, which has only {len(paths)} "
                "files; resume with the data that the run was started with"
            )
        parts = [np.empty(0, np.bool_)]
        for number, path in enumerate(paths):
            lengths = np.diff(read_index(path.with_suffix(".idx"))[1])
            rows = files.get(number, 0)
            mask = np.full(len(lengths), rows == ALL_ROWS)
            for documents in islice(file_rows(lengths, number, max_length, packing), max(0, rows)):
                mask[documents] = True
            parts.append(mask)
        masks[bucket] = np.concatenate(parts)
    return masks


def file_rows(lengths: NDArray[np.int64], number: int, max_length: int, packing: bool = True) -> Iterator[list[int]]:
    """Yield the document indices in each row of a file, in the order in which the original gpt-simple reads them."""
    order = np.arange(len(lengths))
    np.random.RandomState(hash((DATA_SEED, number)) % 2**31).shuffle(order)  # gpt-simple's random generator
    if not packing:
        yield from ([document] for document in order.tolist())
        return
    cut = np.minimum(lengths, max_length)
    for start in range(0, len(order), PACK_BUFFER):
        documents = order[start : start + PACK_BUFFER]
        rows: list[list[int]] = []
        filled: list[int] = []  # tokens in each row
        for document in documents[np.argsort(-lengths[documents], kind="stable")].tolist():  # first fit, longest first
            length = int(cut[document])
            fits = (row for row, tokens in enumerate(filled) if length < max_length and tokens + length <= max_length)
            place = next(fits, len(rows))
            if place == len(rows):
                rows.append([])
                filled.append(0)
            rows[place].append(document)
            filled[place] += length
        yield from rows
