"""What a run may do outside its training clock: how many rows are scored where a budget of seconds is set, and what is too slow.

The speed is measured, the slowest rank's counts for all, and every rank comes to the same number. Runs without a clock, runs with
a budget in bytes and whoever sets evaluation.final_rows read what was asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from ingot.backends.base import Backend
from ingot.backends.sampling import Sampling, prompt_ids
from ingot.config.schema import Config
from ingot.data.tokenizers import Tokenizer
from ingot.errors import Interrupted, Setting
from ingot.eval.evaluator import Evaluator
from ingot.eval.tasks import task_names
from ingot.inference.scoring import TaskRows, read_items, score_tasks, task_rows
from ingot.runs.reporter import Reporter
from ingot.runtime.files import user_path

# An evaluation takes at most half as long as the training: with the last one and the artifact's, a run takes twice its budget.
SHARE = 0.5
ALWAYS_SECONDS = 10.0  # nobody minds these, and a short budget is often a trial
STEADY_STEP = 2  # of a session: the first is often slower than those that follow
LARGE_VOCABULARY = 8192  # ids from which the head outweighs the small models that are trained by the clock on a CPU


class Bounds:
    """How long an evaluation may take and how many rows that is; tells once what is cut and what is slow."""

    def __init__(self, config: Config, backend: Backend, reporter: Reporter, vocab_size: int):
        budget, final_rows = config.budget, config.evaluation.final_rows
        self._config, self._backend, self._reporter, self._vocab_size = config, backend, reporter, vocab_size
        self._steps = 0  # of this session
        self._during: tuple[int | None] | None = None  # the rows of evaluations during training, once they are known
        self._budget_seconds = budget.seconds or 0.0
        self._row_seconds: float | None = None  # of the slowest rank
        self._last_seconds = 0.0
        self._said: set[str] = set()
        self.final_limit = None if final_rows == "auto" else final_rows  # None: all, or as many as there is time for
        bounded = final_rows == "auto" and budget.seconds is not None and budget.artifact_bytes is None
        self.seconds = max(ALWAYS_SECONDS, SHARE * self._budget_seconds) if bounded else None  # None: as long as it takes

    def rows(self, evaluator: Evaluator, limit: int | None, now: Callable[[], float]) -> int | None:
        """`limit` where there is time for as many rows, else how many there is time for. Every rank calls it."""
        ranks, whole = self._backend.ranks.world_size, evaluator.count(None)
        wanted, batch = evaluator.count(limit), evaluator.micro_batch * ranks
        if self.seconds is None or wanted <= batch:
            return limit
        if self._row_seconds is None:
            self._measure(evaluator, wanted, now)
        if self._row_seconds is None or wanted * self._row_seconds <= self.seconds * ranks:
            return limit
        rows = max(batch, int(self.seconds / self._row_seconds) * ranks)
        if rows >= wanted:
            return limit
        would = wanted * self._row_seconds / ranks
        self._say(
            "rows",
            f"scoring {wanted:,} rows would take about {would:.0f} s and budget.seconds is {self._budget_seconds:g}: "
            f"{rows:,} of {whole:,} rows, spread evenly, are scored instead, those of the artifact too; "
            "evaluation.final_rows=null scores all",
        )
        return rows

    def during_and(self, limit: int | None, evaluator: Evaluator, now: Callable[[], float]) -> tuple[int | None, int | None]:
        """The rows of evaluations during training, the same throughout, and those of one that is to read `limit`."""
        asked = self._config.evaluation.rows
        found = self.rows(evaluator, limit, now) if limit != asked else None
        if self._during is None:
            self._during = (self.rows(evaluator, asked, now),)
        [during] = self._during
        if limit == asked:
            return during, during
        cut = found != limit and during != asked  # there is time for neither: one pass is enough
        return during, during if cut else found

    def learn(self, rows: int, seconds: float) -> None:
        """Note how long this rank's rows of an evaluation took. Every rank calls it."""
        if self.seconds is not None:
            self._row_seconds = self._backend.maximum([seconds / max(rows, 1)])[0]

    def note_seconds(self, seconds: float) -> float:
        """Note how long an evaluation during training took, and return it: the slowest rank's seconds. Every rank calls it."""
        if self.seconds is not None:
            self._last_seconds = self._backend.maximum([seconds])[0]
        return self._last_seconds

    def has_time(self, evaluation_seconds: float, training_seconds: float) -> bool:
        """Whether one more evaluation leaves them, all together, no longer than the training so far and one allowance."""
        if self.seconds is None or evaluation_seconds + self._last_seconds <= training_seconds + self.seconds:
            return True
        self._say(
            "skipped",
            f"evaluations have taken {evaluation_seconds:.0f} s and the training {training_seconds:.0f} s, so some that are due "
            "are left out; raise evaluation.every, lower evaluation.rows, or set evaluation.final_rows=null to make them all",
        )
        return False

    def _measure(self, evaluator: Evaluator, wanted: int, now: Callable[[], float]) -> None:
        """Time a batch; where that says there is too little time, another one, because the first may have compiled."""
        batch = next(evaluator.batches(evaluator.rows(evaluator.micro_batch)))
        for attempt in range(2):
            self._reporter.waiting("measuring how fast rows are scored")
            began = now()
            self._backend.score(batch)
            slowest = self._backend.maximum([(now() - began) / len(batch)])[0]
            assert self.seconds is not None
            if attempt:
                self._row_seconds = slowest
            elif wanted * slowest <= self.seconds * self._backend.ranks.world_size:
                return  # there is time for all, and the evaluation itself tells how fast it is

    def took_step(self, seconds: float) -> None:
        """Say what to change where a step takes more than a tenth of the budget."""
        self._steps += 1
        budget, tokens = self._config.budget, self._config.training.tokens_per_step
        if budget.seconds is None or budget.overshoot:
            return
        slow = self._steps == STEADY_STEP and seconds > budget.seconds / 10
        if not slow and not (self._steps == 1 and seconds > budget.seconds / 2):  # then there may be no second one
            return
        large = self._vocab_size >= LARGE_VOCABULARY
        ids = f", use a byte or small tokenizer instead of one of {self._vocab_size:,} ids" if large else ""
        self._reporter.message(
            f"a step takes {seconds:.1f} s, more than a tenth of budget.seconds={budget.seconds:g}: only about "
            f"{max(1, int(budget.seconds / seconds))} fit; lower training.tokens_per_step={tokens:,}{ids}, train a smaller model "
            "or raise budget.seconds"
        )

    def _say(self, what: str, message: str) -> None:
        if what not in self._said:
            self._said.add(what)
            self._reporter.message(message)


