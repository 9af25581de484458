"""torchrun's elastic agent, which starts the ranks of this machine and restarts them if any rank of the run fails.

Two things differ from torchrun. A stop signal goes to the ranks, which save, and the agent waits until they have ended. A failure
that would repeat itself, such as a wrong setting, ends the job at once.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters, registry

from ingot.errors import INTERRUPTED, NO_RESTART, RunError
from ingot.runtime.signals import STOPPING


def run_elastic(
    command: Sequence[str],
    nproc: int,
    nnodes: tuple[int, int],
    node_rank: int,
    master: tuple[str, int],
    max_restarts: int,
    say: Callable[[str], None],
    signals_to: Callable[[Callable[[signal.Signals], None]], AbstractContextManager[None]],
) -> int:
    """Run the ranks until they succeed, a signal stops them or no restart is left; return the exit code."""
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # the agent itself handles no other signal
    # With one store for all restarts, ranks would find the addresses of ranks that have ended.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    for name in [name for name in logging.Logger.manager.loggerDict if name.startswith("torch.distributed.elastic")]:
        logging.getLogger(name).setLevel(os.environ.get("LOGLEVEL", "CRITICAL"))
    fixed = nnodes[0] == nnodes[1] > 1 and not max_restarts
    how: dict[str, Any] = {"rank": node_rank} if fixed else {"is_host": node_rank == 0}
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # finds this machine's address without sending anything
            probe.connect((master[0], master[1] or 1))
            how["local_addr"] = probe.getsockname()[0]
        where = RendezvousParameters("static" if fixed else "c10d", f"{master[0]}:{master[1]}", "ingot", *nnodes, **how)
        handler = registry.get_rendezvous_handler(where)
        spec = WorkerSpec("ingot", nproc, handler, entrypoint=command[0], args=tuple(command[1:]), max_restarts=max_restarts)
        agent = _Agent(spec, say)
        with signals_to(agent.forward):
            result = agent.run()
        handler.shutdown()  # tells the other machines that this one does not come back
    except SignalException as stopped:  # a signal arrived while no rank was running
        return INTERRUPTED if stopped.sigval == signal.SIGINT else 0
    except (RendezvousError, DistError, OSError) as error:
        raise RunError(f"this machine cannot reach the others at {master[0]}:{master[1]}, or they have ended: {error}") from None
    code = _first_failure(result)[1].exitcode if result is not None and result.is_failed() else 0
    return RunError.exit_code if code < 0 or code == NO_RESTART else code


class _Agent(LocalElasticAgent):
    def __init__(self, spec: WorkerSpec, say: Callable[[str], None]) -> None:
        super().__init__(spec, DefaultLogsSpecs())
        self._say, self._stopping = say, False

    def forward(self, number: signal.Signals) -> None:
        """Forward a signal to the ranks, which are not restarted afterwards."""
        self._stopping, self._remaining_restarts = True, 0
        handlers = getattr(self._pcontext, "subprocess_handlers", {}).values()
        running = [handler.proc for handler in handlers if handler.proc.poll() is None]
        for process in running:
            process.send_signal(number)
        if not running:
            raise SignalException("stopped", number)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if self._stopping:
            raise SignalException("stopped", signal.SIGTERM)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)  # a signal would kill an interpreter that is still starting
        try:
            return super()._start_workers(worker_group)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result, spec = super()._monitor_workers(worker_group), worker_group.spec
        if result.state == WorkerState.SUCCEEDED and not self._stopping and spec.rdzv_handler.num_nodes_waiting():
            return RunResult(WorkerState.HEALTHY)  # the ranks saved because another machine joins, so start them again
        if result.is_failed():
            rank, failure = _first_failure(result)
            if failure.exitcode > RunError.exit_code:  # wrong settings, data or checkpoint, NO_RESTART or a second SIGINT
                self._remaining_restarts = 0
            killed, left = failure.exitcode < 0, self._remaining_restarts
            how = f"was killed by {signal.Signals(-failure.exitcode).name}" if killed else "failed"
            restart = f"restart {spec.max_restarts - left + 1} of {spec.max_restarts}, from the last checkpoint"
            if killed or left:  # otherwise the rank has printed the reason
                self._say(f"rank {rank} (process {failure.pid}) {how}{f'; {restart}' if left else ''}")
        return result


def _first_failure(result: RunResult) -> tuple[int, ProcessFailure]:
    """Return the rank that failed first, and its failure; ranks that only lost that rank exit with the code of RunError."""
    return min(result.failures.items(), key=lambda item: (item[1].exitcode == RunError.exit_code, item[1].timestamp))
