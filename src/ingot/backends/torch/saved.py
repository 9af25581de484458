"""Files that torch.save wrote elsewhere, and what an AdamW remembers in them.

They are only ever opened with torch's weights_only, so nothing in them can run. Tensors share memory with their records.
"""

from __future__ import annotations

import errno
import pickle
import re
import warnings
import zipfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ingot.backends.torch.state import DTYPES, NAMES, check_held
from ingot.errors import CheckpointError
from ingot.runtime.tensors import TensorRecord

MOMENTS = ("exp_avg", "exp_avg_sq")
PREFIXES = ("_orig_mod.", "module.")  # what torch.compile and DDP put in front of names
REFUSED = re.compile(r"GLOBAL ([\w.]+)")  # how torch names a class or function that it does not build


class DamagedFile(CheckpointError):
    """A file that is not as it was written."""


def load_saved(path: Path, classes: Mapping[str, type] | None = None) -> Any:
    """What a file holds: numbers, text, tensors, and objects of the classes that are named, built as the types that are given."""
    whole = False
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):  # it may unfold into anything
                    raise ValueError("its parts are compressed, which torch.save never does")
                if archive.testzip() is not None:  # torch does not look at the checksums
                    raise ValueError("its checksums do not match")
            whole = True
        known: list[Any] = [(kind, name) for name, kind in (classes or {}).items()]
        with warnings.catch_warnings(), torch.serialization.safe_globals(known):
            warnings.simplefilter("ignore")  # of a file that is refused anyway
            found = torch.load(path, map_location="cpu", weights_only=True)
        check_held(found, path.stat().st_size)
        return found
    except FileNotFoundError:
        raise CheckpointError(f"there is no {path}") from None
    except MemoryError:
        raise CheckpointError(f"{path} does not fit into the memory") from None
    except Exception as error:  # damaged and hostile files raise almost anything
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # which torch makes of some files that are cut short
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
        if isinstance(error, pickle.UnpicklingError) and (refused := REFUSED.search(str(error))):
            raise CheckpointError(
                f"{path} holds {refused[1]:.80}, and only numbers, text and tensors are read, so that nothing in a file can run; "
                "save its state_dict and settings again, without it"
            ) from None
        known_kind = isinstance(error, RuntimeError | ValueError)
        reason = " ".join(str(error).split()).split(". ")[0][:150] if known_kind else "it is not what torch.save writes"
        kind = CheckpointError if whole else DamagedFile
        raise kind(f"{path} is damaged, or holds more than weights and settings: {reason}") from None


def state_records(state: Any, path: Path) -> dict[str, TensorRecord]:
    """The tensors of a state dict by name, in its order, without the prefixes of wrappers."""
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} does not hold a dictionary of tensors")
    found = {}
    for key, value in state.items():
        name = str(key)
        while name.startswith(PREFIXES):
            name = name.partition(".")[2]
        if not isinstance(value, Tensor) or value.dtype not in NAMES or value.layout is not torch.strided:
            raise CheckpointError(f"{path}: {name:.100} is not a tensor that can be read")
        found[name] = shared_record(name, value)
    return found


def shared_record(name: str, value: Tensor) -> TensorRecord:
    """A tensor as a record that shares its memory."""
    value = value.detach().contiguous()
    return TensorRecord(name, NAMES[value.dtype], tuple(value.shape), value.reshape(-1).view(torch.uint8).numpy().data)


def shared_tensor(source: TensorRecord) -> Tensor:
    """A record as a tensor that shares its memory, if that may be written to: torch knows no other."""
    if not source.data.nbytes:
        return torch.empty(source.shape, dtype=DTYPES[source.dtype])
    data = bytearray(source.data) if source.data.readonly else source.data
    return torch.frombuffer(data, dtype=DTYPES[source.dtype]).reshape(source.shape)


def adamw_memory(
    optimizer: Any, orders: Iterable[Sequence[Sequence[str]]], weights: Mapping[str, TensorRecord]
) -> tuple[dict[str, TensorRecord], str | None]:
    """What an AdamW's state dict remembers, as `parameter/key`, or why there is nothing.

    Parameters are numbered there: `orders` are the names they may stand for, by group.
    """
    try:
        groups = [[int(number) for number in group["params"]] for group in optimizer["param_groups"]]
        state = {int(number): dict(entry) for number, entry in optimizer["state"].items()}
    except (TypeError, KeyError, ValueError, AttributeError):
        return {}, "there is none"
    if not state:
        return {}, "it is empty"
    for order in orders:
        if [len(names) for names in order] != [len(numbers) for numbers in groups]:
            continue
        names = dict(zip(chain(*groups), chain(*order), strict=True))
        if all(number in names and _fits(entry, weights[names[number]]) for number, entry in state.items()):
            return {r.name: r for number, entry in state.items() for r in _moments(names[number], entry)}, None
    return {}, "it is not that of AdamW for these parameters"


def _fits(entry: Mapping[Any, Any], weight: TensorRecord) -> bool:
    moments = [entry.get(key) for key in MOMENTS]
    step = entry.get("step")
    return (isinstance(step, int | float) or (isinstance(step, Tensor) and step.numel() == 1)) and all(
        isinstance(moment, Tensor) and moment.shape == weight.shape and moment.is_floating_point() for moment in moments
    )


def _moments(name: str, entry: Mapping[str, Any]) -> list[TensorRecord]:
    step = torch.tensor(float(entry["step"]))
    return [shared_record(f"{name}/step", step), *(shared_record(f"{name}/{key}", entry[key].float()) for key in MOMENTS)]


def adamw_state(
    decayed: Collection[str], rest: Collection[str], memory: Mapping[str, TensorRecord], weight_decay: float, **options: Any
) -> dict[str, Any]:
    """The state dict of torch's AdamW with two groups; its memory is left out where another optimizer made it."""
    stand_ins = {name: torch.nn.Parameter(torch.empty(0)) for name in (*decayed, *rest)}
    optimizer = torch.optim.AdamW(
        [
            {"params": [stand_ins[name] for name in decayed], "weight_decay": weight_decay},
            {"params": [stand_ins[name] for name in rest], "weight_decay": 0.0},
        ],
        **options,
    )
    keys = ("step", *MOMENTS)
    if all(f"{name}/{key}" in memory for name in stand_ins for key in keys):
        for name, parameter in stand_ins.items():
            optimizer.state[parameter] = {key: shared_tensor(memory[f"{name}/{key}"]) for key in keys}
    return optimizer.state_dict()
