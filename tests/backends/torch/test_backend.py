import math
import os
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch_kit import ROWS, SEQ_LEN, SMALL, VOCABULARY, by_name, make, plan_of, raw, rows_of, step, take, weights, written

from ingot.backends.open import open_backend
from ingot.backends.torch import backend as torch_backend
from ingot.backends.torch import tune as attention
from ingot.backends.torch.compile import compiles, compiles_optimizer
from ingot.backends.torch.state import tensor
from ingot.backends.torch.tune import CUDNN_FLASH4, FLASH4
from ingot.config.schema import Config
from ingot.errors import ConfigError
from ingot.runtime.devices import Device
from ingot.runtime.ranks import Ranks

MINE = """
import math
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, vocab_size, width):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.head = nn.Linear(width, vocab_size)
        self.trouble = ""

    def forward(self, tokens, targets=None):
        logits = self.head(self.embedding(tokens))
        if targets is None:
            return logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        if self.trouble == "loss":  # the derivative of a constant is 0
            loss = loss + math.inf
        if self.trouble == "gradient":  # the square root is finite at 0 and its derivative is not
            loss = loss + (self.head.bias - self.head.bias.detach()).sqrt().sum()
        return loss
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    return {"family": "file", "file": str(tmp_path / "mine.py"), "heads": 2, "width": 32}


def test_ranks_with_unequal_shares_try_the_same_micro_batches(monkeypatch):
    backend, tried = make(), {}
    monkeypatch.setattr(attention, "smallest_micro_batch", lambda largest, attempt, maximum: largest)
    for share in (ROWS - 1, ROWS):
        agreed = []
        monkeypatch.setattr(backend, "maximum", lambda values, agreed=agreed: agreed.append(values) or list(values))
        tried[share] = backend._smallest_micro_batch(rows_of(0)[:share], ROWS, None), len(agreed)
    assert tried[ROWS - 1] == tried[ROWS] == (ROWS, 1)


# -- the step ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 4, 5, 6, 100])
def test_micro_batches_of_any_size_give_the_update_of_one_batch(micro_batch):
    # With AdamW's usual epsilon the rounding error of a gradient near 0 decides the sign of a whole step.
    whole, parts = (make(optimizer={"epsilon": 1e-4}, micro_batch=size) for size in (ROWS, micro_batch))
    (expected,), (found,) = take(whole, 1), take(parts, 1)
    assert parts.tuned()["micro_batch"] == min(micro_batch, ROWS)
    assert found.loss == pytest.approx(expected.loss, abs=1e-6)
    assert found.grad_norm == pytest.approx(expected.grad_norm, abs=1e-6)
    for name, value in weights(whole).items():
        torch.testing.assert_close(weights(parts)[name], value, atol=1e-6, rtol=0)


def test_the_loss_of_a_step_is_the_mean_over_its_tokens():
    backend, rows = make(micro_batch=3), torch.from_numpy(rows_of(0)).long()
    with torch.no_grad():
        expected = backend.model(rows[:, 0], rows[:, 1]).item()
    assert take(backend, 1)[0].loss == pytest.approx(expected, abs=1e-6)


def test_the_gradient_norm_is_told_before_clipping():
    plain, clipped = make(optimizer={"clip_norm": 0.0}), make(optimizer={"clip_norm": 0.01})
    (loose,), (tight,) = take(plain, 1), take(clipped, 1)
    assert tight.grad_norm == loose.grad_norm > 0.01


def test_gradients_are_clipped_to_the_norm():
    """A gradient ten times smaller moves AdamW's first moment a tenth as far."""
    plain = make(optimizer={"clip_norm": 0.0})
    norm = take(plain, 1)[0].grad_norm
    clipped = make(optimizer={"clip_norm": norm / 10})
    take(clipped, 1)
    name = "transformer.wte.weight/exp_avg"
    loose, tight = (tensor(by_name(backend.snapshot()())["optimizer"][name]) for backend in (plain, clipped))
    torch.testing.assert_close(tight, loose / 10, atol=1e-8, rtol=1e-3)


def test_heads_are_grouped_while_a_kernel_that_takes_them_so_is_used():
    backend = make({"family": "golf", "layers": 2, "heads": 4, "kv_heads": 2, "width": 32})
    parts = [block.attn for block in backend.model.blocks]
    with backend._computing("flash-grouped"):
        assert all(part.form == "grouped" for part in parts)
    take(backend, 1)
    assert all(part.form == "repeated" for part in parts)
    assert backend._fastest_attention(rows_of(0), []).removesuffix("-grouped") in ("cudnn", "flash", "efficient")


