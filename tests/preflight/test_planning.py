"""`ingot plan`: the simulated step has the memory of a real one, and what follows from it is right."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import step_memory
import torch
from step_memory import allocated
from torch._subclasses.fake_tensor import FakeTensorMode

import ingot
from ingot.backends.base import StepMemory
from ingot.backends.open import simulate_step
from ingot.backends.torch.simulate import LiveBytes, compiler
from ingot.config.loading import load_config
from ingot.errors import ConfigError
from ingot.model.loss import head_loss
from ingot.preflight.plan import make_plan
from ingot.runtime.ranks import Ranks

FLOAT, VOCAB = 4, 512
TINY = {
    "model.family": "gpt2", "model.layers": 2, "model.heads": 2, "model.width": 64, "model.vocab_size": VOCAB,
    "data.seq_len": 128, "training.tokens_per_step": 1024, "training.max_steps": 10, "training.compile": False,
}  # fmt: skip
WORDS = [word for name, value in TINY.items() for word in (f"--{name}", str(value))]


def config_of(**changes):
    overrides = {**TINY, **{name.replace("__", "."): value for name, value in changes.items()}}
    return load_config(python=overrides, environment={}).config


def simulated(config, gpus=1, parallel="ddp", rows=8, every=0) -> StepMemory:
    return simulate_step(config, VOCAB, gpus, parallel, rows, every)


@pytest.mark.parametrize("compiles", [False, True])
def test_weights_and_adams_moments_are_counted_to_the_byte(compiles):
    step = simulated(config_of(training__compile=compiles))
    size = FLOAT * step.parameters
    assert step.parts["weights"] == size
    assert step.parts["optimizer"] - 2 * size == pytest.approx(0, abs=1000)  # the step counters besides
    assert step.parts["activations"] > 0


def test_gradients_live_on_between_micro_batches():
    one, two = (simulated(config_of(), rows=rows) for rows in (8, 4))
    assert two.passes == 2 and two.parts["gradients"] == FLOAT * two.parameters > one.parts["gradients"]
    assert two.parts["activations"] == pytest.approx(one.parts["activations"] / 2, rel=0.05)


def test_a_plan_of_compiled_and_sharded_blocks_prints_no_warnings(recwarn):
    simulated(config_of(training__compile=True, model__family="llama"), gpus=2, parallel="fsdp", rows=4)
    assert [str(found.message) for found in recwarn if "FSDP2" in str(found.message)] == []


def test_fsdp_over_two_ranks_halves_weights_and_optimizer():
    ddp, fsdp = (simulated(config_of(optimizer__name="adamw"), gpus=2, parallel=kind, rows=4) for kind in ("ddp", "fsdp"))
    for part in ("weights", "optimizer"):
        assert fsdp.parts[part] == pytest.approx(ddp.parts[part] / 2, rel=0.01)
    assert ddp.parts["gradients"] == FLOAT * ddp.parameters  # DDP's buckets
    assert ddp.sent == FLOAT * ddp.parameters  # an all-reduce sends 2 (N - 1) / N of the gradients
    assert fsdp.sent == pytest.approx(
        ddp.sent, rel=0.2
    )  # two gathers in bf16, and a reduction in float32 that sends half as much


def test_checkpointed_blocks_keep_fewer_activations():
    for compiles in (False, True):
        kept, recomputed = (simulated(config_of(training__compile=compiles, model__layers=4), every=every) for every in (0, 1))
        assert recomputed.parts["activations"] < 0.5 * kept.parts["activations"]


@pytest.mark.parametrize(
    "changes",
    [{}, {"model__family": "llama"}, {"model__family": "golf", "model__kv_heads": 1}, {"training__gradient_checkpointing": True}],
    ids=["gpt2", "llama", "golf", "checkpointed"],
)
def test_the_simulated_peak_is_that_of_a_real_step(changes):
    changes = {
        "training__precision": "bf16",
        "training__kernels": "off",
        "model__layers": 3,
        "training__micro_batch": 8,
        **changes,
    }
    config = config_of(training__device="cpu", training__threads=1, **changes)
    step = simulated(config, every=int(config.training.gradient_checkpointing))
    measured = allocated(config, VOCAB, Ranks())
    state = step.parts["weights"] + step.parts["optimizer"]
    assert sum(step.parts.values()) == pytest.approx(state + measured, rel=0.1)


@pytest.mark.long
@pytest.mark.parametrize("changes", [{}, {"model__family": "llama"}, {"optimizer__name": "muon"}], ids=["gpt2", "llama", "muon"])
def test_the_simulated_peak_of_four_sharded_ranks_is_that_of_real_ones(changes):
    fixed = {
        "precision": "bf16",
        "kernels": "off",
        "parallel": "fsdp",
        "tokens_per_step": 8 * 128,
        "micro_batch": 2,
        "threads": 1,
    }
    fixed = {f"training__{name}": value for name, value in fixed.items()}
    config = config_of(**fixed, training__device="cpu", model__layers=6, model__width=128, **changes)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    shared["PYTHONPATH"] = str(Path(ingot.__file__).parents[1])
    command = [sys.executable, step_memory.__file__, config.model_dump_json(), str(VOCAB)]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **shared, "RANK": rank, "LOCAL_RANK": rank}, stdout=subprocess.PIPE)
        for rank in "0123"
    ]
    measured = [int(rank.communicate()[0]) for rank in ranks]
    step = simulated(config, 4, "fsdp", rows=2)
    state = step.parts["weights"] + step.parts["optimizer"]
    assert [state + each for each in measured] == pytest.approx([sum(step.parts.values())] * 4, rel=0.05)


def test_a_compiled_loss_takes_what_was_measured_on_a_gpu():
    tokens, vocab, width, measured = 65536, 50304, 768, 6532 * 2**20  # RESULTS.md, loss_memory.py: all logits, compiled
    live = LiveBytes({(tokens, vocab)})
    with FakeTensorMode():
        hidden = torch.zeros(tokens, width, dtype=torch.bfloat16, requires_grad=True)
        weight, targets = torch.zeros(vocab, width, requires_grad=True), torch.zeros(tokens, dtype=torch.int64)
        loss_of = torch.compile(lambda *inputs: head_loss(*inputs), dynamic=False, backend=compiler(live))

        def once():
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(hidden, weight, targets)
            loss.backward()

        once()
        hidden.grad = weight.grad = None
        with live:
            once()
    assert live.peak.total() == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(
    "changes", [{"training__loss_chunk": 256}, {"optimizer__ema_decay": 0.99}, {"model__dropout": 0.1}], ids=str
)
def test_settings_that_need_memory_of_their_own_are_simulated(changes):
    plain, step = (simulated(config_of(optimizer__name="muon", training__compile=True, **more)) for more in ({}, changes))
    averaged = FLOAT * step.parameters if "optimizer__ema_decay" in changes else 0
    assert step.parts["optimizer"] == plain.parts["optimizer"] + averaged


def test_a_plan_for_1024_gpus_adds_up():
    config = config_of(training__tokens_per_step=1024 * 128, optimizer__name="adamw")
    plan = make_plan(config, 1024, "h100", price=2.0, tokens=10**9)
    assert sum(plan["memory"].values()) == plan["memory_bytes"] <= plan["usable_bytes"] and plan["fits"]
    assert plan["communication_bytes"] == 2 * FLOAT * plan["parameters"] * 1023 // 1024
    assert plan["hours"] * 3600 * plan["tokens_per_second"] == pytest.approx(10**9)
    assert plan["cost"] == pytest.approx(plan["hours"] * 1024 * 2.0)
    assert plan["optimal_tokens"] == 20 * plan["parameters"]


def test_auto_halves_the_micro_batch_until_it_fits():
    plan = make_plan(config_of(training__tokens_per_step=2**24, training__max_steps=1), 1, "4090")
    assert plan["fits"] and plan["micro_batches"] > 1 and plan["micro_batch"] * plan["micro_batches"] >= 2**17
    assert plan["memory_bytes"] > plan["usable_bytes"] / 4  # not smaller than needed


def test_the_table_fits_a_terminal_and_json_has_the_same_numbers(call):
    code, out, _ = call("plan", *WORDS, "--gpus", 2, "--gpu", "h100", "--price", 3)
    assert code == 0 and max(map(len, out.splitlines())) <= 80
    assert "It fits" in out.splitlines()[-1] and "$" in out
    code, document, _ = call("plan", *WORDS, "--gpus", 2, "--gpu", "h100", "--price", 3, "--json")
    record = json.loads(document)
    assert code == 0 and f"{record['parameters']:,}" in out and f"{record['tokens_per_second']:,.0f} tokens/s" in out


def test_what_does_not_fit_is_exit_code_1_with_advice_that_helps(call):
    words = (*WORDS, "--training.tokens_per_step", 2**24, "--gpu", "4090")
    code, out, _ = call("plan", *words, "--training.micro_batch", 2**17)
    advice = out.splitlines()[-1]
    assert code == 1 and advice.startswith("It does not fit") and "set training.micro_batch to " in advice
    size = advice.rpartition(" ")[2].rstrip(".")
    assert call("plan", *words, "--training.micro_batch", size)[0] == 0


def test_a_model_too_large_for_one_gpu_is_told_to_use_several():
    config = config_of(model__layers=48, model__width=2048, model__heads=16, training__tokens_per_step=128)
    plan = make_plan(config, 1, "4090")
    assert plan["parallel"] == "none" and not plan["fits"] and "use several GPUs" in plan["advice"]


def test_unknown_gpus_and_idle_ranks_are_refused():
    with pytest.raises(ConfigError, match="unknown GPU 'tpu'; use h200"):
        make_plan(config_of(), 1, "tpu")
    with pytest.raises(ConfigError, match="9 ranks cannot share the 8 rows"):
        make_plan(config_of(), 9, "h200")


def test_validate_checks_the_memory_of_a_named_gpu(call, data):
    words = ("validate", *WORDS, "--data.path", data, "--training.device", "cpu", "--data.epochs", 100000, "--json")
    _, out, _ = call(*words, "--gpu", "h200")
    step = simulated(config_of(training__device="cpu"))
    assert json.loads(out)["model"]["memory_bytes"] == sum(step.parts.values())


@pytest.mark.long
@pytest.mark.parametrize(
    ("recipe", "changes", "gib", "speed"),  # RESULTS.md, speed_h200.py; the peaks are of uncompiled trials before the run
    [
        ("gpt2", {"model.bias": False, "training.tokens_per_step": 65536}, 27.796, 633_641),
        ("gpt2", {"model.bias": False, "training.tokens_per_step": 12288}, 6.246, 578_476),
        ("golf/seq4096", {"training.tokens_per_step": 131072}, 15.267, 1_770_946),
    ],
)
def test_plans_agree_with_measurements_on_an_h200(recipe, changes, gib, speed):
    plan = make_plan(load_config(recipe=recipe, overrides=changes, environment={}).config, 1, "h200")
    assert plan["tokens_per_second"] == pytest.approx(speed, rel=0.15)
    assert 0.88 * gib <= plan["memory_bytes"] / 2**30 <= gib
