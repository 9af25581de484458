"""Prefetch the rows of each step in a background thread, so that the training loop does not wait for the disk."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
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
    """The batch of one rank in a step, with the step's totals and the next data position, which are the same on all ranks."""

    batch: Batch
    targets: int  # number of targets in the step, over all ranks
    epoch: int
    next_sample: int  # index of the first sample of the next step
    places: Places = field(default_factory=dict)  # number of rows read from each bucket by the end of the step


# A plan, its batch (or a DataExhausted error if too few rows are left), and the buffer that holds the batch.
Ahead = tuple[StepPlan, RankBatch | DataExhausted, Batch]


class RowReader:
    """A reader that prefetches one rank's rows, step by step, in a thread, into buffers allocated by `host_buffer`.

    `following` predicts the plan of the next step from the current plan and its batch. If the training loop requests a different
    plan, the prefetched batches are dropped and prediction restarts from the requested plan. DataExhausted is raised only when
    the training loop requests a step for which there are not enough rows, not when that step is prefetched.

    A buffer is reused only after two more calls of `next`, so an asynchronous copy to a device has time to finish.
    """

    ahead = 2

    def __init__(
        self,
        source: Rows,
        ranks: Ranks,
        first: StepPlan,
        following: Callable[[StepPlan, RankBatch], StepPlan],
        shapes: Sequence[StepPlan],  # one plan for each shape of batch that can occur, to size the buffers
        host_buffer: Callable[[tuple[int, int, int]], Batch],
    ):
        self._source, self._ranks, self._following = source, ranks, following
        most = max(len(ranks.share(shape.samples)) for shape in shapes)
        self._free = deque(host_buffer((most, source.planes, source.seq_len)) for _ in range(self.ahead + 2))
        self._in_use: deque[Batch] = deque()
        self._thread = ThreadPoolExecutor(1, "read-ahead")
        self._restart(first)

    def _restart(self, plan: StepPlan) -> None:
        self._plan = plan  # plan of the next batch to read; while reads are queued, only the reader thread changes it
        self._ready = deque(self._thread.submit(self._read) for _ in range(self.ahead))

    def next(self, plan: StepPlan) -> RankBatch:
        """Return the batch of the next step, whose plan is `plan`; raise DataExhausted if too few rows are left."""
        predicted, result, buffer = self._ready[0].result()
        if rows_of(predicted) != rows_of(plan):
            self._free += [future.result()[2] for future in self._ready if not future.cancel()]
            self._restart(plan)
            _, result, buffer = self._ready[0].result()
        if isinstance(result, DataExhausted):
            raise result
        self._ready.popleft()
        self._in_use.append(buffer)
        if len(self._in_use) > 2:
            self._free.append(self._in_use.popleft())
        self._ready.append(self._thread.submit(self._read))
        return result

    def close(self) -> None:
        """Stop the thread and drop the prefetched batches."""
        self._thread.shutdown(cancel_futures=True)

    def _read(self) -> Ahead:
        plan, buffer = self._plan, self._free.popleft()
        try:
            result = read_rank_batch(self._source, plan, self._ranks, buffer)
        except DataExhausted as end:
            return plan, end, buffer
        self._plan = self._following(plan, result)
        return plan, result, buffer


def read_rank_batch(source: Rows, plan: StepPlan, ranks: Ranks, buffer: Batch) -> RankBatch:
    """Read a rank's share of a step into the front of a buffer and return it as a RankBatch.

    Source rows that are longer than the step's sequence length are split into consecutive parts of that length. Each token keeps
    its document number and its target, even if the target is in the next part.
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