def test_a_run_goes_on_where_the_attention_that_it_kept_is_not_installed(monkeypatch):
    def missing(*_):
        raise ModuleNotFoundError("No module named 'flash_attn'")

    backend = make({"family": "golf", "layers": 2, "heads": 4, "kv_heads": 2, "width": 32})
    kept, stages = {**backend.tuned(), "attention": "flash4", "micro_batch": 3}, [(plan_of(backend), rows_of(0))]
    backend.tune(stages, kept)
    assert (backend.tuned()["attention"], backend.tuned()["micro_batch"]) == ("flash4", 3)
    monkeypatch.setattr("ingot.model.layers.flash_attention", missing)
    backend.tune(stages, kept)
    assert backend.tuned()["attention"] == "default"
    take(backend, 1)
    backend.score(rows_of(0))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_learning_rate_scale_scales_every_update(name):
    no_decay = {"name": name, "weight_decay": 0.0, "muon_weight_decay": 0.0}
    full, half, none = (make(optimizer=no_decay) for _ in range(3))
    before = weights(full)
    for backend, scale in ((full, 1.0), (half, 0.5), (none, 0.0)):
        take(backend, 1, scale=scale)
    for parameter, start in before.items():
        moved = weights(full)[parameter] - start
        assert moved.abs().max() > 0
        torch.testing.assert_close(weights(half)[parameter] - start, moved / 2, atol=1e-6, rtol=0)
        assert torch.equal(weights(none)[parameter], start)


def test_a_scale_does_not_stay_for_the_next_step():
    one, other = make(), make()
    take(one, 1, scale=0.0)
    other.load(by_name(one.snapshot()()))
    take(one, 1, first=1)
    take(other, 1, first=1)
    assert raw(one) == raw(other)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_gradient_checkpointing_gives_the_same_loss_and_gradients(dropout):
    found = {}
    for checkpointing in (False, True):
        backend = make({**SMALL, "dropout": dropout}, gradient_checkpointing=checkpointing)
        passes = []
        backend.model.blocks[0].ln_1.register_forward_hook(lambda *_, passes=passes: passes.append(1))
        rows = torch.from_numpy(rows_of(0)).long()
        torch.manual_seed(5)
        loss = backend.model(rows[:, 0], rows[:, 1])
        loss.backward()
        found[checkpointing] = loss.item(), [p.grad for p in backend.model.parameters()]
        assert len(passes) == (2 if checkpointing else 1)
    assert found[True][0] == found[False][0]
    for kept, recomputed in zip(found[False][1], found[True][1], strict=True):
        torch.testing.assert_close(recomputed, kept, atol=1e-7, rtol=0)


def test_every_second_block_can_be_recomputed_and_gives_the_same_steps():
    def recomputed(backend):
        return ["forward" in vars(block) for block in backend.model.blocks]

    plain, sparing = (
        make({**SMALL, "layers": 5, "dropout": 0.2}),
        make({**SMALL, "layers": 5, "dropout": 0.2}, gradient_checkpointing=2),
    )
    assert recomputed(sparing) == [True, False, True, False, True] and not any(recomputed(plain))
    assert [r.loss for r in take(sparing, 3)] == pytest.approx([r.loss for r in take(plain, 3)], abs=1e-6)


def test_steps_with_gradient_checkpointing_are_those_without():
    plain, sparing = make({**SMALL, "dropout": 0.2}), make({**SMALL, "dropout": 0.2}, gradient_checkpointing=True)
    assert [r.loss for r in take(sparing, 3)] == pytest.approx([r.loss for r in take(plain, 3)], abs=1e-6)


@pytest.mark.parametrize(
    ("family", "compile_as", "on_cuda", "expected"),
    [
        ("gpt2", "auto", True, True),
        ("gpt2", "auto", False, False),
        ("gpt2", True, True, True),
        ("golf", "auto", True, False),
        ("llama", False, True, False),
        ("llama", True, False, True),
    ],
)
def test_what_is_compiled_in_deterministic_mode(family, compile_as, on_cuda, expected):
    training = {"max_steps": 1, "deterministic": True, "compile": compile_as}
    assert compiles(Config(training=training).training, family, on_cuda) is expected
    auto = Config(training={**training, "deterministic": False, "compile": "auto"}).training
    assert compiles(auto, family, on_cuda) is on_cuda


