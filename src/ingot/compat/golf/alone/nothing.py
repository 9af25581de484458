"""In place of modules of which a golf run asks next to nothing: the file that is bundled has of each only what it reaches.

The comment above a name says which module it is of in the package, and why this is enough.
"""

from __future__ import annotations

import signal
from contextlib import ExitStack as collected_later
from contextlib import nullcontext
from contextlib import nullcontext as starting
from dataclasses import fields
from typing import Any

from ingot.train.saver import Progress

__all__ = ["collected_later", "starting"]  # of runtime.memory and runs.starting, whose places the two take

# Of runtime.signals: it listens while it trains, and gives handlers back as they were.
replace_handler, listening_early = signal.signal, nullcontext


def heard_early() -> int:
    """Nothing was."""
    return 0


def leave_closed_terminal() -> None: ...


def handler_after_stop(number: int, before: Any) -> Any:
    """What handles a signal after a run was stopped."""
    return before


# Of model.cache: it writes no text.
LayerCache = None

# Of runtime.children: beside a submission lies nothing that has the name of a module.
safe_path = nullcontext


def die_with(parent: int) -> Any:
    """Whoever starts a submission sees to its end."""
    return lambda: None


def shield_compile_workers() -> None:
    """They look for modules where torch lets them."""


# Of runtime.memory: the allocator and the collector of garbage stay as they are.
def keep_freed_memory() -> None:
    """It is not kept."""


# Of runtime.version: what the file that runs says of itself.
def made_by() -> str:
    """What a log says of its maker."""
    return f"ingot {__loader__.version}, one file"  # type: ignore[name-defined]


# Of runs.telling and train.reading: it reads checkpoints that it wrote itself.
def tells_all(record: object) -> bool:
    """It does."""
    return True


def read_progress(checkpoint: Any) -> Progress:
    """Where a run stood."""
    known = {one.name for one in fields(Progress)}
    return Progress(**{key: value for key, value in checkpoint.progress.items() if key in known})


# Of doors.not_ours: Python tells its errors itself.
def told(error: object) -> None:
    """Nothing of ours is said."""


def show_warnings() -> None:
    """They are as they are."""


# Of doors.golf.look_alikes: whoever runs a submission has its variables from its page.
def look_alikes(*_: Any) -> list[str]:
    """None."""
    return []


# Of train.walltime: a submission has its minutes, and no job that ends before them.
def find_walltime(*_: Any, **__: Any) -> None:
    """No end."""


# Of backends.torch.ahead: nothing gets ready ahead.
def prepare_ahead(*_: Any) -> Any:
    """Nothing to wait for."""
    return lambda: None


# Of backends.torch.kernels: there is none of our kernels.
def name_operations() -> None: ...


def is_short(*_: Any) -> None: ...


def settle_kernels(*_: Any) -> list[str]:
    """None of them."""
    return []


# Of backends.torch.cuda_graphs: the file records nothing.
def uses_cuda_graphs(*_: Any) -> bool:
    """No."""
    return False


def begin_pass(*_: Any) -> None: ...


# Of backends.torch.own_model: the model that the file carries was checked by the run that it comes from.
def check_own_model(*_: Any) -> None:
    """Nothing is checked again."""


# Of backends.torch.room: whether a submission fits was found out by the run that it comes from.
def refuse_too_large(*_: Any) -> None:
    """Nothing is refused."""


def in_parts(score: Any, batch: Any) -> Any:
    """It is held whole."""
    return score(batch)


def recomputed(*_: Any) -> int:
    """No block is: no variable asks for it."""
    return 0


class Builders:
    """Of backends.torch.builders: there are none."""

    def __init__(self, *_: Any): ...

    def wait(self) -> None: ...

    def stop(self) -> None: ...


class Choices:
    """Of backends.torch.choices: nothing is left behind on a machine."""

    def __init__(self, *_: Any): ...

    def recall(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def keep(self, *_: Any) -> None: ...

    def forget(self) -> None: ...


class Bounds:
    """Of train.bounds: a golf run scores the whole split, however long it takes."""

    seconds = final_limit = None

    def __init__(self, *_: Any): ...

    def rows(self, evaluator: Any, limit: int | None, now: Any) -> int | None:
        return limit

    def during_and(self, limit: int | None, evaluator: Any, now: Any) -> tuple[int | None, int | None]:
        return None, limit

    def learn(self, rows: int, seconds: float) -> None: ...

    def note_seconds(self, seconds: float) -> float:
        return 0.0

    def has_time(self, evaluation_seconds: float, training_seconds: float) -> bool:
        return True

    def took_step(self, seconds: float) -> None: ...
