"""`python train_gpt.py`: the challenge's script, driven by environment variables, on our engine.

The challenge has another script, for Macs (mlx/main.py): what it does in another way it overrides of Script, and `run_script` is
what the two share.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from ingot.backends.open import find_device, open_backend
from ingot.compat.golf.data_check import Found, check_data, tell_data
from ingot.compat.golf.log import GolfReporter, RunLog, own_source, torch_head
from ingot.compat.golf.look_alikes import look_alikes
from ingot.compat.golf.run_ids import run_folder
from ingot.compat.golf.translate import advice, translate, variable
from ingot.compat.golf.variables import CARRIED, CODE, NAMES, STATE, Variable, read_variables, usage
from ingot.config.loading import ResolvedConfig
from ingot.console.entry import explained, process_start, warn
from ingot.errors import ConfigError, IngotError
from ingot.runs.lock import LOCK, RunLock
from ingot.runs.reporter import Reporter
from ingot.runtime.files import write_atomically, writing
from ingot.runtime.ranks import Ranks, ranks_from_environment
from ingot.runtime.signals import listening_early
from ingot.runtime.tensors import TensorRecord
from ingot.train.end import Exported
from ingot.train.stop import Shutdown
from ingot.train.trainer import Trainer


class FileExporter(Protocol):
    """Writes and scores the files of a script; `over` says afterwards by how many bytes they are too large."""

    over: int

    def __call__(self, trainer: Trainer, shutdown: Shutdown) -> Exported: ...


class Script:
    """train_gpt.py: what one of the challenge's scripts has of its own. The one for Macs says what it does in another way."""

    name = CODE
    variables: Mapping[str, Variable] = NAMES
    one_at_a_time = True  # in a folder, because the files of a run have fixed names

    def read(self, environment: Mapping[str, str]) -> tuple[dict[str, Any], Ranks]:
        """The value of every variable, and which of the processes this is."""
        return read_variables(environment), ranks_from_environment(environment)

    def logs(self, values: Mapping[str, Any]) -> Path:
        """The folder of logs and run folders."""
        return Path("logs")

    def config(self, values: Mapping[str, Any], ranks: Ranks, folder: Path) -> ResolvedConfig:
        """The config of a run."""
        return translate(values, ranks.world_size, find_device("auto").kind == "cuda", folder)

    def variable(self, path: str) -> str:
        """What its users know a setting as."""
        return variable(path)

    def head(self, values: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """The sources that compute and what they run on, for the head of the log."""
        return torch_head(values["MODEL_FILE"])

    def tell_data(self, values: Mapping[str, Any], found: Found) -> list[str]:
        """The lines of the log on the data."""
        return tell_data(values, found)

    def reporter(self, values: Mapping[str, Any], run_log: RunLog, data: Mapping[str, Any]) -> Reporter:
        """What tells a run in the lines of its log."""
        return GolfReporter(values, run_log)

    def exporter(self, values: Mapping[str, Any], run_log: RunLog, data: Mapping[str, Any]) -> FileExporter:
        """What writes and scores its files."""
        from ingot.compat.golf.export import GolfExporter

        return GolfExporter(values, run_log, data)

    def weights(self, content: bytes, path: Path, values: Mapping[str, Any]) -> tuple[dict[str, TensorRecord], str]:
        """The weights in one of its files, and what its score is called."""
        from ingot.compat.golf.export import ROUND_TRIP
        from ingot.compat.golf.files import is_state, read_golf

        return read_golf(content, path), STATE.stem if is_state(content) else ROUND_TRIP


def main(arguments: Sequence[str] = (), carried: str | None = None) -> int:
    """Run as the environment says; a user's mistake is one line and the exit code of its class.

    `carried` is the text of the model of its own that a submission's file brings.
    """
    return started(Script(), arguments, carried)


def started(script: Script, arguments: Sequence[str], carried: str | None = None) -> int:
    """Run a script as the environment says; the only argument is --help."""
    with explained(script.name, script.variable, advice) as outcome, listening_early():
        if {"--help", "-h"} & set(arguments):
            print(usage(script.name, script.variables.values()))
        elif arguments:
            raise ConfigError(_no_argument(script, arguments[0]))
        else:
            if carried is not None and os.environ["MODEL_FILE"] == CARRIED:
                os.environ["MODEL_FILE"] = str(_placed(carried))
            outcome.code = run_script(script, os.environ)
    return outcome.code


def _placed(model: str) -> Path:
    """The model that a submission's file carries, beside that file; another one that is there is neither trained nor replaced."""
    code = Path(sys.argv[0])
    path = code.with_name(CARRIED)
    if path.exists():
        if own_source(str(path)) != model:
            raise ConfigError(f"{path} is not the model that {code} carries; remove it, or rename it and set MODEL_FILE to it")
        return path
    try:
        write_atomically(path, model)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; copy {code} to a folder that can be") from None
    return path


def _no_argument(script: Script, word: str) -> str:
    name, given, value = word.lstrip("-").partition("=")
    name = name.replace("-", "_").upper()
    example = f"{name}={value if given else 'VALUE'}" if name in script.variables else "ITERATIONS=100"
    return (
        f"{script.name} takes no arguments and was given {word}; settings are variables before the command, as in {example} "
        f"python {script.name}, and --help lists them"
    )


def run_script(script: Script, environment: Mapping[str, str]) -> int:
    """Train, or score what EVAL_ONLY_PATH names; 1 where the artifact is over its limit."""
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
    data = check_data(values, run_log, ranks.first, script.tell_data)
    with _logs_folder(logs, ranks.first, shared=not script.one_at_a_time or bool(values["EVAL_ONLY_PATH"])):
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
    """The folder of logs for this process, alone unless it is shared; one made for a start that failed is removed again."""
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
            (logs / LOCK).unlink(missing_ok=True)  # before it is released: whoever waits for it looks whether it is still there
            with suppress(OSError):
                logs.rmdir()
        lock.release()


def _train(script: Script, values: Mapping[str, Any], resolved: ResolvedConfig, run_log: RunLog, data: Mapping[str, Any]) -> int:
    from ingot.train.start import run
    from ingot.train.stop import find_walltime

    find_walltime(resolved.config.training, process_start(), warn=run_log.note)  # told here: nobody else looks before the run
    exporter = script.exporter(values, run_log, data)
    result = run(resolved, script.reporter(values, run_log, data), exporter, process_start())
    if result.status == "stopped":
        run_log.note(
            f"stopped after step {result.total_steps} and saved; the same command with RUN_ID={values['RUN_ID']} goes on"
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
    from ingot.compat.golf.export import score_lines
    from ingot.compat.golf.files import read_file
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
