"""What the loop asks of a framework. Everything that crosses is numpy, numbers, text or raw bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from ingot.backends.sampling import RowScores, Sampling
from ingot.runtime.devices import Device
from ingot.runtime.ranks import Ranks
from ingot.runtime.tensors import Batch, TensorRecord

State = dict[str, list[TensorRecord]]  # by file: model, optimizer and, where it is kept, the average of the weights (ema)


@dataclass(frozen=True)
class GroupRates:
    """What one step asks of the optimizer of a group of parameters."""

    lr: float
    momentum: float | None  # of Muon
    weight_decay: float


@dataclass(frozen=True)
class StepPlan:
    """What one step reads and at which rates it updates: the same on every rank."""

    step: int  # steps done before it
    stage: int
    sample: int  # its first row, counted in rows of data.seq_len
    samples: int  # and how many of them it reads,
    rows: int  # cut into this many rows
    seq_len: int  # of this many tokens
    groups: Mapping[str, GroupRates]
    model: Mapping[str, float]  # numbers that the model is given by its method `set`
    ema_decay: float | None  # how much of the average of the weights is kept
    tokens: int = 0  # targets trained before it
    phase: int = 0  # of data.phases
    places: Mapping[str, int] = field(default_factory=dict)  # how many rows of each bucket were read before it


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did, over all micro-batches and ranks."""

    loss: float  # nats per token
    grad_norm: float  # before clipping
    skipped: bool  # nothing was updated: the loss or a gradient was not finite
    ended: float | None = field(default=None, compare=False)  # when, by time.perf_counter; None: when its numbers are seen


class Pending(Protocol):
    """A step that was handed to the device; asking for its result waits for it."""

    def result(self) -> StepResult: ...


class Group(Protocol):
    """The ranks of a run, and what they say to each other."""

    ranks: Ranks

    def maximum(self, values: Sequence[float]) -> list[float]:
        """Each value's maximum over the ranks."""

    def total(self, values: Sequence[float]) -> list[float]:
        """Each value's sum over the ranks."""

    def broadcast(self, text: str) -> str:
        """The first rank's text, on every rank."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Rounding:
    """How finely weights are rounded: to codes of so many bits, the largest of which stands for k times the spread of a row."""

    bits: int
    k: float

    @property
    def most(self) -> int:
        """The largest code."""
        return 2 ** (self.bits - 1) - 1


class Rounder(Protocol):
    """The large weights of a model, rounded again and again from what they were; the rest is left alone."""

    def estimate(self, rounding: Rounding, embedding: bool) -> float:
        """The bytes of all tables (`embedding`) or all matrices under an entropy coder, without rounding them for good."""

    def round(self, matrices: Rounding, embeddings: Rounding) -> float:
        """Let the model hold rounded weights; their bytes under an entropy coder."""

    def codes(self) -> dict[str, list[TensorRecord]]:
        """What a file stores of each weight as it was rounded last: codes (I8) and a scale per row (its name with ::scale)."""


class Inference(Group, Protocol):
    """A model on a device that writes and is scored; one per rank.

    Every rank calls each method, as often as the others and in the same order: a sharded model gathers inside.
    """

    parameters: int
    device: Device
    precision: str  # bf16, fp16 or fp32: of forward passes

    def score(self, batch: Batch) -> float:
        """The summed loss, in nats, of the targets that are not -1."""

    def generate(self, prompts: list[list[int]], sampling: Sampling) -> Iterator[list[int]]:
        """The next token of every prompt, for ever. Leaves no trace in the training state.

        MemoryError: the device does not hold so many texts at once.
        """

    def score_rows(self, rows: Sequence[Sequence[int]], firsts: Sequence[int], top: int) -> list[RowScores]:
        """Log-probabilities of each row's tokens from its place `first` on, with the `top` likeliest tokens there.

        MemoryError: the device does not hold so many rows at once.
        """

    def cast(self, precision: str) -> bool:
        """Keep the weights as fp32, bf16 or fp16 from now on, to write with; False where this model's cannot be."""

    def weights(self) -> list[TensorRecord]:
        """What the model is scored by and others get: the average of the weights where one is kept, else the weights.

        On the first rank; [] on others.
        """

    def rounder(self, batches: Iterable[Batch]) -> Rounder:
        """What rounds the weights of this model, by what it makes of some training text; by none, each to the nearest code."""

    def load_weights(self, weights: Mapping[str, TensorRecord], where: str) -> None:
        """Take other weights, to begin with or to be scored; `where` they come from is said if they do not fit."""


class Backend(Inference, Protocol):
    """A model with its optimizer on a device; one per rank."""

    uses_loss_scaling: bool  # whether a step may be skipped to find a better loss scale

    def host_buffer(self, shape: tuple[int, int, int]) -> Batch:
        """A host buffer from which copies to the device are fast."""

    def tune(self, stages: Sequence[tuple[StepPlan, Batch]], kept: Mapping[str, Any]) -> None:
        """Settle what depends on the machine (micro-batch, attention), as an earlier session `kept` it where that can be.

        For every stage there is a plan and what this rank reads by it.
        """

    def tuned(self) -> dict[str, Any]:
        """What `tune` settled, as JSON, to be kept with the run."""

    def step(self, batch: Batch, targets: int, plan: StepPlan) -> Pending:
        """Compute this rank's rows of a step that has `targets` in all, and update with everybody's gradients."""

    def snapshot(self) -> Callable[[], State]:
        """Everything that decides the future and is not in the cursor, as it is now, on the first rank; nothing on others.

        Every rank calls it; what it returns gives copies on the host, from any thread, while steps go on.
        """

    def without_trace(self) -> AbstractContextManager[None]:
        """A block of steps that are undone when it ends, in whatever way."""

    def load(self, state: Mapping[str, Mapping[str, TensorRecord]]) -> None:
        """Put a state back."""

    def flops_per_token(self, seq_len: int) -> float:
        """FLOPs of training on one token of a row of `seq_len`."""

    def peak_flops(self) -> float | None:
        """Peak FLOPs a second of all ranks together; None: not known."""

    def peak_memory(self) -> tuple[int, int]:
        """The most bytes that were used and that were held, on this rank's device."""

    def wait(self) -> None:
        """Return when the device has done all it was given."""

    def release(self) -> None:
        """Give memory that is only kept for later back to the device."""
