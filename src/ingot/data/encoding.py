"""Documents to ids, in order, by any number of processes.

Work is cut into blocks of text, by size alone, so that neither the blocks nor what becomes of them depends on who encodes them.
Lines of JSON are parsed by whoever encodes them. Workers are plain child processes that read blocks from a pipe and write ids to
another: they run nothing of the program that started them, and end when it does, however that happens.
"""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Lock
from typing import Any, BinaryIO, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray
from pydantic_core import from_json

from ingot.data.shards import PART_TOKENS
from ingot.data.sources import READERS, Text, read_texts
from ingot.data.sources.records import read_lines
from ingot.data.sources.unpacking import CODECS, open_unpacked
from ingot.data.tokenizers import Tokenizer, from_spec
from ingot.data.tokenizers.base import OUTSIDE, utf8
from ingot.errors import DataError, IngotError, RunError
from ingot.runtime.children import python_command

BLOCK_BYTES = 1 << 20  # of text that one worker encodes at once
SMALL_BYTES = 1 << 23  # of input, which is encoded before other processes would have started
BLOCKS_AHEAD = 8  # for each worker, read and not yet written
ATTEMPTS = 3  # at a block whose worker was killed
NEWLINE = ord("\n")
BOOT = "from ingot.data.encoding import serve; serve()"

T = TypeVar("T")


class Lines(NamedTuple):
    """Whole lines of a file of JSON lines, and how many lines and bytes of it come before."""

    path: Path
    text_field: str
    data: bytes
    lines_before: int
    bytes_before: int


Block = Lines | list[Text]


class Encoded(NamedTuple):
    """Documents as ids one behind the other; for each its tokens, its bytes, and the bytes that its tokens stand for."""

    ids: NDArray[np.uint16]
    tokens: NDArray[np.int64]
    bytes: NDArray[np.int64]
    piece_bytes: NDArray[np.int64]
    empty: int  # texts without a character, which are no documents

    def select(self, which: NDArray[np.bool_]) -> Encoded:
        """Some of the documents."""
        if which.all():
            return self
        ids = self.ids[np.repeat(which, self.tokens)] if which.any() else self.ids[:0]
        return Encoded(ids, self.tokens[which], self.bytes[which], self.piece_bytes[which], 0)


Engine = Callable[[Iterable[Block]], Iterator[Encoded]]


def read_blocks(files: Sequence[Path], text_field: str, advance: Callable[[int], None]) -> Iterator[Block]:
    """The documents of files as blocks; `advance` is told the bytes read."""
    others: list[Path] = []
    for path in files:
        if _has_lines(path):
            yield from text_blocks(read_texts(others, text_field, advance))
            yield from _line_blocks(path, text_field, advance)
            others = []
        else:
            others.append(path)
    yield from text_blocks(read_texts(others, text_field, advance))


def text_blocks(texts: Iterable[Text], characters: int = BLOCK_BYTES) -> Iterator[list[Text]]:
    """Texts a block at a time."""
    block: list[Text] = []
    size = 0
    for text in texts:
        block.append(text)
        size += len(text)
        if size >= characters:
            yield block
            block, size = [], 0
    if block:
        yield block


def encode_block(tokenizer: Tokenizer, block: Block) -> Encoded:
    """The documents of a block."""
    texts = [text if isinstance(text, bytes) else utf8(text) for text in block] if isinstance(block, list) else _parse(block)
    documents = [text for text in texts if text]
    ids, tokens = tokenizer.encode_batch(documents)
    sizes = np.fromiter(map(len, documents), np.int64, len(documents))
    pieces = sizes if tokenizer.lossless else _piece_bytes(tokenizer, ids, tokens)
    return Encoded(ids, tokens, sizes, pieces, len(texts) - len(documents))


