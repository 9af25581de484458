"""A torch model for generation, scoring and export, with the moving average of the weights if there is one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel

from ingot.backends.sampling import RowScores, Sampling
from ingot.backends.torch.build import build_model, build_outline, fill_outline
from ingot.backends.torch.collectives import Collectives
from ingot.backends.torch.device import find_torch_device
from ingot.backends.torch.generate import generate, score_rows
from ingot.backends.torch.gptq import Moments, TorchRounder
from ingot.backends.torch.parallel import Parallel
from ingot.backends.torch.state import WeightAverage, check_fits, load_model, model_tensors, record
from ingot.backends.torch.tune import ATTENTION, DTYPES, GROUPED, attention_form, use_form, use_kernels
from ingot.config.schema import Config
from ingot.errors import DataError
from ingot.model.layers import Form, extended_context
from ingot.model.registry import OURS
from ingot.runtime.devices import Device
from ingot.runtime.ranks import Ranks
from ingot.runtime.tensors import IGNORED, Batch, TensorRecord

STARTS_MULTIPLE = 32  # document starts are padded to a multiple of this length, because a graph is compiled for each length


def document_starts(numbers: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the offset of each document's first token in the flattened batch, padded with the total number of tokens.

    `numbers` (rows, length) holds each token's document number. Every row starts a new document.
    """
    begins = np.ones(numbers.shape, bool)
    np.not_equal(numbers[:, 1:], numbers[:, :-1], out=begins[:, 1:])
    indices = np.flatnonzero(begins)
    starts = np.full((len(indices) // STARTS_MULTIPLE + 1) * STARTS_MULTIPLE, numbers.size, np.int32)
    starts[: len(indices)] = indices
    return starts


class TorchInference:
    """The torch implementation of Inference (methods documented in base.py) for a model on one device."""

    records_steps = True  # record decoding steps as CUDA graphs; False in a training backend, which needs the memory

    def __init__(
        self,
        model: nn.Module,
        vocab_size: int,
        device: Device,
        precision: str,
        group: Collectives,
        parallel: Parallel | None = None,
    ):
        self.model, self.vocab_size, self.device, self.precision = model, vocab_size, device, precision
        self.ranks, self.maximum, self.total = group.ranks, group.maximum, group.total
        self.broadcast, self.close = group.broadcast, group.close
        self.parameters = sum(p.numel() for p in model.parameters())
        self._device = torch.device(str(device))
        self.parallel = parallel or Parallel("none", group.ranks, self._device)
        self._average: WeightAverage | None = None
        self._attention, self._deterministic = "default", False
        self._form: Form = "repeated"

    @classmethod
    def of(cls, config: Config, vocab_size: int) -> Self:
        """Build the model of a config without loading weights."""
        device = find_torch_device(config.training.device)
        trained_in = config.training.precision
        precision = device.precision("auto" if trained_in == "fp16" else trained_in)  # not every device supports fp16
        # A custom model may compute buffers in __init__, which `fill_outline` would leave uninitialised.
        own = config.model.family == "file"
        model = build_model(config, vocab_size).to(str(device)) if own else build_outline(config, vocab_size)
        return cls(model.eval(), vocab_size, device, precision, Collectives(Ranks(), device))

    @torch.no_grad()
    def score(self, batch: Batch) -> float:
        """Return the summed loss. The model runs even if all targets are -1, because other ranks may wait for this rank.

        If the batch does not fit into the GPU's memory, its halves are scored separately.
        """
        try:
            with self._evaluating(), self._computing(), extended_context(self.model, batch.shape[-1]):
                mean = float(self.model(*self._upload(batch)))
            count = int(np.count_nonzero(batch[:, 1] != IGNORED))
            return mean * count if count else 0.0
        except torch.OutOfMemoryError:
            if len(batch) == 1:
                raise
        half = len(batch) // 2  # after the except block: inside it, the exception would keep the tensors alive
        return self.score(batch[:half]) + self.score(batch[half:])

    def generate(self, prompts: list[list[int]], sampling: Sampling) -> Iterator[list[int]]:
        self._show(average=True)
        self._use_form("repeated")  # repeat key and value heads: no attention kernel supports grouped-query heads in float32
        lengths = [len(prompt) for prompt in prompts]
        padded = [prompt + [0] * (max(lengths) - len(prompt)) for prompt in prompts]
        start = torch.tensor(padded, device=self._device)
        try:
            stream = generate(self.model, start, sampling, self.vocab_size, record=self.records_steps, lengths=lengths)
            with self.parallel.gathered(self.model):
                for tokens in stream:
                    yield tokens.tolist()
        except torch.OutOfMemoryError:
            raise MemoryError(f"{len(prompts)} completions at once do not fit into the GPU's memory") from None

    def score_rows(self, rows: Sequence[Sequence[int]], firsts: Sequence[int], top: int) -> list[RowScores]:
        try:
            # Use the default attention kernel, because the one chosen for training may not support the shapes of these rows.
            longer = extended_context(self.model, max(map(len, rows), default=1) - 1)
            with self._evaluating(), self._computing("default"), self.parallel.gathered(self.model), longer:
                return score_rows(self.model, rows, firsts, top, self.vocab_size)
        except torch.OutOfMemoryError:
            raise MemoryError(f"{len(rows)} rows at once do not fit into the GPU's memory") from None

    def weights(self) -> list[TensorRecord]:
        self._show(average=True)
        whole = ((name, self.parallel.whole(value)) for name, value in model_tensors(self.model))
        if self.ranks.first:
            return [record(name, value) for name, value in whole]
        for _ in whole if self.parallel.sharded else ():
            pass  # every rank takes part in gathering each tensor
        return []

    @torch.no_grad()
    def rounder(self, batches: Iterable[Batch]) -> TorchRounder:
        moments = Moments()
        with moments.watching(self.model):
            for batch in batches:
                with self._computing():
                    tokens, _, *documents = self._upload(batch)
                    if isinstance(self.model, OURS):
                        moments.note(self.model.head, self.model.hidden(tokens, None, *documents))  # tied heads have no nn.Linear
                    else:
                        self.model(tokens, None, *documents)
        return TorchRounder(self.model, moments.found)

    def load_weights(self, weights: Mapping[str, TensorRecord], where: str) -> None:
        """Copy weights into the model; if a moving average is kept, it restarts from these weights."""
        self._show(average=False)
        if any(p.is_meta for p in self.model.parameters()):
            check_fits(self.model, weights, where)  # before allocating memory: untrusted settings may ask for any size
            self.model = fill_outline(self.model, self._device)
        load_model(self.model, weights, where, self.parallel.put)
        if self._average is not None:
            self._average.load({})

    def cast(self, precision: str) -> bool:
        """Cast the weights of a built-in model for generation; return False for a custom model, which may not support it."""
        torch.set_float32_matmul_precision("high")  # allow TF32 for float32 matmuls
        if not isinstance(self.model, OURS):
            return False
        self.model.to(DTYPES[precision])
        return True

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Swap in the averaged weights, if there are any, and run the block with the model in eval mode."""
        self._show(average=True)
        training = self.model.training
        self.model.eval()
        try:
            yield
        finally:
            self.model.train(training)

    def _show(self, average: bool) -> None:
        if self._average is not None:
            self._average.swap_in() if average else self._average.swap_out()

    def _upload(self, batch: Batch) -> tuple[Tensor, ...]:
        """Copy a batch's tokens, targets and, if present, document numbers (for `flash4`: document starts) to the device."""
        if (largest := batch[:, :2].max()) >= self.vocab_size:
            raise DataError(f"the data contains token {largest}, outside the vocabulary; check the data with: ingot data verify")
        planes = torch.from_numpy(batch).to(self._device, non_blocking=True).transpose(0, 1)
        # The conversion to int64 also makes each plane contiguous, so that a custom model may call `targets.view(-1)`.
        tokens, targets, *numbers = planes.to(torch.int64, memory_format=torch.contiguous_format).unbind()
        if numbers and self._form == "flash4":
            starts = torch.from_numpy(document_starts(batch[:, 2]))
            pinned = starts.pin_memory() if self._device.type == "cuda" else starts
            numbers = [pinned.to(self._device, non_blocking=True)]
            torch._dynamo.maybe_mark_dynamic(numbers[0], 0)  # type: ignore[no-untyped-call]
        return tokens, targets, *numbers

    @contextmanager
    def _computing(self, attention: str | None = None) -> Iterator[None]:
        """Run the block with an attention kernel (default: the tuned one) and, if set, autocast and deterministic algorithms."""
        name = attention or self._attention
        self._use_form(attention_form(name))
        with ExitStack() as stack:
            if self._deterministic:  # not set globally, because sampling has no deterministic algorithm
                before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
                stack.callback(torch.use_deterministic_algorithms, before[0], warn_only=before[1])
                torch.use_deterministic_algorithms(True)
            if self.precision != "fp32":
                stack.enter_context(torch.autocast(self.device.kind, DTYPES[self.precision]))
            if (kernel := name.removesuffix(GROUPED)) in ATTENTION:
                stack.enter_context(sdpa_kernel(ATTENTION[kernel]))
            yield

    def _use_form(self, form: Form) -> None:
        if form != self._form:
            use_form(self.model, form)
            self._form = form

    def run_row(self, attention: str, kernels: Sequence[str], seq_len: int, documents: bool, max_share: float) -> None:
        """Compile `attention` and `kernels` by running a forward and backward pass on one row, with uninitialised weights.

        Do nothing if weights and gradients would take more than `max_share` of the GPU's free memory.
        """
        if self._device.type == "cuda" and 8 * self.parameters > max_share * torch.cuda.mem_get_info(self._device)[0]:
            return
        self.model = fill_outline(self.model, self._device).train()
        use_kernels(self.model, kernels)
        with self._computing(attention):
            self.model(*self._upload(np.zeros((1, 3 if documents else 2, seq_len), np.int32))).backward()
        self.wait()

    def wait(self) -> None:
        if self.device.kind == "cuda":
            torch.cuda.synchronize(self._device)
        elif self.device.kind == "mps":
            torch.mps.synchronize()

    def release(self) -> None:
        if self.device.kind == "cuda":
            torch.cuda.empty_cache()
