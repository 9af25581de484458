"""How a program of this door begins and ends: `--help`, the arguments, and an error as one line with its exit code."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from ingot.doors.nanogpt.command_line import HELP, Given, help_text, read_arguments
from ingot.errors import INTERRUPTED, CheckpointError, ConfigError, DataError, IngotError, PeerLost, RunError

BROKEN_PIPE = 141  # what shells report when a reader such as `head` has left
PATIENCE_SECONDS = 10


class Outcome:
    """How a program ended."""

    code = 0


def enter(program: str, body: Callable[[Given], None], arguments: Sequence[str] | None = None) -> int:
    """Read the arguments of a program and let `body` do its work; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    with explained(program) as outcome:
        if any(word in HELP for word in given):
            say(help_text(program))
        else:
            from ingot.runtime.ranks import ranks_from_environment

            first = ranks_from_environment().first
            body(read_arguments(program, given, say if first else lambda line: None))
    return outcome.code


def say(line: str) -> None:
    """Print a line of the log, at once: somebody may be watching it through a pipe."""
    print(line, flush=True)


def warn(line: str) -> None:
    """Print a line that is no part of the log."""
    with suppress(OSError, ValueError):  # whoever read it may have left
        print(line, file=sys.stderr, flush=True)


@contextmanager
def explained(program: str) -> Iterator[Outcome]:
    """Turn our errors into a line and an exit code; whoever reads the output may leave."""
    outcome = Outcome()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a terminal that cannot show a character is no reason to fail
    try:
        yield outcome
        print(end="", flush=True)  # there may be no stdout
    except PeerLost as error:
        time.sleep(PATIENCE_SECONDS)  # the rank that knows why speaks first; whoever started the ranks then ends this one
        outcome.code = error.exit_code
    except IngotError as error:
        if not _speaks(error):
            time.sleep(PATIENCE_SECONDS)
        else:
            from ingot.doors.nanogpt.translate import in_their_words

            warn(f"{program}: error: {in_their_words(' '.join(str(error).split()))}")
        outcome.code = error.exit_code
    except KeyboardInterrupt:
        warn(f"{program}: interrupted")
        outcome.code = INTERRUPTED
    except BrokenPipeError:
        _drop_stdout()
        outcome.code = BROKEN_PIPE
    except OSError as error:
        if error.filename is None:  # it is the log that cannot be written
            _drop_stdout()
        warn(f"{program}: error: {error}")
        outcome.code = RunError.exit_code
    except (MemoryError, RuntimeError) as error:
        if not _no_memory(error):
            raise
        warn(f"{program}: error: the memory is full; lower batch_size or block_size, ask for fewer texts or take a smaller model")
        outcome.code = RunError.exit_code


def _speaks(error: IngotError) -> bool:
    """Whether this rank says what went wrong: what every rank finds wrong, the first one does."""
    return os.environ.get("RANK", "0") == "0" or not isinstance(error, ConfigError | DataError | CheckpointError)


def _drop_stdout() -> None:
    """Let what is not yet printed go nowhere, or Python complains when it closes stdout."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _no_memory(error: BaseException) -> bool:
    """Whether an error is that of torch's allocators, or Python's, at the end of the memory."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"MemoryError", "OutOfMemoryError"}) or "not enough memory" in str(error)