def _piece_bytes(tokenizer: Tokenizer, ids: NDArray[np.uint16], tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """The bytes that the tokens of each document stand for, counted a part at a time: one document may be all there is."""
    ends = np.cumsum(tokens)
    starts, sums, total = (ends - tokens)[tokens > 0], np.zeros(len(ends), np.int64), 0
    for begin in range(0, len(ids), PART_TOKENS):
        part = ids[begin : begin + PART_TOKENS]
        end = begin + len(part)
        previous = np.append(np.int32(ids[begin - 1]), part[:-1].astype(np.int32))
        first, last = np.searchsorted(starts, [begin, end])
        previous[starts[first:last] - begin] = OUTSIDE
        counted = np.cumsum(tokenizer.target_bytes(previous, part), dtype=np.int64)
        first, last = np.searchsorted(ends, [begin, end], "right")
        sums[first:last] = total + counted[ends[first:last] - begin - 1]
        total += int(counted[-1])
    return np.diff(sums, prepend=0)


def encode_or_explain(tokenizer: Tokenizer, block: Block) -> Encoded | IngotError:
    """`encode_block`, with a mistake in the text as a value, which survives the way back to the user better than a raise."""
    try:
        return encode_block(tokenizer, block)
    except IngotError as error:
        return error


def in_order(
    blocks: Iterable[Block], begin: Callable[[Block], T], finish: Callable[[T], Encoded], ahead: int
) -> Iterator[Encoded]:
    """What `finish` makes of each block that `begin` began, in their order; no more than `ahead` blocks are under way."""
    waiting: deque[tuple[T, int]] = deque()
    size = 0
    problem: IngotError | None = None
    source = iter(blocks)
    while True:
        try:
            block = next(source, None)
        except IngotError as error:  # what was read before comes first, with mistakes of its own perhaps
            block, problem = None, error
        if block is not None:
            waiting.append((begin(block), _size(block)))
            size += waiting[-1][1]
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
    """An engine of this many processes; of this process alone, if one worker is asked for."""
    if workers <= 1:
        yield lambda blocks: (encode_block(tokenizer, block) for block in blocks)
        return
    spec = tokenizer.spec()
    idle: SimpleQueue[_Worker] = SimpleQueue()
    crew: list[_Worker] = []
    starting, ended = Lock(), Event()

    def take() -> _Worker:
        with starting:
            if ended.is_set():
                raise RunError("the work has ended")
            if idle.empty() and len(crew) < workers:  # a block would wait though there may be another process
                crew.append(_Worker(spec))
                return crew[-1]
        return idle.get()

    def encode(block: Block) -> Encoded:
        worker = take()
        try:
            return worker.encode(block)
        finally:
            idle.put(worker)

    threads = ThreadPoolExecutor(workers)
    try:
        ahead = BLOCKS_AHEAD * workers + BLOCKS_AHEAD
        yield lambda blocks: in_order(blocks, lambda block: threads.submit(encode, block), lambda begun: begun.result(), ahead)
    finally:
        with starting:
            ended.set()
            for worker in crew:
                worker.close()
        threads.shutdown(cancel_futures=True)


class _Worker:
    """A child process that encodes blocks, and its successor if it is killed."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._spec, self._closed = spec, False
        self._start()

    def encode(self, block: Block) -> Encoded:
        for _ in range(ATTEMPTS):
            try:
                self._send(block)
                found = pickle.load(self._process.stdout)  # type: ignore[arg-type]
            except (OSError, EOFError, pickle.UnpicklingError, ValueError):
                if self._closed:
                    break
                self._stop()
                self._start()
                continue
            if isinstance(found, IngotError):
                raise found
            return cast(Encoded, found)
        raise RunError(
            f"a worker process ended {ATTEMPTS} times at the same text, killed for want of memory perhaps; "
            "give fewer --workers, and the same command continues"
        )

    def close(self) -> None:
        self._closed = True
        self._stop()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            python_command(BOOT),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
            process_group=0,  # the terminal's Ctrl-C is for us, and they end when we do
        )
        with suppress(OSError):  # the one that reads the answer notices
            self._send(self._spec)

    def _send(self, message: Any) -> None:
        assert self._process.stdin is not None
        pickle.dump(message, self._process.stdin, pickle.HIGHEST_PROTOCOL)
        self._process.stdin.flush()

    def _stop(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                pipe.close()  # type: ignore[union-attr]


def serve() -> None:
    """The life of a worker: a tokenizer's spec, then blocks, until the pipe ends."""
    requests, answers = os.fdopen(0, "rb", closefd=False), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints is no answer
    with suppress(EOFError, BrokenPipeError):
        tokenizer = from_spec(pickle.load(requests))
        while True:
            pickle.dump(encode_or_explain(tokenizer, pickle.load(requests)), answers, pickle.HIGHEST_PROTOCOL)
            answers.flush()


def workers_for(tokenizer: Tokenizer, size: int) -> int:
    """How many processes encode an input of this many bytes, if nobody says so."""
    return 1 if tokenizer.instant or size <= SMALL_BYTES else cpu_count()


def cpu_count() -> int:
    """The processors that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _has_lines(path: Path) -> bool:
    named = path.with_suffix("") if path.suffix.lower() in CODECS else path
    return READERS.get(named.suffix.lower()) is read_lines


def _line_blocks(path: Path, text_field: str, advance: Callable[[int], None]) -> Iterator[Lines]:
    lines = size = 0
    try:
        with open_unpacked(path, advance) as stream:
            while data := stream.read(BLOCK_BYTES):
                data += b"" if data.endswith(b"\n") else stream.readline()
                yield Lines(path, text_field, data, lines, size)
                lines, size = lines + len(_newlines(data)), size + len(data)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def _parse(block: Lines) -> list[bytes]:
    """The documents of lines; if one is wrong, from blank lines in front the reader learns its place in the file."""
    if (found := _parse_plain(block.data, block.text_field)) is not None:
        return found
    try:
        return [text.encode() for text in _read(block, [b"\n"][: block.lines_before])]
    except DataError:
        each, more = divmod(block.bytes_before, block.lines_before or 1)
        before = (b" " * (each - 1 + (line < more)) + b"\n" for line in range(block.lines_before))
        for _ in _read(block, before):
            pass
        raise


def _parse_plain(data: bytes, text_field: str) -> list[bytes] | None:
    """The texts in UTF-8 of whole lines with an object each; None: `read_lines` has to read them, or say what is wrong."""
    texts: list[bytes] = []
    begin = 0
    try:
        for end in [*_newlines(data).tolist(), *([] if data.endswith(b"\n") else [len(data)])]:
            texts.append(from_json(data[begin:end], cache_strings="none")[text_field].encode())
            begin = end + 1
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return texts


def _newlines(data: bytes) -> NDArray[np.int64]:
    return np.flatnonzero(np.frombuffer(data, np.uint8) == NEWLINE)


def _read(block: Lines, before: Iterable[bytes]) -> Iterator[str]:
    lines = chain(before, io.BytesIO(block.data))
    return read_lines(cast(BinaryIO, lines), block.path, block.text_field)


def _size(block: Block) -> int:
    return sum(map(len, block)) if isinstance(block, list) else len(block.data)
