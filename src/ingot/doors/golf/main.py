"""`python train_gpt.py`: the challenge's script, driven by environment variables, on our engine."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ingot.backends.open import find_device, open_backend
from ingot.config.loading import ResolvedConfig
from ingot.doors.entry import explained, process_start, warn
from ingot.doors.golf.data.check import check_data
from ingot.doors.golf.log import GolfReporter, RunLog
from ingot.doors.golf.translate import advice, translate, variable
from ingot.doors.golf.variables import NAMES, STATE, look_alikes, read_variables, usage
from ingot.errors import ConfigError, IngotError
from ingot.runs.lock import NAME as LOCK
from ingot.runs.lock import RunLock
from ingot.runs.state import read_state
from ingot.runtime.files import writing
from ingot.runtime.ranks import Ranks, ranks_from_environment

LOGS = Path("logs")


def main(arguments: Sequence[str] = ()) -> int:
    """Run as the environment says; a user's mistake is one line and the exit code of its class."""
    with explained("train_gpt.py", variable, advice) as outcome:
        if list(arguments) in (["--help"], ["-h"]):
            print(usage())
        elif arguments:
            raise ConfigError(_no_argument(arguments[0]))
        else:
            outcome.code = golf(os.environ)
    return outcome.code


def _no_argument(word: str) -> str:
    name, given, value = word.lstrip("-").partition("=")
    name = name.replace("-", "_").upper()
    example = f"{name}={value if given else 'VALUE'}" if name in NAMES else "ITERATIONS=100"
    return (
        f"train_gpt.py takes no arguments and was given {word}; settings are variables before the command, as in {example} "
        "python train_gpt.py, and --help lists them"
    )


def golf(environment: Mapping[str, str]) -> int:
    """Train, or score what EVAL_ONLY_PATH names; 1 where the artifact is over its limit."""
    values, ranks = read_variables(environment), ranks_from_environment(environment)
    for warning in look_alikes(environment) if ranks.first else ():
        warn(f"train_gpt.py: warning: {warning}")
    run_id = values["RUN_ID"] or str(uuid.uuid4())
    if Path(run_id).name != run_id or run_id == ".." or not run_id.isprintable():
        raise ConfigError(f"RUN_ID={run_id} names a file in {LOGS}/; it may not be a path or have line breaks")
    folder = _run_folder(run_id) if ranks.first else LOGS / run_id
    resolved = translate(values, ranks.world_size, find_device("auto").kind == "cuda", folder)
    run_log = RunLog(LOGS / f"{run_id}.txt" if ranks.first else None)
    if ranks.first:
        run_log.head(resolved, values)
    data = check_data(values, run_log, ranks.first)
    with _logs_folder(ranks.first, bool(values["EVAL_ONLY_PATH"])):
        run_log.show()
        try:
            if values["EVAL_ONLY_PATH"]:
                return _score(values, resolved, ranks, run_log)
            return _train(values, resolved, run_log, run_id, data)
        except IngotError as error:
            run_log.line(f"error: {error.render(variable, advice)}", console=False)
            raise


@contextmanager
def _logs_folder(first: bool, shared: bool) -> Iterator[None]:
    """logs/ for this process, alone unless it is shared; one made for a start that failed is removed again."""
    if not first:
        yield
        return
    new = not LOGS.exists()
    with writing(LOGS):
        LOGS.mkdir(exist_ok=True)
    lock = RunLock(LOGS, elsewhere="another folder to run in")
    try:
        if not shared:
            lock.acquire()
        yield
    finally:
        if new and not [path for path in LOGS.iterdir() if path.name != LOCK]:
            (LOGS / LOCK).unlink(missing_ok=True)  # before it is released: whoever waits for it looks whether it is still there
            with suppress(OSError):
                LOGS.rmdir()
        lock.release()


def _train(values: Mapping[str, Any], resolved: ResolvedConfig, run_log: RunLog, run_id: str, data: Mapping[str, Any]) -> int:
    from ingot.doors.golf.export import GolfExporter
    from ingot.train.start import run

    exporter = GolfExporter(values, run_log, data)
    result = run(resolved, GolfReporter(values, run_log), exporter, process_start())
    if result.status == "stopped":
        run_log.note(f"stopped after step {result.total_steps} and saved; the same command with RUN_ID={run_id} goes on")
    return 1 if exporter.over else 0


def _score(values: Mapping[str, Any], resolved: ResolvedConfig, ranks: Ranks, run_log: RunLog) -> int:
    """Read a file of an earlier run and score it as the end of a run does."""
    from ingot.doors.golf.export import score_lines
    from ingot.doors.golf.files import is_state, read_file, read_golf
    from ingot.runs.report import Reporter
    from ingot.train.progress import Progress
    from ingot.train.start import open_data
    from ingot.train.trainer import Trainer

    path = Path(values["EVAL_ONLY_PATH"])
    content = read_file(path)
    dataset, rows = open_data(resolved.config, ranks.world_size)
    backend = open_backend(resolved.config, dataset.tokenizer.vocab_size, ranks)
    backend.load_weights(read_golf(content, path), str(path))
    run_log.write()
    run_log.line(f"model_params:{backend.parameters}")
    trainer = Trainer(resolved.config, dataset, rows, backend, Progress(), Reporter(), None)
    if is_state(content):
        score_lines(trainer, run_log, STATE.stem)
    else:
        score_lines(trainer, run_log)
    backend.close()
    return 0


def _run_folder(run_id: str) -> Path:
    """logs/RUN_ID; after a run that is complete there, the next free or unfinished one: logs/RUN_ID-2 and so on."""
    folder, number = LOGS / run_id, 1
    while (state := read_state(folder)) is not None and state.status == "completed":
        number += 1
        folder = LOGS / f"{run_id}-{number}"
    return folder
