"""The loop: schedule, step, report, evaluate, save, stop.

Every rank runs it in lockstep. The first rank's clock and anybody's signal are agreed upon before each step; all other decisions
follow from the step number, so no rank ever decides alone.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from ingot.backends.base import Backend, Pending, StepPlan, StepResult
from ingot.config.schema import Config
from ingot.data.loading.order import DataExhausted
from ingot.data.loading.reader import RankBatch, RowReader, read_rank_batch
from ingot.data.loading.rows import Rows
from ingot.data.store.dataset import Dataset
from ingot.errors import Interrupted, PeerLost, RunError, Setting
from ingot.eval.evaluator import Evaluator, Score, bucket_record, evaluator_of
from ingot.inference.scoring import TaskRows
from ingot.optim.schedules import fraction_spent
from ingot.runs.folder import Kind
from ingot.runs.reporter import EvaluationReport, Reporter, StepReport
from ingot.runs.state import Status
from ingot.train.evaluation import Bounds, task_records, write_sample
from ingot.train.saver import Progress, RunOutputs
from ingot.train.step_plan import following, plan_step, shapes, starts_with
from ingot.train.stop import Clock, Shutdown, is_near_end, longest_but_one, sync_clock_and_stop

ALWAYS_LOGGED = 10  # first steps: where things go wrong
RATE_STEPS = 50  # over which tokens per second are averaged
LAST_STEPS = 20  # by which it is told whether another one fits into the budget
AGREE_BATCHES = 16  # of an evaluation, or tokens of a sample, after which ranks ask each other whether to stop
PRIMING_STEPS = 2  # of a compiled model: the second finds what the first left to compile
OVERFLOWS_IN_A_ROW = 100  # fp16 gives up after this many steps without an update


class Trainer:
    """One session of a run, from a progress to the end or to a signal."""

    def __init__(
        self,
        config: Config,
        dataset: Dataset,
        rows: Rows,
        backend: Backend,
        progress: Progress,
        reporter: Reporter,
        outputs: RunOutputs | None,
    ):
        self.config, self.dataset, self.rows, self.backend = config, dataset, rows, backend
        self.progress, self.reporter, self.outputs = progress, reporter, outputs
        self.clock = Clock(progress.elapsed_seconds)
        self.facts: dict[str, Any] = {}  # goes into every checkpoint beside the progress
        self.saved_step: int | None = None  # of the checkpoint that was written last or that it resumed from
        self.tasks: TaskRows | None = None  # that evaluations score too
        self.last_sample: str | None = None
        self.bounds = Bounds(config, backend, reporter, dataset.tokenizer.vocab_size)
        self._marks: deque[tuple[float, int]] = deque(maxlen=RATE_STEPS)
        self._saved_at = progress.elapsed_seconds
        self._shutdown: Shutdown | None = None
        self._pending: tuple[Pending, StepPlan, RankBatch] | None = None
        self.end_reason: str | None = None  # where the data ended the run
        self._overflows = 0
        self._evaluators: dict[str, Evaluator] = {}

    def prepare(self, choices: Mapping[str, Any]) -> None:
        """Settle what depends on the machine, by what the first step would read in every stage."""
        self.backend.tune([(plan, self._first(plan).batch) for plan in shapes(self.config)], choices)

    def prime(self, shutdown: Shutdown) -> None:
        """Take the priming steps of every stage that is not over, which leave no trace; a stop breaks them off."""
        asked = self.config.training.priming_steps
        steps = (PRIMING_STEPS if self.backend.tuned().get("compile") else 0) if asked == "auto" else asked
        if not steps:
            return
        self.reporter.waiting("compiling" if self.backend.tuned().get("compile") else "priming")
        left = shapes(self.config)[plan_step(self.config, self.progress.position(self.clock.elapsed)).stage :]
        plans = [replace(plan, step=step) for plan in left for step in range(steps)]
        with suppress(Interrupted), self.backend.without_trace(), shutdown.breaking_off(self.backend.ranks.world_size == 1):
            for done, plan in enumerate(plans, 1):
                if self.backend.maximum([shutdown.requested])[0]:
                    break
                first = self._first(plan)
                self.backend.step(first.batch, first.targets, plan).result()
                self.reporter.primed(done, len(plans))

    def _first(self, plan: StepPlan) -> RankBatch:
        """What the next step would read by a plan, which is not taken from the reader."""
        p, share = self.progress, self.backend.ranks.share(plan.samples)
        buffer = self.backend.host_buffer((len(share), self.rows.planes, self.rows.seq_len))
        phase = plan_step(self.config, p.position(p.elapsed_seconds)).phase
        try:
            return read_rank_batch(
                self.rows, replace(plan, sample=p.sample, phase=phase, places=p.places), self.backend.ranks, buffer
            )
        except DataExhausted:  # said by the first step; what is tuned needs no more than the shape
            batch = buffer.reshape(-1, self.rows.planes, plan.seq_len)
            batch[:] = 0
            return RankBatch(batch, plan.rows * plan.seq_len, 0, p.sample)

    def run(self, shutdown: Shutdown) -> Status:
        """Train until the steps or seconds are spent, or until a signal asks to stop; either way the state is saved."""
        c, p = self.config, self.progress
        self._shutdown = shutdown
        reader = RowReader(
            self.rows,
            self.backend.ranks,
            plan_step(c, p.position(p.elapsed_seconds)),
            partial(following, c),
            shapes(c),
            self.backend.host_buffer,
        )
        try:
            status = self._loop(reader, shutdown)
            self._finish_pending_step()
            self.backend.wait()
            self.clock.stop()
            p.elapsed_seconds = self.clock.elapsed
        finally:
            self.clock.stop()
            reader.close()
        self.save("final" if status == "completed" else "shutdown", wait=True)
        return status

    def _loop(self, reader: RowReader[StepPlan], shutdown: Shutdown) -> Status:
        c, p = self.config, self.progress
        durations = deque([p.step_seconds] if p.step_seconds else [], maxlen=LAST_STEPS)
        try:
            if self._evaluation_is_due() and p.val_step != p.step:  # at the start, or where a signal came in between
                self.evaluate(c.evaluation.rows)
                if p.step:
                    self.note()
            self.reporter.waiting("training")
            self.clock.start()
            self._marks.append((self.clock.elapsed, p.tokens))
            while True:
                began = self.clock.elapsed
                # 1. Agree with the other ranks on the time and on whether to stop.
                if self.backend.ranks.first and is_near_end(began, shutdown, c.budget, durations):
                    self._finish_pending_step()  # the device may be a step behind, which matters there
                elapsed, reason, budget_spent = sync_clock_and_stop(self.backend, self.clock, shutdown, c.budget, durations)
                if reason:
                    return "stopped"
                if budget_spent or self._at_end():
                    return "completed"
                # 2. Plan the step, read its rows, hand it to the device, and report the one before.
                try:
                    self._step(reader, elapsed)
                except DataExhausted as end:
                    self.end_reason = end.reason
                    self._finish_pending_step()
                    self.reporter.message(end.told(c.data.epochs))
                    return "completed" if end.bucket is None else "halted"
                durations.append(self.clock.elapsed - began)
                p.step_seconds = longest_but_one(durations)
                self.bounds.took_step(durations[-1])
                # 3. Evaluate and save where that is due.
                self._do_what_is_due(elapsed)
        except Interrupted:
            return "stopped"

    def _evaluation_is_due(self) -> bool:
        e, step = self.config.evaluation, self.progress.step
        if self._at_end():
            return False  # the end of the run evaluates by itself
        return e.at_start if step == 0 else bool(e.every) and step % e.every == 0

    def _at_end(self) -> bool:
        steps = self.config.training.max_steps
        return steps is not None and self.progress.step >= steps

    def _step(self, reader: RowReader[StepPlan], elapsed: float) -> None:
        p, at = self.progress, self.progress.position(elapsed)
        plan = plan_step(self.config, at)
        rank_batch = reader.next(plan)
        self._begin_phases(plan)
        pending = self.backend.step(rank_batch.batch, rank_batch.targets, plan)
        self._finish_pending_step()  # the step before: its numbers are there while the device works on this one
        p.step += 1
        p.sample = rank_batch.next_sample
        p.tokens += rank_batch.targets
        p.starts, p.places = list(starts_with(at, plan)), dict(rank_batch.places)
        self._pending = (pending, plan, rank_batch)

    def _begin_phases(self, plan: StepPlan) -> None:
        """Note and tell the phases that begin with a step; one shorter than a step has begun too."""
        p = self.progress
        while self.config.data.phases and p.phases_begun <= plan.phase:
            p.phases_begun += 1
            if p.phases_begun > 1:
                self._finish_pending_step()
                self.reporter.phase(p.phases_begun - 1, plan.tokens)

    def _finish_pending_step(self) -> None:
        """Take the numbers of the pending step, refuse those that are not finite, and report the rest."""
        if self._pending is None:
            return
        pending, plan, rank_batch = self._pending
        self._pending = None
        result = pending.result()
        self._overflows = self._overflows + 1 if result.skipped else 0
        if (
            not math.isfinite(result.loss)
            or (result.skipped and not self.backend.uses_loss_scaling)
            or self._overflows > OVERFLOWS_IN_A_ROW
        ):
            if not self.backend.ranks.first:
                raise PeerLost  # every rank has found the same
            what = "gradient" if math.isfinite(result.loss) else "loss"
            raise RunError(
                f"the {what} is not finite at step {self.progress.step} (loss {result.loss}, gradient norm {result.grad_norm}); "
                "the weights were not updated and the checkpoints before it are sound:",
                Setting("optimizer.warmup_steps"),
                advice="lower the learning rate, lengthen {0} or look at the data, and start again",
            )
        self.progress.loss = result.loss
        report = self._report(result, plan, rank_batch)
        log = report.step % self.config.tracking.log_every == 0 or report.step <= ALWAYS_LOGGED or report.step == report.max_steps
        if self.outputs is not None:
            self.outputs.heartbeat.check()
            self.outputs.heartbeat.update(
                step=report.step,
                loss=result.loss,
                tokens=report.tokens,
                tokens_per_second=report.tokens_per_second,
                elapsed_seconds=report.elapsed_seconds,
            )
            if log:
                self.outputs.folder.record("train", asdict(report))
            self.reporter.step(report, log)

    def _report(self, result: StepResult, plan: StepPlan, read: RankBatch) -> StepReport:
        c, p = self.config, self.progress
        now = self.clock.elapsed if result.ended is None else self.clock.elapsed_at(result.ended)
        self._marks.append((now, p.tokens))
        then, before = self._marks[0]
        rate = (p.tokens - before) / (now - then) if now > then else 0.0
        peak = self.backend.peak_flops()
        return StepReport(
            step=p.step,
            max_steps=c.training.max_steps,
            loss=result.loss,
            grad_norm=result.grad_norm,
            learning_rate=plan.groups["matrix"].lr,
            tokens=p.tokens,
            tokens_per_second=rate,
            elapsed_seconds=now,
            budget_seconds=c.budget.seconds,
            epoch=read.epoch,
            mfu=rate * self.backend.flops_per_token(plan.seq_len) / peak if peak else None,
            spent=fraction_spent(c, p.step, now),
            targets=read.targets,
            phase=plan.phase,
        )

    def _do_what_is_due(self, elapsed: float) -> None:
        """Evaluate and save where the step, or the clock that was agreed upon, says so."""
        c, step = self.config, self.progress.step
        if self._evaluation_is_due() and self.bounds.has_time(self.progress.evaluation_seconds, elapsed):
            self._finish_pending_step()
            if self.evaluate(c.evaluation.rows):
                self.save()
        save_by_step = c.training.save_every and step % c.training.save_every == 0
        save_by_clock = c.training.save_seconds and elapsed - self._saved_at >= c.training.save_seconds
        if (save_by_step or save_by_clock) and not self._at_end():  # the end of the run saves by itself
            self._saved_at = elapsed
            self._finish_pending_step()
            self.save()

    def evaluate(self, limit: int | None, final: bool = False) -> bool:
        """Score the validation split, or `limit` rows of it, and tasks, and write a sample; True: the best score so far."""
        c, p = self.config, self.progress
        with self.clock.paused():
            began = self.clock.now()
            during, limit = self.bounds.during_and(limit, self.evaluator("val"), self.clock.now)
            found = self.score("val", limit)
            # The best is chosen by the rows that evaluations before the last one read, if there are any: like with like.
            several = c.evaluation.every or c.evaluation.at_start
            compared = self.score("val", during) if several and limit != during else found
            train = self.score("train", c.evaluation.train_rows).loss if c.evaluation.train_rows else None
            seconds = self.clock.now() - began  # a stop from here on leaves the step without a score
            tasks = task_records(self.tasks, self.backend, self.reporter, self._asked_to_stop) if self.tasks is not None else {}
            text = self._sample() if c.evaluation.sample_tokens else None
            p.note_score(found, final)
            report = EvaluationReport(
                step=p.step,
                val_loss=found.loss,
                val_bpb=found.bits_per_byte,
                tokens=found.tokens,
                bytes=found.bytes,
                seconds=seconds,
                elapsed_seconds=self.clock.elapsed,
                best=p.note_best(compared),
                trained_tokens=p.tokens,
                train_loss=train,
                other=found.other,
                rows=found.rows,
                rows_of=found.rows_of,
                stride=found.stride,
                buckets={name: bucket_record(score) for name, score in found.buckets.items()},
                tasks=tasks,
            )
            if self.outputs is not None:
                self.outputs.heartbeat.update(val_bpb=report.val_bpb, val_rows=report.rows, val_rows_of=report.rows_of)
                self.outputs.folder.record("evaluation", asdict(report))
                self.reporter.evaluation(report)
            if text is not None:
                self._keep_sample(text)
            if not final:
                p.evaluation_seconds += self.bounds.note_seconds(self.clock.now() - began)
        return report.best

    def is_evaluated(self) -> bool:
        """Whether the validation score of this step is the one the end of the run asks for."""
        p, limit = self.progress, self.bounds.final_limit
        enough = p.val_final and self.bounds.seconds is not None if limit is None else p.val_rows >= limit
        return p.val_step == p.step and (p.val_whole or enough)

    def artifact_rows(self) -> int | None:
        """How many rows the artifact is scored by; None: all. Every rank calls it."""
        if self.is_evaluated():
            return None if self.progress.val_whole else self.progress.val_rows
        return self.bounds.rows(self.evaluator("val"), self.bounds.final_limit, self.clock.now)

    def evaluator(self, split: str) -> Evaluator:
        """What scores a split as the config says."""
        if split not in self._evaluators:
            self._evaluators[split] = evaluator_of(self.config, self.dataset, split)
        return self._evaluators[split]

    def score(self, split: str, limit: int | None) -> Score:
        """The score of a split, or of `limit` rows of it, over all ranks."""
        evaluator = self.evaluator(split)
        rows = evaluator.rows(limit)
        ranks, began = self.backend.ranks, self.clock.now()
        dealt = [rows[share.start : share.stop] for share in ranks.shares(len(rows))]
        mine, most = dealt[ranks.rank], max(evaluator.calls(some) for some in dealt)
        progress = partial(self.reporter.waiting, "evaluating")
        part = evaluator.score(mine, self.backend.score, self._anybody_stops, progress, at_least=most)
        *sums, stopped = self.backend.total([*part.sums, float(self._asked_to_stop())])
        if stopped:
            raise Interrupted
        self.bounds.learn(len(mine), self.clock.now() - began)
        return evaluator.total(sums)

    def _anybody_stops(self, batch: int) -> bool:
        """Whether any rank was asked to stop; ranks agree on it now and then, so that all of them break off at the same batch."""
        if self.backend.ranks.world_size == 1:
            return self._asked_to_stop()
        return batch % AGREE_BATCHES == 0 and self.backend.maximum([self._asked_to_stop()])[0] > 0

    def _asked_to_stop(self) -> bool:
        return self._shutdown is not None and self._shutdown.requested

    def _sample(self) -> str:
        self.reporter.waiting("sampling")
        return write_sample(self.config, self.backend, self.dataset.tokenizer, self._anybody_stops)

    def _keep_sample(self, text: str) -> None:
        self.last_sample = text
        if self.outputs is not None:
            self.outputs.folder.sample(self.progress.step, text)
        self.reporter.sample(self.progress.step, text)

    def save(self, kind: Kind = "regular", wait: bool = False) -> None:
        """Copy the state and let the saver write it; with `wait`, until it is on the disk or cannot be. Every rank calls it."""
        saver = self.outputs.saver if self.outputs is not None else None
        with self.clock.paused():
            missing = self.progress.step != self.saved_step
            if not missing and kind != "regular":  # the last chance for a step whose save failed
                missing = self.backend.maximum([saver is not None and saver.lacks(self.progress.step)])[0] > 0
            if missing:
                self.progress.elapsed_seconds = self.clock.elapsed
                state = self.backend.snapshot()
                if saver is not None:
                    saver.save(self.progress.step, state, self._record(), self.progress.best_step, kind)
                self.saved_step = self.progress.step
            elif kind != "regular" and saver is not None:
                saver.note(self.progress.step, self._record(), kind)
            if wait and saver is not None:
                self.reporter.waiting("saving")
                saver.wait()

    def note(self) -> None:
        """Let the checkpoint of this step know what was found out since it was saved."""
        if self.outputs is not None:
            self.outputs.saver.note(self.progress.step, self._record())

    def _record(self) -> dict[str, Any]:
        return {**asdict(self.progress), "choices": self.backend.tuned(), **self.facts}
