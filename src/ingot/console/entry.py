"""How a program of ours ends: an error is one line in its users' words, with the exit code of its class.

Whatever starts ranks ends all of them when one fails, so the rank that knows why must be the first to speak; a rank that has
nothing to add waits for that.
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
    PeerLost,
    Rename,
    RunError,
    Setting,
    shown,
)
from ingot.runtime.processes import process_age, safe_path
from ingot.runtime.ranks import ranks_from_environment

# What Python's own errors and warnings say that are no mistakes of ours: names that cannot be, and what a user's model does.

PREFIX = "ingot_model_"  # of the names that model/registry.py gives to users' files
LINES = 3  # of the user's that are shown, those nearest to the error


def told(error: BaseException) -> IngotError | None:
    """The error for whoever can mend it; None: it is ours."""
    said = str(error)
    if isinstance(error, UnicodeEncodeError) or "embedded null" in said:
        return ConfigError(f"a name or text holds what none can have ({said})", advice="correct it")
    if said.startswith("Symlink loop"):
        return ConfigError(said, advice="give the name of what it should lead to")
    return _of_a_model(error)


def show_warnings() -> None:
    """Let warnings show the control characters of names, and not send them."""
    if logging.lastResort is not None:  # where they go
        logging.lastResort.setFormatter(_Shown())


class _Shown(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return shown(super().format(record))


def _of_a_model(error: BaseException | None) -> IngotError | None:
    """What went wrong in a user's file, wherever it was called from; None where none was involved."""
    while error is not None:
        frames = [
            (frame.f_code, line)
            for frame, line in traceback.walk_tb(error.__traceback__)
            if str(frame.f_globals.get("__name__")).startswith(PREFIX)
        ]
        if frames:
            lines = [
                f"{Path(code.co_filename).name}:{line} in {code.co_name}: {linecache.getline(code.co_filename, line).strip()}"
                for code, line in frames[-LINES:]
            ]
            said = f"it ends the program with {error.code!r}" if isinstance(error, SystemExit) else str(error)
            return RunError(f"your model fails: {' > '.join(lines)} > {type(error).__name__}: {said}")
        error = error.__cause__
    return None


BROKEN_PIPE = 141  # what shells report when a reader such as `head` has left
PATIENCE_SECONDS = 10
STARTED_AT = "INGOT_STARTED_AT"  # tells a rank when its launcher began


class Outcome:
    """How a program ended."""

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
    """Turn errors into a line and an exit code, with a door's names for settings and its advice; readers may leave.

    What every rank finds wrong is said by the first alone. With `every_rank` another speaks too if nobody ended it meanwhile: it
    is then the only one that found it. `stopped`: the exit code after a signal that came before a run began.
    """
    outcome = Outcome()
    _open_streams()
    try:
        with safe_path():
            yield outcome
        sys.stdout.flush()
    except IngotError as error:
        speaks = not isinstance(error, PeerLost) and _speaks(error)
        if not speaks:
            time.sleep(PATIENCE_SECONDS)
        if speaks or (every_rank and not isinstance(error, PeerLost)):
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
    except OSError as error:
        if error.filename is None:  # it is the output that cannot be written
            _drop_stdout()
        outcome.error = RunError(_refused(error))
        warn(f"{program}: error: {outcome.error}")
        outcome.code = RunError.exit_code
    except (Exception, SystemExit) as error:
        outcome.error = _told(error)
        if outcome.error is None:
            raise
        warn(f"{program}: error: {outcome.error.render(name, advise)}")
        outcome.code = outcome.error.exit_code


def stop_exit_code(words: Sequence[str]) -> int:
    """What --stop-exit-code says in the words of a command that was not read yet; 0 where it says nothing."""
    pairs = zip(words, [*words[1:], ""], strict=False)  # there may be no word
    given = [word.partition("=")[2] or after for word, after in pairs if word.partition("=")[0] == "--stop-exit-code"]
    return int(given[-1]) if given and given[-1].isdecimal() and int(given[-1]) < 256 else 0


def process_start() -> float:
    """The unix time at which this program began, or the one that launched it as a rank."""
    if STARTED_AT in os.environ:
        with suppress(ValueError):
            return float(os.environ[STARTED_AT])
    age = process_age()
    return time.time() - (age if age is not None else time.process_time())  # importing is mostly computing


def say(line: str) -> None:
    """Print a line of a log, at once: somebody may be watching it through a pipe."""
    print(line, flush=True)


def warn(line: str) -> None:
    """Print a line that is not a part of the output."""
    with suppress(OSError, ValueError):  # whoever read it may have left
        print(shown(line), file=sys.stderr, flush=True)


def _open_streams() -> None:
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell: >&-
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, PTH123
        if hasattr(stream := getattr(sys, name), "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a terminal that cannot show a character is no reason to fail
    show_warnings()


def _speaks(error: IngotError) -> bool:
    """Whether this rank says what went wrong: what every rank finds wrong, the first one does."""
    try:
        first = ranks_from_environment().first
    except ConfigError:
        first = True  # nobody knows which one is
    return first or not isinstance(error, ConfigError | DataError | CheckpointError)


def _drop_stdout() -> None:
    """Let what is not yet printed go nowhere, or Python complains when it closes stdout."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _refused(error: OSError) -> str:
    """What the system said and of which file, without the number it has for it."""
    said = error.strerror or str(error)
    return said if error.filename is None else f"{error.filename}: {said}"


def _told(error: BaseException) -> IngotError | None:
    """What an error says that is no mistake of ours; None: it is one."""
    if not _no_memory(error):
        return told(error)
    return RunError(
        "the memory is full",
        Setting("training.micro_batch"),
        Setting("data.seq_len"),
        advice="lower {0} or {1}, ask for fewer texts or take a smaller model",
    )


def _no_memory(error: BaseException) -> bool:
    """Whether an error is that of an allocator, of torch, MLX or Python, at the end of the memory."""
    names = {kind.__name__ for kind in type(error).__mro__}
    said = ("not enough memory", "can't allocate memory", "[metal::malloc]", "Insufficient Memory")
    return bool(names & {"MemoryError", "OutOfMemoryError"}) or any(words in str(error) for words in said)
