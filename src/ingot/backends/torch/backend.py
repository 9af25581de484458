"""The training step of the torch backend.

Random numbers are never stored: every step seeds the generators from (seed, step, rank), so dropout after a resume is what it
would have been, and evaluating or sampling in between changes nothing.
"""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ingot.backends.base import Group, State
from ingot.backends.torch.average import WeightAverage
from ingot.backends.torch.build import build_model, check_fused_mask, checkpoint_blocks, flops_per_token
from ingot.backends.torch.collectives import peers_present
from ingot.backends.torch.device import find_torch_device, torch_device
from ingot.backends.torch.inference import TorchInference, group_of
from ingot.backends.torch.parallel import compiled, compiles, replicated, without_sync
from ingot.backends.torch.pending import DeviceResult
from ingot.backends.torch.precision import LossScale, choose_no_kernel_by_speed
from ingot.backends.torch.state import load_model, load_optimizers, model_records, optimizer_records
from ingot.backends.torch.tuning import HOST_MICRO_BATCH_TOKENS, fastest_attention, largest_micro_batch
from ingot.config.schema import Config
from ingot.errors import ConfigError, RunError
from ingot.optim.groups import make_optimizers
from ingot.optim.schedules import Rates
from ingot.runtime.batch import IGNORED, Batch
from ingot.runtime.children import shield_compile_workers
from ingot.runtime.ranks import Ranks
from ingot.runtime.seeds import mix
from ingot.runtime.tensors import TensorRecord


