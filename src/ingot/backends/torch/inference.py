"""A model that writes and is scored: scores, tokens and weights, by the average of the weights where one is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ingot.backends.sampling import RowScores, Sampling
from ingot.backends.torch.build import build_model, build_outline, fill_outline
from ingot.backends.torch.collectives import Collectives
from ingot.backends.torch.device import find_torch_device, torch_device
from ingot.backends.torch.generate import continue_prompts, score_rows
from ingot.backends.torch.precision import DTYPES, arithmetic
from ingot.backends.torch.rounding import Moments, TorchRounder
from ingot.backends.torch.state import WeightAverage, check_fits, load_model, model_records
from ingot.backends.torch.tune import form_of, in_parts, use_form
from ingot.config.schema import Config
from ingot.errors import DataError
from ingot.model.layers import Form, extended_context
from ingot.model.registry import OURS
from ingot.runtime.devices import Device
from ingot.runtime.ranks import Ranks
from ingot.runtime.tensors import IGNORED, Batch, TensorRecord

# Documents of a batch as FlashAttention 4 takes them: where they begin in all tokens, rows one after another.

ROOM = 32  # the number of boundaries is a multiple of it, so that CUDA graphs, which have one size, are few


def boundaries(numbers: NDArray[np.int32]) -> NDArray[np.int32]:
    """Where documents begin, from the number (rows, length) of each token's, then the end, once or more often.

    Every row begins one.
    """
    begins = np.ones(numbers.shape, bool)
    np.not_equal(numbers[:, 1:], numbers[:, :-1], out=begins[:, 1:])
    found = np.flatnonzero(begins)
    starts = np.full((len(found) // ROOM + 1) * ROOM, numbers.size, np.int32)
    starts[: len(found)] = found
    return starts


def upload(starts: NDArray[np.int32], device: torch.device) -> Tensor:
    """On the device, without waiting for what that computes; the compiler is told that there may be more or fewer of them."""
    host = torch.from_numpy(starts)
    there = host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
    torch._dynamo.maybe_mark_dynamic(there, 0)  # type: ignore[no-untyped-call]
    return there


def upload_planes(batch: Tensor, device: torch.device) -> tuple[Tensor, ...]:
    """Copy a host batch (rows, planes, seq_len) to a device and return each plane as int64 (rows, seq_len).

    The copy that converts the dtype also makes each plane contiguous, so that a model may call `targets.view(-1)`.
    """
    planes = batch.to(device, non_blocking=True).transpose(0, 1)
    return planes.to(torch.int64, memory_format=torch.contiguous_format).unbind()


class TorchInference:
    """A model on one device. `forward` takes the model's place in scoring where the model's own returns something else."""

    records_steps = True  # steps of one token are recorded on a GPU, which takes memory that training has no room for

    def __init__(
        self,
        model: nn.Module,
        vocab_size: int,
        device: Device,
        precision: str,
        group: Collectives,
        forward: Callable[..., Any] | None = None,
    ):
        self.model, self.vocab_size, self.device, self.precision = model, vocab_size, device, precision
        self.ranks, self.maximum, self.total = group.ranks, group.maximum, group.total
        self.broadcast, self.close = group.broadcast, group.close
        self.parameters = sum(p.numel() for p in model.parameters())
        self._forward = forward
        self._device = torch_device(device)
        self._average: WeightAverage | None = None
        self._attention, self._deterministic = "default", False
        self._form: Form = "repeated"

    @classmethod
    def of(cls, config: Config, vocab_size: int) -> Self:
        """The model of a config, still without weights."""
        device = find_torch_device(config.training.device)
        asked = config.training.precision
        precision = device.precision("auto" if asked == "fp16" else asked)  # what a GPU trained must be scored anywhere
        if config.model.family == "file":  # it may compute buffers, which `fill_outline` would leave undefined
            model = build_model(config, vocab_size).to(torch_device(device))
        else:
            model = build_outline(config, vocab_size)
        return cls(model.eval(), vocab_size, device, precision, Collectives(Ranks(), device))

    def score(self, batch: Batch) -> float:
        """The summed loss of the targets that count; the model also runs where none does, because other ranks' models do."""
        return in_parts(self._score, batch)

    @torch.no_grad()
    def _score(self, batch: Batch) -> float:
        count = int(np.count_nonzero(batch[:, 1] != IGNORED))
        with self._evaluating(), self._computing(), extended_context(self.model, batch.shape[-1]):
            mean = float((self._forward or self.model)(*self._upload(batch)))
        return mean * count if count else 0.0

    def generate(self, prompts: list[list[int]], sampling: Sampling) -> Iterator[list[int]]:
        """Continue prompts, token by token."""
        self._show(average=True)
        self._use_form("repeated")  # float32 has no kernel that takes fewer heads
        return continue_prompts(self.model, prompts, sampling, self.vocab_size, self.records_steps)

    def score_rows(self, rows: Sequence[Sequence[int]], firsts: Sequence[int], top: int) -> list[RowScores]:
        """Log-probabilities of tokens that are there."""
        try:
            # The fastest kernel for training does not take every shape.
            with self._evaluating(), self._computing("default"), extended_context(self.model, max(map(len, rows), default=1) - 1):
                return score_rows(self.model, rows, firsts, top, self.vocab_size)
        except torch.OutOfMemoryError:
            raise MemoryError(f"the GPU's memory does not hold {len(rows)} rows at once") from None

    def weights(self) -> list[TensorRecord]:
        """Copies of the weights that scores are of, on the rank that writes."""
        self._show(average=True)
        return model_records(self.model) if self.ranks.first else []

    @torch.no_grad()
    def rounder(self, batches: Iterable[Batch]) -> TorchRounder:
        """What rounds the weights, by the inputs that matrices have on some text."""
        moments = Moments()
        moments.watch(self.model, lambda: self._read(batches, moments))
        return TorchRounder(self.model, moments.found)

    def _read(self, batches: Iterable[Batch], moments: Moments) -> None:
        for batch in batches:
            with self._computing():
                tokens, _, *documents = self._upload(batch)
                if isinstance(self.model, OURS):
                    moments.note(self.model.head, self.model.hidden(tokens, None, *documents))  # no module
                else:
                    self.model(tokens, None, *documents)

    def load_weights(self, weights: Mapping[str, TensorRecord], where: str) -> None:
        """Copy weights into the model, and let an average begin with them."""
        self._show(average=False)
        if any(p.is_meta for p in self.model.parameters()):
            check_fits(self.model, weights, where)  # before memory is taken: a stranger's settings may ask for any size
            self.model = fill_outline(self.model, self._device)
        load_model(self.model, weights, where)
        if self._average is not None:
            self._average.load({})

    def cast(self, precision: str) -> bool:
        """Keep the weights of one of our models in another number format, to write with; one's own may not expect it."""
        torch.set_float32_matmul_precision("high")  # TF32 where float32 remains
        ours = isinstance(self.model, OURS)
        if ours:
            self.model.to(DTYPES[precision])
        return ours

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """A block in which the model holds the average of the weights and drops nothing."""
        self._show(average=True)
        training = self.model.training
        self.model.eval()
        try:
            yield
        finally:
            self.model.train(training)

    def _show(self, average: bool) -> None:
        """Let the model hold the average of the weights, or the weights themselves."""
        if self._average is not None:
            self._average.swap_in() if average else self._average.swap_out()

    def _upload(self, batch: Batch) -> tuple[Tensor, ...]:
        """Tokens, targets and, where rows have them, document numbers on the device, or where documents begin for `flash4`."""
        if (largest := batch[:, :2].max()) >= self.vocab_size:
            raise DataError(f"the data holds token {largest}, outside the vocabulary; look at it with: ingot data verify")
        tokens, targets, *numbers = upload_planes(torch.from_numpy(batch), self._device)
        if numbers and self._form == "flash4":
            numbers = [upload(boundaries(batch[:, 2]), self._device)]
        return tokens, targets, *numbers

    @contextmanager
    def _computing(self, attention: str | None = None) -> Iterator[None]:
        """A block of passes with the attention kernel that was chosen or another; the model keeps its form until one differs."""
        name = attention or self._attention
        self._use_form(form_of(name))
        with arithmetic(self.device.kind, self.precision, name, self._deterministic):
            yield

    def _use_form(self, form: Form) -> None:
        if form != self._form:
            use_form(self.model, form)
            self._form = form

    def wait(self) -> None:
        """Synchronise with the device."""
        if self.device.kind == "cuda":
            torch.cuda.synchronize(self._device)
        elif self.device.kind == "mps":
            torch.mps.synchronize()

    def release(self) -> None:
        """Empty the cache of the allocator, so that another process finds room on the GPU."""
        if self.device.kind == "cuda":
            torch.cuda.empty_cache()
