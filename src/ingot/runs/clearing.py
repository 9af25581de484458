"""What `train --force` deletes: what Ingot wrote into a run folder, by its names, and nothing that somebody put beside it."""

from __future__ import annotations

import hashlib
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from ingot.runs.folder import EVENTS, MODEL_COPY, TRACKIO_ID, WANDB_ID, RunFolder
from ingot.runs.state import NAME as STATE
from ingot.runs.steps import DAMAGED, INDEX, PARTIAL, is_checkpoint_name
from ingot.runtime.files import read_json, writing

ARTIFACTS = ("model.ingot", "model.safetensors")


def clear(folder: RunFolder, say: Callable[[str], None], also: Sequence[str] = (), keep: Sequence[Path] = ()) -> None:
    """Delete an earlier run and say what it was; `also` are patterns of what a door writes besides, `keep` is left alone.

    The caller has claimed the folder: its lock and its empty folders stay, so whoever is killed in here can start again.
    """
    kept = {path.resolve() for path in keep}
    matching = {path for pattern in also for path in folder.path.glob(pattern)}
    to_delete = [path for path in [*_written(folder), *sorted(matching)] if path.resolve() not in kept]
    if not to_delete:
        return
    counts = Counter(path.parent.relative_to(folder.path).as_posix() for path in to_delete if path.parent != folder.path)
    told = [path.name for path in to_delete if path.parent == folder.path]
    say(f"--force deletes in {folder.path}: {', '.join([*told, *(f'{name}/ ({count})' for name, count in counts.items())])}")
    with writing(folder.path):
        for path in to_delete:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def _written(folder: RunFolder) -> list[Path]:
    checkpoints = [path for path in sorted(folder.checkpoints.glob("step-*")) if _is_ours(path)]
    files = [folder.config_path, folder.environment_path, folder.metrics.path, folder.log_path, folder.result_path]
    files += [folder.stop_path, folder.path / STATE, folder.path / WANDB_ID, folder.path / TRACKIO_ID]
    if _model_hashes(checkpoints) & _hash_of(folder.path / MODEL_COPY):
        files.append(folder.path / MODEL_COPY)
    found = [path for path in files if path.is_file()] + checkpoints
    found += sorted(folder.samples.glob("step-*.txt"))
    found += [folder.artifact / name for name in ARTIFACTS if (folder.artifact / name).is_file()]
    return found + sorted((folder.path / EVENTS).glob("events.out.tfevents.*"))


def _is_ours(path: Path) -> bool:
    return path.is_dir() and is_checkpoint_name(path.name.removesuffix(PARTIAL).removesuffix(DAMAGED))


def _model_hashes(checkpoints: Sequence[Path]) -> set[str]:
    """The checksums of the models of one's own that these checkpoints are of: a copy of one is ours, another file is not."""
    found = set()
    for path in checkpoints:
        try:
            found.add(str(read_json(path / INDEX)["progress"]["model_file_sha256"]))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found


def _hash_of(path: Path) -> set[str]:
    return {hashlib.sha256(path.read_bytes()).hexdigest()} if path.is_file() else set()
