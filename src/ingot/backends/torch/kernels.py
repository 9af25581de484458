"""Which kernels of our own a model uses: all, or those that are asked for, where they run here, as seen by running them.

A module that has one says so by an attribute `fused_NAME`, which is False until it is switched on here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn

from ingot.backends.torch.precision import FLASH4
from ingot.backends.torch.tuning import Agree
from ingot.config.families import Kernel
from ingot.errors import ConfigError, Setting
from ingot.model import kernels
from ingot.runtime.batch import Batch

NAMES: tuple[str, ...] = get_args(Kernel)  # docs/experiments.md says what each is worth
LAUNCHED_SLOWLY = ("rotary", "qkv", "mlp", "gate")  # operations of ours in every layer: the host takes 0.1 to 0.2 ms for one
WITH_FLASH4 = ("qkv",)  # used with that attention alone
SHORT = 32768  # tokens of a rank in a step that waits for the host: 12 rows of 1,024 took 27.5 ms with `mlp` and 24.3 without

Asked = Literal["auto", "off"] | Sequence[str]


def name_operations() -> None:
    """Tell the compiler's caches which operations of ours its graphs call: it knows these by their names alone.

    A graph of another version would be taken from there and call an operation with other arguments.
    """
    settings: Any = torch.compiler.config
    if not settings.cache_key_tag:  # else the user's, who takes care of it
        sources = sorted(Path(kernels.__path__[0]).glob("*.py"))
        settings.cache_key_tag = "ingot " + hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()[:16]


def is_short(batch: Batch, maximum: Agree) -> bool:
    """Whether a step of such a batch on each rank is over before the host has launched the next one's kernels."""
    return maximum([batch[:, 0].size])[0] <= SHORT  # shares of a step may differ by a row


def worth_trying(asked: Asked, waits: bool) -> list[str]:
    """The kernels that a run tries where its model has them; `waits`: whether a step waits for the host to launch them."""
    fast = [name for name in NAMES if not (waits and name in LAUNCHED_SLOWLY)]
    wanted = {"auto": fast, "off": ()}.get(asked, asked) if isinstance(asked, str) else asked
    return [name for name in NAMES if name in wanted]


def settle_kernels(
    model: nn.Module,
    asked: Asked,
    kept: Sequence[str] | None,
    able: bool,
    waits: bool,
    attempt: Callable[[str | None], None] | None,
    maximum: Agree,
) -> list[str]:
    """Switch on the kernels that an earlier session `kept`, or that are asked for and let `attempt` pass; returns their names.

    `attempt` makes a pass, with this attention kernel or with torch's choice; without one those that were kept are known to run
    here. `able`: whether the device and the number format are those that they are made for; `waits`: whether a step waits for the
    host to launch them. A kernel that is asked for by its name and does not run is an error.
    """
    present = [name for name in worth_trying(asked, waits) if able and has_kernel(model, name)]
    if kept is not None:
        present = [name for name in present if name in kept]
    if attempt is None:
        use_kernels(model, present)
        return present
    chosen: list[str] = []
    for name in present:
        use_kernels(model, [*chosen, name])
        failure = failure_of(partial(attempt, FLASH4 if name in WITH_FLASH4 else None))
        if not maximum([failure is not None])[0]:
            chosen.append(name)
        elif asked != "auto":
            use_kernels(model, [])
            raise ConfigError(f"{{0}}: {name} does not run here: {failure or 'on another rank'}", Setting("training.kernels"))
    use_kernels(model, chosen)
    return chosen


def has_kernel(model: nn.Module, name: str) -> bool:
    """Whether a part of the model can use a kernel."""
    return any(hasattr(module, f"fused_{name}") for module in model.modules())


def use_kernels(model: nn.Module, names: Collection[str]) -> None:
    """Let the parts of the model use these kernels and no others."""
    for module in model.modules():
        for name in NAMES:
            if hasattr(module, f"fused_{name}"):
                setattr(module, f"fused_{name}", name in names)


def failure_of(attempt: Callable[[], None]) -> str | None:
    """What went wrong, in a line: a compiler, a driver or a missing package may raise anything."""
    try:
        attempt()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None
