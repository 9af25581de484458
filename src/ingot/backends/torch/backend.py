"""The training step of the torch backend.

RNG state is never stored: every step seeds the generators from (seed, step, rank), so dropout is the same after a resume, and
evaluating or sampling between steps does not affect training.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from importlib import import_module
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_

from ingot.backends.base import State, StepPlan
from ingot.backends.torch import tune
from ingot.backends.torch.build import build_model, checkpoint_blocks, flops_per_token, set_numbers
from ingot.backends.torch.collectives import Collectives
from ingot.backends.torch.compile import begin_pass, compiled, compiled_backward, compiles, compiles_optimizer, uses_cuda_graphs
from ingot.backends.torch.custom_model import check_custom_model
from ingot.backends.torch.device import cpu_name, find_torch_device
from ingot.backends.torch.inference import TorchInference
from ingot.backends.torch.parallel import Parallel, choose
from ingot.backends.torch.startup import Builders, prepare_ahead
from ingot.backends.torch.state import (
    ROWWISE,
    DeviceResult,
    LossScale,
    WeightAverage,
    load_model,
    model_tensors,
    optimizer_tensors,
    snapshot,
    tensor,
)
from ingot.backends.torch.tune import CUDNN_FLASH4, DTYPES, FLASH4, Tuned
from ingot.config.memory import recomputed_every
from ingot.config.schema import Config
from ingot.errors import ConfigError, RunError, Setting
from ingot.model.registry import OURS
from ingot.model.settings import FileSettings
from ingot.optim.groups import has_custom_optimizers, make_optimizers
from ingot.runtime.machine import host_bytes, keep_freed_memory
from ingot.runtime.processes import shield_compile_workers
from ingot.runtime.ranks import Ranks
from ingot.runtime.seeds import mix
from ingot.runtime.tensors import IGNORED, Batch, TensorRecord


class TorchBackend(TorchInference):
    """The torch implementation of Backend (documented in base.py); each rank has a replica or a shard of the model."""

    records_steps = False

    def __init__(self, config: Config, vocab_size: int, ranks: Ranks, builders: Builders):
        t, family = config.training, config.model.family
        shield_compile_workers()
        if t.deterministic:  # cuBLAS and the compiler read these options once, at their first use
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            compiler: Any = import_module("torch._inductor.config")
            compiler.deterministic = True
        wait_for_imports = prepare_ahead(config, ranks)
        device = find_torch_device(t.device, ranks.local_rank)
        if device.kind == "cpu":
            keep_freed_memory()
        precision = device.precision(t.precision)
        if device.kind != "cuda" or precision != "bf16":
            builders.stop()
        self._group = Collectives(ranks, device, t)
        memory = torch.cuda.get_device_properties(device.index).total_memory if device.kind == "cuda" else host_bytes()
        kind, reason = choose(config, vocab_size, memory, ranks)
        dtype = DTYPES[precision] if precision == "bf16" else None
        parallel = Parallel(kind, ranks, torch.device(str(device)), dtype, t.cpu_offload)
        self.notes = [reason] if reason else []
        self.writers = parallel.shards
        tune.refuse_too_large(config, vocab_size, device, memory, ranks.world_size, parallel.shards)
        torch.set_float32_matmul_precision("high")  # allow TF32 for float32 matmuls
        if isinstance(config.model, FileSettings):
            wait_for_imports()  # a custom model may import modules that background threads are still importing
            check_custom_model(config, config.model.file, vocab_size, torch.device(str(device)))
        self._choices = tune.Choices(config.model, config.data, t, device, ranks.world_size)
        self._builders = builders
        model = parallel.place(build_model(config, vocab_size))
        if t.fp8_head:
            nvidia = device.kind == "cuda" and torch.version.hip is None
            capability = torch.cuda.get_device_capability(device.index) if nvidia else None
            tune.use_fp8_head(model, config.data.seq_len, t, precision, capability)
        super().__init__(model, vocab_size, device, precision, self._group, parallel)
        closing = contextlib.ExitStack()
        closing.callback(torch.set_num_threads, torch.get_num_threads())  # restore the thread count, which the run may change
        closing.callback(self._group.close)
        closing.callback(self._builders.stop)
        self.close = closing.close
        self._deterministic, self._takes_kernels = t.deterministic, device.kind == "cuda" and precision == "bf16"
        self._config = config
        self._stages: list[Tuned] = []  # the options that `tune` chose for each stage
        self._kernels: list[str] = []
        self._computed: Any = 0.0  # time at which the latest step began its last backward pass
        self._last_numbers: Mapping[str, float] = t.stages[-1].model if t.stages else {}
        self._numbers: Mapping[str, float] = self._last_numbers  # the values last passed to the model's `set`
        self._later = torch.zeros((), device=self._device)
        if t.later_targets:
            model.later_scale = self._later  # type: ignore[assignment]
        self._names = {parallel.local(p): name for name, p in model.named_parameters()}  # cached, because it takes 0.1 ms a layer
        self._passes: list[int] = []  # the number of micro-batches per step of each stage, equal on all ranks
        self._compile = compiles(t, family, device.kind == "cuda")
        wait_for_imports()  # creating optimizers imports modules that background threads may still be importing
        compile_muon = compiles_optimizer(t, family, config.optimizer.muon_beta2, device.kind == "cuda")
        into = parallel.local, parallel.exchange
        self.optimizers = make_optimizers(model, config.optimizer, self._device, compile_muon, *into)
        # Custom optimizers ignore found_inf, and AdamW of weights on the host would read it before its copy from the GPU arrives.
        self._host_skips = device.kind != "cuda" or t.cpu_offload or has_custom_optimizers(model)
        self._average = WeightAverage(model, parallel.local) if config.optimizer.ema_decay is not None else None
        self.uses_loss_scaling = precision == "fp16"
        self._scale = LossScale(self.uses_loss_scaling, self._device)
        self._python_reducer = self._compile and t.ddp_python_reducer and ranks.world_size > 1
        if every := recomputed_every(config, vocab_size, memory):
            checkpoint_blocks(model, every)
        nested = bool(every) or config.data.document_mask or getattr(model, "windowed", False)
        stages, blocks = max(1, len(t.stages)), t.compile == "blocks" or parallel.sharded
        graphs = uses_cuda_graphs(config, vocab_size, self._compile, device.kind == "cuda", ranks)
        self._cuda_graphs = graphs and not parallel.sharded
        self._module = model
        if self._compile:
            self._module = compiled(model, nested, stages, self._python_reducer, blocks, self._cuda_graphs)
        self._module = parallel.wrap(self._module, family)

    def tune(self, stages: Sequence[tuple[StepPlan, Batch]], kept: Mapping[str, Any]) -> None:
        """Choose the thread count, kernels and each stage's micro-batch size and attention kernel, or reuse those in `kept`."""
        this_device, kept_device = self.device.name.split(",")[0], str(kept.get("device")).split(",")[0]  # drop the thread count
        if this_device != kept_device or kept.get("world_size") != self.ranks.world_size:
            kept = {}
        noted = False
        if not kept:  # reuse the choices of an earlier run, which the first rank has cached
            kept = json.loads(self.broadcast(json.dumps(self._choices.recall() if self.ranks.first else {})))
            # Cached choices have been tried on this machine and need no trial, but in deterministic mode all runs must match.
            noted = bool(kept) and self.ranks.world_size == 1 and not self._deterministic
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        first, batch = stages[0]
        row = batch[:1]
        self._set(first.model, first.later)
        if self.device.kind == "cpu":
            part = batch[: max(1, tune.HOST_MICRO_BATCH_TOKENS // first.seq_len)]
            measures = not self._deterministic
            threads = tune.settle_threads(self._config.training.threads, kept, measures, lambda: self._try(part), self.maximum)
            self.device = replace(self.device, name=cpu_name(threads))
        trial = None if kept else next(iter(self._without_masks(row)), None)
        if getattr(self.model, "fp8_head", False):
            failure = tune.failure_of(lambda: self._try(row, attention=trial), self.maximum)
            if failure is not None:
                raise ConfigError(f"{{0}} failed a test run: {failure}", tune.FP8_HEAD)
        self._kernels = tune.settle_kernels(
            self.model,
            self._config.training.kernels,
            previous=kept.get("kernels", []) if kept else None,
            supported=self._takes_kernels,
            launch_bound=not self._cuda_graphs and self._is_short(batch),
            attempt=None if noted else lambda attention: self._try(row, attention=attention or trial),
            maximum=self.maximum,
        )
        self._builders.wait()
        kept_stages = kept.get("stages", [kept])
        self._stages = []
        for plan, batch in stages:
            self._set(plan.model, plan.later)
            self._stages.append(self._tune(batch, kept_stages[plan.stage] if plan.stage < len(kept_stages) else {}, noted))
            if plan.seq_len == self._config.data.seq_len:
                self._attention = self._stages[-1].attention  # evaluation uses rows of data.seq_len tokens
        self._passes = [
            math.ceil(self.maximum([len(batch)])[0] / tuned.micro_batch)
            for (_, batch), tuned in zip(stages, self._stages, strict=True)
        ]
        if self.parallel.kind != "none":
            # DDP reorders its buckets after the first pass. Trigger that now, so that a resumed run sums in the same order.
            # FSDP2 takes the first module that is called as the root; text generation would call a block first.
            plan, batch = stages[0]
            self._set(plan.model, plan.later)
            self._accumulate(batch, max(1, int(np.count_nonzero(batch[:, 1] != IGNORED))), 0)
        for buffer, before in buffers:  # restore buffers that the trials may have changed
            buffer.copy_(before)
        self._forget_gradients()
        if not kept and self.ranks.first:
            self._choices.keep(self.tuned())

    def _tune(self, batch: Batch, kept: Mapping[str, Any], noted: bool) -> Tuned:
        rows, _, seq_len = batch.shape
        on_cuda, auto = self.device.kind == "cuda", self._config.training.micro_batch == "auto"
        if not (noted or self._runs(batch[:1], str(kept.get("attention", "default")))):
            kept = {}  # the kept attention kernel no longer runs, so repeat the trials
        most = rows if on_cuda else max(1, tune.HOST_MICRO_BATCH_TOKENS // seq_len)
        wanted = kept.get("micro_batch", most) if auto else self._config.training.micro_batch
        micro_batch = int(self.maximum([min(int(wanted), rows)])[0])  # all ranks use the largest value
        attention = str(kept.get("attention", "default"))
        if on_cuda and not kept:
            names = self._without_masks(batch)
            if auto:
                micro_batch = self._smallest_micro_batch(batch, micro_batch, next(iter(names), None))
            attention = self._fastest_attention(batch[:micro_batch], names)
            if not self._runs(batch[:1], attention):  # check the whole model: the timings may omit windows and fused qkv
                attention = "default"
        return Tuned(micro_batch, attention)

    def _runs(self, batch: Batch, attention: str) -> bool:
        """Return True if the attention kernel is `default` or a forward and backward pass with it succeeds on every rank."""
        return attention == "default" or tune.failure_of(lambda: self._try(batch, attention=attention), self.maximum) is None

    def _is_short(self, batch: Batch) -> bool:
        """Return True if steps on batches of this size are so short that kernel launches on the host limit their speed."""
        return self.maximum([batch[:, 0].size])[0] <= tune.SHORT_STEP_TOKENS  # batches may differ by one row between ranks

    def _without_masks(self, batch: Batch) -> list[str]:
        """Return the attention kernels that run here and support the model's sliding window without a FlexAttention mask."""
        model: Any = self.model
        windowed = isinstance(model, OURS) and getattr(model, "windowed", False)
        wanted = windowed and self._takes_kernels and not self._deterministic
        if not wanted or model.window >= batch.shape[2] or batch.shape[1] == 3 or not tune.flash4_everywhere(model, self.maximum):
            return []
        names = [FLASH4, CUDNN_FLASH4] if model.kv_heads == tune.query_heads(model) else [FLASH4]
        return [name for name in names if self._runs(batch[:1], name)]

    def _smallest_micro_batch(self, batch: Batch, rows: int, attention: str | None = None) -> int:
        """Return the smallest size up to `rows` that does not reduce throughput; in deterministic mode, the largest that fits."""

        def attempt(size: int, times: int = 1) -> None:
            self._try(batch[:size], times, attention)

        size = tune.largest_micro_batch(rows, attempt, self.maximum)
        if not self._deterministic:  # a choice based on timings is not reproducible
            size = tune.smallest_micro_batch(size, attempt, self.maximum)
        self.release()  # free the memory that the largest size needed
        return size

    def _fastest_attention(self, batch: Batch, names: Sequence[str] = ()) -> str:
        """Return the fastest of the attention kernels `names` (default: all); in deterministic mode, the first that runs."""
        rows, planes, seq_len = batch.shape  # two planes (tokens, targets), or three with document numbers
        dropout = getattr(self._config.model, "dropout", 0.0)
        alone = isinstance(self.model, OURS) and planes == 2 and not (names or dropout)
        records = self._cuda_graphs or not self._is_short(batch)  # time short passes without a graph, to include launch overhead
        repeats: dict[str, Callable[[], None]] = {}

        def attempt(name: str, times: int) -> None:
            if not alone:
                return self._try(batch, times, name)
            with self._computing(name):
                if name not in repeats:
                    form = tune.attention_form(name)
                    repeats[name] = tune.attention_alone(self.model, rows, seq_len, self.precision, self._device, form, records)
                for _ in range(times):
                    repeats[name]()
            return self.wait()

        names = names or tune.candidates(self.model, alone, planes == 3, self.maximum)
        return tune.fastest_attention(names, attempt, self._deterministic, self.maximum)

    def tuned(self) -> dict[str, Any]:
        first = self._stages[0] if self._stages else Tuned(0, self._attention)
        return {
            "device": self.device.name,
            "world_size": self.ranks.world_size,
            "precision": self.precision,
            **asdict(first),
            "compile": self._compile,
            "kernels": self._kernels,
            **({"threads": torch.get_num_threads()} if self.device.kind == "cpu" else {}),
            **({"stages": [asdict(stage) for stage in self._stages]} if len(self._stages) > 1 else {}),
        }

    def _set(self, numbers: Mapping[str, float], later: float = 0.0) -> None:
        """Pass a stage's values to the model, and multiply the loss weights in training.later_targets by `later`."""
        if numbers != self._numbers:
            set_numbers(self.model, numbers, "training.stages")
            self._numbers = numbers
        if self._config.training.later_targets:
            model: Any = self.model
            model.later_weights = tuple(self._config.training.later_targets) if later else ()
            self._later.fill_(later)

    def _try(self, batch: Batch, times: int = 1, attention: str | None = None) -> None:
        """Run `times` forward and backward passes, wait until they have finished, and drop the gradients."""
        if attention == FLASH4:
            self._builders.wait()  # otherwise FlashAttention would also compile the kernels; quack-kernels waits by itself
        try:
            for _ in range(times):
                with self._computing(attention):
                    self.model(*self._upload(batch)).backward()
            self.wait()
        except Exception:
            self.parallel.recover(self.model)
            raise
        finally:
            self._forget_gradients()

    def host_buffer(self, shape: tuple[int, int, int]) -> Batch:
        return torch.empty(shape, dtype=torch.int32, pin_memory=self.device.kind == "cuda").numpy()

    def step(self, batch: Batch, targets: int, plan: StepPlan) -> DeviceResult:
        """Run one step. On a GPU this returns before the step has finished."""
        tuned, self._group.step, began = self._stages[plan.stage], plan.step + 1, self._mark()
        # 1. Switch from the averaged weights, if in use, to the training weights, and seed the RNG from the step number.
        self._show(average=False)
        self._set(plan.model, plan.later)
        seed = mix(self._config.training.seed, plan.step, self.ranks.rank) >> 1
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed all device types and take 0.4 ms
        if self.device.kind == "cuda":
            torch.cuda.manual_seed(seed)
        elif self.device.kind == "mps":
            torch.mps.manual_seed(seed)
        # 2. Run forward and backward for each micro-batch; the last backward pass averages the gradients over the ranks.
        try:
            losses = self._accumulate(batch, targets, plan.stage)
        except torch.OutOfMemoryError:
            self._choices.keep({})
            raise RunError(
                f"the GPU ran out of memory at step {plan.step + 1} with micro-batches of {tuned.micro_batch} rows",
                Setting("training.micro_batch"),
                Setting("training.gradient_checkpointing", "true"),
                Setting("training.cuda_graphs", "false"),
                advice="lower {0} or set {1}" + (" or {2}" if self._cuda_graphs else "") + ", and start again",
            ) from None
        # 3. Compute the gradient norm and clip the gradients.
        grads = [p.grad for p in self._names if p.grad is not None]
        self._scale.unscale(grads)
        with self._group.peers_present("the gradient norm"):
            norm = self.parallel.norm(self._names)
        overflow = ~torch.isfinite(norm)
        if self._config.optimizer.clip_norm:
            clip_grads_with_norm_(self._names, self._config.optimizer.clip_norm, norm)
        # 4. Update the weights, unless the loss or the gradient norm is not finite.
        skipped = overflow | ~torch.isfinite(losses[0])
        with self._group.peers_present("the optimizer step"):
            self._update(skipped, plan)
        self._scale.update(overflow)
        self._forget_gradients()
        return DeviceResult(torch.cat([torch.stack([norm, skipped.float()]), losses]), began, self._computed)

    def _accumulate(self, batch: Batch, targets: int, stage: int) -> Tensor:
        """Accumulate the gradients of the step's loss (the mean over its targets); return the loss and each rank's part of it."""
        rank_loss, tuned = torch.zeros((), device=self._device), self._stages[stage]
        passes = self._passes[stage] if self.parallel.sharded else math.ceil(len(batch) / tuned.micro_batch)
        for number in range(passes):
            start = number * tuned.micro_batch
            part = batch[start : start + tuned.micro_batch]
            if not len(part):  # another rank has more rows, and this rank must take part in gathering the shards
                part = np.full_like(batch[:1], IGNORED)
            weight = np.count_nonzero(part[:, 1] != IGNORED) / targets
            if not weight:  # a micro-batch without targets would have a mean loss of NaN
                part = np.where(part == IGNORED, 0, part)
            if self._cuda_graphs:  # the second pass copies the gradients of the first; later passes add to the copies
                begin_pass(self._names if start == tuned.micro_batch else ())
            sync = self.parallel.accumulating(self._module, number == passes - 1)
            with self._group.peers_present("the gradient all-reduce"), self._computing(tuned.attention), sync:
                loss = self._module(*self._upload(part))
                if not isinstance(loss, Tensor) or loss.dim():  # some custom models return a scalar only for one-row batches
                    raise ConfigError("the model's forward(tokens, targets) must return the mean loss, a scalar tensor")
                weighted: Any = loss.float() * weight
                self._computed = self._mark()  # the last backward pass waits for the other ranks
                # DDP averages gradients over the ranks; multiplying each rank's loss by world_size turns the mean into a sum.
                with compiled_backward(self._python_reducer):
                    (weighted * self._scale.value * self.ranks.world_size).backward()
            rank_loss += weighted.detach()
        with self._group.peers_present("the gradient all-reduce"):
            self.parallel.collect()
        if self.ranks.world_size == 1:
            return rank_loss[None]
        losses = torch.zeros(1 + self.ranks.world_size, device=self._device)
        losses[0] = losses[1 + self.ranks.rank] = rank_loss
        with self._group.peers_present("the loss all-reduce"):
            torch.distributed.all_reduce(losses)
        return losses

    def _mark(self) -> Any:
        """Return the current time or, on a GPU with several ranks, an event that the GPU records after the work queued so far."""
        if self.device.kind != "cuda" or self.ranks.world_size == 1:
            return time.perf_counter()
        return torch.cuda.current_stream(self._device).record_event(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]

    def _update(self, skip: Tensor, plan: StepPlan) -> None:
        """Update the weights and their average unless `skip`; on CUDA, built-in optimizers read `skip` without a host sync."""
        if self._host_skips and bool(skip):
            return
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                rates = plan.groups[group["name"]]
                group["lr"], group["weight_decay"] = rates.lr, rates.weight_decay
                if rates.momentum is not None:
                    group["momentum"] = rates.momentum
            if not self._host_skips:
                optimizer.found_inf = skip.float()  # type: ignore[attr-defined]
            optimizer.step()
        if self._average is not None and plan.ema_decay is not None:
            self._average.update(plan.ema_decay, skip)

    def score(self, batch: Batch) -> float:
        with self._group.peers_present("an evaluation"):
            return super().score(batch)

    def _show(self, average: bool) -> None:
        """If `average`, switch to the averaged weights and the last stage's model settings, else back to the training weights."""
        if average:
            self._set(self._last_numbers)
        super()._show(average)

    def _forget_gradients(self) -> None:
        for p in self._names:
            p.grad = None
        self.parallel.forget_gradients()

    def snapshot(self) -> Callable[[], State]:
        if self.ranks.rank >= self.writers:
            return dict
        return self._captured(lambda record: self.ranks.first or (record.part is not None and record.data.nbytes > 0))

    @contextlib.contextmanager
    def without_trace(self) -> Iterator[None]:
        before = {file: {record.name: record for record in records} for file, records in self._captured()().items()}
        try:
            yield
        finally:
            self.load(before)

    def _captured(self, wanted: Callable[[TensorRecord], bool] = lambda record: True) -> Callable[[], State]:
        """Capture this rank's part of the state; the returned function copies it to the host and returns the `wanted` records."""
        self._show(average=False)
        optimizer = chain(optimizer_tensors(self.optimizers, self._names), self._scale.tensors())
        average = {"ema": self._average.tensors()} if self._average is not None else {}
        model = list(model_tensors(self.model))
        parts = {name: part for name, p in model if (part := self.parallel.part(p)) is not None}
        local = ((name, self.parallel.local(p)) for name, p in model)
        bring = snapshot({"model": local, "optimizer": optimizer, **average}, self._device)

        def with_part(file: str, record: TensorRecord) -> TensorRecord:
            parameter, _, key = record.name.rpartition("/") if file == "optimizer" else (record.name, "", "")
            return replace(record, part=parts.get(parameter)) if not key or key in ROWWISE else record

        def records() -> State:
            located = {file: [with_part(file, record) for record in found] for file, found in bring().items()}
            return {file: [record for record in found if wanted(record)] for file, found in located.items()}

        return records if parts else bring

    def load(self, state: Mapping[str, Mapping[str, TensorRecord]]) -> None:
        self._show(average=False)
        load_model(self.model, state["model"], "the checkpoint", self.parallel.put)
        optimizer = dict(state["optimizer"])
        self._scale.restore(optimizer)
        by_parameter: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for name, source in optimizer.items():
            parameter, _, key = name.rpartition("/")
            by_parameter[parameter][key] = tensor(source)
        for o in self.optimizers:
            o.state.clear()
            for p in (p for group in o.param_groups for p in group["params"]):
                if entries := by_parameter.get(self._names[p]):  # without records, the state starts empty
                    rows = {key: self.parallel.cut(entries[key], p) for key in ROWWISE if key in entries}
                    o.state[p] = {key: value.to(p.device, copy=key in rows) for key, value in {**entries, **rows}.items()}
        if self._average is not None:
            self._average.load(state.get("ema", {}), self.parallel.cut)

    def flops_per_token(self, seq_len: int) -> float:
        return flops_per_token(self.model, seq_len)

    def peak_memory(self) -> tuple[int, int]:
        """Return the peak bytes allocated and reserved on the GPU; without a GPU, both are this process's peak memory."""
        if self.device.kind == "cuda":
            return torch.cuda.max_memory_allocated(self._device), torch.cuda.max_memory_reserved(self._device)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return peak, peak
