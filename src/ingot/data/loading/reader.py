"""A rank's rows of step after step, read ahead by a thread: the loop never waits on a disk."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from ingot.data.loading.rows import Rows
from ingot.runtime.batch import Batch
from ingot.runtime.ranks import Ranks

Lender = Callable[[tuple[int, int, int]], Batch]


@dataclass(frozen=True)
class Portion:
    """What one rank reads for one step, and what is true of the step as a whole."""

    batch: Batch
    targets: int  # in the step, over all ranks
    epoch: int


class RowReader:
    """One rank's rows of step after step, read ahead by a thread into buffers that `lend` makes.

    A buffer is written again only after `next` was called twice more, so a copy to a device may still be under way meanwhile.
    """

    ahead = 2

    def __init__(self, source: Rows, rows: int, ranks: Ranks, sample: int, lend: Lender):
        self._source, self._rows, self._share = source, rows, ranks.share(rows)
        self._sample = sample
        self._free: queue.Queue[Batch] = queue.Queue()
        for _ in range(self.ahead + 2):
            self._free.put(lend((len(self._share), source.planes, source.seq_len)))
        self._ready: queue.Queue[Portion | Exception] = queue.Queue(maxsize=self.ahead)
        self._lent: list[Batch] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._read, name="read-ahead", daemon=True)
        self._thread.start()

    def next(self) -> Portion:
        """The rows of the next step."""
        portion = self._ready.get()
        if isinstance(portion, Exception):
            self._ready.put(portion)  # for whoever asks again: nobody will ever put another
            raise portion
        self._lent.append(portion.batch)
        if len(self._lent) > 2:
            self._free.put(self._lent.pop(0))
        return portion

    def close(self) -> None:
        """End the thread; what it read ahead is dropped."""
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
                self._ready.put(read_portion(self._source, self._sample, self._rows, self._share, buffer))
                self._sample += self._rows
        except Exception as error:  # handed to the loop, which raises it at its next step
            self._ready.put(error)


def read_portion(source: Rows, sample: int, rows: int, share: range, buffer: Batch) -> Portion:
    """Read a rank's share of the step that begins at `sample`."""
    targets = source.read(range(sample, sample + rows), share, buffer)
    return Portion(buffer, targets, source.epoch(sample + rows))
