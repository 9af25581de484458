"""bench.py: time training steps, by default of GPT-2 with 124M parameters, without evaluations or checkpoints."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import cycle, repeat
from pathlib import Path
from typing import TYPE_CHECKING

from ingot.compat.nanogpt.keys import TRAIN, Arguments, check_data, enter, fresh_settings, settle, translate
from ingot.compat.nanogpt.train import peak_flops
from ingot.compat.options import defaults
from ingot.config.schema import GPT2_VOCAB_SIZE
from ingot.console.entry import say
from ingot.errors import ConfigError, DataError

if TYPE_CHECKING:
    from ingot.backends.base import Backend, StepPlan
    from ingot.runtime.tensors import Batch

BURN_IN, TIMED = 10, 20
WAIT, WARMUP, ACTIVE = 5, 5, 5  # number of steps in each phase of torch.profiler.schedule
LOG = Path("bench_log")
# Keys of train.py whose values nanoGPT's bench.py hard-codes.
FIXED = {
    "gradient_accumulation_steps": 1, "learning_rate": 1e-4, "weight_decay": 1e-2, "grad_clip": 0.0, "decay_lr": False,
    "max_iters": 1,
}  # fmt: skip


def bench(arguments: Arguments) -> None:
    """Time training steps or, with the key `profile`, record a trace of a few steps."""
    import numpy as np

    from ingot.backends.open import open_backend
    from ingot.compat.nanogpt.checkpoint import count_parameters, meta_model
    from ingot.runtime.ranks import ranks_from_environment
    from ingot.train.reader import read_rank_batch
    from ingot.train.start import open_data
    from ingot.train.step_plan import following, shapes

    ranks = ranks_from_environment()
    if ranks.world_size > 1:
        raise ConfigError("bench.py measures a single process; start it without torchrun")
    shared = {name: value for name, value in arguments.values.items() if name in TRAIN}
    values = settle(Arguments({**defaults(TRAIN), **FIXED, **shared}, arguments.set_keys))
    settings = fresh_settings(values, None)
    config = translate(values, settings).config
    backend = open_backend(config, GPT2_VOCAB_SIZE, ranks)
    (plan,) = shapes(config)
    shape = (config.rows_per_step, 2, config.data.seq_len)
    buffers = cycle([backend.host_buffer(shape), backend.host_buffer(shape)])  # double buffering: one is filled, one copied
    if arguments.values["real_data"]:
        try:
            check_data(values)
        except DataError as error:
            raise DataError(f"{error}; or use random tokens with --real_data=False") from None
        dataset, rows = open_data(config, 1)
        if dataset.tokenizer.vocab_size != GPT2_VOCAB_SIZE:
            raise ConfigError(f"{config.data.path} does not contain GPT-2 tokens; use random tokens with --real_data=False")

        def read() -> Iterator[Batch]:
            at = plan
            while True:
                batch = read_rank_batch(rows, at, ranks, next(buffers))
                at = following(config, at, batch)
                yield batch.batch

        batches = read()
    else:
        buffer = next(buffers)
        buffer[:] = np.random.default_rng(arguments.values["seed"]).integers(0, GPT2_VOCAB_SIZE, buffer.shape, np.int32)
        batches = repeat(buffer)
    backend.tune([(plan, next(batches))], {})
    say(f"number of parameters: {count_parameters(meta_model(settings)) / 1e6:.2f}M")
    if arguments.values["profile"]:
        from ingot.backends.torch.device import profiled

        for _ in profiled(backend.device, LOG, WAIT, WARMUP, ACTIVE):
            _steps(backend, batches, plan, 1)
        say(f"the profile is in {LOG}")  # a trace for chrome://tracing, Perfetto or TensorBoard
        return
    _steps(backend, batches, plan, BURN_IN)
    seconds = _steps(backend, batches, plan, TIMED) / TIMED
    tokens = config.training.tokens_per_step
    flops = backend.flops_per_token(config.data.seq_len) * tokens
    mfu = flops / seconds / peak_flops(values["mfu_peak"], backend.device)
    say(f"time per iteration: {seconds * 1000:.4f}ms, MFU: {mfu * 100:.2f}%, {tokens / seconds:,.0f} tokens/s")


main = partial(enter, "bench.py", bench)


def _steps(backend: Backend, batches: Iterator[Batch], plan: StepPlan, steps: int) -> float:
    """Run `steps` steps and return the elapsed seconds; each loss is printed while the next step runs, as in training."""
    backend.wait()
    began = time.perf_counter()
    previous = None
    for step in range(steps + 1):
        pending = None
        if step < steps:
            batch = next(batches)
            pending = backend.step(batch, batch[:, 1].size, replace(plan, step=step))
        if previous is not None:
            say(f"{step - 1}/{steps} loss: {previous.result().loss:.4f}")
        previous = pending
    backend.wait()
    return time.perf_counter() - began
