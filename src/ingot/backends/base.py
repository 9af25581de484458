"""The interface between the training loop and a framework (torch or MLX); only numpy arrays, numbers, text and bytes cross it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from ingot.backends.sampling import RowScores, Sampling
from ingot.runtime.devices import Device
from ingot.runtime.ranks import Ranks
from ingot.runtime.tensors import Batch, TensorRecord

State = dict[str, list[TensorRecord]]  # tensors by file name: "model", "optimizer" and, if weights are averaged, "ema"


@dataclass(frozen=True)
class GroupRates:
    """Learning rate, momentum and weight decay of a parameter group for one step."""

    lr: float
    momentum: float | None  # Muon only
    weight_decay: float


@dataclass(frozen=True)
class StepPlan:
    """The data that one step reads and the hyperparameters it uses; identical on every rank."""

    step: int  # number of steps completed before this one
    stage: int
    sample: int  # index of the step's first sample; a sample is a row of data.seq_len tokens
    samples: int  # number of samples the step reads
    rows: int  # number of rows the samples are cut into
    seq_len: int  # tokens per row
    groups: Mapping[str, GroupRates]
    model: Mapping[str, float]  # values passed to the model's `set` method
    later: float  # factor by which the loss weights in training.later_targets are multiplied
    ema_decay: float | None  # decay of the moving average of the weights
    tokens: int = 0  # number of targets trained on before this step
    phase: int = 0  # index into data.phases
    places: Mapping[str, int] = field(default_factory=dict)  # number of rows read from each bucket before this step


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step, over all micro-batches and ranks."""

    loss: float  # nats per token
    grad_norm: float  # before clipping
    skipped: bool  # True if no update was made because the loss or a gradient was not finite
    ended: float | None = field(default=None, compare=False)  # time.perf_counter() at the end of the step; None: unknown
    rank_losses: Sequence[float] = ()  # each rank's part of the loss
    compute_seconds: float = field(default=0.0, compare=False)  # from the step's start until this rank first waits for others

    def result(self) -> StepResult:
        """Return self, so that a backend that waits for every step may return a StepResult where a Pending is expected."""
        return self


@dataclass(frozen=True)
class StepMemory:
    """Memory, FLOPs and communication of one rank's training step, from a simulation of the step."""

    parts: Mapping[str, int]  # bytes at the peak: weights, gradients, optimizer, activations, logits, workspace
    parameters: int
    flops_per_token: float
    matmul_flops_per_token: float  # FLOPs per token without attention over earlier tokens
    sent: int  # bytes that a rank sends to other ranks in a step
    passes: int  # micro-batches per step


class Pending(Protocol):
    """A training step queued on the device; `result` blocks until the step has finished."""

    def result(self) -> StepResult: ...


class Group(Protocol):
    """The ranks (processes) of a run, and communication between them."""

    ranks: Ranks

    def maximum(self, values: Sequence[float]) -> list[float]:
        """Return the maximum of each value over all ranks."""

    def total(self, values: Sequence[float]) -> list[float]:
        """Return the sum of each value over all ranks."""

    def broadcast(self, text: str) -> str:
        """Broadcast the first rank's text, and return it on every rank."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Rounding:
    """Precision of quantised weights: codes have `bits` bits; the largest represents k times the root mean square of its row."""

    bits: int
    k: float

    @property
    def most(self) -> int:
        """Return the largest integer code."""
        return 2 ** (self.bits - 1) - 1


class Rounder(Protocol):
    """A quantiser for large matrices and embedding tables; every `estimate` or `round` starts from the unquantised weights."""

    def estimate(self, rounding: Rounding, embedding: bool) -> float:
        """Estimate the entropy-coded size in bytes of all embedding tables (if `embedding`) or all other large matrices."""

    def round(self, matrices: Rounding, embeddings: Rounding) -> float:
        """Quantise the model's weights in place; return their entropy-coded size in bytes."""

    def codes(self) -> dict[str, list[TensorRecord]]:
        """Return the int8 codes of each weight that `round` has quantised, and the scales of its rows in a record NAME::scale."""


class Inference(Group, Protocol):
    """A model on a device, for generation and scoring; each rank has one.

    All ranks must call the same methods in the same order, because a sharded model runs collectives inside them.
    """

    parameters: int
    device: Device
    precision: str  # dtype of forward passes: bf16, fp16 or fp32

    def score(self, batch: Batch) -> float:
        """Return the loss in nats, summed over the batch's targets; targets of -1 are ignored."""

    def generate(self, prompts: list[list[int]], sampling: Sampling) -> Iterator[list[int]]:
        """Yield the next token of every prompt, indefinitely, without changing the training state.

        Raises MemoryError if the device cannot hold this many completions at once.
        """

    def score_rows(self, rows: Sequence[Sequence[int]], firsts: Sequence[int], top: int) -> list[RowScores]:
        """Score the tokens of row i from position firsts[i] on; also return the `top` likeliest tokens at each position.

        Raises MemoryError if the device cannot hold this many rows at once.
        """

    def cast(self, precision: str) -> bool:
        """Cast the weights to fp32, bf16 or fp16 for generation; return False if this model cannot be cast."""

    def weights(self) -> list[TensorRecord]:
        """Return the weights for scoring and export (their moving average, if there is one); [] on all ranks but the first."""

    def rounder(self, batches: Iterable[Batch]) -> Rounder:
        """Return a Rounder for this model: GPTQ calibrated on `batches`, or plain rounding if `batches` is empty."""

    def load_weights(self, weights: Mapping[str, TensorRecord], where: str) -> None:
        """Replace the weights before training or scoring; `where` names their source in error messages."""


class Backend(Inference, Protocol):
    """A model and its optimizer on a device; each rank has one."""

    uses_loss_scaling: bool  # True if a step may be skipped to adjust the loss scale
    notes: list[str]  # messages about automatic choices, for the run to report

    writers: int  # number of ranks, starting with the first, that write a part of each checkpoint

    def host_buffer(self, shape: tuple[int, int, int]) -> Batch:
        """Return a host buffer that can be copied to the device quickly, such as pinned memory."""

    def tune(self, stages: Sequence[tuple[StepPlan, Batch]], kept: Mapping[str, Any]) -> None:
        """Choose machine-dependent options (micro-batch size, attention kernel), or reuse those of an earlier session (`kept`).

        `stages` holds, for each stage of the run, the plan of one step and this rank's part of its batch.
        """

    def tuned(self) -> dict[str, Any]:
        """Return the options that `tune` chose, as JSON values to be stored with the run."""

    def step(self, batch: Batch, targets: int, plan: StepPlan) -> Pending:
        """Update the weights with the gradients of all ranks, whose batches together have `targets` targets."""

    def snapshot(self) -> Callable[[], State]:
        """Capture this rank's part of the training state, except the data position; ranks beyond `writers` capture nothing.

        Every rank must call this. The returned function copies the state to the host; any thread may call it during training.
        """

    def without_trace(self) -> AbstractContextManager[None]:
        """Return a context manager that undoes all training steps of its block, even if the block raises an exception."""

    def load(self, state: Mapping[str, Mapping[str, TensorRecord]]) -> None:
        """Restore a training state that `snapshot` captured."""

    def flops_per_token(self, seq_len: int) -> float:
        """Return training FLOPs per token for rows of `seq_len` tokens."""

    def peak_memory(self) -> tuple[int, int]:
        """Return the peak bytes allocated and reserved on this rank's device."""

    def wait(self) -> None:
        """Block until the device has finished all queued work."""

    def release(self) -> None:
        """Release device memory that the framework has cached but does not use."""
