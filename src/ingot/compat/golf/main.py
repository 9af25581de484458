"""`python train_gpt.py`: the challenge's script, driven by environment variables, on our engine.

The challenge has a second script, for Macs (mlx_script.py): it overrides what differs in Script.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ingot.backends.open import find_device, open_backend
from ingot.compat.golf.data_check import DataFacts, check_data, data_lines
from ingot.compat.golf.log import GolfReporter, RunLog, custom_model_source, torch_head
from ingot.compat.golf.translate import advice, translate, variable
from ingot.compat.golf.variables import CARRIED, CODE, STATE, VARIABLES, look_alikes, read_variables, run_folder, usage
from ingot.compat.options import Option
from ingot.config.loading import ResolvedConfig
from ingot.console.entry import explained, process_start, warn
from ingot.errors import ConfigError, IngotError, Rename
from ingot.runs.lock import LOCK, RunLock
from ingot.runs.reporter import Reporter
from ingot.runtime.files import write_atomically, writing
from ingot.runtime.ranks import Ranks, ranks_from_environment
from ingot.runtime.signals import listening_early
from ingot.runtime.tensors import TensorRecord
from ingot.train.trainer import Trainer


class Script:
    """train_gpt.py: what differs between the challenge's two scripts."""

    name = CODE
    variables: Mapping[str, Option] = VARIABLES
    exclusive = True  # one run at a time in a folder, because its files have fixed names
    variable: Rename = staticmethod(variable)
    data_lines: Callable[[Mapping[str, Any], DataFacts], list[str]] = staticmethod(data_lines)

    def read(self, environment: Mapping[str, str]) -> tuple[dict[str, Any], Ranks]:
        """Return the value of every variable, and the rank of this process."""
        return read_variables(environment), ranks_from_environment(environment)

    def logs(self, values: Mapping[str, Any]) -> Path:
        """Return the folder of logs and run folders."""
        return Path("logs")

    def config(self, values: Mapping[str, Any], ranks: Ranks, folder: Path) -> ResolvedConfig:
        """Return the config of a run."""
        return translate(values, ranks.world_size, find_device("auto").kind == "cuda", folder)

    def head(self, values: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """Return the sources that compute and the versions they run on, for the head of the log."""
        return torch_head(values["MODEL_FILE"])

    def reporter(self, values: Mapping[str, Any], run_log: RunLog, data: Mapping[str, Any]) -> Reporter:
        """Return what writes the lines of the log."""
        return GolfReporter(values, run_log)

    def exporter(self, values: Mapping[str, Any], run_log: RunLog, data: Mapping[str, Any]) -> Any:
        """Return what writes and scores the files; its `over` says afterwards by how many bytes they exceed the limit."""
        from ingot.compat.golf.files import GolfExporter

        return GolfExporter(values, run_log, data)

    def weights(self, content: bytes, path: Path, values: Mapping[str, Any]) -> tuple[dict[str, TensorRecord], str]:
        """Return the weights in one of its files, and what the log calls its score."""
        from ingot.compat.golf.files import ROUND_TRIP, is_zip, read_golf

        return read_golf(content, path), STATE.stem if is_zip(content) else ROUND_TRIP


def main(arguments: Sequence[str] = (), carried: str | None = None) -> int:
    """Run train_gpt.py and return its exit code; `carried` is the source of the custom model in a submission's file."""
    return start_script(Script(), arguments, carried)


def start_script(script: Script, arguments: Sequence[str], carried: str | None = None) -> int:
    """Run a script as the environment says; the only argument is --help."""
    with explained(script.name, script.variable, advice) as outcome, listening_early():
        if {"--help", "-h"} & set(arguments):
            print(usage(script.name, script.variables.values()))
        elif arguments:
            word, _, value = arguments[0].lstrip("-").partition("=")
            name = word.replace("-", "_").upper()
            example = f"{name}={value or 'VALUE'}" if name in script.variables else "ITERATIONS=100"
            raise ConfigError(
                f"{script.name} takes no arguments and was given {arguments[0]}; set variables before the command, as in "
                f"{example} python {script.name}; --help lists them"
            )
        else:
            if carried is not None and os.environ["MODEL_FILE"] == CARRIED:
                os.environ["MODEL_FILE"] = str(_write_carried(carried))
            outcome.code = run_script(script, os.environ)
    return outcome.code


def _write_carried(model: str) -> Path:
    """Write the custom model of a submission's file beside that file; a different file of that name is never replaced."""
    code = Path(sys.argv[0])
    path = code.with_name(CARRIED)
    if path.exists():
        if custom_model_source(str(path)) != model:
            raise ConfigError(f"{path} is not the model that {code} carries; remove it, or rename it and set MODEL_FILE to it")
        return path
    try:
        write_atomically(path, model)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; copy {code} to a folder that can be") from None
    return path


def run_script(script: Script, environment: Mapping[str, str]) -> int:
    """Train, or score the file of EVAL_ONLY_PATH; return 1 if the artifact exceeds its limit."""
    values, ranks = script.read(environment)
    for warning in look_alikes(environment, script.variables) if ranks.first else ():
        warn(f"{script.name}: warning: {warning}")
    logs, run_id = script.logs(values), values["RUN_ID"] or str(uuid.uuid4())
    folder = run_folder(logs, run_id, ranks.first)
    values["RUN_ID"] = run_id
    resolved = script.config(values, ranks, folder)
    run_log = RunLog(logs / f"{run_id}.txt" if ranks.first else None)
    if ranks.first:
        run_log.head(resolved, values, *script.head(values))
    data = check_data(values, run_log, ranks.first, script.data_lines)
    with _logs_folder(logs, ranks.first, shared=not script.exclusive or bool(values["EVAL_ONLY_PATH"])):
        run_log.show()
        try:
            if values["EVAL_ONLY_PATH"]:
                return _score(script, values, resolved, ranks, run_log, data)
            return _train(script, values, resolved, run_log, data)
        except IngotError as error:
            run_log.line(f"error: {error.render(script.variable, advice)}", console=False)
            raise


@contextmanager
def _logs_folder(logs: Path, first: bool, shared: bool) -> Iterator[None]:
    """Make the folder of logs and lock it unless it is shared; remove it again if it is new and stays empty."""
    if not first:
        yield
        return
    with writing(logs):
        new = not logs.exists()
        logs.mkdir(parents=True, exist_ok=True)
    lock = RunLock(logs, elsewhere="another folder to run in")
    try:
        if not shared:
            lock.acquire()
        yield
    finally:
        if new and not [path for path in logs.iterdir() if path.name != LOCK]:
            (logs / LOCK).unlink(missing_ok=True)  # before its release: whoever waits for it checks that it still exists
            with suppress(OSError):
                logs.rmdir()
        lock.release()


def _train(script: Script, values: Mapping[str, Any], resolved: ResolvedConfig, run_log: RunLog, data: Mapping[str, Any]) -> int:
    from ingot.train.start import run
    from ingot.train.stop import find_walltime

    find_walltime(resolved.config.training, process_start(), warn=run_log.note)  # for its warnings: the run itself has no log yet
    exporter = script.exporter(values, run_log, data)
    result = run(resolved, script.reporter(values, run_log, data), exporter, process_start())
    if result.status == "stopped":
        run_log.note(
            f"stopped after step {result.total_steps} and saved; the same command with RUN_ID={values['RUN_ID']} resumes it"
        )
    return 1 if exporter.over else 0


def _score(
    script: Script,
    values: Mapping[str, Any],
    resolved: ResolvedConfig,
    ranks: Ranks,
    run_log: RunLog,
    data: Mapping[str, Any],
) -> int:
    """Read a file of an earlier run and score it as the end of a run does."""
    from ingot.compat.golf.files import read_file, score_lines
    from ingot.train.resume import Progress
    from ingot.train.start import open_data

    path = Path(values["EVAL_ONLY_PATH"])
    weights, name = script.weights(read_file(path), path, values)
    dataset, rows = open_data(resolved.config, ranks.world_size)
    backend = open_backend(resolved.config, dataset.tokenizer.vocab_size, ranks)
    backend.load_weights(weights, str(path))
    run_log.write()
    run_log.line(f"model_params:{backend.parameters}")
    reporter = script.reporter(values, run_log, data)
    score_lines(Trainer(resolved.config, dataset, rows, backend, Progress(), reporter, None), run_log, name)
    backend.close()
    return 0