class TorchBackend(TorchInference):
    """A model with its optimizers on one device, one replica per rank."""

    records_steps = False

    def __init__(self, config: Config, vocab_size: int, ranks: Ranks, group: Group | None = None):
        t, own_model = config.training, config.model.family == "file"
        shield_compile_workers()
        device = find_torch_device(t.device, ranks.local_rank)
        precision = device.precision(t.precision)
        if t.deterministic:
            choose_no_kernel_by_speed()
        if device.kind == "cuda" and config.data.document_mask and not own_model:
            check_fused_mask(config)
        self._group = group_of(group, ranks, device)
        torch.set_float32_matmul_precision("high")  # TF32 where float32 remains
        model = build_model(config, vocab_size).to(torch_device(device))
        super().__init__(model, vocab_size, device, precision, self._group)
        self._deterministic = t.deterministic
        self._seed, self._clip_norm = t.seed, config.optimizer.clip_norm
        self._micro_batch, self._asked_micro_batch = 0, t.micro_batch
        self._names = {p: name for name, p in model.named_parameters()}
        self.optimizers = make_optimizers(model, config.optimizer, self._device)
        decay = config.optimizer.ema_decay
        self._average = WeightAverage(model, decay) if decay is not None else None
        self.uses_loss_scaling = precision == "fp16"
        self._scale = LossScale(self.uses_loss_scaling, self._device)
        self._compile = compiles(config, device.kind == "cuda")
        if t.gradient_checkpointing:
            checkpoint_blocks(model)
        nested = t.gradient_checkpointing or config.data.document_mask
        module = compiled(model, nested) if self._compile else model
        self._module = replicated(module, ranks, self._device, some_unused=own_model)  # ours use all of theirs

    def tune(self, batch: Batch, kept: Mapping[str, Any]) -> None:
        """Settle micro-batch and attention by trying them here, unless an earlier session on such a machine has."""
        same_machine = kept.get("device") == self.device.name and kept.get("world_size") == self.ranks.world_size
        kept = kept if same_machine else {}
        rows, _, seq_len = batch.shape
        most = rows if self.device.kind == "cuda" else max(1, HOST_MICRO_BATCH_TOKENS // seq_len)
        asked = kept.get("micro_batch", most) if self._asked_micro_batch == "auto" else self._asked_micro_batch
        self._micro_batch = int(self.maximum([min(int(asked), rows)])[0])  # one for all ranks, kept with the run
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        self._attention = str(kept.get("attention", "default"))
        if self.device.kind == "cuda" and not kept:
            if self._asked_micro_batch == "auto":
                self._micro_batch = int(-self.maximum([-largest_micro_batch(rows, lambda size: self._try(batch[:size]))])[0])
            if batch.shape[1] == 2:  # document masks have a kernel of their own
                part = batch[: self._micro_batch]
                found = fastest_attention(lambda name, times: self._try(part, times, name), self._deterministic)
                self._attention = self.broadcast(found)
        if self.ranks.world_size > 1:
            # DDP reorders its buckets after the first step. Let it do so now: sums are then the same before and after a resume.
            self._accumulate(batch, int(np.count_nonzero(batch[:, 1] != IGNORED)))
        for buffer, before in buffers:  # trying leaves no trace
            buffer.copy_(before)
        self._forget_gradients()

    def tuned(self) -> dict[str, Any]:
        """What `tune` settled."""
        return {
            "device": self.device.name,
            "world_size": self.ranks.world_size,
            "precision": self.precision,
            "micro_batch": self._micro_batch,
            "attention": self._attention,
            "compile": self._compile,
        }

    def _try(self, batch: Batch, times: int = 1, attention: str | None = None) -> None:
        """Forward and backward passes to their end, whose gradients are of no use."""
        try:
            for _ in range(times):
                with self._arithmetic(attention):
                    self.model(*self._upload(batch)).backward()
            self.wait()
        finally:
            self._forget_gradients()

    def host_buffer(self, shape: tuple[int, int, int]) -> Batch:
        """A host buffer, pinned where that makes copies to the device asynchronous."""
        return torch.empty(shape, dtype=torch.int32, pin_memory=self.device.kind == "cuda").numpy()

    def step(self, batch: Batch, targets: int, step: int, rates: Rates) -> DeviceResult:
        """One optimizer step; returns at once on a GPU."""
        # 1. The weights themselves, and random numbers that depend on the step alone.
        self._show(average=False)
        self._reseed(mix(self._seed, step, self.ranks.rank) >> 1)
        # 2. Forward and backward, micro-batch by micro-batch; the last one's backward averages over the ranks.
        try:
            loss = self._accumulate(batch, targets)
        except torch.OutOfMemoryError:
            raise RunError(
                f"the GPU's memory is full at step {step + 1} with micro-batches of {self._micro_batch} rows; "
                "lower training.micro_batch or set training.gradient_checkpointing=true, and start again"
            ) from None
        # 3. The norm of the gradients, which are clipped to it.
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        self._scale.unscale(grads)
        norm = get_total_norm(grads)
        overflow = ~torch.isfinite(norm)
        if self._clip_norm:
            clip_grads_with_norm_(list(self.model.parameters()), self._clip_norm, norm)
        # 4. The update, unless a number is not finite.
        skipped = overflow | ~torch.isfinite(loss)
        self._update(skipped, step, rates)
        self._scale.update(overflow)
        self._forget_gradients()
        return DeviceResult(torch.stack([loss, norm, skipped.float()]))

    def _reseed(self, seed: int) -> None:
        # Not torch.manual_seed: it looks for every kind of device each time, 0.4 ms on a CPU.
        torch.default_generator.manual_seed(seed)
        if self.device.kind == "cuda":
            torch.cuda.manual_seed(seed)
        elif self.device.kind == "mps":
            torch.mps.manual_seed(seed)

    def _accumulate(self, batch: Batch, targets: int) -> Tensor:
        """Gradients of the mean loss over all the targets of the step, and that loss."""
        share = torch.zeros((), device=self._device)
        micro_batches = range(0, len(batch), self._micro_batch)
        for start in micro_batches:
            part = batch[start : start + self._micro_batch]
            weight = np.count_nonzero(part[:, 1] != IGNORED) / targets
            last = start == micro_batches[-1]
            with peers_present(), self._arithmetic(), contextlib.nullcontext() if last else without_sync(self._module):
                loss = self._module(*self._upload(part))
                if not isinstance(loss, Tensor) or loss.dim():
                    raise ConfigError("the model's forward(tokens, targets) must return the mean loss, a tensor of no dimensions")
                weighted: Any = loss.float() * weight
                # Replicas are averaged, so each rank's part counts world_size times.
                (weighted * self._scale.value * self.ranks.world_size).backward()
            share += weighted.detach()
        return self._group.sum_tensor(share)

    def _update(self, skip: Tensor, step: int, rates: Rates) -> None:
        """Step the optimizers unless `skip`; on CUDA the device decides, so that the host need not wait for it."""
        if self.device.kind != "cuda" and bool(skip):
            return
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * rates.scale
                if "momentum" in group:
                    group["momentum"] = rates.momentum
            if self.device.kind == "cuda":
                optimizer.found_inf = skip.float()  # type: ignore[attr-defined]
            optimizer.step()
        if self._average is not None:
            self._average.update(step, skip)

    def _forget_gradients(self) -> None:
        for p in self.model.parameters():
            p.grad = None

    def state(self) -> State:
        """Copies of the weights, of the optimizer's memory and of the average of the weights."""
        self._show(average=False)
        memory = optimizer_records(self.optimizers, self._names) + self._scale.records()
        average = {"ema": self._average.records()} if self._average is not None else {}
        return {"model": model_records(self.model), "optimizer": memory, **average}

    def load(self, state: Mapping[str, Mapping[str, TensorRecord]]) -> None:
        """Put a state back."""
        self._show(average=False)
        load_model(self.model, state["model"], "the checkpoint")
        memory = dict(state["optimizer"])
        self._scale.take(memory)
        load_optimizers(self.optimizers, self._names, memory)
        if self._average is not None:
            self._average.load(state.get("ema", {}))

    def flops_per_token(self, seq_len: int) -> float:
        """Of training."""
        return flops_per_token(self.model, seq_len)

    def peak_flops(self) -> float | None:
        """Of all ranks together."""
        peak = self.device.peak_flops
        return peak * self.ranks.world_size if peak and self.precision != "fp32" else None

    def peak_memory(self) -> tuple[int, int]:
        """On a GPU what the allocator gave and what it took, elsewhere the peak of this process."""
        if self.device.kind == "cuda":
            return torch.cuda.max_memory_allocated(self._device), torch.cuda.max_memory_reserved(self._device)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return peak, peak

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
