"""Plan a run before it is paid for: memory per GPU, speed, hours and cost on hardware that need not be present.

Memory is that of a simulated step. Speed is the GPU's data-sheet rate times efficiencies fitted to measurements on one H200
(benchmarks/RESULTS.md), which other GPUs and widths are assumed to reach. Collectives reach BUS_EFFICIENCY of the links' rates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ingot.backends.base import StepMemory
from ingot.backends.open import simulate_step
from ingot.config.memory import FULL, recomputed_every, replica_bytes
from ingot.config.schema import Config
from ingot.errors import ConfigError, Setting
from ingot.preflight.data_checks import total_tokens
from ingot.preflight.validate import Report, validate
from ingot.runtime.devices import PEAK_FLOPS
from ingot.train.step_plan import refuse_idle_ranks

Plan = dict[str, Any]

GIB = 2**30
PER_NODE = 8  # GPUs of one node, connected by NVLink or PCIe
USABLE = 0.93  # fraction of a GPU's memory that tensors can use; the rest is CUDA's context and fragmentation
BUS_EFFICIENCY = 0.8  # fraction of a link's data-sheet rate that large collectives reach
TOKENS_PER_PARAMETER = 20  # compute-optimal number of training tokens per parameter (Hoffmann et al., 2022)
# Fraction of the peak FLOP rate that compiled models reach outside attention, by model width; measured only for 512 and 768.
EFFICIENCY = {512: 0.46, 768: 0.57, 1024: 0.59, 2048: 0.63, 4096: 0.66}
ATTENTION_EFFICIENCY = 0.35  # fraction of the peak FLOP rate that causal attention reaches, without counting masked scores
OPTIMIZER_BYTES = 56  # bytes that an optimizer step reads and writes per parameter, as measured


@dataclass(frozen=True)
class GPU:
    """Data-sheet figures of a GPU; `name` is its key in PEAK_FLOPS."""

    name: str
    memory: float  # size of its memory in GiB
    bandwidth: float  # memory bandwidth in bytes per second
    link: float  # bandwidth to the other GPUs of its node, in bytes per second and direction
    network: float  # bandwidth from a node of eight GPUs to other nodes, in bytes per second
    missing: tuple[str, ...] = ()  # Ingot's kernels that do not run on this GPU


GPUS = {
    "h200": GPU("H200", 139.8, 4.8e12, 450e9, 400e9),
    "h100": GPU("H100", 79.2, 3.35e12, 450e9, 400e9),
    "b200": GPU("B200", 178.3, 8e12, 900e9, 400e9, ("gate",)),
    "a100": GPU("A100", 79.2, 2e12, 300e9, 200e9, ("gate", "qkv")),
    "l40s": GPU("L40S", 44.4, 0.86e12, 32e9, 50e9, ("gate", "qkv")),
    "4090": GPU("RTX 4090", 23.5, 1.01e12, 32e9, 12.5e9, ("gate", "qkv")),
}


def make_plan(config: Config, gpus: int, gpu: str, price: float | None = None, tokens: int | None = None) -> Plan:
    """Plan a run of `tokens` tokens (default: those of the config's steps, else the compute-optimal number) on `gpus` GPUs.

    Memory and communicated bytes are those of one GPU; seconds and communicated bytes are those of one step.
    """
    if gpu not in GPUS:
        raise ConfigError(f"unknown GPU {gpu!r}; use {', '.join(GPUS)}")
    if gpus < 1:
        raise ConfigError(f"--gpus is {gpus}; there must be at least 1")
    refuse_idle_ranks(config, gpus)
    hardware, t, length = GPUS[gpu], config.training, config.data.seq_len
    vocab_size = validate(config, gpus, thorough=False, fresh=True).vocab_size
    memory, rows = int(hardware.memory * GIB), -(-config.rows_per_step // gpus)
    every, usable = recomputed_every(config, vocab_size, memory), int(USABLE * memory)
    parallel = t.parallel if gpus > 1 else "none"
    if parallel == "hsdp" or t.cpu_offload:
        raise ConfigError("{0} and {1} cannot be planned", Setting("training.parallel", "hsdp"), Setting("training.cpu_offload"))
    if parallel == "auto":  # choose as training would
        parallel = "ddp" if (replica_bytes(config, vocab_size) or 0) <= FULL * memory else "fsdp"
    rows_at_once = rows if t.micro_batch == "auto" else min(t.micro_batch, rows)
    while True:
        step = simulate_step(config, vocab_size, gpus, parallel, rows_at_once, every, hardware.missing)
        peak = sum(step.parts.values())
        if peak <= usable or rows_at_once == 1 or t.micro_batch != "auto":
            break
        rows_at_once = _smaller(rows_at_once, step, usable)
    factor = 1 + (1 / (3 * every) if every else 0)  # checkpointed blocks run their forward pass twice
    efficiency = float(np.interp(math.log2(config.model.width), np.log2([*EFFICIENCY]), [*EFFICIENCY.values()]))
    attention = (step.flops_per_token - step.matmul_flops_per_token) / 2
    rate = PEAK_FLOPS[hardware.name]
    compute = rows * length * factor * (step.matmul_flops_per_token / efficiency + attention / ATTENTION_EFFICIENCY) / rate
    held = step.parameters / (gpus if parallel == "fsdp" else 1)
    optimizer = OPTIMIZER_BYTES * held / hardware.bandwidth
    sending = step.sent / (BUS_EFFICIENCY * (hardware.link if gpus <= PER_NODE else min(hardware.link, hardware.network)))
    # DDP averages gradients during the backward pass of the last micro-batch; FSDP communicates in every pass.
    exposed = max(0.0, sending - compute * (1 if parallel == "fsdp" else 2 / (3 * step.passes)))
    speed = config.rows_per_step * length / (compute + optimizer + exposed)
    optimal = TOKENS_PER_PARAMETER * step.parameters
    count = tokens or total_tokens(config) or optimal
    hours = count / speed / 3600
    return {
        "gpu": gpu, "gpus": gpus, "parallel": parallel, "micro_batch": rows_at_once,
        "micro_batches": step.passes, "checkpointed": every,  # every k-th block is checkpointed; 0: none
        "parameters": step.parameters, "flops_per_token": step.flops_per_token, "memory": dict(step.parts),
        "memory_bytes": peak, "usable_bytes": usable, "fits": peak <= usable, "compute_seconds": compute,
        "optimizer_seconds": optimizer, "communication_bytes": step.sent, "communication_seconds": sending,
        "exposed_seconds": exposed,  # communication that does not overlap with compute
        "tokens_per_second": speed, "mfu": speed * step.flops_per_token / (gpus * rate), "tokens": count,
        "optimal_tokens": optimal, "hours": hours, "cost": None if price is None else hours * gpus * price,
        "advice": _advice(config, step, rows_at_once, every, parallel, usable),
    }  # fmt: skip


def _state(step: StepMemory) -> int:
    return sum(step.parts.get(part, 0) for part in ("weights", "gradients", "optimizer"))


def _smaller(size: int, step: StepMemory, usable: int) -> int:
    """Halve a micro-batch that does not fit until it should, assuming activation memory proportional to the number of rows."""
    most = size * (usable - _state(step)) / max(1, sum(step.parts.values()) - _state(step))
    size = (size + 1) // 2
    while size > max(1, most):
        size = (size + 1) // 2
    return size


def _advice(config: Config, step: StepMemory, size: int, every: int, parallel: str, usable: int) -> str:
    """Return a sentence that says whether the step fits in memory and, if not, which setting to change first."""
    peak = sum(step.parts.values())
    if peak <= usable:
        return f"It fits: {peak / GIB:.1f} GiB of {usable / GIB:.1f} usable."
    if _state(step) > usable:
        change = "use more GPUs or a smaller model" if parallel == "fsdp" else "use several GPUs, which can share the model"
    elif size > 1:
        change = f"set training.micro_batch to {_smaller(size, step, usable)}"
    elif not every:
        change = "set training.gradient_checkpointing to true"
    elif step.parts.get("logits", 0) > step.parts.get("activations", 0) and config.training.loss_chunk is None:
        change = "set training.loss_chunk to 1024"
    else:
        change = "shorten data.seq_len or use a GPU with more memory"
    return f"It does not fit: {peak / GIB:.1f} GiB of {usable / GIB:.1f} usable; {change}."


def add_plan(report: Report, gpu: str) -> None:
    """Replace the memory estimate of a report with that of a simulated step on a GPU; add a finding if the step does not fit."""
    plan = make_plan(report.config, report.world_size, gpu)
    report.memory = plan["memory_bytes"]
    if not plan["fits"]:
        report.findings.add("model.memory", "error", f"{gpu}: {plan['advice']}")
