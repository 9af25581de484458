"""`python train_gpt_mlx.py`: the challenge's script for Macs, driven by environment variables, on our engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ingot.backends.open import find_device
from ingot.compat.golf.data_check import Found
from ingot.compat.golf.log import RunLog
from ingot.compat.golf.main import FileExporter, Script, started
from ingot.compat.golf.mlx.log import MLXReporter, mlx_head, tell_mlx_data
from ingot.compat.golf.mlx.translate import VARIABLES, mlx_variable, read_mlx_variables, translate_mlx
from ingot.compat.golf.variables import Variable
from ingot.config.loading import ResolvedConfig
from ingot.errors import ConfigError
from ingot.runs.reporter import Reporter
from ingot.runtime.devices import Device
from ingot.runtime.ranks import Ranks
from ingot.runtime.tensors import TensorRecord

ALONE = {"WORLD_SIZE": "1", "RANK": "0"}  # as torchrun sets them for one process


class MLXScript(Script):
    """train_gpt_mlx.py."""

    name, one_at_a_time = "train_gpt_mlx.py", False  # the names of its files are those of its runs
    variables: Mapping[str, Variable] = VARIABLES

    def read(self, environment: Mapping[str, str]) -> tuple[dict[str, Any], Ranks]:
        values = read_mlx_variables(environment)
        told = {name: environment[name] for name in ALONE if name in environment}
        for name, value in told.items():
            if value != ALONE[name]:
                raise ConfigError(f"{name}={value}: {self.name} runs in one process; start it without torchrun")
        if len(told) == 1:
            ((name, value),) = told.items()
            (missing,) = ALONE.keys() - told
            raise ConfigError(f"{name}={value} is set and {missing} is not; unset both, or start it with torchrun")
        return values, Ranks()

    def logs(self, values: Mapping[str, Any]) -> Path:
        return Path(values["OUT_DIR"])

    def config(self, values: Mapping[str, Any], ranks: Ranks, folder: Path) -> ResolvedConfig:
        return translate_mlx(values, self._device(), folder)

    def _device(self) -> Device:
        try:
            return find_device("mlx")
        except ConfigError as error:
            raise ConfigError(f"{self.name} needs mlx, which is not installed", advice=error.advice) from None

    def variable(self, path: str) -> str:
        return mlx_variable(path)

    def head(self, values: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        return mlx_head()

    def tell_data(self, values: Mapping[str, Any], found: Found) -> list[str]:
        return tell_mlx_data(values, found)

    def reporter(self, values: Mapping[str, Any], run_log: RunLog, data: Mapping[str, Any]) -> Reporter:
        return MLXReporter(values, run_log, data)

    def exporter(self, values: Mapping[str, Any], run_log: RunLog, data: Mapping[str, Any]) -> FileExporter:
        from ingot.compat.golf.mlx.files import MLXExporter

        return MLXExporter(values, run_log, data)

    def weights(self, content: bytes, path: Path, values: Mapping[str, Any]) -> tuple[dict[str, TensorRecord], str]:
        from ingot.compat.golf.mlx.files import head_size, read_mlx, score_name

        return read_mlx(content, f"EVAL_ONLY_PATH={path}", head_size(values)), score_name(content)


def main(arguments: Sequence[str] = ()) -> int:
    """Run as the environment says; a user's mistake is one line and the exit code of its class."""
    return started(MLXScript(), arguments)