# What the model writes at an evaluation. Every rank writes it, and all of them break off at the same token.


def write_sample(config: Config, backend: Backend, tokenizer: Tokenizer, stop: Callable[[int], bool]) -> str:
    """The text after evaluation.sample_prompt; Interrupted where `stop`, which is asked before each token, says so."""
    e = config.evaluation
    sampling = Sampling(e.temperature, e.top_k, seed=config.training.seed)
    written: list[int] = []
    for row in islice(backend.generate([prompt_ids(tokenizer, e.sample_prompt)], sampling), e.sample_tokens):
        if stop(len(written)):
            raise Interrupted
        written.append(row[0])
    return e.sample_prompt + tokenizer.decode_bytes(written, at_start=not e.sample_prompt).decode("utf-8", "replace")


# Tasks that are scored while a run trains, as `ingot eval --tasks` scores them when it is over.


def open_tasks(config: Config, tokenizer: Tokenizer) -> TaskRows:
    """The items of evaluation.tasks; whatever is wrong with them is told now and not at the first evaluation."""
    e, asked = config.evaluation, config.evaluation.tasks or ""
    names = task_names(asked if isinstance(asked, str) else ",".join(asked))
    folder = user_path(e.task_data) if e.task_data is not None else None
    truncate = None if e.task_truncate else Setting("evaluation.task_truncate", "true")
    items = read_items(names, folder, e.task_items)
    return task_rows(items, tokenizer, config.model.context or config.data.seq_len, truncate)


def task_records(tasks: TaskRows, backend: Backend, reporter: Reporter, stop: Callable[[], bool]) -> dict[str, dict[str, Any]]:
    """What metrics.jsonl says of each task; Interrupted where a rank was asked to stop. Every rank calls it."""
    scores = score_tasks(tasks, backend, partial(reporter.waiting, "scoring tasks"), stop)
    return {name: replace(score, parts={}).record() for name, score in scores.items()}
