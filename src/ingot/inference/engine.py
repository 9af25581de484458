"""Texts for many who ask at once: one thread writes, and what arrives together is written side by side.

A batch is what waited when it began, drawn in one way; several batches take turns, a token each, so that nobody waits for a long
text of another's. A text depends on its own seed alone, so it is the same in any company. A row whose reader has left is told no
further, and a batch that nobody reads ends.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from ingot.backends.sampling import RowScores, Sampling
from ingot.data.tokenizers import StreamDecoder
from ingot.errors import IngotError, RunError
from ingot.inference.model import AT_ONCE, BATCH_TOKENS, LoadedModel
from ingot.inference.scoring import score_batches, score_rows

GATHER_SECONDS = 0.004  # that a first text waits for others; a step of a small model takes about as long
MOST_BATCHES = 4  # that take turns; what arrives later waits
SCORE_EVERY = 16  # tokens of a stream that are scored at once


class Closed(RunError):
    """The model was let go of before a text was done."""

    def __init__(self) -> None:
        super().__init__("the model was closed before this text was done; ask again")


@dataclass
class Piece:
    """Something that was written: tokens with their text and, where asked for, their scores; the last piece says why it ends."""

    text: str
    ids: list[int]
    scores: RowScores | None = None  # of these ids, but for the first of a row, which nothing stands before
    finish: str | None = None  # stop or length
    error: IngotError | None = None


@dataclass
class Text:
    """One text that is asked for. `put` is called, from the thread that writes, with each piece; the last has a `finish`."""

    ids: list[int]
    is_new: bool  # no text comes before what is written
    tokens: int
    sampling: Sampling  # its seed is this text's
    put: Callable[[Piece], None]
    stop: tuple[str, ...] = ()
    logprobs: int | None = None  # how many of the likeliest tokens are told at each place; None: no scores
    echo: bool = False  # the prompt is told too
    stream: bool = False  # pieces as they come; else one
    gone: threading.Event = field(default_factory=threading.Event)  # its reader has left

    @property
    def kind(self) -> tuple[float, float]:
        """Texts of one kind can be written side by side."""
        return self.sampling.temperature, self.sampling.top_p


class Engine:
    """The thread that writes. Texts may be submitted from any other."""

    def __init__(self, model: LoadedModel) -> None:
        self.model = model
        self._arrived: queue.SimpleQueue[Text | None] = queue.SimpleQueue()
        self._waiting: list[Text] = []
        self._batches: list[Generator[None]] = []
        self._at_once = AT_ONCE
        self._closed = False
        self._lock, self._ended = threading.Lock(), False  # nothing is taken any more
        self._thread = threading.Thread(target=self._work, name="ingot-serve", daemon=True)
        self._thread.start()

    def submit(self, text: Text) -> None:
        """Ask for a text; after the end it fails at once."""
        with self._lock:
            if not self._ended:
                self._arrived.put(text)
                return
        _fail([text], Closed())

    @property
    def busy(self) -> bool:
        """Whether something is being written or waits for it."""
        return bool(self._batches or self._waiting or not self._arrived.empty())

    def close(self) -> None:
        """End the thread; texts that are not done fail."""
        self._arrived.put(None)
        self._thread.join()

    def _work(self) -> None:
        try:
            while not self._closed:
                self._gather()
                if self._waiting and len(self._batches) < MOST_BATCHES:
                    self._begin()
                self._batches = [batch for batch in self._batches if next(batch, self) is None]
        finally:
            self._end()

    def _end(self) -> None:
        """Tell all whose text is not done that it will not be: a reader waits for a last piece."""
        with self._lock:
            self._ended = True
        for batch in self._batches:
            batch.close()
        with suppress(queue.Empty):
            while True:
                self._take(self._arrived.get_nowait())
        _fail(self._waiting, Closed())
        self._batches, self._waiting = [], []

    def _gather(self) -> None:
        """Take what has arrived; wait for it where there is nothing else to do."""
        if not self._batches and not self._waiting:
            self._take(self._arrived.get())
            time.sleep(GATHER_SECONDS)
        with suppress(queue.Empty):
            while True:
                self._take(self._arrived.get_nowait())

    def _take(self, text: Text | None) -> None:
        if text is None:
            self._closed = True
        else:
            self._waiting.append(text)

    def _begin(self) -> None:
        """Begin a batch with the first that waits and all others of its kind, as many as there is room for."""
        self._waiting = [text for text in self._waiting if not text.gone.is_set()]
        scored = [text for text in self._waiting if not text.tokens]
        if scored:
            self._waiting = [text for text in self._waiting if text.tokens]
            self._batches.append(self._score(scored))
        if not self._waiting:
            return
        part: list[Text] = []
        for text in [text for text in self._waiting if text.kind == self._waiting[0].kind]:
            longest = max(len(one.ids) + one.tokens for one in [*part, text])
            if part and (len(part) == self._at_once or longest * (len(part) + 1) > BATCH_TOKENS):
                break
            part.append(text)
        self._waiting = [text for text in self._waiting if not any(text is one for one in part)]
        self._batches.append(self._write(part))

    def _score(self, texts: list[Text]) -> Generator[None]:
        """Texts of which nothing is written: prompts that are echoed are scored together, as many at a turn as one pass takes."""
        left = {id(text): text for text in texts}
        asked = [text for text in texts if text.logprobs is not None and text.echo and len(text.ids) > 1]
        unscored = left.keys() - {id(text) for text in asked}
        try:
            for text in unscored:
                self._tell_prompt(left.pop(text), None)
            rows, firsts = [text.ids for text in asked], [1] * len(asked)
            for _, found in score_batches(self.model.backend, rows, firsts, _most(asked)):
                for row, scores in found.items():
                    self._tell_prompt(left.pop(id(asked[row])), scores)
                if left:
                    yield
        except GeneratorExit:
            _fail(left.values(), Closed())
        except Exception as error:
            _fail(left.values(), error)

    def _tell_prompt(self, text: Text, scores: RowScores | None) -> None:
        told = self.model.tokenizer.decode(text.ids) if text.echo else ""
        text.put(Piece(told, list(text.ids) if text.echo else [], scores, "length"))

    def _write(self, texts: list[Text]) -> Generator[None]:
        """One token of each text at a time, until all are over."""
        rows, begun = {row: Writing(self.model, text) for row, text in enumerate(texts)}, False
        sampling = Sampling(
            temperature=texts[0].sampling.temperature,
            top_p=texts[0].sampling.top_p,
            seeds=tuple(text.sampling.seed for text in texts),
        )
        try:
            tokens = self.model.backend.generate([text.ids for text in texts], sampling)
            for found in tokens:
                for row in [row for row, writing in rows.items() if writing.text.gone.is_set()]:
                    del rows[row]
                told = {row: piece for row, writing in rows.items() if (piece := writing.push(found[row])) is not None}
                self._add_scores([(rows[row], piece) for row, piece in told.items()])
                for row, piece in told.items():
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
        except GeneratorExit:
            _fail([writing.text for writing in rows.values()], Closed())
        except Exception as error:
            _fail([writing.text for writing in rows.values()], error)

    def _add_scores(self, told: Sequence[tuple[Writing, Piece]]) -> None:
        """Score what is told of several texts together, where scores are asked for."""
        asked = [(writing, piece) for writing, piece in told if writing.text.logprobs is not None and piece.ids]
        rows = [writing.row for writing, _ in asked]
        firsts = [max(1, len(writing.row) - len(piece.ids)) for writing, piece in asked]
        scores = score_rows(self.model.backend, rows, firsts, _most([writing.text for writing, _ in asked]))
        for (_, piece), found in zip(asked, scores, strict=True):
            piece.scores = found


def _most(texts: Iterable[Text]) -> int:
    """How many of the likeliest tokens are looked for at a place, so that each of some texts has as many as it asks for."""
    return max((max(1, text.logprobs or 0) for text in texts), default=1)


def _fail(texts: Iterable[Text], error: Exception) -> None:
    """Tell each of some texts that it ends with an error."""
    if isinstance(error, MemoryError):
        error = RunError("the device's memory does not hold so much text; ask for less at once")
    told = error if isinstance(error, IngotError) else RunError(f"the model failed: {type(error).__name__}: {error}")
    for text in texts:
        text.put(Piece("", [], finish="stop", error=told))


class Writing:
    """A text as it grows: what of it may be shown, and whether it is over."""

    def __init__(self, model: LoadedModel, text: Text) -> None:
        self.text = text
        self._decoder = StreamDecoder(model.tokenizer, at_start=text.is_new)
        self._ends = model.ends
        self.row = list(text.ids)  # all tokens
        self._told = 0 if text.echo else len(text.ids)  # of them
        self._held = model.tokenizer.decode(text.ids) if text.echo else ""  # what is decoded and not shown
        self._echoed = len(self._held)  # characters of the prompt among it, which are never a stop

    def push(self, token: int) -> Piece | None:
        """Take the next token; what may be told now, still without scores. The last piece has a `finish`."""
        ended = token in self._ends
        self.row.append(token)
        self._held += self._decoder.finish() if ended else self._decoder.push([token])
        finish = "stop" if ended or self._stopped() else None
        if finish is None and len(self.row) - len(self.text.ids) >= self.text.tokens:
            self._held += self._decoder.finish()
            finish = "stop" if self._stopped() else "length"
        if finish is not None:
            return self._cut(len(self._held), finish)
        if self.text.stream and (self.text.logprobs is None or len(self.row) - self._told >= SCORE_EVERY):
            return self._cut(len(self._held) - self._unsure())
        return None

    def _stopped(self) -> bool:
        """Whether one of the stops is there; what comes from it on is dropped."""
        places = [self._held.find(stop, self._echoed) for stop in self.text.stop]
        found = min((place for place in places if place >= 0), default=None)
        if found is not None:
            self._held = self._held[:found]
        return found is not None

    def _unsure(self) -> int:
        """Characters at the end that may be the beginning of a stop."""
        written = self._held[self._echoed :]
        sizes = [size for stop in self.text.stop for size in range(1, len(stop)) if written.endswith(stop[:size])]
        return max(sizes, default=0)

    def _cut(self, characters: int, finish: str | None = None) -> Piece | None:
        """A piece of so many characters of what is held, with all tokens up to now; None: there is nothing to tell."""
        shown, self._held = self._held[:characters], self._held[characters:]
        if not shown and finish is None:
            return None
        self._echoed = max(0, self._echoed - characters)
        ids, self._told = self.row[self._told :], len(self.row)
        return Piece(shown, ids, finish=finish)
