"""bench.py: the time of a training step of the 124M model, without evaluation, saving and logging."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingot.compat.nanogpt.keys import TRAIN, Given, enter
from ingot.compat.nanogpt.train import find_peak
from ingot.compat.nanogpt.translate import check_data, data_path, fresh_args, settle, torch_device_named, translate
from ingot.compat.options import defaults
from ingot.config.schema import GPT2_VOCAB_SIZE, Config
from ingot.console.entry import say
from ingot.errors import ConfigError, DataError

if TYPE_CHECKING:
    from ingot.backends.base import Backend, StepPlan
    from ingot.runtime.tensors import Batch

BURN_IN, TIMED = 10, 20
WAIT, WARMUP, ACTIVE = 5, 5, 5  # steps of a profile, as torch.profiler.schedule names them
LOG = Path("bench_log")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run bench.py; return the exit code."""
    return enter("bench.py", bench, arguments)


def bench(given: Given) -> None:
    """Time training steps, or record a profile of a few."""
    from ingot.backends.open import open_backend
    from ingot.runtime.ranks import ranks_from_environment
    from ingot.train.step_plan import shapes

    ranks = ranks_from_environment()
    if ranks.world_size > 1:
        raise ConfigError("bench.py measures one process; start it without torchrun")
    values = settle(_as_train(given))
    args = fresh_args(values, None)
    config = translate(values, args).config
    backend = open_backend(config, GPT2_VOCAB_SIZE, ranks)
    (plan,) = shapes(config)
    with _batches(given.values, config, backend) as next_batch:
        backend.tune([(plan, next_batch())], {})
        say(f"number of parameters: {args.parameters / 1e6:.2f}M")
        if given.values["profile"]:
            torch_device_named(values["device"], "the profiler")
            _profile(backend, next_batch, plan)
            return
        _steps(backend, next_batch, plan, BURN_IN)
        seconds = _steps(backend, next_batch, plan, TIMED) / TIMED
    peak = find_peak(values["mfu_peak"], backend.device)
    tokens = config.training.tokens_per_step
    mfu = args.flops_per_token * tokens / seconds / peak.flops
    say(str(peak))
    say(f"time per iteration: {seconds * 1000:.4f}ms, MFU: {mfu * 100:.2f}%, {tokens / seconds:,.0f} tokens/s")


def _as_train(given: Given) -> Given:
    """Return the keys of train.py for a benchmark, with the values that nanoGPT's bench.py fixes."""
    fixed: dict[str, Any] = {
        "gradient_accumulation_steps": 1, "learning_rate": 1e-4, "weight_decay": 1e-2, "grad_clip": 0.0, "decay_lr": False,
        "max_iters": 1,
    }  # fmt: skip
    shared = {name: value for name, value in given.values.items() if name in TRAIN}
    return Given({**defaults(TRAIN), **fixed, **shared}, given.given)


@contextmanager
def _batches(values: Mapping[str, Any], config: Config, backend: Backend) -> Iterator[Callable[[], Batch]]:
    """Yield a function that returns the next batch: of the data, read ahead, or always the same random tokens."""
    import numpy as np

    from ingot.data.loading.reader import RowReader
    from ingot.train.start import open_data
    from ingot.train.step_plan import following, shapes

    if not values["real_data"]:
        batch = backend.host_buffer((config.rows_per_step, 2, config.data.seq_len))
        batch[:] = np.random.default_rng(values["seed"]).integers(0, GPT2_VOCAB_SIZE, batch.shape, np.int32)
        yield lambda: batch
        return
    try:
        check_data(values)
    except DataError as error:
        raise DataError(f"{error}; or add --real_data=False") from None
    dataset, rows = open_data(config, 1)
    if dataset.tokenizer.vocab_size != GPT2_VOCAB_SIZE:
        raise ConfigError(f"bench.py needs GPT-2's tokens, and {data_path(values)} has others; add --real_data=False")
    plans = shapes(config)
    reader = RowReader(rows, backend.ranks, plans[0], partial(following, config), plans, backend.host_buffer)

    def next_batch() -> Batch:
        read = reader.next(plans[-1])
        plans.append(following(config, plans.pop(), read))
        return read.batch

    try:
        yield next_batch
    finally:
        reader.close()


def _steps(backend: Backend, next_batch: Callable[[], Batch], plan: StepPlan, steps: int) -> float:
    """Run some steps and return their seconds; each loss is printed while the next step is computed, as in training."""
    backend.wait()
    began = time.perf_counter()
    previous = None
    for step in range(steps):
        batch = next_batch()
        pending = backend.step(batch, batch[:, 1].size, replace(plan, step=step))
        if previous is not None:
            say(f"{step - 1}/{steps} loss: {previous.result().loss:.4f}")
        previous = pending
    if previous is not None:
        say(f"{steps - 1}/{steps} loss: {previous.result().loss:.4f}")
    backend.wait()
    return time.perf_counter() - began


def _profile(backend: Backend, next_batch: Callable[[], Batch], plan: StepPlan) -> None:
    """Record a few steps with torch's profiler, for chrome://tracing, Perfetto or TensorBoard."""
    from ingot.backends.torch.device import profiled

    for _ in profiled(backend.device, LOG, WAIT, WARMUP, ACTIVE):
        _steps(backend, next_batch, plan, 1)
    say(f"the profile is in {LOG}")
