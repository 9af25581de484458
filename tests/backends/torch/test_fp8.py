"""Which runs can have a head of 8 bits, and what of a run it leaves as it is."""

import pytest
import torch
from torch import nn
from torch_kit import SMALL, by_name, make, plan_of, raw, rows_of, take

from ingot.backends.torch.tune import use_fp8_head
from ingot.config.schema import Config
from ingot.errors import ConfigError
from ingot.model.registry import FAMILIES

HOPPER = (9, 0)


def refusal(capability=HOPPER, precision="bf16", model=None, words=64, seq_len=32, **training):
    config = Config(model=SMALL, data={"seq_len": seq_len}, training={"max_steps": 4, "tokens_per_step": 8 * seq_len, **training})
    use_fp8_head(model or FAMILIES["gpt2"](words, seq_len, **SMALL), seq_len, config.training, precision, capability)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_of_ours_can_have_it_on_a_gpu_with_8_bit_products(family):
    for capability in ((8, 9), HOPPER, (12, 0)):
        refusal(capability, model=FAMILIES[family](64, 32, layers=2, heads=4, width=32))


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"capability": None}, "needs an NVIDIA GPU of compute capability 8.9"),
        ({"capability": (8, 0)}, "needs an NVIDIA GPU of compute capability 8.9"),
        ({"precision": "fp16"}, "needs training.precision=bf16"),
        ({"words": 50}, "needs sizes divisible by 16; raise model.vocab_size=50 to 64"),
        ({"seq_len": 24}, "needs sizes divisible by 16; raise data.seq_len=24 to 32"),
        ({"seq_len": 48, "stages": [{"share": 0.5, "seq_len": 24}, {"share": 0.5}]}, "raise data.seq_len=24 to 32"),
        ({"loss_chunk": 64}, "cannot be combined with training.loss_chunk=64; keep one"),
        ({"model": nn.Linear(16, 16)}, "needs a built-in model; a custom model computes its loss itself"),
    ],
)
def test_what_cannot_have_it_is_told_in_a_line(how, told):
    with pytest.raises(ConfigError) as error:
        refusal(**how)
    assert str(error.value).startswith("training.fp8_head=true ") and told in str(error.value)


def test_a_cpu_refuses_it_before_training():
    with pytest.raises(ConfigError, match=r"training\.fp8_head=true needs an NVIDIA GPU"):
        make(fp8_head=True)


def test_a_pass_that_does_not_run_is_told_in_a_line():
    backend, kept = engine(True), {}
    backend.tune([(plan_of(backend), rows_of(0))], kept)

    def attempt(*_, **__):
        raise RuntimeError("no such kernel\nand a long story")

    backend._try = attempt
    with pytest.raises(ConfigError, match=r"^training\.fp8_head=true failed a test run: RuntimeError: no such kernel$"):
        backend.tune([(plan_of(backend), rows_of(0))], backend.tuned())


def engine(fp8):
    backend = make({**SMALL, "vocab_size": 48})
    backend.model.fp8_head = fp8  # as a GPU has it
    return backend


def test_steps_differ_and_what_is_saved_has_the_same_form():
    states = []
    for fp8 in (True, False):
        backend = engine(fp8)
        take(backend, 2)
        states.append(raw(backend))
    assert {name: value[:2] for name, value in states[0].items()} == {name: value[:2] for name, value in states[1].items()}
    assert states[0] != states[1]


def test_a_resumed_run_goes_on_bit_for_bit():
    whole, first, second = engine(True), engine(True), engine(True)
    take(whole, 4)
    take(first, 2)
    second.load(by_name(first.snapshot()()))
    take(second, 2, first=2)
    assert raw(second) == raw(whole)


def test_scores_and_exported_weights_are_those_of_the_plain_head():
    backend = engine(True)
    take(backend, 2)
    plain = engine(False)
    plain.load(by_name(backend.snapshot()()))
    assert backend.score(rows_of(9)) == plain.score(rows_of(9))
    pairs = zip(backend.weights(), plain.weights(), strict=True)
    assert all(mine.dtype == theirs.dtype and bytes(mine.data) == bytes(theirs.data) for mine, theirs in pairs)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU with 8-bit products"
)
@pytest.mark.parametrize("family", ["gpt2", "golf", "frontier"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_gpu_learns_as_with_the_plain_head(family, compiled):
    model = {"family": family, "layers": 2, "heads": 4, "width": 64, "vocab_size": 48}
    losses = []
    for fp8 in (True, False):
        backend = make(model, device="cuda", precision="bf16", compile=compiled, fp8_head=fp8)
        losses.append([found.loss for found in take(backend, 4)])
        backend.close()
    assert losses[0] == pytest.approx(losses[1], abs=0.02)
