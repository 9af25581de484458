"""Report the error that ends a program: print it on one line and set the exit code for its class.

A launcher ends all ranks when one fails, so the rank that has the original error must print it first; a rank that only noticed
another rank's failure waits.
"""

from __future__ import annotations

import linecache
import logging
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ingot.errors import (
    INTERRUPTED,
    CheckpointError,
    ConfigError,
    DataError,
    IngotError,
    Interrupted,
    NotFinite,
    PeerLost,
    Rename,
    RunError,
    Setting,
    shown,
)
from ingot.runtime.processes import process_age, safe_path
from ingot.runtime.ranks import ranks_from_environment

MODEL_MODULE_PREFIX = "ingot_model_"  # prefix under which model/registry.py imports users' model files
MAX_FRAMES = 3  # an error shows at most this many stack frames of the user's file, the innermost ones


def _user_error(error: BaseException) -> IngotError | None:
    """Convert a Python error or an error in a custom model to an IngotError; return None if it is a bug in Ingot."""
    message = str(error)
    if isinstance(error, OSError):
        reason = error.strerror or message
        return RunError(reason if error.filename is None else f"{error.filename}: {reason}")
    kinds = {kind.__name__ for kind in type(error).__mro__}
    phrases = ("not enough memory", "can't allocate memory", "[metal::malloc]", "Insufficient Memory")  # of torch and MLX
    if kinds & {"MemoryError", "OutOfMemoryError"} or any(phrase in message for phrase in phrases):
        return RunError(
            "out of memory",
            Setting("training.micro_batch"),
            Setting("data.seq_len"),
            advice="lower {0} or {1}, generate fewer texts or use a smaller model",
        )
    if isinstance(error, UnicodeEncodeError) or "embedded null" in message:
        return ConfigError(f"a name or text contains invalid characters ({message})", advice="correct it")
    if message.startswith("Symlink loop"):
        return ConfigError(message, advice="give the target path instead of the link")
    cause: BaseException | None = error
    while cause is not None:  # search the whole chain for a frame in a custom model's file
        frames = [
            (frame.f_code, line)
            for frame, line in traceback.walk_tb(cause.__traceback__)
            if str(frame.f_globals.get("__name__")).startswith(MODEL_MODULE_PREFIX)
        ]
        if frames:
            lines = [
                f"{Path(code.co_filename).name}:{line} in {code.co_name}: {linecache.getline(code.co_filename, line).strip()}"
                for code, line in frames[-MAX_FRAMES:]
            ]
            why = f"it ends the program with {cause.code!r}" if isinstance(cause, SystemExit) else str(cause)
            return RunError(f"your model fails: {' > '.join(lines)} > {type(cause).__name__}: {why}")
        cause = cause.__cause__
    return None


BROKEN_PIPE = 141  # exit code by shell convention when a reader such as `head` has closed the pipe
PEER_WAIT_SECONDS = 10  # wait of a rank that noticed another rank's failure, so that the failed rank can report it first
STARTED_AT = "INGOT_STARTED_AT"  # environment variable with the launcher's start time


class Outcome:
    """A program's exit code, and the error that ended it."""

    code = 0
    error: IngotError | None = None


@contextmanager
def explained(
    program: str,
    name: Rename = str,
    advise: Rename = str,
    *,
    interrupted: str = "interrupted",
    every_rank: bool = False,
    stopped: int = 0,
) -> Iterator[Outcome]:
    """Print an error raised in the `with` block on one line, and set the exit code of the Outcome that the block receives.

    `name` and `advise` translate settings and advice in the message; `stopped` is the exit code for a stop before training.
    An error that all ranks raise is printed by the first rank and, with `every_rank`, by other ranks still alive after a wait.
    """
    outcome = Outcome()
    for stream_name in ("stdout", "stderr"):
        if getattr(sys, stream_name) is None:  # the shell closed the stream, as in `ingot train >&-`
            setattr(sys, stream_name, open(os.devnull, "w"))  # noqa: SIM115, PTH123
        if hasattr(stream := getattr(sys, stream_name), "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # escape characters that the terminal's encoding lacks
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_VisibleFormatter())
    try:
        with safe_path():
            yield outcome
        sys.stdout.flush()
    except IngotError as error:
        try:
            first = ranks_from_environment().first
        except ConfigError:
            first = True  # print the error if the environment has no valid rank
        found_by_all = isinstance(error, ConfigError | DataError | CheckpointError | NotFinite)
        speaks = not isinstance(error, PeerLost) and (first or not found_by_all)
        if not speaks:
            time.sleep(PEER_WAIT_SECONDS)
        if speaks or (every_rank and not isinstance(error, PeerLost | NotFinite)):
            warn(f"{program}: error: {error.render(name, advise)}")
        outcome.code, outcome.error = error.exit_code, error
    except Interrupted as signalled:
        warn(f"{program}: stopped by {signalled} before training began")
        outcome.code = stopped
    except KeyboardInterrupt:
        warn(f"{program}: {interrupted}")
        outcome.code = INTERRUPTED
    except BrokenPipeError:
        _drop_stdout()
        outcome.code = BROKEN_PIPE
    except (Exception, SystemExit) as error:
        if isinstance(error, OSError) and error.filename is None:  # raised while writing to stdout
            _drop_stdout()
        outcome.error = _user_error(error)
        if outcome.error is None:
            raise
        warn(f"{program}: error: {outcome.error.render(name, advise)}")
        outcome.code = outcome.error.exit_code


def stop_exit_code(words: Sequence[str]) -> int:
    """Return the value of --stop-exit-code in an unparsed command line, or 0 if it is absent or invalid."""
    pairs = zip(words, [*words[1:], ""], strict=False)
    given = [word.partition("=")[2] or after for word, after in pairs if word.partition("=")[0] == "--stop-exit-code"]
    return int(given[-1]) if given and given[-1].isdecimal() and int(given[-1]) < 256 else 0


def process_start() -> float:
    """Return the Unix time at which this program or, if this is a rank, its launcher started."""
    if STARTED_AT in os.environ:
        with suppress(ValueError):
            return float(os.environ[STARTED_AT])
    age = process_age()
    return time.time() - (age if age is not None else time.process_time())  # unknown age: CPU time is a close estimate


def say(line: str) -> None:
    """Print a line and flush it, because stdout may be a pipe."""
    print(line, flush=True)


def warn(line: str) -> None:
    """Print a line to stderr."""
    with suppress(OSError, ValueError):  # stderr may be a closed pipe
        print(shown(line), file=sys.stderr, flush=True)


class _VisibleFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return shown(super().format(record))


def _drop_stdout() -> None:
    """Redirect stdout to /dev/null after its reader has exited, so that Python's flush at exit does not report an error."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
