"""Encode blocks of documents, in order, with any number of worker processes or a Ray cluster.

Workers are plain child processes that read blocks from one pipe and write ids to another: they do not import the main program,
and exit when it does, even if it is killed.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import socket
import subprocess
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from functools import lru_cache
from importlib import import_module
from typing import Any, TypeVar

from ingot.data.prepare.blocks import BLOCK_BYTES, Block, encode_block
from ingot.data.store.writer import Encoded
from ingot.data.tokenizers import Tokenizer, from_spec
from ingot.errors import ConfigError, IngotError, RunError
from ingot.runtime.processes import away_from_the_users_folder, cpu_count, python_command

SMALL_BYTES = 1 << 23  # inputs up to this size are encoded faster than worker processes start
BLOCKS_AHEAD = 8  # blocks in flight per worker: read but not yet written
RAY_RETRIES = 10  # retries of a task whose process or machine died
RAY_CONNECT_SECONDS = 10
LOCAL = "local"  # Ray's address for a temporary cluster on this machine
BOOT = "from ingot.data.prepare.workers import run_worker; run_worker()"

T = TypeVar("T")
Engine = Callable[[Iterable[Block]], Iterator[Encoded]]


def in_order(
    blocks: Iterable[Block], begin: Callable[[Block], T], finish: Callable[[T], Encoded], ahead: int
) -> Iterator[Encoded]:
    """Call `begin` on each block and yield the results of `finish` in order, with at most `ahead` blocks in flight."""
    waiting: deque[tuple[T, int]] = deque()
    size = 0
    problem: IngotError | None = None
    source = iter(blocks)
    while True:
        try:
            block = next(source, None)
        except IngotError as error:  # raised after the blocks read before it, which may have errors too
            block, problem = None, error
        if block is not None:
            weight = sum(map(len, block)) if isinstance(block, list) else len(block.data)  # bytes or characters
            waiting.append((begin(block), weight))
            size += weight
        while waiting and (block is None or len(waiting) >= ahead or size > ahead * BLOCK_BYTES):
            begun, weight = waiting.popleft()
            size -= weight
            yield finish(begun)
        if block is None:
            break
    if problem is not None:
        raise problem


@contextmanager
def local_engine(tokenizer: Tokenizer, workers: int) -> Iterator[Engine]:
    """Open an engine with this many worker processes; with one worker, encode in this process."""
    if workers <= 1:
        yield lambda blocks: (encode_block(tokenizer, block) for block in blocks)
        return
    spec = tokenizer.spec()
    started: list[_Worker] = []
    own = threading.local()

    def encode(block: Block) -> Encoded:  # each thread has a separate process
        if not hasattr(own, "worker"):
            own.worker = _Worker(spec)
            started.append(own.worker)
        return own.worker.encode(block)

    threads = ThreadPoolExecutor(workers)
    try:
        ahead = BLOCKS_AHEAD * workers + BLOCKS_AHEAD
        yield lambda blocks: in_order(blocks, lambda block: threads.submit(encode, block), lambda begun: begun.result(), ahead)
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        for worker in started:
            worker.stop()
        threads.shutdown()
        for worker in started:  # including one that was still starting
            worker.stop()


class _Worker:
    """A child process that encodes blocks."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            python_command(BOOT),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
            process_group=0,  # only the parent receives Ctrl-C; workers exit when it does
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
            raise RunError(
                "a worker process was killed, perhaps for lack of memory; run the same command with fewer --workers to continue"
            ) from error
        return _checked(encoded)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                pipe.close()  # type: ignore[union-attr]


def run_worker() -> None:
    """Run a worker: read a tokenizer spec and then blocks from stdin, until it is closed."""
    requests, answers = os.fdopen(0, "rb", closefd=False), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # library output must not mix with the results on stdout
    with suppress(EOFError, BrokenPipeError):
        tokenizer = from_spec(pickle.load(requests))
        while True:
            pickle.dump(_encode(tokenizer, pickle.load(requests)), answers, pickle.HIGHEST_PROTOCOL)
            answers.flush()


def _encode(tokenizer: Tokenizer, block: Block) -> Encoded | IngotError:
    """Encode a block; a user error is returned, not raised, because the parent process has to report it."""
    try:
        return encode_block(tokenizer, block)
    except IngotError as error:
        return error


def _checked(encoded: Encoded | IngotError) -> Encoded:
    if isinstance(encoded, IngotError):
        raise encoded
    return encoded


def workers_for(tokenizer: Tokenizer, size: int) -> int:
    """Return the default number of processes for an input of this many bytes."""
    return 1 if tokenizer.instant or size <= SMALL_BYTES else cpu_count()


@contextmanager
def ray_engine(tokenizer: Tokenizer, address: str | None, workers: int | None) -> Iterator[Engine]:
    """Open an engine of Ray tasks on the cluster at `address`, else at RAY_ADDRESS, else on this machine.

    `workers` is the number of processes on this machine, by default one per CPU, or the number of tasks in flight on a cluster,
    by default enough to keep it busy.
    """
    try:
        ray: Any = import_module("ray")
    except ImportError:
        raise ConfigError("--engine ray needs the package ray; install it with: pip install 'ingot-lm[ray]'") from None
    address = address or os.environ.get("RAY_ADDRESS") or LOCAL
    with ExitStack() as undo:
        undo.enter_context(redirect_stdout(sys.stderr))  # keep Ray's messages out of the results on stdout
        if not ray.is_initialized():
            try:
                if parts := re.fullmatch(
                    r"(?:ray://)?(.+):(\d+)", address
                ):  # check the port first, because Ray would retry for many minutes
                    socket.create_connection((parts[1], int(parts[2])), timeout=RAY_CONNECT_SECONDS).close()
                local = {"num_cpus": workers or cpu_count(), "include_dashboard": False} if address == LOCAL else {}
                with warnings.catch_warnings(), away_from_the_users_folder():
                    warnings.simplefilter("ignore")  # FutureWarnings about coming Ray versions
                    ray.init(address, logging_level="ERROR", log_to_driver=False, **local)
            except (OSError, ValueError, RuntimeError, OverflowError) as error:
                raise ConfigError(
                    f"no Ray cluster answers at {address} ({' '.join(str(error).split())[:200]}); start one with "
                    "`ray start --head`, set RAY_AUTH_MODE=token if a token guards it (from Ray 2.59 on), or leave --ray-address "
                    "out to use this machine"
                ) from None
            undo.callback(ray.shutdown)
        task = ray.remote(max_retries=RAY_RETRIES)(_encode_on_ray)
        spec = ray.put(json.dumps(tokenizer.spec()))
        busy = BLOCKS_AHEAD * (1 + int(ray.cluster_resources().get("CPU", 1)))

        def finish(begun: Any) -> Encoded:
            try:
                return _checked(ray.get(begun))
            except ray.exceptions.RayError as error:
                reason = " ".join(str(error).strip().splitlines()[-1:])[:300]
                raise RunError(f"ray could not encode: {reason}; every machine needs this version of ingot") from None

        ahead = busy if address == LOCAL else workers or busy
        yield lambda blocks: in_order(blocks, lambda block: task.remote(spec, block), finish, ahead)


def _encode_on_ray(spec: str, block: Block) -> Encoded | IngotError:
    return _encode(_open(spec), block)


@lru_cache(maxsize=1)
def _open(spec: str) -> Tokenizer:
    return from_spec(json.loads(spec))