@pytest.mark.parametrize(
    ("asked", "optimizer", "on_cuda", "expected"),
    [
        ("auto", {"muon_beta2": 0.95}, True, True),
        ("auto", {"muon_beta2": 0.95}, False, False),
        ("auto", {}, True, False),
        (True, {}, True, True),
        (True, {}, False, False),
        (False, {"muon_beta2": 0.95}, True, False),
    ],
)
def test_muons_step_is_compiled_on_cuda_where_it_is_asked_for_or_normuons(asked, optimizer, on_cuda, expected):
    training = {"max_steps": 1, "compile_optimizer": asked}
    config = Config(optimizer={"name": "muon", **optimizer}, training=training)
    assert compiles_optimizer(config.training, "gpt2", config.optimizer.muon_beta2, on_cuda) is expected


def test_a_family_that_cannot_be_compiled_in_deterministic_mode_says_so():
    training = {"max_steps": 1, "deterministic": True, "compile": True}
    with pytest.raises(ConfigError, match="cannot be combined with a compiled golf model"):
        compiles(Config(training=training).training, "golf", on_cuda=True)


def test_deterministic_mode_is_on_in_both_passes_and_nowhere_else(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "mine")
    fixed, free, seen = make(deterministic=True), make(), []
    note = lambda *_: seen.append(torch.are_deterministic_algorithms_enabled())  # noqa: E731
    fixed.model.register_forward_hook(note)
    fixed.model.register_full_backward_pre_hook(note)
    results = take(fixed, 2)
    assert seen == [True] * 4 and not torch.are_deterministic_algorithms_enabled()
    assert results == take(free, 2) and raw(fixed) == raw(free)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == "mine"


def test_deterministic_mode_leaves_a_caller_s_own_as_it_was():
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        take(make(deterministic=True), 1)
        assert torch.is_deterministic_algorithms_warn_only_enabled() and torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_gradient_checkpointing_of_a_model_without_blocks_is_refused(mine):
    with pytest.raises(ConfigError, match=r"gradient_checkpointing needs a model with `blocks`"):
        make(mine, gradient_checkpointing=True)


def test_training_lowers_the_loss():
    backend = make(optimizer={"learning_rate": 1e-2})
    losses = [step(backend, rows_of(0), number).loss for number in range(30)]
    assert losses[0] == pytest.approx(math.log(VOCABULARY), abs=0.1)
    assert losses[-1] < losses[0] - 1


# -- trouble -------------------------------------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_updates_nothing_and_is_told(mine):
    backend = make(mine)
    take(backend, 2)
    with torch.no_grad():
        backend.model.embedding.weight[:] = math.nan
    before = raw(backend)
    (result,) = take(backend, 1, first=2)
    assert not math.isfinite(result.loss)
    assert result.skipped
    assert raw(backend) == before


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("trouble", ["loss", "gradient"])
def test_a_loss_or_a_gradient_that_is_not_finite_is_enough_to_skip(mine, name, trouble):
    backend = make(mine, {"name": name})
    take(backend, 2)
    before = raw(backend)
    backend.model.trouble = trouble
    (result,) = take(backend, 1, first=2)
    assert math.isfinite(result.loss) is (trouble == "gradient")
    assert math.isfinite(result.grad_norm) is (trouble == "loss")
    assert raw(backend) == before
    assert result.skipped


def test_every_rank_drops_others():
    first, second = make({**SMALL, "dropout": 0.3}), make({**SMALL, "dropout": 0.3})
    second.ranks = replace(second.ranks, rank=1)
    assert take(first, 1)[0].loss != take(second, 1)[0].loss


def test_the_step_after_a_skipped_one_is_sound(mine):
    troubled, plain = make(mine), make(mine)
    troubled.model.trouble = "gradient"
    take(troubled, 1)
    troubled.model.trouble = ""
    (found,), (expected,) = take(troubled, 1, first=1), take(plain, 1, first=1)
    assert not found.skipped
    assert found == expected
    assert raw(troubled) == raw(plain)


# -- precision and choices -----------------------------------------------------------------------------------------------------


