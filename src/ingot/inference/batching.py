"""Batched generation for many clients: a single thread generates, and requests that arrive together share a batch.

A batch contains the requests that were waiting when it began and that have the same temperature and top_p. Batches alternate
after every token, so that no client waits for another client's long completion. A completion depends only on its
prompt and seed, not on the rest of its batch. The row of a client that has disconnected is dropped; a batch without clients ends.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from ingot.backends.sampling import RowScores, Sampling
from ingot.data.tokenizers.tokenizer_base import StreamDecoder
from ingot.errors import IngotError, RunError
from ingot.inference.model import AT_ONCE, BATCH_TOKENS, LoadedModel
from ingot.inference.scoring import score_batches, score_rows

BATCH_WAIT_SECONDS = 0.004  # how long a request waits for others to share its batch; about the time of one step of a small model
MAX_BATCHES = 4  # maximum number of concurrent batches, which take turns; later requests wait
SCORE_EVERY = 16  # number of streamed tokens that are scored at once


class Closed(RunError):
    """Raised when the model is closed before a completion is finished."""

    def __init__(self) -> None:
        super().__init__("the model was closed before this completion was finished; send the request again")


@dataclass
class Chunk:
    """Generated tokens with their text and, if requested, scores; `finish` is set only in the last chunk of a completion."""

    text: str
    ids: list[int]
    scores: RowScores | None = None  # scores of `ids`; the first token of a row has no score
    finish: str | None = None  # "stop" or "length"
    error: IngotError | None = None


@dataclass(eq=False)
class Completion:
    """A requested completion. The engine's thread calls `put` with each chunk; `finish` is set only in the last chunk."""

    ids: list[int]
    is_new: bool  # True if the completion starts a document
    tokens: int
    sampling: Sampling  # with the seed of this completion
    put: Callable[[Chunk], None]
    stop: tuple[str, ...] = ()
    logprobs: int | None = None  # number of top tokens reported per position; None: no scores
    echo: bool = False  # True: return the prompt too
    stream: bool = False  # True: send chunks as they are generated; False: send a single chunk
    gone: threading.Event = field(default_factory=threading.Event)  # set when the client has disconnected


class Engine:
    """Generates all completions in one thread; `submit` may be called from any other thread."""

    def __init__(self, model: LoadedModel) -> None:
        self.model = model
        self._arrived: queue.SimpleQueue[Completion | None] = queue.SimpleQueue()
        self._waiting: list[Completion] = []
        self._batches: list[Generator[None]] = []
        self._at_once = AT_ONCE
        self._closed = False
        self._lock, self._ended = threading.Lock(), False  # `_ended`: True once no more requests are accepted
        self._thread = threading.Thread(target=self._work, name="ingot-serve", daemon=True)
        self._thread.start()

    def submit(self, text: Completion) -> None:
        """Submit a completion; it fails at once if the engine is closed."""
        with self._lock:
            if not self._ended:
                self._arrived.put(text)
                return
        _fail([text], Closed())

    @property
    def busy(self) -> bool:
        """Return True if any completion is waiting or being generated."""
        return bool(self._batches or self._waiting or not self._arrived.empty())

    def close(self) -> None:
        """End the thread; unfinished completions fail."""
        self._arrived.put(None)
        self._thread.join()

    def _work(self) -> None:
        try:
            while not self._closed:
                self._gather(wait=not self._batches and not self._waiting)
                if self._waiting and len(self._batches) < MAX_BATCHES:
                    self._begin()
                self._batches = [batch for batch in self._batches if next(batch, self) is None]
        finally:  # fail all unfinished completions, because each client waits for a last chunk
            with self._lock:
                self._ended = True
            for batch in self._batches:
                batch.close()
            self._gather(wait=False)
            _fail(self._waiting, Closed())
            self._batches, self._waiting = [], []

    def _gather(self, wait: bool) -> None:
        """Collect the requests that have arrived; with `wait`, wait for the first request and give others time to join it."""
        with suppress(queue.Empty):
            while True:
                text = self._arrived.get(block=wait)
                if text is None:
                    self._closed = True
                else:
                    self._waiting.append(text)
                if wait:
                    time.sleep(BATCH_WAIT_SECONDS)
                wait = False

    def _begin(self) -> None:
        """Start a batch of requests that need no new tokens, and one of the next request and those it can be batched with."""
        self._waiting = [text for text in self._waiting if not text.gone.is_set()]
        scored = [text for text in self._waiting if not text.tokens]
        if scored:
            self._waiting = [text for text in self._waiting if text.tokens]
            self._batches.append(self._score(scored))
        if not self._waiting:
            return
        part: list[Completion] = []
        first = self._waiting[0].sampling
        for text in self._waiting:
            if (text.sampling.temperature, text.sampling.top_p) != (first.temperature, first.top_p):
                continue
            longest = max(len(member.ids) + member.tokens for member in [*part, text])
            if part and (len(part) == self._at_once or longest * (len(part) + 1) > BATCH_TOKENS):
                break
            part.append(text)
        self._waiting = [text for text in self._waiting if text not in part]
        self._batches.append(self._write(part))

    def _score(self, texts: list[Completion]) -> Generator[None]:
        """Answer requests for zero new tokens; echoed prompts that need scores are scored one batch per turn."""
        left, scored = list(texts), [text for text in texts if text.logprobs is not None and text.echo and len(text.ids) > 1]

        def answer(text: Completion, scores: RowScores | None) -> None:
            left.remove(text)
            prompt = self.model.tokenizer.decode(text.ids) if text.echo else ""
            text.put(Chunk(prompt, list(text.ids) if text.echo else [], scores, "length"))

        try:
            for text in texts:
                if text not in scored:
                    answer(text, None)
            rows, firsts = [text.ids for text in scored], [1] * len(scored)
            for _, by_row in score_batches(self.model.backend, rows, firsts, _max_logprobs(scored)):
                for row, scores in by_row.items():
                    answer(scored[row], scores)
                if left:
                    yield
        except (Exception, GeneratorExit) as error:
            _fail(left, error)

    def _write(self, texts: list[Completion]) -> Generator[None]:
        """Generate one token of each completion per turn, until all are done."""
        rows, begun = {row: Writing(self.model, text) for row, text in enumerate(texts)}, False
        most = (self.model.context or 10**9) + 1  # maximum length of a row to score; longer rows are cut to their last tokens
        shared, seeds = texts[0].sampling, tuple(text.sampling.seed for text in texts)
        sampling = Sampling(temperature=shared.temperature, top_p=shared.top_p, seeds=seeds)
        try:
            tokens = self.model.backend.generate([text.ids for text in texts], sampling)
            for next_tokens in tokens:
                for row in [row for row, writing in rows.items() if writing.text.gone.is_set()]:
                    del rows[row]
                ready = {row: piece for row, writing in rows.items() if (piece := writing.push(next_tokens[row])) is not None}
                scored = [(rows[row], piece) for row, piece in ready.items() if rows[row].text.logprobs is not None and piece.ids]
                scored_rows = [writing.row[-most:] for writing, _ in scored]
                firsts = [max(1, len(row) - len(piece.ids)) for row, (_, piece) in zip(scored_rows, scored, strict=True)]
                highest = _max_logprobs([writing.text for writing, _ in scored])
                scores = score_rows(self.model.backend, scored_rows, firsts, highest)  # score all chunks in one call
                for (_, piece), row_scores in zip(scored, scores, strict=True):
                    piece.scores = row_scores
                for row, piece in ready.items():
                    rows[row].text.put(piece)
                    if piece.finish is not None:
                        del rows[row]
                if not rows:
                    return
                begun = True
                yield
        except MemoryError as error:
            if begun or len(texts) == 1:
                _fail([writing.text for writing in rows.values()], error)
            else:
                self._at_once = len(texts) // 2
                self._waiting = texts + self._waiting
        except (Exception, GeneratorExit) as error:
            _fail([writing.text for writing in rows.values()], error)


