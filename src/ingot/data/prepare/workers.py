"""Encode blocks of documents, in order, with any number of worker processes.

Workers are plain child processes that read blocks from one pipe and write ids to another: they do not import the main program,
and exit when it does, even if it is killed.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

from ingot.data.prepare.blocks import BLOCK_BYTES, Block, encode_block
from ingot.data.store.writer import Encoded
from ingot.data.tokenizers import Tokenizer, from_spec
from ingot.errors import IngotError, RunError
from ingot.runtime.processes import cpu_count, python_command

SMALL_BYTES = 1 << 23  # inputs up to this size are encoded faster than worker processes start
BLOCKS_AHEAD = 8  # maximum number of blocks per worker that have been read but not yet written
BOOT = "from ingot.data.prepare.workers import run_worker; run_worker()"

Engine = Callable[[Iterable[Block]], Iterator[Encoded]]


def in_order(blocks: Iterable[Block], submit: Callable[[Block], Future[Encoded]], ahead: int) -> Iterator[Encoded]:
    """Submit each block and yield the results in order, with at most `ahead` blocks in flight."""
    waiting: deque[tuple[Future[Encoded], int]] = deque()
    size = 0
    problem: IngotError | None = None
    source = iter(blocks)
    while True:
        try:
            block = next(source, None)
        except IngotError as error:  # raised below, after the results of the earlier blocks, which may raise errors themselves
            block, problem = None, error
        if block is not None:
            weight = sum(map(len, block)) if isinstance(block, list) else len(block.data)  # characters or, for JSON lines, bytes
            waiting.append((submit(block), weight))
            size += weight
        while waiting and (block is None or len(waiting) >= ahead or size > ahead * BLOCK_BYTES):
            encoding, weight = waiting.popleft()
            size -= weight
            yield encoding.result()
        if block is None:
            break
    if problem is not None:
        raise problem


@contextmanager
def local_engine(tokenizer: Tokenizer, workers: int) -> Iterator[Engine]:
    """Yield a function that encodes blocks in `workers` child processes or, if `workers` is 1, in this process."""
    if workers <= 1:
        yield lambda blocks: (encode_block(tokenizer, block) for block in blocks)
        return
    spec = tokenizer.spec()
    started: list[_Worker] = []
    own = threading.local()

    def encode(block: Block) -> Encoded:  # each thread has its own worker process
        if not hasattr(own, "worker"):
            own.worker = _Worker(spec)
            started.append(own.worker)
        return own.worker.encode(block)

    threads = ThreadPoolExecutor(workers)
    try:
        ahead = BLOCKS_AHEAD * workers + BLOCKS_AHEAD
        yield lambda blocks: in_order(blocks, lambda block: threads.submit(encode, block), ahead)
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        for worker in started:
            worker.stop()
        threads.shutdown()
        for worker in started:  # again, because a worker may have started during the first loop
            worker.stop()


class _Worker:
    """A child process that encodes blocks."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            python_command(BOOT),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
            process_group=0,  # Ctrl-C reaches only the parent, whose exit ends the workers
        )
        self._spec: Any = spec  # sent with the first block

    def encode(self, block: Block) -> Encoded:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            for message in (self._spec, block) if self._spec else (block,):
                pickle.dump(message, self._process.stdin, pickle.HIGHEST_PROTOCOL)
            self._process.stdin.flush()
            self._spec = None
            encoded = pickle.load(self._process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError, ValueError) as error:
            advice = "run the same command with fewer --workers to continue"
            raise RunError("a worker process was killed, possibly because memory ran out", advice=advice) from error
        if isinstance(encoded, IngotError):
            raise encoded
        return encoded  # type: ignore[no-any-return]

    def stop(self) -> None:
        self._process.kill()
        with suppress(OSError), self._process:
            pass  # leaving the `with` block closes the pipes and waits for the process to exit


def run_worker() -> None:
    """Run a worker: read a tokenizer spec and then blocks from stdin until it is closed; write encoded blocks to stdout."""
    requests, answers = os.fdopen(0, "rb", closefd=False), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # library output must not mix with the results on stdout
    with suppress(EOFError, BrokenPipeError):
        tokenizer = from_spec(pickle.load(requests))
        while True:
            try:
                answer: Encoded | IngotError = encode_block(tokenizer, pickle.load(requests))
            except IngotError as error:  # sent to the parent process, which reports it
                answer = error
            pickle.dump(answer, answers, pickle.HIGHEST_PROTOCOL)
            answers.flush()


def workers_for(tokenizer: Tokenizer, size: int) -> int:
    """Return the default number of worker processes for an input of `size` bytes."""
    return 1 if tokenizer.instant or size <= SMALL_BYTES else cpu_count()
