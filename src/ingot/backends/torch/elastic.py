"""Restarts: torchrun's elastic agent starts the ranks of this machine, and starts them again if one of them fails.

Two things differ from torchrun. A stop signal goes to the ranks, which save, and the agent waits until they have ended. A failure
that would repeat itself, such as a wrong setting, ends the job at once.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Callable, Sequence

from torch.distributed.elastic.agent.server import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters, registry

from ingot.errors import NO_RESTART, RunError
from ingot.runtime.signals import STOPPING


class ElasticAgent(LocalElasticAgent):
    """torchrun's agent for the ranks of one machine."""

    def __init__(
        self,
        command: Sequence[str],
        nproc: int,
        nnodes: tuple[int, int],
        max_restarts: int,
        master: tuple[str, int],
        hosts_rendezvous: bool,
        say: Callable[[str], None],
    ) -> None:
        # Every start gets a store of its own: a store that outlives a start would hand out the addresses of ranks that have ended.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # the other signals go to `forward`
        for name in [name for name in logging.Logger.manager.loggerDict if name.startswith("torch.distributed.elastic")]:
            logging.getLogger(name).setLevel(os.environ.get("LOGLEVEL", "CRITICAL"))
        self._say, self._stopping = say, False
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing: only finds the route to the master
            try:
                probe.connect((master[0], master[1] or 1))
            except OSError as error:
                raise RunError(f"--master-addr {master[0]} cannot be reached: {error.strerror}") from None
            address = probe.getsockname()[0]
        where = RendezvousParameters(
            "c10d", f"{master[0]}:{master[1]}", "ingot", *nnodes, local_addr=address, is_host=hosts_rendezvous
        )
        try:
            handler = registry.get_rendezvous_handler(where)
        except RendezvousError as error:
            raise RunError(f"the rendezvous at {master[0]}:{master[1]} failed: {error.__cause__ or error}") from None
        spec = WorkerSpec("ingot", nproc, handler, entrypoint=command[0], args=tuple(command[1:]), max_restarts=max_restarts)
        spec.monitor_interval = 0.1
        super().__init__(spec, DefaultLogsSpecs())

    def launch(self) -> int:
        """Run the ranks until they have succeeded, a signal has stopped them or no restart is left; return the exit code."""
        try:
            result = self.run()
        except SignalException:  # a signal arrived while no rank was running, so the last checkpoint is what there is to save
            return 0
        except RendezvousError as error:
            raise RunError(f"the machines lost contact: {error}") from None
        finally:
            self._worker_group.spec.rdzv_handler.shutdown()
        if result is None or not result.is_failed():
            return 0
        code = self._first_failure(result)[1].exitcode
        return RunError.exit_code if code < 0 or code == NO_RESTART else code

    def forward(self, number: signal.Signals) -> None:
        """Send a signal to the ranks, which are not restarted after it."""
        self._stopping, self._remaining_restarts = True, 0
        handlers = getattr(self._pcontext, "subprocess_handlers", {}).values()
        running = [handler.proc for handler in handlers if handler.proc.poll() is None]
        for process in running:
            process.send_signal(number)
        if not running:
            raise SignalException("stopped", number)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        if self._stopping:
            raise SignalException("stopped", signal.SIGTERM)
        super()._rendezvous(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)  # a signal would kill a Python that is still starting
        try:
            return super()._start_workers(worker_group)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if result.state == WorkerState.SUCCEEDED and not self._stopping and worker_group.spec.rdzv_handler.num_nodes_waiting():
            return RunResult(WorkerState.HEALTHY)  # the ranks saved and ended because another machine joins: start them again
        if not result.is_failed():
            return result
        rank, failure = self._first_failure(result)
        if failure.exitcode > RunError.exit_code:  # wrong settings, data or checkpoints, NO_RESTART, or a second SIGINT
            self._remaining_restarts = 0
        count, spec = self._remaining_restarts, worker_group.spec
        how = f"was killed by {signal.Signals(-failure.exitcode).name}" if failure.exitcode < 0 else "failed"
        what = f"starting all ranks from the last checkpoint (restart {spec.max_restarts - count + 1} of {spec.max_restarts})"
        if failure.exitcode < 0 or count:
            self._say(f"rank {rank} (process {failure.pid}) {how}{f'; {what}' if count else ''}")
        return result

    @staticmethod
    def _first_failure(result: RunResult) -> tuple[int, ProcessFailure]:
        """Return the rank that failed first, and its failure."""
        return min(result.failures.items(), key=lambda item: item[1].timestamp)
