"""The mistakes a user can make and the mishaps a run can meet, each with the exit code its class is known by.

Every message is one line: what is wrong, where, and what to do. The command line prints it and exits; nobody sees a traceback.
"""

from __future__ import annotations


class IngotError(Exception):
    """Something went wrong that is not a bug of ours."""

    exit_code = 1


class ConfigError(IngotError):
    """A setting is unknown, malformed or does not fit the others."""

    exit_code = 2


class DataError(IngotError):
    """Text, shards or a tokenizer are missing, damaged or do not belong together."""

    exit_code = 3


class CheckpointError(IngotError):
    """A run folder or checkpoint cannot be read, written or continued."""

    exit_code = 4


class RunError(IngotError):
    """Training had to stop: the loss is not finite, or the folder is in use."""

    exit_code = 1


class PeerLost(RunError):
    """Another rank is gone, or fails as this one does; it is the one that says why."""

    def __init__(self, exit_code: int = RunError.exit_code):
        super().__init__("another rank has ended; its message says why")
        self.exit_code = exit_code


INTERRUPTED = 130  # exit code after a second SIGINT or SIGTERM, as shells know it