def test_fp16_is_refused_on_a_cpu():
    with pytest.raises(ConfigError, match=r"training\.precision=fp16 needs a GPU"):
        make(precision="fp16")


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_bf16_computes_on_a_cpu_and_weights_stay_float32():
    half, full, rows = make(precision="bf16"), make(), rows_of(0)
    total = half.score(rows)
    (found,), (expected,) = take(half, 1), take(full, 1)
    assert found.loss != expected.loss
    assert found.loss == pytest.approx(expected.loss, abs=0.02)
    assert total / (ROWS * SEQ_LEN) == pytest.approx(expected.loss, abs=0.02)
    assert {p.dtype for p in half.model.parameters()} == {torch.float32}


def test_auto_takes_a_small_step_in_one_micro_batch():
    assert make().tuned()["micro_batch"] == ROWS


def test_what_an_earlier_session_chose_is_kept_on_such_a_machine():
    backend = make()
    backend.tune([(plan_of(backend), rows_of(0))], {**backend.tuned(), "micro_batch": 3})
    assert backend.tuned()["micro_batch"] == 3


def test_what_another_machine_chose_is_not_taken_over():
    backend = make()
    backend.tune([(plan_of(backend), rows_of(0))], {**backend.tuned(), "device": "another GPU", "micro_batch": 3})
    assert backend.tuned()["micro_batch"] == ROWS


def test_a_micro_batch_that_is_asked_for_counts_more_than_what_an_earlier_session_chose():
    backend = make(micro_batch=2)
    backend.tune([(plan_of(backend), rows_of(0))], {**backend.tuned(), "micro_batch": 5})
    assert backend.tuned()["micro_batch"] == 2


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused():
    with pytest.raises(ConfigError, match=r"model\.vocab_size=39 is smaller than the tokenizer's vocabulary of 40"):
        make({**SMALL, "vocab_size": VOCABULARY - 1})


def test_a_mistake_in_a_model_of_ones_own_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match=r"does not exist"):
        make({"family": "file", "file": str(tmp_path / "nowhere.py")})


# -- judging and the rest ------------------------------------------------------------------------------------------------------


def test_evaluate_sums_the_targets_that_count():
    backend, rows = make({**SMALL, "dropout": 0.3}), rows_of(0)
    tokens, targets = rows[:, 0], rows[:, 1]
    targets[np.random.default_rng(1).random(targets.shape) < 0.6] = -1
    found = backend.score(rows)
    backend.model.eval()
    with torch.no_grad():
        logits = backend.model(torch.from_numpy(tokens).long()).double()
    expected = F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(targets).long().flatten(), ignore_index=-1, reduction="sum")
    assert found == pytest.approx(expected.item(), rel=1e-6)


def test_evaluate_of_nothing_is_nothing():
    rows = rows_of(0)
    rows[:, 1] = -1
    assert make().score(rows) == 0.0


def test_evaluating_goes_back_to_training():
    backend, rows = make(), rows_of(0)
    before = raw(backend)
    backend.score(rows)
    assert backend.model.training
    assert raw(backend) == before
    assert all(p.grad is None for p in backend.model.parameters())


def test_sampling_draws_only_what_the_tokenizer_knows_and_leaves_no_trace():
    backend = make({**SMALL, "vocab_size": 200})
    before = raw(backend)
    ids = written(backend, [1, 2, 3], 30, temperature=5.0, seed=3)
    assert len(ids) == 30
    assert max(ids) < VOCABULARY
    assert backend.model.training
    assert raw(backend) == before


def test_weights_are_copies_of_what_is_evaluated():
    backend = make()
    found = {entry.name: entry for entry in backend.weights()}
    assert found.keys() == backend.model.state_dict().keys()
    for parameter, value in weights(backend).items():
        assert torch.equal(tensor(found[parameter]), value)
    take(backend, 1)
    assert not torch.equal(tensor(found["transformer.wte.weight"]), weights(backend)["transformer.wte.weight"])


def test_flops_are_nanogpts(monkeypatch):
    """nanoGPT's own estimate, for 480 sequences of 1024 tokens in a second on an A100's 312 TFLOP/s."""
    monkeypatch.setattr(torch_backend, "find_torch_device", lambda *_: Device("meta", 0, "meta", None, ("fp32",)))
    config = Config(
        model={"bias": False, "vocab_size": 50304}, data={"seq_len": 1024}, training={"max_steps": 1, "compile": False}
    )
    with torch.device("meta"):
        backend = open_backend(config, 50257, Ranks())
    assert backend.parameters == 124_373_760
    assert backend.flops_per_token(1024) * 480 * 1024 / 312e12 == pytest.approx(1.3466, abs=1e-4)


