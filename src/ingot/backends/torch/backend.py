"""The torch backend: how a model is placed, compiled, replicated and stepped.

Random numbers are never stored: every step seeds the generators from (seed, step, rank), so dropout after a resume is what it
would have been, and evaluating or sampling in between changes nothing.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ingot.backends.base import State
from ingot.backends.torch.average import WeightAverage
from ingot.backends.torch.build import build_model, check_fused_mask, checkpoint_blocks, compiles
from ingot.backends.torch.collectives import Collectives, peers_present
from ingot.backends.torch.pending import DeviceResult
from ingot.backends.torch.state import load_model, load_optimizers, model_records, optimizer_records, record, tensor
from ingot.config.schema import Config
from ingot.errors import ConfigError, DataError, RunError
from ingot.generate.sampling import Sampling
from ingot.generate.torch.decode import generate
from ingot.optim.groups import facing_vocabulary, make_optimizers
from ingot.optim.schedules import Rates
from ingot.runtime.batch import IGNORED, Batch
from ingot.runtime.children import shield_compile_workers
from ingot.runtime.device import DTYPES, describe, peak_flops, pick_device, pick_precision
from ingot.runtime.ranks import Ranks
from ingot.runtime.seeds import mix
from ingot.runtime.tensors import TensorRecord

ATTENTION = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
HOST_MICRO_BATCH_TOKENS = 16384  # on a CPU larger micro-batches only cost memory


class TorchBackend:
    """A model with its optimizers on one device, one replica per rank."""

    def __init__(self, config: Config, vocab_size: int, ranks: Ranks):
        t = config.training
        shield_compile_workers()
        self.ranks = ranks
        self.device = pick_device(t.device, ranks.local_rank)
        self.precision = pick_precision(t.precision, self.device)
        self.rescales = self.precision == "fp16"
        self._seed, self._clip_norm = t.seed, config.optimizer.clip_norm
        self._micro_batch, self._attention = 0, "default"
        self._asked_micro_batch = t.micro_batch
        self._vocab_size = vocab_size
        self._own_model = config.model.family == "file"
        self._deterministic = t.deterministic
        if t.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
            compiler: Any = import_module("torch._inductor.config")
            compiler.deterministic = True  # no kernel is chosen by its speed
        if self.device.type == "cuda" and config.data.document_mask and not self._own_model:
            check_fused_mask(config)
        self.group = Collectives(ranks, self.device)
        self.maximum, self.total, self.tell, self.close = self.group.maximum, self.group.total, self.group.tell, self.group.close
        torch.set_float32_matmul_precision("high")  # TF32 where float32 remains
        self.model = build_model(config, vocab_size).to(self.device)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.device_name = describe(self.device)
        self._names = {p: name for name, p in self.model.named_parameters()}
        self.optimizers = make_optimizers(self.model, config.optimizer, self.device)
        decay = config.optimizer.ema_decay
        self._average = WeightAverage(self.model, decay) if decay is not None else None
        # Only fp16 needs its loss scaled into range. The scale halves when a gradient overflows, doubles after 2,000 good steps.
        self._scale = torch.tensor(65536.0 if self.rescales else 1.0, device=self.device)
        self._good_steps = torch.zeros((), dtype=torch.int32, device=self.device)
        self._compile = compiles(config, self.device.type == "cuda")
        if t.gradient_checkpointing:
            checkpoint_blocks(self.model)
        self._module = self._wrapped(nested=t.gradient_checkpointing or config.data.document_mask)

    def _wrapped(self, nested: bool) -> nn.Module:
        """The module the step calls: compiled if asked, replicated if there are ranks to share with."""
        module: nn.Module = self.model
        if self._compile:
            # DDP splits the graph at its buckets, to send one while the next is computed; parts that are graphs themselves
            # (masked attention, recomputed blocks) do not survive it.
            torch._dynamo.config.optimize_ddp = not nested
            module = torch.compile(module)  # type: ignore[assignment]
        if self.ranks.world_size > 1:
            ids = [self.device.index] if self.device.type == "cuda" else None
            module = DistributedDataParallel(
                module,
                device_ids=ids,
                gradient_as_bucket_view=True,
                find_unused_parameters=self._own_model,  # ours use all of theirs
            )
        return module

    def prepare(self, batch: Batch, choices: Mapping[str, Any]) -> None:
        """Settle micro-batch and attention by trying them here, unless an earlier session on such a machine has."""
        same_machine = choices.get("device") == self.device_name and choices.get("world_size") == self.ranks.world_size
        kept = choices if same_machine else {}
        rows, _, seq_len = batch.shape
        most = rows if self.device.type == "cuda" else max(1, HOST_MICRO_BATCH_TOKENS // seq_len)
        asked = kept.get("micro_batch", most) if self._asked_micro_batch == "auto" else self._asked_micro_batch
        self._micro_batch = int(self.group.maximum([min(int(asked), rows)])[0])  # one for all ranks, kept with the run
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        self._attention = str(kept.get("attention", "default"))
        if self.device.type == "cuda" and not kept:
            if self._asked_micro_batch == "auto":
                self._micro_batch = int(-self.group.maximum([-self._largest_micro_batch(batch)])[0])
            if batch.shape[1] == 2:  # document masks have a kernel of their own
                self._attention = self.group.tell(self._fastest_attention(batch[: self._micro_batch]))
        if self.ranks.world_size > 1:
            # DDP reorders its buckets after the first step. Let it do so now: sums are then the same before and after a resume.
            self._accumulate(batch, int(np.count_nonzero(batch[:, 1] != IGNORED)))
        for buffer, before in buffers:  # trying leaves no trace
            buffer.copy_(before)
        self._forget_gradients()

    def choices(self) -> dict[str, Any]:
        """What `prepare` settled."""
        return {
            "device": self.device_name,
            "world_size": self.ranks.world_size,
            "precision": self.precision,
            "micro_batch": self._micro_batch,
            "attention": self._attention,
            "compile": self._compile,
        }

    def _largest_micro_batch(self, batch: Batch) -> int:
        """The most rows whose forward and backward pass fit into the memory, by halving."""
        size = len(batch)
        while True:
            try:
                self._try(batch[:size])
                return size
            except torch.OutOfMemoryError:
                if size == 1:
                    raise ConfigError(
                        "one row of data.seq_len tokens does not fit into the GPU's memory; shorten it, shrink the model "
                        "or set training.gradient_checkpointing=true"
                    ) from None
                size = (size + 1) // 2
            finally:
                self._forget_gradients()
                torch.cuda.empty_cache()

    def _fastest_attention(self, batch: Batch) -> str:
        """The attention kernel whose forward and backward pass take the least time at this run's own shape.

        In deterministic mode the first one that there is: times differ from run to run.
        """
        seconds: dict[str, float] = {}
        for name in ATTENTION:
            self._attention = name
            # A kernel that cannot take this shape or type warns and raises a RuntimeError; it is then no candidate.
            with contextlib.suppress(RuntimeError), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._try(batch)
                self.wait()
                if self._deterministic:
                    return name
                began = time.perf_counter()
                for _ in range(3):
                    self._try(batch)
                self.wait()
                seconds[name] = time.perf_counter() - began
            self._forget_gradients()
        return min(seconds, key=seconds.__getitem__) if seconds else "default"

    def _try(self, batch: Batch) -> None:
        with self._arithmetic():
            self.model(*self._upload(batch)).backward()

    def lend(self, shape: tuple[int, int, int]) -> Batch:
        """A host buffer, pinned where that makes copies to the device asynchronous."""
        return torch.empty(shape, dtype=torch.int32, pin_memory=self.device.type == "cuda").numpy()

    def step(self, batch: Batch, targets: int, step: int, rates: Rates) -> DeviceResult:
        """One optimizer step; returns at once on a GPU."""
        self._show(average=False)
        self._reseed(mix(self._seed, step, self.ranks.rank) >> 1)
        try:
            loss = self._accumulate(batch, targets)
        except torch.OutOfMemoryError:
            raise RunError(
                f"the GPU's memory is full at step {step + 1} with micro-batches of {self._micro_batch} rows; "
                "lower training.micro_batch or set training.gradient_checkpointing=true, and start again"
            ) from None
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        if self.rescales:
            torch._foreach_mul_(grads, 1.0 / self._scale)
        norm = get_total_norm(grads)
        overflow = ~torch.isfinite(norm)
        if self._clip_norm:
            clip_grads_with_norm_(list(self.model.parameters()), self._clip_norm, norm)
        skipped = overflow | ~torch.isfinite(loss)
        self._update(skipped, step, rates)
        if self.rescales:
            torch._amp_update_scale_(self._scale, self._good_steps, overflow.float(), 2.0, 0.5, 2000)
        self._forget_gradients()
        return DeviceResult(torch.stack([loss, norm, skipped.float()]))

    def _reseed(self, seed: int) -> None:
        # Not torch.manual_seed: it looks for every kind of device each time, 0.4 ms on a CPU.
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)
        elif self.device.type == "mps":
            torch.mps.manual_seed(seed)

    def _accumulate(self, batch: Batch, targets: int) -> Tensor:
        """Gradients of the mean loss over all the targets of the step, and that loss."""
        share = torch.zeros((), device=self.device)
        micro_batches = range(0, len(batch), self._micro_batch)
        for start in micro_batches:
            part = batch[start : start + self._micro_batch]
            weight = np.count_nonzero(part[:, 1] != IGNORED) / targets
            last = start == micro_batches[-1]
            with peers_present(), self._arithmetic(), contextlib.nullcontext() if last else self._without_sync():
                loss = self._module(*self._upload(part))
                if not isinstance(loss, Tensor) or loss.dim():
                    raise ConfigError("the model's forward(tokens, targets) must return the mean loss, a tensor of no dimensions")
                weighted: Any = loss.float() * weight
                # Replicas are averaged, so each rank's part counts world_size times.
                (weighted * self._scale * self.ranks.world_size).backward()
            share += weighted.detach()
        return self.group.sum_tensor(share)

    def _update(self, skip: Tensor, step: int, rates: Rates) -> None:
        """Step the optimizers unless `skip`; on CUDA the device decides, so that the host need not wait for it."""
        if self.device.type != "cuda" and bool(skip):
            return
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * rates.scale
                if "momentum" in group:
                    group["momentum"] = rates.momentum
            if self.device.type == "cuda":
                optimizer.found_inf = skip.float()  # type: ignore[attr-defined]
            optimizer.step()
        if self._average is not None:
            self._average.update(step, skip)

    def _show(self, average: bool) -> None:
        """Let the model hold the average of the weights, or the weights themselves."""
        if self._average is not None:
            self._average.show() if average else self._average.hide()

    def _upload(self, batch: Batch) -> tuple[Tensor, ...]:
        """Tokens, targets and, where rows have them, document numbers, on the device."""
        if (largest := batch[:, :2].max()) >= self._vocab_size:
            raise DataError(f"the data holds token {largest}, outside the vocabulary; look at it with: ingot data verify")
        return torch.from_numpy(batch).to(self.device, non_blocking=True).long().unbind(1)

    def _without_sync(self) -> contextlib.AbstractContextManager[Any]:
        return self._module.no_sync() if isinstance(self._module, DistributedDataParallel) else contextlib.nullcontext()

    @contextlib.contextmanager
    def _arithmetic(self) -> Iterator[None]:
        """Precision and attention kernel of forward and backward, and whether their sums have a fixed order."""
        with contextlib.ExitStack() as stack:
            if self._deterministic:
                stack.enter_context(_fixed_order())
            if self.precision != "fp32":
                stack.enter_context(torch.autocast(self.device.type, DTYPES[self.precision]))
            if self._attention != "default":
                stack.enter_context(sdpa_kernel(ATTENTION[self._attention]))
            yield

    def _forget_gradients(self) -> None:
        for p in self.model.parameters():
            p.grad = None

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> float:
        """The summed loss of the targets that count, by the average of the weights where there is one."""
        count = int(np.count_nonzero(batch[:, 1] != IGNORED))
        if not count:
            return 0.0
        self._show(average=True)
        self.model.eval()
        try:
            with self._arithmetic():
                return float(self.model(*self._upload(batch))) * count
        finally:
            self.model.train()

    def generate(self, prompt: Sequence[int], tokens: int, temperature: float, top_k: int, seed: int) -> list[int]:
        """Continue a prompt."""
        self._show(average=True)
        start = torch.tensor([list(prompt)], device=self.device)
        sampling = Sampling(temperature=temperature, top_k=top_k, seed=seed)
        return [int(t) for t in islice(generate(self.model, start, sampling, self._vocab_size), tokens)]

    def state(self) -> State:
        """Copies of the weights, of the optimizer's memory and of the average of the weights."""
        self._show(average=False)
        memory = optimizer_records(self.optimizers, self._names)
        if self.rescales:
            memory += [record("scaler/scale", self._scale), record("scaler/good_steps", self._good_steps)]
        average = {"ema": self._average.records()} if self._average is not None else {}
        return {"model": model_records(self.model), "optimizer": memory, **average}

    def weights(self) -> list[TensorRecord]:
        """Copies of the weights that evaluation uses."""
        self._show(average=True)
        return model_records(self.model)

    def put(self, weights: Mapping[str, TensorRecord], where: str) -> None:
        """Copy weights into the model, and let an average begin with them."""
        self._show(average=False)
        load_model(self.model, weights, where)
        if self._average is not None:
            self._average.load({})

    def peak_memory(self) -> tuple[int, int]:
        """On a GPU what the allocator gave and what it took, elsewhere the peak of this process."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return peak, peak

    def release(self) -> None:
        """Empty the cache of the allocator, so that another process finds room on the GPU."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def load(self, state: Mapping[str, Mapping[str, TensorRecord]]) -> None:
        """Put a state back."""
        self._show(average=False)
        load_model(self.model, state["model"], "the checkpoint")
        memory = dict(state["optimizer"])
        scale, good_steps = memory.pop("scaler/scale", None), memory.pop("scaler/good_steps", None)
        if self.rescales and scale is not None and good_steps is not None:
            self._scale.copy_(tensor(scale))
            self._good_steps.copy_(tensor(good_steps))
        load_optimizers(self.optimizers, self._names, memory)
        if self._average is not None:
            self._average.load(state.get("ema", {}))

    def flops_per_token(self, seq_len: int) -> float:
        """Training FLOPs: six per weight that multiplies, twelve per layer, width and position of attention."""
        embeddings = [m for m in self.model.modules() if isinstance(m, nn.Embedding)]
        tied = not facing_vocabulary(self.model)
        idle = sum(m.weight.numel() for m in embeddings[tied:])  # looked up, not multiplied; the first is the head where tied
        width = embeddings[0].embedding_dim if embeddings else 0
        layers = len(getattr(self.model, "blocks", ()))
        return 6.0 * (self.parameters - idle) + 12.0 * layers * width * seq_len

    def peak_flops(self) -> float | None:
        """Of all ranks together."""
        peak = peak_flops(self.device)
        return peak * self.ranks.world_size if peak and self.precision != "fp32" else None

    def wait(self) -> None:
        """Synchronise with the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()


@contextlib.contextmanager
def _fixed_order() -> Iterator[None]:
    """Only algorithms that give the same bits each time; drawing tokens, for one, has none, and happens outside."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
