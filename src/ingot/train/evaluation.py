"""Evaluation during and after training: validation scores, tasks, text samples, and a limit on evaluation time.

If budget.seconds is set, evaluation time is limited too: scoring speed is measured, and the speed of the slowest rank determines
how many rows are scored. Runs without budget.seconds, runs with budget.artifact_bytes and runs that set
evaluation.final_rows always score the requested number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache, partial
from itertools import islice

from ingot.backends.base import Backend
from ingot.backends.sampling import Sampling, prompt_ids
from ingot.config.schema import Config, EvaluationSection
from ingot.data.store.dataset import Dataset
from ingot.data.tokenizers import Tokenizer
from ingot.errors import Interrupted, Setting
from ingot.eval.evaluator import Evaluator, Score, bucket_record, evaluator_of
from ingot.eval.tasks import task_names
from ingot.inference.scoring import TaskRows, read_items, score_tasks, task_rows
from ingot.runs.reporter import EvaluationReport, Reporter
from ingot.runtime.files import user_path
from ingot.train.outputs import RunOutputs
from ingot.train.resume import Progress
from ingot.train.stop import Clock, Shutdown

# An evaluation may take this share of budget.seconds: training, evaluation and scoring the artifact then fit in twice the budget.
MAX_BUDGET_SHARE = 0.5
MIN_ALLOWED_SECONDS = 10.0  # shorter evaluations score all requested rows, because short budgets are often used for trial runs
STOP_CHECK_INTERVAL = 16  # ranks check for stop requests after this many batches of an evaluation or tokens of a sample


def open_tasks(evaluation: EvaluationSection, context: int, tokenizer: Tokenizer) -> TaskRows:
    """Read and tokenize the items of evaluation.tasks up front, so that errors in them are raised before training."""
    tasks = evaluation.tasks or ""
    names = task_names(tasks if isinstance(tasks, str) else ",".join(tasks))
    folder = user_path(evaluation.task_data) if evaluation.task_data is not None else None
    truncate = None if evaluation.task_truncate else Setting("evaluation.task_truncate", "true")
    return task_rows(read_items(names, folder, evaluation.task_items), tokenizer, context, truncate)


class RunEvaluation:
    """The evaluations of a run in one session: validation scores, tasks and text samples."""

    def __init__(
        self,
        config: Config,
        dataset: Dataset,
        backend: Backend,
        clock: Clock,
        progress: Progress,
        reporter: Reporter,
        outputs: RunOutputs | None,
    ):
        self.settings, self.seed, self.dataset, self.backend = config.evaluation, config.training.seed, dataset, backend
        self.clock, self.progress, self.reporter, self.outputs = clock, progress, reporter, outputs
        self._budget_seconds = config.budget.seconds or 0.0
        self._row_seconds: float | None = None  # seconds per row on the slowest rank
        self._last_seconds = 0.0  # duration of the last evaluation during training, on the slowest rank
        self._reported: set[str] = set()  # topics of the messages already shown; each topic is shown once
        final_rows = config.evaluation.final_rows
        self.final_limit = None if final_rows == "auto" else final_rows  # None: all rows, or as many as time allows
        bounded = final_rows == "auto" and config.budget.seconds is not None and config.budget.artifact_bytes is None
        self._bound = max(MIN_ALLOWED_SECONDS, MAX_BUDGET_SHARE * self._budget_seconds) if bounded else None  # None: unlimited
        self.tasks: TaskRows | None = None
        self.shutdown = Shutdown()  # placeholder until training starts
        self.last_sample: str | None = None
        self.evaluator: Callable[[str], Evaluator] = cache(partial(evaluator_of, config, dataset))  # argument: the split
        # The number of rows per evaluation during training, computed at the first evaluation and then cached.
        self._rows_during: Callable[[], int | None] = cache(partial(self.bounded_rows, config.evaluation.rows))

    def evaluate(self, final: bool = False) -> bool:
        """Score the validation split and the tasks, and generate a sample; return True if the score is the best so far."""
        e, p = self.settings, self.progress
        with self.clock.paused():
            began = self.clock.now()
            rows = self._rows_at_end() if final else self._rows_during()
            score = self.score("val", rows)
            # Only scores over the same rows are comparable, so the final evaluation also scores the rows of earlier evaluations.
            several = e.every or e.points or e.at_start
            compared = self.score("val", self._rows_during()) if several and rows != self._rows_during() else score
            train_loss = self.score("train", e.train_rows).loss if e.train_rows else None
            seconds = self.clock.now() - began  # excludes tasks and sample; a stop request during these discards the score
            tasks = {}
            if self.tasks is not None:
                waiting = partial(self.reporter.waiting, "scoring tasks")
                scores = score_tasks(self.tasks, self.backend, waiting, lambda: self.shutdown.requested)
                tasks = {name: replace(score, parts={}).record() for name, score in scores.items()}
            text = self._sample() if e.sample_tokens else None
            p.record_score(score, final)
            report = EvaluationReport(
                step=p.step,
                val_loss=score.loss,
                val_bpb=score.bits_per_byte,
                seconds=seconds,
                elapsed_seconds=self.clock.elapsed,
                best=p.record_best(compared),
                trained_tokens=p.tokens,
                train_loss=train_loss,
                **{name: getattr(score, name) for name in ("tokens", "bytes", "other", "rows", "rows_of", "stride")},
                buckets={name: bucket_record(bucket) for name, bucket in score.buckets.items()},
                tasks=tasks,
            )
            if self.outputs is not None:
                self.outputs.heartbeat.update(val_bpb=report.val_bpb, val_rows=report.rows, val_rows_of=report.rows_of)
                self.outputs.folder.record("evaluation", asdict(report))
                self.reporter.evaluation(report)
            if text is not None:
                self.last_sample = text
                if self.outputs is not None:
                    self.outputs.folder.sample(p.step, text)
                self.reporter.sample(p.step, text)
            if not final:
                if self._bound is not None:
                    self._last_seconds = self.backend.maximum([self.clock.now() - began])[0]
                p.evaluation_seconds += self._last_seconds
        return report.best

    def bounded_rows(self, limit: int | None) -> int | None:
        """Return `limit`, or a smaller number of rows if scoring `limit` rows would take too long. Call on every rank."""
        evaluator, ranks = self.evaluator("val"), self.backend.ranks.world_size
        wanted = evaluator.count(limit)
        batch_rows = evaluator.micro_batch * ranks
        if self._bound is None or wanted <= batch_rows:
            return limit
        if self._row_seconds is None:
            # Time a batch. If its time suggests scoring fewer rows, time a second one, because the first may include compilation.
            batch = next(evaluator.batches(evaluator.rows(evaluator.micro_batch)))
            for attempt in range(2):
                self.reporter.waiting("measuring how fast rows are scored")
                began = self.clock.now()
                self.backend.score(batch)
                slowest = self.backend.maximum([(self.clock.now() - began) / len(batch)])[0]
                if not attempt and wanted * slowest <= self._bound * ranks:
                    return limit  # the evaluation itself will measure the speed
            self._row_seconds = slowest
        if wanted * self._row_seconds <= self._bound * ranks:
            return limit
        rows = max(batch_rows, int(self._bound / self._row_seconds) * ranks)
        self._report_once(
            "rows",
            f"scoring {wanted:,} rows would take about {wanted * self._row_seconds / ranks:.0f} s, and budget.seconds is "
            f"{self._budget_seconds:g}, so only {rows:,} of {evaluator.count(None):,} rows, spread evenly, are scored, also for "
            "the artifact; set evaluation.final_rows=null to score all rows",
        )
        return rows

    def _rows_at_end(self) -> int | None:
        wanted = self.settings.rows
        if self.final_limit == wanted:
            return self._rows_during()
        rows = self.bounded_rows(self.final_limit)
        # If time limits the rows both during training and at the end, score the same rows: one pass is then enough.
        return self._rows_during() if rows != self.final_limit and self._rows_during() != wanted else rows

    def has_time(self, training_seconds: float) -> bool:
        """Return True unless one more evaluation would bring evaluation time above training time plus the evaluation limit."""
        evaluation_seconds = self.progress.evaluation_seconds
        if self._bound is None or evaluation_seconds + self._last_seconds <= training_seconds + self._bound:
            return True
        self._report_once(
            "skipped",
            f"evaluations and samples have taken {evaluation_seconds:.0f} s and training {training_seconds:.0f} s, so some "
            "evaluations are skipped; raise evaluation.every, lower evaluation.rows or set evaluation.final_rows=null to run all",
        )
        return False

    def _report_once(self, topic: str, message: str) -> None:
        if topic not in self._reported:
            self._reported.add(topic)
            self.reporter.message(message)

    def is_final(self) -> bool:
        """Return True if this step's validation score already covers all rows that the final evaluation must score."""
        p, limit = self.progress, self.final_limit
        enough = p.val_final and self._bound is not None if limit is None else p.val_rows >= limit
        return p.val_step == p.step and (p.val_whole or enough)

    def artifact_rows(self) -> int | None:
        """Return the number of rows to score the artifact on, or None for all rows. Call on every rank."""
        if self.is_final():
            return None if self.progress.val_whole else self.progress.val_rows
        return self.bounded_rows(self.final_limit)

    def score(self, split: str, limit: int | None) -> Score:
        """Score a split, or `limit` of its rows, on all ranks together; raise Interrupted if a stop is requested."""
        evaluator = self.evaluator(split)
        rows = evaluator.rows(limit)
        ranks, began = self.backend.ranks, self.clock.now()
        shares = [rows[share.start : share.stop] for share in ranks.shares(len(rows))]
        own, most_calls = shares[ranks.rank], max(evaluator.calls(share) for share in shares)
        progress = partial(self.reporter.waiting, "evaluating")
        part = evaluator.score(own, self.backend.score, self._any_rank_stops, progress, at_least=most_calls)
        *sums, stopped = self.backend.total([*part.sums, float(self.shutdown.requested)])
        if stopped:
            raise Interrupted
        if self._bound is not None:
            self._row_seconds = self.backend.maximum([(self.clock.now() - began) / max(len(own), 1)])[0]
        return evaluator.total(sums)

    def _sample(self) -> str:
        """Return evaluation.sample_prompt with a generated continuation, which is the same on all ranks."""
        self.reporter.waiting("sampling")
        e, tokenizer, ids = self.settings, self.dataset.tokenizer, list[int]()
        sampling = Sampling(e.temperature, e.top_k, seed=self.seed)
        for row in islice(self.backend.generate([prompt_ids(tokenizer, e.sample_prompt)], sampling), e.sample_tokens):
            if self._any_rank_stops(len(ids)):
                raise Interrupted
            ids.append(row[0])
        return e.sample_prompt + tokenizer.decode_bytes(ids, at_start=not e.sample_prompt).decode("utf-8", "replace")

    def _any_rank_stops(self, number: int) -> bool:
        """Return True on all ranks if any rank must stop; ranks synchronise if `number` is a multiple of STOP_CHECK_INTERVAL."""
        if self.backend.ranks.world_size == 1:
            return self.shutdown.requested
        return number % STOP_CHECK_INTERVAL == 0 and self.backend.maximum([self.shutdown.requested])[0] > 0
