"""Where a run stands, and where its first rank writes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ingot.eval.evaluator import Score
from ingot.runs.folder import RunFolder
from ingot.runs.state import Heartbeat
from ingot.train.saver import Saver
from ingot.train.step_plan import Position


@dataclass
class Progress:
    """Where a run stands; with the weights, the optimizer's memory and the config it decides everything that follows."""

    step: int = 0
    sample: int = 0  # the next row of the data order, counted in rows of data.seq_len
    tokens: int = 0
    elapsed_seconds: float = 0.0
    step_seconds: float = 0.0  # the longest of the last steps but one
    loss: float | None = None
    val_loss: float | None = None
    val_bpb: float | None = None
    val_step: int | None = None  # the step at which they were found
    val_whole: bool = False  # and whether by the whole validation split
    val_rows: int = 0  # or by how many
    val_rows_of: int = 0  # of its rows
    val_stride: int | None = None  # at this distance from each other, where they overlap
    val_final: bool = False  # and whether at the end of the run
    val_other: dict[str, float] = field(default_factory=dict)  # val_bpb by the other count of bytes, where there are two
    best_step: int | None = None
    best_bpb: float | None = None
    best_by: list[int | str | None] = field(default_factory=list)  # the rows, stride and rule of that score; empty: not known
    evaluation_seconds: float = 0.0  # of evaluations during training, where they are bounded
    resumed_from: str | None = None  # the checkpoint or run of another folder whose state this run began with
    wandb_id: str | None = None  # of the run at Weights & Biases, which goes on with this one
    starts: list[int] = field(default_factory=list)  # the first steps of the stages that have begun
    phases_begun: int = 0  # of data.phases
    places: dict[str, int] = field(default_factory=dict)  # how many rows of each bucket have been read

    def note_score(self, found: Score, final: bool) -> None:
        """Keep what an evaluation of this step found."""
        self.val_loss, self.val_bpb, self.val_other = found.loss, found.bits_per_byte, found.other
        self.val_step, self.val_whole, self.val_final = self.step, found.rows == found.rows_of, final
        self.val_rows, self.val_rows_of, self.val_stride = found.rows, found.rows_of, found.stride

    def note_best(self, found: Score) -> bool:
        """Keep a score of this step if it is the best so far, and say so: NaN is worse than any number.

        A score by other rows, as another session may have, is not compared: the first of them is the best so far.
        """
        bpb = found.bits_per_byte
        by: list[int | str | None] = [found.rows, found.stride, found.rule]
        best = math.isfinite(bpb) and (self.best_bpb is None or self.best_by not in ([], by) or not self.best_bpb <= bpb)
        if best:
            self.best_step, self.best_bpb, self.best_by = self.step, bpb, by
        return best

    def position(self, seconds: float) -> Position:
        """Where the next step begins, at a time that was agreed upon."""
        return Position(self.step, self.sample, self.tokens, seconds, tuple(self.starts), self.phases_begun, self.places)


@dataclass(frozen=True)
class RunOutputs:
    """Where the first rank writes: the run folder, its heartbeat and the thread that saves. Other ranks have none."""

    folder: RunFolder
    heartbeat: Heartbeat
    saver: Saver
