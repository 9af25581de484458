"""Prefetch the rows of each step in a background thread, so that the training loop does not wait for the disk."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np

from ingot.backends.base import StepPlan
from ingot.data.loading.order import DataExhausted, Places
from ingot.data.loading.rows import Rows
from ingot.runtime.ranks import Ranks
from ingot.runtime.tensors import Batch

rows_of = attrgetter("sample", "samples", "seq_len", "phase", "places")  # the fields of a plan that select its rows


@dataclass(frozen=True)
class RankBatch:
    """One rank's batch for one step, with the totals of the step over all ranks."""

    batch: Batch
    targets: int  # number of targets in the step, over all ranks
    epoch: int
    next_sample: int  # index of the first sample of the next step
    places: Places = field(default_factory=dict)  # rows read from each bucket by the end of the step


# A prefetched batch (or an exception such as DataExhausted), its plan, the number of plan changes before it, and its buffer.
Ahead = tuple[RankBatch | DataExhausted, StepPlan, int, Batch]


class RowReader:
    """Prefetches one rank's rows step by step in a thread, into buffers allocated by `host_buffer`.

    `following` predicts the plan of the next step from the current plan and its batch. If the training loop requests a different
    plan, the prefetched batches are dropped and prediction restarts from the requested plan. DataExhausted is raised only by the
    step for which there are not enough rows, never by a predicted one.

    A buffer is reused only after two more calls of `next`, so an asynchronous copy to a device has time to finish.
    """

    ahead = 2

    def __init__(
        self,
        source: Rows,
        ranks: Ranks,
        first: StepPlan,
        following: Callable[[StepPlan, RankBatch], StepPlan],
        shapes: Sequence[StepPlan],  # one plan for every possible shape, to size the buffers
        host_buffer: Callable[[tuple[int, int, int]], Batch],
    ):
        self._source, self._ranks, self._following = source, ranks, following
        self._plan, self._turn, self._changing = first, 0, threading.Lock()
        most = max(len(ranks.share(shape.samples)) for shape in shapes)
        self._free: queue.Queue[Batch] = queue.Queue()
        for _ in range(self.ahead + 2):
            self._free.put(host_buffer((most, source.planes, source.seq_len)))
        self._ready: queue.Queue[Ahead | Exception] = queue.Queue(maxsize=self.ahead)
        self._in_use: list[Batch] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._read, name="read-ahead", daemon=True)
        self._thread.start()

    def next(self, plan: StepPlan) -> RankBatch:
        """Return the batch of the next step, whose plan is `plan`."""
        result, predicted, turn, buffer = self._take()
        if rows_of(predicted) != rows_of(plan):
            with self._changing:
                self._plan, self._turn = plan, self._turn + 1
            while turn != self._turn:
                self._free.put(buffer)
                result, _, turn, buffer = self._take()
        if isinstance(result, DataExhausted):
            self._free.put(buffer)
            raise result
        self._in_use.append(buffer)
        if len(self._in_use) > 2:
            self._free.put(self._in_use.pop(0))
        return result

    def _take(self) -> Ahead:
        ahead = self._ready.get()
        if isinstance(ahead, Exception):
            self._ready.put(ahead)  # keep the error for later calls: the thread has ended and produces nothing more
            raise ahead
        return ahead

    def close(self) -> None:
        """Stop the thread and drop the prefetched batches."""
        self._closing.set()
        while self._thread.is_alive():
            with suppress(queue.Empty):
                self._ready.get_nowait()
            self._free.put(np.empty((0, 0, 0), np.int32))
            self._thread.join(timeout=0.05)

    def _read(self) -> None:
        try:
            while not self._closing.is_set():
                buffer = self._free.get()
                if self._closing.is_set():
                    return
                with self._changing:
                    plan, turn = self._plan, self._turn
                result: RankBatch | DataExhausted
                try:
                    result = read_rank_batch(self._source, plan, self._ranks, buffer)
                except DataExhausted as end:
                    result = end
                self._ready.put((result, plan, turn, buffer))
                with self._changing:
                    if turn == self._turn and isinstance(result, RankBatch):
                        self._plan = self._following(plan, result)
        except Exception as error:  # passed to the training loop, which raises it at its next step
            self._ready.put(error)


def read_rank_batch(source: Rows, plan: StepPlan, ranks: Ranks, buffer: Batch) -> RankBatch:
    """Read a rank's share of a step into the front of a buffer and return it as a RankBatch.

    Longer rows of the source are split into consecutive parts of the step's sequence length. A token keeps its document number
    and its target, even if the target is in the next part.
    """
    share, pieces, planes = ranks.share(plan.samples), source.seq_len // plan.seq_len, source.planes
    size = (len(share) * pieces, planes, plan.seq_len)
    batch = buffer.reshape(-1)[: size[0] * size[1] * size[2]].reshape(size)
    samples = range(plan.sample, plan.sample + plan.samples)
    rows = source.at(plan.phase, plan.places)
    if pieces == 1:
        targets = rows.read(samples, share, batch)
    else:
        whole = np.empty((len(share), planes, source.seq_len), np.int32)
        targets = rows.read(samples, share, whole)
        cut = whole.reshape(len(share), planes, pieces, plan.seq_len)
        batch.reshape(len(share), pieces, planes, plan.seq_len)[:] = cut.swapaxes(1, 2)
    next_sample, places = rows.after(samples)
    return RankBatch(batch, targets, source.at(plan.phase, places).epoch(next_sample), next_sample, places)
