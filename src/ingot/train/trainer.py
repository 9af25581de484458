"""The training loop: schedule, step, report, evaluate, save, stop.

All ranks run the loop in lockstep. Before each step they synchronise the first rank's clock and any rank's stop request; all
decisions depend only on these values and the run's progress, so no rank ever decides alone.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np

from ingot.backends.base import Backend, Pending, StepPlan, StepResult
from ingot.config.schema import Config
from ingot.data.loading.order import DataExhausted
from ingot.data.loading.rows import Rows
from ingot.data.store.dataset import Dataset
from ingot.errors import Interrupted, NotFinite, Setting
from ingot.optim.schedules import fraction_spent
from ingot.runs.folder import Kind
from ingot.runs.reporter import Reporter, StepReport
from ingot.runs.state import Status
from ingot.train.evaluation import RunEvaluation
from ingot.train.outputs import PartSaver, RunOutputs
from ingot.train.reader import RankBatch, RowReader, read_rank_batch
from ingot.train.resume import Progress
from ingot.train.step_plan import following, plan_step, shapes, starts_with
from ingot.train.stop import Clock, Shutdown, fits, longest_but_one, sync_clock_and_stop

ALWAYS_LOGGED_STEPS = 10  # this many first steps are all logged, because most failures show up there
RATE_WINDOW = 50  # recent steps over which tokens per second are averaged
RANKS_EVERY = 100  # steps between records of each rank's speed
STEP_TIME_WINDOW = 20  # recent steps used to predict whether another one fits in the budget
PRIMING_STEPS = 2  # warm-up steps of a compiled model: the second step may still compile
MAX_OVERFLOWS = 100  # consecutive fp16 steps without an update before the run fails
LARGE_VOCABULARY = 8192  # with this many ids or more, the output head dominates a small model's step time on a CPU


class Trainer:
    """One training session of a run, which lasts until the budget is spent or a stop is requested."""

    def __init__(
        self,
        config: Config,
        dataset: Dataset,
        rows: Rows,
        backend: Backend,
        progress: Progress,
        reporter: Reporter,
        outputs: RunOutputs | None,
        clock: Clock | None = None,
        part_saver: PartSaver | None = None,
    ):
        self.config, self.dataset, self.rows, self.backend = config, dataset, rows, backend
        self.progress, self.reporter, self.outputs, self.part_saver = progress, reporter, outputs, part_saver
        self.clock = clock or Clock(progress.elapsed_seconds)
        self.evaluation = RunEvaluation(config, dataset, backend, self.clock, progress, reporter, outputs)
        self.facts: dict[str, Any] = {}  # metadata stored in every checkpoint, next to the progress
        self.saved_step: int | None = None  # step of the last checkpoint that was written or resumed from
        self.end_reason: str | None = None  # reason to report if the run ends because its data is exhausted
        self._marks: deque[tuple[float, int]] = deque(maxlen=RATE_WINDOW)
        self._saved_at = progress.elapsed_seconds
        self._points = self._points_by(progress.elapsed_seconds)
        self._pending: tuple[Pending, StepPlan, RankBatch] | None = None
        self._rank_seconds: deque[float] = deque(maxlen=RANKS_EVERY)  # seconds per step until this rank waited for others
        self._steps = 0  # steps taken in this session
        self._overflows = 0

    def prepare(self, choices: Mapping[str, Any]) -> None:
        """Choose kernels and micro-batch sizes by trying a batch of every stage, or reuse the `choices` of an earlier session."""
        self.backend.tune([(plan, self._first(plan).batch) for plan in shapes(self.config)], choices)

    def prime(self, shutdown: Shutdown) -> None:
        """Take warm-up steps for every unfinished stage, then undo them; a stop request ends the warm-up early."""
        steps, compiled = self.config.training.priming_steps, self.backend.tuned().get("compile")
        if steps == "auto":
            steps = PRIMING_STEPS if compiled else 0
        if not steps:
            return
        self.reporter.waiting("compiling" if compiled else "priming")
        left = shapes(self.config)[plan_step(self.config, self.progress.position(self.clock.elapsed)).stage :]
        plans = [replace(plan, step=step) for plan in left for step in range(steps)]
        shutdown.breaks_off = self.backend.ranks.world_size == 1
        with suppress(Interrupted), self.backend.without_trace():
            for done, plan in enumerate(plans, 1):
                if self.backend.maximum([shutdown.requested])[0]:
                    break
                first = self._first(plan)
                self.backend.step(first.batch, first.targets, plan).result()
                self.reporter.primed(done, len(plans))
        shutdown.breaks_off = False

    def _first(self, plan: StepPlan) -> RankBatch:
        """Read the batch of a plan at the current position, bypassing the prefetching reader."""
        p, share = self.progress, self.backend.ranks.share(plan.samples)
        buffer = self.backend.host_buffer((len(share), self.rows.planes, self.rows.seq_len))
        phase = plan_step(self.config, p.position(p.elapsed_seconds)).phase
        try:
            current = replace(plan, sample=p.sample, phase=phase, places=p.places)
            return read_rank_batch(self.rows, current, self.backend.ranks, buffer)
        except DataExhausted:  # the first training step raises this again; tuning needs only a batch of the right shape
            batch = buffer.reshape(-1, self.rows.planes, plan.seq_len)
            batch[:] = 0
            return RankBatch(batch, plan.rows * plan.seq_len, 0, p.sample)

    def run(self, shutdown: Shutdown) -> Status:
        """Train until the budget is spent or a stop is requested, and save the state either way."""
        c, p = self.config, self.progress
        self.evaluation.shutdown = shutdown
        first = plan_step(c, p.position(p.elapsed_seconds))
        reader = RowReader(self.rows, self.backend.ranks, first, partial(following, c), shapes(c), self.backend.host_buffer)
        with closing(reader):
            status = self._loop(reader, shutdown)
            self._finish_pending_step()
            self.backend.wait()
            self.clock.stop()
            p.elapsed_seconds = self.clock.elapsed
        self.save("final" if status == "completed" else "shutdown", wait=True)
        return status

    def _loop(self, reader: RowReader, shutdown: Shutdown) -> Status:
        c, p = self.config, self.progress
        durations = deque([p.step_seconds] if p.step_seconds else [], maxlen=STEP_TIME_WINDOW)
        try:
            if self._evaluation_is_due() and p.val_step != p.step:  # due at step 0, or missed because an earlier session stopped
                self.evaluation.evaluate()
                if p.step:
                    self.update_checkpoint()
            self.reporter.waiting("training")
            self.clock.start()
            self._marks.append((self.clock.elapsed, p.tokens))
            while True:
                began = self.clock.elapsed
                # 1. Synchronise time and stop requests with the other ranks.
                in_budget = fits(began, 2 * longest_but_one(durations), c.budget.seconds)
                if self.backend.ranks.first and not (in_budget and shutdown.has_time(2 * max(durations, default=0.0))):
                    self._finish_pending_step()  # near the end, wait for the device
                elapsed, reason, budget_spent = sync_clock_and_stop(self.backend, self.clock, shutdown, c.budget, durations)
                if reason:
                    return "stopped"
                if budget_spent or self._at_end():
                    return "completed"
                # 2. Plan the step, read its rows, launch it on the device, and report the previous step.
                try:
                    self._step(reader, elapsed)
                except DataExhausted as end:
                    self.end_reason = end.reason
                    self._finish_pending_step()
                    self.reporter.message(end.told(c.data.epochs))
                    return "completed" if end.bucket is None else "halted"
                durations.append(self.clock.elapsed - began)
                p.step_seconds = longest_but_one(durations)
                self._warn_if_slow(durations[-1])
                if p.step % RANKS_EVERY == 0 and self.backend.ranks.world_size > 1:
                    self._compare_ranks()
                # 3. Evaluate and save if due by step number or synchronised clock; the final evaluation and save come later.
                points, self._points = self._points, self._points_by(elapsed)
                due = self._evaluation_is_due() or (self._points > points and not self._at_end())
                if due and self.evaluation.has_time(elapsed):
                    self._finish_pending_step()
                    if self.evaluation.evaluate():
                        self.save()
                save_by_step = c.training.save_every and p.step % c.training.save_every == 0
                save_by_clock = c.training.save_seconds and elapsed - self._saved_at >= c.training.save_seconds
                if (save_by_step or save_by_clock) and not self._at_end():
                    self._saved_at = elapsed
                    self._finish_pending_step()
                    self.save()
        except Interrupted:
            return "stopped"

    def _evaluation_is_due(self) -> bool:
        e, step = self.config.evaluation, self.progress.step
        if self._at_end():
            return False  # `finish` does the final evaluation
        return e.at_start if step == 0 else bool(e.every) and step % e.every == 0

    def _points_by(self, elapsed: float) -> int:
        """Return how many of the evaluation.points evaluations, without the last, are due after `elapsed` training seconds."""
        points, seconds = self.config.evaluation.points, self.config.budget.seconds
        return min(int(points * elapsed / seconds), points - 1) if points and seconds else 0

    def _at_end(self) -> bool:
        steps = self.config.training.max_steps
        return steps is not None and self.progress.step >= steps

    def _step(self, reader: RowReader, elapsed: float) -> None:
        p, at = self.progress, self.progress.position(elapsed)
        plan = plan_step(self.config, at)
        rank_batch = reader.next(plan)
        while self.config.data.phases and p.phases_begun <= plan.phase:  # a loop, because phases may be shorter than a step
            p.phases_begun += 1
            if p.phases_begun > 1:
                self._finish_pending_step()
                self.reporter.phase(p.phases_begun - 1, plan.tokens)
        pending = self.backend.step(rank_batch.batch, rank_batch.targets, plan)
        self._finish_pending_step()  # report the previous step while the device computes this one
        p.step += 1
        p.sample = rank_batch.next_sample
        p.tokens += rank_batch.targets
        p.starts, p.places = list(starts_with(at, plan)), dict(rank_batch.places)
        self._pending = (pending, plan, rank_batch)

    def _finish_pending_step(self) -> None:
        """Wait for the pending step and report it; raise an error if its loss or gradient is not finite."""
        if self._pending is None:
            return
        pending, plan, rank_batch = self._pending
        self._pending = None
        result = pending.result()
        self._overflows = self._overflows + 1 if result.skipped else 0
        failed = self._overflows > MAX_OVERFLOWS or (result.skipped and not self.backend.uses_loss_scaling)
        if failed or not math.isfinite(result.loss):
            ranks = [str(rank) for rank, loss in enumerate(result.rank_losses) if not math.isfinite(loss)]
            on_rank = f" on rank {', '.join(ranks)}" if self.backend.ranks.world_size > 1 and ranks else ""
            what = "gradient" if math.isfinite(result.loss) else "loss"
            measured = f"loss {result.loss}, gradient norm {result.grad_norm}"
            sound = "the weights were not updated and earlier checkpoints are intact"
            what = f"the {what} is not finite at step {self.progress.step}{on_rank} ({measured}); {sound}:"
            advice = "lower the learning rate, raise {0} or check the data, and start again"
            raise NotFinite(what, Setting("optimizer.warmup_steps"), advice=advice)
        self._rank_seconds.append(result.compute_seconds)
        self.progress.loss = result.loss
        report = self._report(result, plan, rank_batch)
        regular = report.step % self.config.tracking.log_every == 0
        log = regular or report.step <= ALWAYS_LOGGED_STEPS or report.step == report.max_steps
        if self.outputs is not None:
            self.outputs.heartbeat.check()
            shown = ("step", "loss", "tokens", "tokens_per_second", "elapsed_seconds")
            self.outputs.heartbeat.update(**{name: getattr(report, name) for name in shown})
            if log:
                self.outputs.folder.record("train", asdict(report))
            self.reporter.step(report, log)

    def _compare_ranks(self) -> None:
        """Record percentiles of the seconds per step that each rank computed before it first waited for others."""
        ranks = self.backend.ranks
        own = np.quantile(self._rank_seconds or [0.0], (0.5, 0.95))
        values = np.where(np.arange(ranks.world_size) == ranks.rank, own[:, None], 0.0)
        p50, p95 = np.array_split(self.backend.maximum(values.ravel().tolist()), 2)
        if self.outputs is not None:
            self.outputs.folder.record("ranks", {"step": self.progress.step, "p50": p50.tolist(), "p95": p95.tolist()})

    def _report(self, result: StepResult, plan: StepPlan, read: RankBatch) -> StepReport:
        c, p = self.config, self.progress
        now = self.clock.elapsed if result.ended is None else self.clock.elapsed_at(result.ended)
        self._marks.append((now, p.tokens))
        then, before = self._marks[0]
        rate = (p.tokens - before) / (now - then) if now > then else 0.0
        peak = self.backend.device.peak_flops if self.backend.precision != "fp32" else None
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
            mfu=rate * self.backend.flops_per_token(plan.seq_len) / (peak * self.backend.ranks.world_size) if peak else None,
            spent=fraction_spent(c, p.step, now),
            targets=read.targets,
            phase=plan.phase,
        )

    def _warn_if_slow(self, seconds: float) -> None:
        """Suggest what to change if a step takes more than a tenth of the budget."""
        self._steps += 1
        budget, tokens, vocab_size = self.config.budget, self.config.training.tokens_per_step, self.dataset.tokenizer.vocab_size
        # Judge by the second step, because the first is often slower; but after a very slow first step there may be no second.
        share = {1: 0.5, 2: 0.1}.get(self._steps, math.inf)
        if budget.seconds is None or budget.overshoot or seconds <= share * budget.seconds:
            return
        vocabulary = f", use a tokenizer with fewer than {vocab_size:,} ids" if vocab_size >= LARGE_VOCABULARY else ""
        self.reporter.message(
            f"a step takes {seconds:.1f} s, more than a tenth of budget.seconds={budget.seconds:g}: only about "
            f"{max(1, int(budget.seconds / seconds))} steps fit; lower training.tokens_per_step={tokens:,}{vocabulary}, train "
            "a smaller model or raise budget.seconds"
        )

    def save(self, kind: Kind = "regular", wait: bool = False) -> None:
        """Capture the state and start writing a checkpoint; with `wait`, block until it is written. Call on every rank."""
        saver = self.outputs.saver if self.outputs is not None else None
        with self.clock.paused():
            missing = self.progress.step != self.saved_step
            if not missing and kind != "regular":  # save again if the earlier save of this step failed
                missing = self.backend.maximum([saver is not None and saver.lacks(self.progress.step)])[0] > 0
            if missing:
                self.progress.elapsed_seconds = self.clock.elapsed
                state, writers = self.backend.snapshot(), self.backend.writers
                if writers > 1:
                    self._begin_parts()
                if saver is not None:
                    saver.save(self.progress.step, state, self._record(), self.progress.best_step, kind, writers)
                elif self.part_saver is not None:
                    self.part_saver.save(self.progress.step, state)
                self.saved_step = self.progress.step
            elif kind != "regular" and saver is not None:
                saver.update(self.progress.step, self._record(), kind)
            if wait and saver is not None:
                self.reporter.waiting("saving")
                saver.wait()
            elif wait and self.part_saver is not None:
                self.part_saver.wait()

    def _begin_parts(self) -> None:
        """Wait until every rank has written its part of the last checkpoint and the first rank has created the next folder."""
        own = self.outputs.saver if self.outputs is not None else self.part_saver
        if own is not None:
            own.wait()
        self.backend.maximum([0.0])
        if self.outputs is not None:
            self.outputs.saver.begin(self.progress.step)
        self.backend.maximum([0.0])

    def update_checkpoint(self) -> None:
        """Store the current progress, such as a new score, in the checkpoint of this step."""
        if self.outputs is not None:
            self.outputs.saver.update(self.progress.step, self._record())

    def _record(self) -> dict[str, Any]:
        return {**asdict(self.progress), "choices": self.backend.tuned(), **self.facts}
