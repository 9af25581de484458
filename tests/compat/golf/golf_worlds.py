"""Runs train_gpt.py with several ranks, again and again: torch is imported once and every rank is a fork.

The argument is JSON, a list of [folder, ranks, variables]. Every rank leaves its output in folder/rank-N.out and, when it has
trained, the checksum of its weights in folder/rank-N.sha256. Prints the exit codes of each world as JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

import torch
import torch._dynamo  # torch imports it at the first step of an optimizer, which takes two seconds

import ingot.train.start  # noqa: F401 (every rank needs it)
from ingot.backends.torch.state import model_records
from ingot.compat.golf import main as script
from ingot.compat.golf.bundle import bundle
from ingot.compat.golf.main import main


def free_port() -> int:
    """A port below those that the system gives to connections of others."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as found, suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port


def run_rank(folder: Path, rank: int, environment: dict[str, str]) -> int:
    os.chdir(folder)
    os.environ.update(environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
    with Path(f"rank-{rank}.out").open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    finish = script.Script.export

    def exporting(run: script.Script, trainer: script.Trainer, shutdown: script.Shutdown) -> script.Exported:
        weights = hashlib.sha256(b"".join(bytes(one.data) for one in model_records(trainer.backend.model)))  # every rank's own
        Path(f"rank-{rank}.sha256").write_text(weights.hexdigest())
        return finish(run, trainer, shutdown)

    script.Script.export = exporting  # type: ignore[method-assign]
    return main()


def run_world(folder: Path, ranks: int, variables: dict[str, str]) -> list[int]:
    where = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    running, codes = {}, [0] * ranks
    for rank in range(ranks):
        if not (child := os.fork()):
            os._exit(run_rank(folder, rank, variables | where))
        running[child] = rank
    while running:
        child, status = os.wait()
        codes[running.pop(child)] = os.waitstatus_to_exitcode(status)
        if status:
            for other in running:  # they would wait for it for half an hour
                os.kill(other, signal.SIGKILL)
    return codes


if __name__ == "__main__":
    bundle()  # kept for all of them
    print(json.dumps([run_world(Path(folder), ranks, variables) for folder, ranks, variables in json.loads(sys.argv[1])]))
