"""Start one process per rank on this machine, forward signals to all ranks, and end all of them if one fails.

Every rank runs in its own session, so Ctrl-C reaches only this launcher, which forwards it to each rank exactly once: a rank
saves and stops at the first SIGINT and exits immediately at the second, so it must not receive one key press twice.
On several machines, or with restarts, torchrun's elastic agent starts the ranks and waits for the other machines.
"""

from __future__ import annotations

import contextlib
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from ingot.console.entry import STARTED_AT, process_start, warn
from ingot.errors import INTERRUPTED, ConfigError, RunError
from ingot.runtime.processes import cpu_count, die_with
from ingot.runtime.signals import STOPPING, handler_after_stop, replace_handler

_Rank = subprocess.Popen[bytes]
# An event is a received signal, or a rank that has exited and its exit code; SimpleQueue.put() is safe in a signal handler.
_Events = queue.SimpleQueue[tuple[_Rank, int] | signal.Signals]


def launch(
    nproc: int,
    argv: Sequence[str],
    *,
    nnodes: int = 1,
    node_rank: int = 0,
    master_addr: str = "127.0.0.1",
    master_port: int | None = None,
    module: str = "ingot",
    program: str = "ingot",
    command: Sequence[str] | None = None,
    grace_seconds: float = 10.0,
    min_nodes: int | None = None,
    max_restarts: int = 0,
) -> int:
    """Run `python -m module <argv>` or `<command> <argv>` as `nproc` ranks; return 0 or the exit code of the first failed rank.

    After a failure, all ranks are started again on the remaining machines, at most `max_restarts` times and only if at least
    `min_nodes` (default: all) of the `nnodes` machines remain. `program` is the name in error messages.
    """
    min_nodes = nnodes if min_nodes is None else min_nodes
    if nproc < 1 or not 0 <= node_rank < nnodes:
        raise ConfigError(f"--nproc-per-node must be at least 1 and --node-rank 0 to {nnodes - 1}, not {nproc} and {node_rank}")
    if nnodes > 1 and master_port is None:
        raise ConfigError(f"--nnodes {nnodes} needs --master-port: all nodes must be given the same port")
    if master_port is not None and not 1 <= master_port <= 65535:
        raise ConfigError(f"--master-port {master_port} is out of range; give a port from 1 to 65535")
    if max_restarts < 0 or not 1 <= min_nodes <= nnodes or (min_nodes < nnodes and not max_restarts):
        raise ConfigError(f"--nnodes {min_nodes}:{nnodes} needs 1 <= MIN <= MAX and --max-restarts above 0, not {max_restarts}")
    # With -P, as with the `ingot` script, Python does not import a stray random.py from the working directory.
    hold_back = command is None
    command = [*([sys.executable, "-P", "-m", module] if command is None else command), *argv]
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, cpu_count() // nproc))}
    environment[STARTED_AT] = str(process_start())
    if nnodes > 1 or max_restarts:
        from ingot.backends.open import run_elastic

        os.environ.update(environment)
        nodes, master = (min_nodes, nnodes), (master_addr, master_port or 0)
        return run_elastic(command, nproc, nodes, node_rank, master, max_restarts, warn, _signals_to)
    environment |= {"WORLD_SIZE": str(nproc), "LOCAL_WORLD_SIZE": str(nproc)}
    environment |= {"MASTER_ADDR": master_addr, "MASTER_PORT": str(master_port or _free_port())}
    events: _Events = queue.SimpleQueue()
    ranks: list[_Rank] = []
    with _signals_to(events.put), contextlib.ExitStack() as at_end:
        at_end.callback(_kill, ranks)
        # Signals are blocked until the ranks can handle them: a signal that arrives while Python starts would kill a rank.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING if hold_back else ())
        try:
            for number in range(nproc):
                rank = subprocess.Popen(
                    command,
                    env={**environment, "RANK": str(number), "LOCAL_RANK": str(number)},
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    preexec_fn=die_with(os.getpid()) if sys.platform == "linux" else None,  # safe: no other thread is running yet
                )
                ranks.append(rank)
        except (OSError, subprocess.SubprocessError) as error:
            raise RunError(f"cannot start a rank with {command[0]}: {error}") from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for rank in ranks:
            threading.Thread(target=lambda rank: events.put((rank, rank.wait())), args=(rank,), daemon=True).start()
        return _supervise(program, ranks, events, grace_seconds)


def _supervise(program: str, ranks: list[_Rank], events: _Events, grace_seconds: float) -> int:
    """Wait for all ranks and return the exit code; if one fails, stop the others."""
    alive, exit_code, deadline = list(ranks), 0, None
    while alive:
        try:
            event = events.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
        except queue.Empty:  # the grace period is over; ranks ignore SIGTERM while they wait in a collective
            _kill(alive)
            deadline = None
            continue
        if isinstance(event, signal.Signals):
            for rank in alive:
                rank.send_signal(event)
            continue
        ended, code = event
        alive.remove(ended)
        if code and not exit_code:
            exit_code = code if code > 0 else INTERRUPTED if code == -signal.SIGINT else RunError.exit_code
            if code < 0:  # the rank was killed by a signal, so it could not print the reason
                print(f"{program}: error: rank process {ended.pid} was killed by {signal.Signals(-code).name}", file=sys.stderr)
            deadline = time.monotonic() + grace_seconds
            for rank in alive:
                rank.send_signal(signal.SIGTERM)
    return exit_code


@contextlib.contextmanager
def _signals_to(hear: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Pass received signals to `hear`, except signals that the process already ignores, for example under nohup."""
    seen: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        hear(signal.Signals(number))

    heard = [number for number in (signal.SIGINT, *STOPPING) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: replace_handler(number, receive) or signal.SIG_DFL for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler_after_stop(number, handler) if seen else handler)


def _kill(ranks: Sequence[_Rank]) -> None:
    for rank in ranks:
        if rank.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)  # kills the rank and its child processes


def _free_port() -> int:
    """Return a free port below the ephemeral range, so that no outgoing connection takes it while the ranks start."""
    for port in random.sample(range(20000, 32768), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise RunError("found no free port between 20000 and 32767 for the ranks; give one with --master-port")