def _max_logprobs(texts: Iterable[Completion]) -> int:
    return max((max(1, text.logprobs or 0) for text in texts), default=1)


def _fail(texts: Iterable[Completion], error: BaseException) -> None:
    if isinstance(error, GeneratorExit):  # raised inside a batch's generator when the generator is closed
        error = Closed()
    if isinstance(error, MemoryError):
        error = RunError("the device is out of memory; request fewer or shorter completions at once")
    reported = error if isinstance(error, IngotError) else RunError(f"the model failed: {type(error).__name__}: {error}")
    for text in texts:
        text.put(Chunk("", [], finish="stop", error=reported))


class Writing:
    """The state of a completion during generation: its tokens, and the decoded text that has not been sent yet."""

    def __init__(self, model: LoadedModel, text: Completion) -> None:
        self.text = text
        self._decoder = StreamDecoder(model.tokenizer, at_start=text.is_new)
        self._ends = model.ends
        self.row = list(text.ids)  # all tokens, prompt included
        self._sent = 0 if text.echo else len(text.ids)  # number of tokens already sent
        self._held = model.tokenizer.decode(text.ids) if text.echo else ""  # decoded text that is not sent yet
        self._echoed = len(self._held)  # number of prompt characters in `_held`, in which stop strings are ignored

    def push(self, token: int) -> Chunk | None:
        """Add the next token; return the chunk to send now (still without scores), or None if nothing should be sent yet."""
        ended = token in self._ends
        self.row.append(token)
        self._held += self._decoder.finish() if ended else self._decoder.push([token])
        finish = "stop" if ended or self._stopped() else None
        if finish is None and len(self.row) - len(self.text.ids) >= self.text.tokens:
            self._held += self._decoder.finish()
            finish = "stop" if self._stopped() else "length"
        if finish is not None:
            return self._cut(len(self._held), finish)
        if self.text.stream and (self.text.logprobs is None or len(self.row) - self._sent >= SCORE_EVERY):
            written = self._held[self._echoed :]
            sizes = [size for stop in self.text.stop for size in range(1, len(stop)) if written.endswith(stop[:size])]
            return self._cut(len(self._held) - max(sizes, default=0))  # hold back text that may be the start of a stop string
        return None

    def _stopped(self) -> bool:
        """Truncate the unsent text before its first stop string; return True if it contained one."""
        positions = [self._held.find(stop, self._echoed) for stop in self.text.stop]
        first = min((position for position in positions if position >= 0), default=None)
        if first is not None:
            self._held = self._held[:first]
        return first is not None

    def _cut(self, characters: int, finish: str | None = None) -> Chunk | None:
        """Return a chunk of `characters` unsent characters and all unsent tokens; None if it has neither text nor `finish`."""
        shown, self._held = self._held[:characters], self._held[characters:]
        if not shown and finish is None:
            return None
        self._echoed = max(0, self._echoed - characters)
        ids, self._sent = self.row[self._sent :], len(self.row)
        return Chunk(shown, ids, finish=finish)
