"""Weights & Biases: a run there that goes on when ours is resumed, by an id that checkpoints and the run folder keep.

Nothing is imported before a run asks for it. Offline its files lie in the run folder until `wandb sync`.
"""

from __future__ import annotations

import importlib
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ingot.errors import ConfigError, RunError
from ingot.runs.folder import WANDB_ID
from ingot.runs.tracked_id import keep_id, read_id


def check_installed(setting: str) -> None:
    """Refuse a setting that needs the package where it is missing."""
    try:
        importlib.import_module("wandb")
    except ImportError:
        raise ConfigError(f"{setting} needs Weights & Biases; install it with: pip install 'ingot-lm[wandb]'") from None


class WandbRun:
    """A run of Weights & Biases, begun or continued."""

    def __init__(
        self, folder: Path, project: str, name: str, mode: str | None, config: Mapping[str, Any], known: str | None
    ) -> None:
        wandb = importlib.import_module("wandb")
        self.id = known or read_id(folder / WANDB_ID) or secrets.token_hex(4)
        keep_id(folder / WANDB_ID, self.id)
        try:
            self._run = wandb.init(
                project=project, name=name, config=dict(config), dir=str(folder), id=self.id, resume="allow", mode=mode
            )
        except Exception as error:  # whatever it raises: its errors have changed with its versions
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise RunError(
                f"Weights & Biases does not start: {reason}; log in with `wandb login`, or set WANDB_MODE=offline, or go without"
            ) from None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the values of a step."""
        self._run.log(dict(values), step=step)

    def close(self, failed: bool) -> None:
        """End the run at Weights & Biases."""
        self._run.finish(exit_code=int(failed))
