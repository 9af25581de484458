"""What the keys of train.py mean as a config of ours."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.backends.open import find_device
from ingot.backends.torch.build import flops_per_token
from ingot.compat.nanogpt.checkpoint import count_parameters, meta_model
from ingot.compat.nanogpt.keys import TRAIN, Arguments, fresh_settings, key_name, read_arguments, record, settle, translate
from ingot.compat.nanogpt.train import NanoGPTReporter, peak_flops
from ingot.compat.options import defaults
from ingot.config.schema import Config
from ingot.errors import ConfigError
from ingot.optim.schedules import learning_rate_scale
from ingot.runs.reporter import StepReport
from ingot.runtime.ranks import Ranks


def values(*arguments: str, world_size: int = 1) -> dict[str, object]:
    return settle(read_arguments("train.py", ["--device=cpu", *arguments], lambda line: None), world_size)


def config_of(*arguments: str, world_size: int = 1):
    found = values(*arguments, world_size=world_size)
    return translate(found, fresh_settings(found, None)).config


def learning_rate(config: Config, iteration: int) -> float:
    return config.optimizer.learning_rate * learning_rate_scale(config, iteration, seconds=0.0)


@pytest.mark.parametrize(
    ("iteration", "rate"), [(0, 2.9985e-7), (1999, 5.997e-4), (2000, 6e-4), (301000, 3.3e-4), (600001, 6e-5)]
)
def test_the_learning_rate_is_nanogpt_s(iteration, rate):
    assert learning_rate(config_of(), iteration) == pytest.approx(rate, rel=1e-4)


@given(st.integers(0, 50), st.integers(0, 50), st.floats(1e-6, 1.0), st.floats(0.0, 1.0), st.integers(0, 100), st.booleans())
def test_the_loop_follows_the_documented_learning_rate_whatever_the_keys(warmup, end, peak, part, iteration, decay):
    config = config_of(
        f"--warmup_iters={warmup}", f"--lr_decay_iters={end}", f"--learning_rate={peak}", f"--min_lr={peak * part}",
        f"--decay_lr={decay}", "--max_iters=100",
    )  # fmt: skip
    if not decay:
        documented = peak
    elif iteration < warmup:
        documented = peak * (iteration + 1) / (warmup + 1)
    else:
        length = max(end - warmup, 1)  # nanoGPT divides by zero where they are equal
        done = min(1.0, (iteration - warmup) / length)
        documented = peak * part + 0.5 * (1 + math.cos(math.pi * done)) * (peak - peak * part)
    assert learning_rate(config, iteration) == pytest.approx(documented, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize(("iteration", "rate"), [(9, 1e-3 * 10 / 11), (10, 1e-3), (11, 1e-4), (90, 1e-4)])
def test_a_decay_that_ends_with_the_warm_up_is_no_division_by_zero(iteration, rate):
    config = config_of("--warmup_iters=10", "--lr_decay_iters=10", "--learning_rate=1e-3", "--min_lr=1e-4")
    assert learning_rate(config, iteration) == pytest.approx(rate)


def test_mfu_of_the_124m_model_is_nanogpt_s():
    model = meta_model(fresh_settings(values(), None))
    assert count_parameters(model) == 123_587_328
    assert flops_per_token(model, 1024) * 480 * 1024 / 312e12 == pytest.approx(1.3466, abs=1e-4)


def test_mfu_is_minus_100_percent_until_the_run_has_settled_and_then_a_running_mean(capsys):
    reporter = NanoGPTReporter(values(), config_of(), ideal_seconds=0.5)
    for iteration, elapsed in enumerate([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 6.5]):
        report = StepReport(iteration + 1, None, 1.0, 1.0, 1e-3, 1, 1.0, elapsed, None, 0, None, 0.0)
        reporter.step(report, log=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[4] == "iter 4: loss 1.0000, time 1000.00ms, mfu -100.00%"
    assert lines[5] == "iter 5: loss 1.0000, time 1000.00ms, mfu 50.00%"
    assert lines[6] == f"iter 6: loss 1.0000, time 500.00ms, mfu {100 * (0.9 * 0.5 + 0.1 * 1.0):.2f}%"


def test_the_peak_is_printed_with_its_source(capsys):
    assert peak_flops(312e12, find_device("cpu")) == 312e12 and peak_flops(None, find_device("cpu")) > 1e8
    assert "312 TFLOP/s, set by mfu_peak" in (printed := capsys.readouterr().out) and "measured" in printed


def test_the_accumulation_is_that_of_all_ranks_together():
    one, eight = config_of(), config_of(world_size=8)
    assert one.training.tokens_per_step == eight.training.tokens_per_step == 491_520
    rows = len(Ranks(0, 8, 0).share(eight.rows_per_step))
    assert (rows, rows // eight.training.micro_batch) == (60, 5)


def test_an_accumulation_that_ranks_cannot_share_is_refused_with_what_they_can():
    with pytest.raises(ConfigError) as error:
        values(world_size=3)
    assert "gradient_accumulation_steps=40" in str(error.value) and "such as 42" in str(error.value)


def test_iterations_from_0_to_max_iters_are_one_more_step():
    assert config_of("--max_iters=2000", "--lr_decay_iters=2000", "--warmup_iters=0").training.max_steps == 2001


def test_without_a_dtype_a_cpu_computes_in_float32_and_is_not_compiled():
    found = values()
    assert (found["dtype"], found["compile"]) == ("float32", False)
    assert values("--compile=True", "--dtype=bfloat16")["compile"] is True
    assert config_of("--dtype=bfloat16").training.precision == "bf16"


def test_float16_on_a_cpu_is_float32_and_says_so():
    said: list[str] = []
    arguments = read_arguments("train.py", ["--device=cpu", "--dtype=float16"], lambda line: None)
    assert settle(arguments, warn=said.append)["dtype"] == "float32"
    assert said == ["dtype=float16 needs a CUDA GPU; computing in float32"]


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("--eval_interval=0", "eval_interval=0 must be a whole number >= 1"),
        ("--dropout=1", "dropout=1 must be a number >= 0 and < 1"),
        ("--max_iters=-1", "max_iters=-1 must be a whole number >= 0"),
        ("--dtype=fp8", "dtype=fp8 must be float32, bfloat16, float16 or None"),
        ("--backend=mpi", "backend=mpi must be nccl or gloo"),
        ("--n_head=7", "n_head=7 does not divide n_embd=768"),
        ("--learning_rate=1e-5", "min_lr=6e-05 is above learning_rate=1e-05"),
    ],
)
def test_values_that_cannot_be_are_refused_in_the_words_of_the_keys(argument, says):
    with pytest.raises(ConfigError) as error:
        config_of(argument)
    assert says in error.value.render(key_name)


def test_a_machine_without_a_gpu_says_what_to_add(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="add --device=cpu"):
        settle(Arguments(defaults(TRAIN)))


def test_what_a_checkpoint_records_are_nanogpt_s_33_keys_as_plain_values():
    recorded = record(values())
    assert len(recorded) == 33 and recorded["dtype"] == "float32" and "mfu_peak" not in recorded
    assert all(type(value) in (int, float, bool, str) for value in recorded.values())