@pytest.mark.parametrize("context", [SEQ_LEN, VOCABULARY, 100])
def test_flops_leave_out_the_position_table_however_long_it_is(context):
    backend = make({**SMALL, "context": context})
    counted = sum(p.numel() for name, p in backend.model.named_parameters() if "wpe" not in name)
    assert backend.flops_per_token(SEQ_LEN) == 6 * counted + 12 * 2 * 32 * SEQ_LEN


def test_buffers_have_the_shape_that_is_asked_for():
    buffer = make().host_buffer((3, 17))
    assert buffer.shape == (3, 17)
    assert buffer.dtype == np.int32


def test_one_rank_agrees_with_itself():
    backend = make()
    assert backend.maximum([1.5, -2.0]) == [1.5, -2.0]
    assert backend.total([1.5, -2.0]) == [1.5, -2.0]
    assert backend.broadcast("text") == "text"
    backend.close()


def test_ranks_without_a_meeting_place_are_a_config_error(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"MASTER_ADDR is not set; start ranks with torchrun"):
        make(ranks=Ranks(0, 2, 0))


WINDOWED = {"family": "frontier", "layers": 2, "heads": 2, "width": 32, "window": 4, "pattern": "SL"}


@pytest.fixture
def tried(monkeypatch):
    """Gives the attention of two stages, the second of longer rows, chosen as if for a GPU, and the kernels of all trials."""

    def tuned(model, has_flash4=True, longest=SEQ_LEN, bf16=True, deterministic=False):
        backend, found = make(model), set()
        plain = backend._try

        def noted(batch, times=1, attention=None):
            name = attention or backend._attention
            found.add(name)
            if name.endswith("flash4") and batch.shape[2] > longest:
                raise RuntimeError("no kernel")
            plain(batch, times, attention)

        monkeypatch.setattr(attention, "has_flash4", lambda: has_flash4)
        monkeypatch.setattr(attention, "fastest_attention", lambda names, *_: names[-1])
        monkeypatch.setattr(backend, "wait", lambda: None)
        monkeypatch.setattr(backend, "_try", noted)
        backend.device = replace(backend.device, kind="cuda")
        backend._takes_kernels, backend._deterministic = bf16, deterministic
        plan, rows = plan_of(backend), rows_of(0)
        half = SEQ_LEN // 2
        backend.tune([(replace(plan, seq_len=half), rows[:, :, :half]), (replace(plan, stage=1), rows)], {})
        return [stage["attention"] for stage in backend.tuned()["stages"]], found

    return tuned


def test_windows_are_flash_attentions_where_it_runs_and_no_mask_is_compiled_for_a_trial(tried):
    assert tried({**WINDOWED, "kv_heads": 1}) == ([FLASH4, FLASH4], {FLASH4})
    assert tried(WINDOWED) == ([CUDNN_FLASH4, CUDNN_FLASH4], {FLASH4, CUDNN_FLASH4})


def test_where_it_does_not_run_others_are_tried(tried):
    chosen, names = tried(WINDOWED, longest=SEQ_LEN // 2)
    assert chosen[0] == CUDNN_FLASH4 and "default" in names
    assert tried(WINDOWED, longest=0)[1] >= {FLASH4, "default"}


@pytest.mark.parametrize(
    "lack",
    [
        {"has_flash4": False},
        {"bf16": False},
        {"deterministic": True},
        {"model": {**WINDOWED, "pattern": "L"}},
        {"model": {**WINDOWED, "window": SEQ_LEN}},
    ],
)
def test_rows_without_windows_and_runs_without_the_package_are_tried_as_ever(tried, lack):
    assert "default" in tried(**{"model": WINDOWED, **lack})[1]


def test_rows_of_documents_are_not_told_by_their_windows_alone(monkeypatch):
    monkeypatch.setattr(attention, "has_flash4", lambda: True)
    backend = make(WINDOWED)
    backend._takes_kernels = True
    monkeypatch.setattr(backend, "_runs", lambda *_: True)
    assert backend._without_masks(rows_of(0)) == [FLASH4, CUDNN_FLASH4]
    assert backend._without_masks(np.zeros((ROWS, 3, SEQ_LEN), np.int32)) == []


def test_kernels_that_are_being_built_are_waited_for_before_they_are_tried():
    backend, waited = make(WINDOWED), []
    backend._builders = SimpleNamespace(wait=lambda: waited.append(True), stop=lambda: None)
    backend._try(rows_of(0), attention="default")
    assert not waited
    backend._try(rows_of(0), attention=FLASH4)
    assert waited
