"""Half-finished runs of the original go on here: its newest checkpoint becomes one of ours, and the loop resumes from that.

Weights, AdamW, step, tokens, phase and the run of Weights & Biases are taken over, and the documents it has read are listed in a
file of the run folder, so that they are not read again. Nothing of the original's is changed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np

from ingot.artifact.gpt_simple import FINAL, SHUTDOWN, Saved, refuse_other_shapes, saved_checkpoints
from ingot.compat.gpt_simple.checkpoint import count_rows, documents_read, read_cursors, read_state
from ingot.compat.gpt_simple.config import Config
from ingot.compat.gpt_simple.translate import already_read_path, resume_setting, tokens_per_step, translate
from ingot.config.schema import Config as IngotConfig
from ingot.data.loading.data_path import open_dataset
from ingot.data.loading.rows import read_already_read, write_already_read
from ingot.errors import CheckpointError, IngotError, PeerLost
from ingot.preflight.checks import foreign_checkpoint
from ingot.runs.checkpoints import save_checkpoint
from ingot.runs.folder import WANDB_ID, Kind, RunFolder
from ingot.runs.lock import RunLock
from ingot.runs.tracking import write_id
from ingot.runtime.files import user_path, writing
from ingot.runtime.ranks import Ranks
from ingot.train.resume import Progress, facts_of

Say = Callable[[str], None]


def take_over(config: Config, ranks: Ranks, say: Say, warn: Say) -> None:
    """Take over a run of the original, if that is what is to go on; every rank calls it, the first does it."""
    if ranks.world_size == 1:
        adopt(config, say, warn)
        return
    from ingot.backends.open import find_device, open_group

    device = find_device(translate(config, ranks.world_size).config.training.device, ranks.local_rank)
    group = open_group(device, ranks)
    if ranks.first:
        try:
            adopt(config, say, warn)
        except IngotError as error:
            group.broadcast(json.dumps({"exit_code": error.exit_code}))
            raise
        group.broadcast("{}")
    elif told := json.loads(group.broadcast("")):
        raise PeerLost(told["exit_code"])


def find_foreign(config: Config) -> Saved | None:
    """The checkpoint of the original that a run goes on from; None where it begins, or goes on from one of ours."""
    return foreign_checkpoint(resume_setting(config), Path(config.training.output_dir))


def adopt(config: Config, say: Say, warn: Say) -> Path | None:
    """Write the checkpoint of the original that a run goes on from as one of ours, and return it; None where there is none."""
    saved = find_foreign(config)
    if saved is None:
        return None
    weights, memory, settings, problem = read_state(saved)
    world_size = _world_size(saved.path)
    resolved = translate(config, world_size).config
    refuse_other_shapes(saved.path, settings, resolved.model.model_dump())
    out = Path(resolved.training.output_dir or ".")
    missing = ["the random numbers"]
    if problem is not None:
        missing.append(f"AdamW's memory ({problem})")
    if config.training.mixed_precision == "fp16":
        missing.append("the scale of the gradients")
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    with RunLock(out), writing(out):
        if (problem := _list_documents(config, resolved, saved)) is not None:
            missing.append(f"where it stood in the data ({problem})")
        resolved = translate(config, world_size, tokens_per_step(config, world_size)).config  # which names the list
        dataset = open_dataset(resolved.data.path, resolved.data.tokenizer, resolved.data.trust_tokens)
        folder = RunFolder(out).checkpoints
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {"model": list(weights.values()), "optimizer": list(memory.values())}
        known = {**asdict(_progress(saved)), "choices": {}, **facts_of(resolved, dataset)}
        if config.training.resume != "auto":
            known["resumed_from"] = str(saved.path.resolve())
        path = save_checkpoint(folder, saved.step, tensors, known, _kind(saved))
        if isinstance(run_id := saved.state.get("wandb_run_id"), str):
            write_id(out / WANDB_ID, run_id)
    say(f"going on from {saved.path} of gpt-simple at step {saved.step}")
    warn(f"{saved.path} does not hold {', '.join(missing)}: the run goes on, and not exactly as an unbroken one would")
    return path


def _list_documents(config: Config, resolved: IngotConfig, saved: Saved) -> str | None:
    """Write down which documents have been read, by all checkpoints that are left of the run; or say why that is not known.

    All of them: with a new phase the original begins its files anew and forgets what it had read before.
    """
    if config.data.format != "pretokenized":
        return "it does not say that for JSON lines"
    run = saved.run
    earlier = [one for one in saved_checkpoints(run) if one.step <= saved.step] if run is not None else [saved]
    cursors: dict[str, dict[int, int]] = {}
    newest = -1
    for one in earlier:
        count_rows(cursors, found := read_cursors(one.path) or {})
        newest = one.step if found else newest
    if not cursors:
        return "it was stopped before it had read a batch"
    masks = documents_read(user_path(config.data.path), cursors, config.data.max_length, config.data.packing)
    path = already_read_path(config)
    if path.exists():
        dataset = open_dataset(resolved.data.path, resolved.data.tokenizer, resolved.data.trust_tokens)
        known = read_already_read(str(path), dataset)
        masks = {name: np.logical_or(mask, known[name]) if name in known else mask for name, mask in masks.items()}
        masks = {**known, **masks}
    write_already_read(path, masks)
    return None if newest == saved.step else f"it is known up to step {newest}"


def _progress(saved: Saved) -> Progress:
    """Where the loop stands: rows are counted anew, among the documents that are left."""
    state, phase = saved.state, saved.state.get("curriculum") or {}
    try:
        tokens = int(state.get("tokens_trained", 0))
        phases_begun = int(phase.get("phase_idx", 0)) + 1 if phase.get("current_mix") else 0
        seconds = float((state.get("timing") or {}).get("wallclock_seconds_elapsed", 0.0))
        loss = float((state.get("metrics") or {}).get("loss", math.inf))
    except (TypeError, ValueError, AttributeError, OverflowError):
        raise CheckpointError(f"{saved.path / 'trainer_state.json'} is damaged: it has no numbers where they should be") from None
    return Progress(
        step=saved.step,
        tokens=tokens,
        elapsed_seconds=seconds if math.isfinite(seconds) else 0.0,
        loss=loss if math.isfinite(loss) else None,
        phases_begun=phases_begun,
    )


def _world_size(path: Path) -> int:
    """The ranks that wrote a checkpoint: each left a file with its random numbers."""
    return max(1, len(list((path / "rng").glob("rank_*.pkl"))))


def _kind(saved: Saved) -> Kind:
    return "final" if saved.name == FINAL else "shutdown" if saved.name.endswith(SHUTDOWN) else "regular"
