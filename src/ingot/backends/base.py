"""The interface between the training loop and a framework. Only numpy arrays, numbers, text and raw bytes cross it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from ingot.backends.sampling import RowScores, Sampling
from ingot.runtime.devices import Device
from ingot.runtime.ranks import Ranks
from ingot.runtime.tensors import Batch, TensorRecord

State = dict[str, list[TensorRecord]]  # maps a file to its tensors: model, optimizer and, if enabled, the averaged weights (ema)


@dataclass(frozen=True)
class GroupRates:
    """The rates of one step for a group of parameters."""

    lr: float
    momentum: float | None  # Muon only
    weight_decay: float


@dataclass(frozen=True)
class StepPlan:
    """The data and rates of one step: the same on every rank."""

    step: int  # steps done before it
    stage: int
    sample: int  # index of its first sample; a sample is a row of data.seq_len tokens
    samples: int  # number of samples it reads
    rows: int  # number of rows the samples are cut into
    seq_len: int  # tokens per row
    groups: Mapping[str, GroupRates]
    model: Mapping[str, float]  # numbers passed to the model's method `set`
    ema_decay: float | None  # decay of the weights' moving average
    tokens: int = 0  # targets trained before it
    phase: int = 0  # index into data.phases
    places: Mapping[str, int] = field(default_factory=dict)  # rows of each bucket read before it


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step, over all micro-batches and ranks."""

    loss: float  # nats per token
    grad_norm: float  # before clipping
    skipped: bool  # no update: the loss or a gradient was not finite
    ended: float | None = field(default=None, compare=False)  # time.perf_counter() at its end; None: known when it is read


class Pending(Protocol):
    """A step that was queued on the device; reading its result waits for it."""

    def result(self) -> StepResult: ...


class Group(Protocol):
    """The ranks of a run and their communication."""

    ranks: Ranks

    def maximum(self, values: Sequence[float]) -> list[float]:
        """Return each value's maximum over the ranks."""

    def total(self, values: Sequence[float]) -> list[float]:
        """Return each value's sum over the ranks."""

    def broadcast(self, text: str) -> str:
        """Return the first rank's text on every rank."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Rounding:
    """The precision of rounded weights: codes of `bits` bits; the largest stands for k times a row's standard deviation."""

    bits: int
    k: float

    @property
    def most(self) -> int:
        """The largest code."""
        return 2 ** (self.bits - 1) - 1


class Rounder(Protocol):
    """Rounds the large weights of a model, each time from their original values."""

    def estimate(self, rounding: Rounding, embedding: bool) -> float:
        """Return the bytes of all tables (`embedding`) or all matrices under an entropy coder, without changing the model."""

    def round(self, matrices: Rounding, embeddings: Rounding) -> float:
        """Round the model's weights; return their bytes under an entropy coder."""

    def codes(self) -> dict[str, list[TensorRecord]]:
        """Return what a file stores of each rounded weight: codes (I8) and a scale per row (its name with ::scale)."""


class Inference(Group, Protocol):
    """A model on a device, for generation and scoring; one per rank.

    Every rank calls each method, as often as the others and in the same order: a sharded model gathers inside.
    """

    parameters: int
    device: Device
    precision: str  # dtype of forward passes: bf16, fp16 or fp32

    def score(self, batch: Batch) -> float:
        """Return the summed loss, in nats, of the targets that are not -1."""

    def generate(self, prompts: list[list[int]], sampling: Sampling) -> Iterator[list[int]]:
        """Yield the next token of every prompt, forever, without changing the training state.

        MemoryError: the device does not hold so many completions at once.
        """

    def score_rows(self, rows: Sequence[Sequence[int]], firsts: Sequence[int], top: int) -> list[RowScores]:
        """Return log-probabilities of each row's tokens from position `first` on, with the `top` likeliest tokens there.

        MemoryError: the device does not hold so many rows at once.
        """

    def cast(self, precision: str) -> bool:
        """Cast the weights to fp32, bf16 or fp16 for generation; return False if this model does not allow it."""

    def weights(self) -> list[TensorRecord]:
        """Return the weights used for scoring and export on the first rank; [] on others.

        The average of the weights where there is one.
        """

    def rounder(self, batches: Iterable[Batch]) -> Rounder:
        """Return a rounder of this model's weights, guided by some training text; without text it rounds to the nearest code."""

    def load_weights(self, weights: Mapping[str, TensorRecord], where: str) -> None:
        """Replace the weights, to start training from them or to score them; errors name `where` they come from."""


class Backend(Inference, Protocol):
    """A model with its optimizer on a device; one per rank."""

    uses_loss_scaling: bool  # a step may be skipped to find a better loss scale

    def host_buffer(self, shape: tuple[int, int, int]) -> Batch:
        """Return a host buffer from which copies to the device are fast."""

    def tune(self, stages: Sequence[tuple[StepPlan, Batch]], kept: Mapping[str, Any]) -> None:
        """Choose what depends on the machine (micro-batch, attention), if possible as an earlier session `kept` it.

        `stages` has a plan for every stage, with this rank's batch.
        """

    def tuned(self) -> dict[str, Any]:
        """Return the choices of `tune` as JSON, to be stored with the run."""

    def step(self, batch: Batch, targets: int, plan: StepPlan) -> Pending:
        """Compute this rank's rows of a step with `targets` targets over all ranks; update with the gradients of all ranks."""

    def snapshot(self) -> Callable[[], State]:
        """Capture all state that is not in the cursor, on the first rank; nothing on others.

        Every rank calls it; the returned function gives copies on the host, from any thread, while training continues.
        """

    def without_trace(self) -> AbstractContextManager[None]:
        """Undo the steps of the block when it ends, also by an exception."""

    def load(self, state: Mapping[str, Mapping[str, TensorRecord]]) -> None:
        """Restore a state."""

    def flops_per_token(self, seq_len: int) -> float:
        """Return training FLOPs per token in rows of `seq_len`."""

    def peak_flops(self) -> float | None:
        """Return the peak FLOPS of all ranks together; None if unknown."""

    def peak_memory(self) -> tuple[int, int]:
        """Return the peak bytes allocated and reserved on this rank's device."""

    def wait(self) -> None:
        """Wait until the device has done all queued work."""

    def release(self) -> None:
        """Return cached memory to the device."""
