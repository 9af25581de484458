"""What Python's own errors and warnings say that are no mistakes of ours: names that cannot be, and what a user's model does.

The author of a model sees its lines and the message, and nothing of ours.
"""

from __future__ import annotations

import linecache
import logging
import traceback
from pathlib import Path

from ingot.errors import ConfigError, IngotError, RunError, shown

PREFIX = "ingot_model_"  # of the names that model/own.py gives to users' files
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
