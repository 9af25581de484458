"""What a model of one's own is refused for before its first step."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ingot
from ingot.backends.torch import custom_model as own_model
from ingot.config.loading import load_config
from ingot.config.schema import Config
from ingot.errors import ConfigError
from ingot.model.gpt2 import GPT2
from ingot.model.llama import Llama

VOCAB, LENGTH, WIDTH = 17, 24, 8


class Good(nn.Module):
    """Attention over what came before, with dropout, a running count and a head of zeros."""

    causal, zeros = True, False

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.qkv, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, VOCAB)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("calls", torch.zeros(()))
        if self.zeros:
            nn.init.zeros_(self.head.weight), nn.init.zeros_(self.head.bias)

    def logits(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        x = self.embed(tokens) + self.position.weight[: tokens.size(1)]
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.head(self.drop(x + F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)))

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        logits = self.logits(tokens)
        return logits if targets is None else self.loss(logits, targets)


class ZeroHead(Good):
    zeros = True


class SeesAll(Good):
    causal = False


class SeesAllBehindZeros(SeesAll):
    zeros = True


class SeesTheNext(Good):
    def logits(self, tokens: Tensor) -> Tensor:
        return super().logits(tokens) + 0.01 * self.head(self.embed(tokens.roll(-1, 1)))


class SeesItsChunk(Good):
    def logits(self, tokens: Tensor) -> Tensor:
        chunks = self.embed(tokens).unflatten(1, (-1, 4))
        return super().logits(tokens) + self.head(chunks.mean(2, keepdim=True).expand_as(chunks).flatten(1, 2))


class CountsIgnored(Good):
    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten().clamp(min=0))


class CountsIgnoredBehindZeros(CountsIgnored):
    zeros = True


class DividesByAll(Good):
    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum") / targets.numel()


class FailsOnIgnored(Good):
    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


class ManyLosses(Good):
    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="none")


class Pair(Good):
    def forward(self, tokens: Tensor, targets: Tensor | None = None):
        return super().forward(tokens), None if targets is None else super().forward(tokens, targets)


class LastOnly(Good):
    def logits(self, tokens: Tensor) -> Tensor:
        return super().logits(tokens)[:, -1:]


class Idle(Good):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2)


class Frozen(Idle):
    def __init__(self) -> None:
        super().__init__()
        self.spare.requires_grad_(False)


class FrozenNumbers(Good):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(3), requires_grad=False)


class Broken(Good):
    def logits(self, tokens: Tensor) -> Tensor:
        raise RuntimeError("no such\nthing")


class Ends(Good):
    def logits(self, tokens: Tensor) -> Tensor:
        raise SystemExit(0)


def check(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    own_model.check(make(), "mine.py", VOCAB, LENGTH, documents=False)


BAD = {
    SeesAll: r"Model sees the future: changing tokens from position 8 on changes the logits of position 0; .*is_causal=True",
    SeesAllBehindZeros: "Model sees the future",
    SeesTheNext: "Model sees the future: changing tokens from position 8 on changes the logits of position 7",
    SeesItsChunk: "Model sees the future: changing tokens from position 23 on changes the logits of position 20",
    CountsIgnored: r"the loss is not the mean over the targets that are not -1; compute it with .* ignore_index=-1",
    CountsIgnoredBehindZeros: "the loss is not the mean over the targets that are not -1",
    DividesByAll: "the loss is not the mean over the targets that are not -1",
    FailsOnIgnored: r"forward\(tokens, targets\) fails: IndexError: .*\(targets of -1 must be ignored\)",
    ManyLosses: r"forward\(tokens, targets\) returns a tensor of shape \(24,\); it must return the mean loss, a scalar",
    Pair: r"forward\(tokens\) returns a tuple; it must return logits of shape \(1, 24, 17 or more\)",
    LastOnly: r"forward\(tokens\) returns shape \(1, 1, 17\); it must return logits of shape \(1, 24, 17 or more\)",
    Idle: r"the loss does not depend on spare\.weight and 1 more; use it in forward or freeze it with requires_grad_\(False\)",
    Ends: r"forward\(tokens\) fails: SystemExit: 0",
    Broken: r"forward\(tokens\) fails: RuntimeError: no such thing",
}


def test_a_model_that_is_a_part_of_itself_is_refused(tmp_path: Path) -> None:
    begin = "from torch import nn\nclass Model(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    (tmp_path / "mine.py").write_text(begin + "        self.again = self\n")
    with pytest.raises(ConfigError, match="Model contains itself"):
        ingot.train(model={"file": str(tmp_path / "mine.py")}, training={"max_steps": 1, "device": "cpu"}, quiet=True)


@pytest.mark.parametrize("make", BAD, ids=lambda make: make.__name__)
def test_a_model_that_would_be_scored_wrongly_is_refused_in_one_line(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(ConfigError, match=rf"^model\.file=mine\.py: {BAD[make]}") as caught:
        check(make)
    assert "\n" not in str(caught.value)


def gpt2() -> nn.Module:
    return GPT2(vocab_size=VOCAB, context=LENGTH, layers=2, heads=2, width=8, dropout=0.1)


def llama() -> nn.Module:
    return Llama(vocab_size=VOCAB, context=LENGTH, layers=2, heads=2, width=16)


@pytest.mark.parametrize("make", [Good, ZeroHead, Frozen, FrozenNumbers, gpt2, llama], ids=lambda make: make.__name__)
def test_a_good_model_is_taken(make: Callable[[], nn.Module]) -> None:
    check(make)


def train_model(folder: Path, body: str) -> None:
    """Train with a file whose Model is derived from Good."""
    source = Path(__file__).read_text()
    good = source[source.index("class Good") : source.index("class ZeroHead")].replace("VOCAB", "260").replace("LENGTH", "24")
    head = "import torch, torch.nn.functional as F\nfrom torch import Tensor, nn\nWIDTH = 8\n"
    (folder / "mine.py").write_text(f"{head}{good}\nclass Model(Good):\n{body}")
    ingot.train(
        recipe="demo",
        quiet=True,
        model={"file": str(folder / "mine.py")},
        data={"seq_len": 24, "tokenizer": "byte"},
        evaluation={"stride": None},
        training={"output_dir": str(folder / "run"), "device": "cpu", "tokens_per_step": 48, "micro_batch": 2},
    )


def test_training_refuses_it_before_there_is_a_run_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"model.file={tmp_path / 'mine.py'}: Model sees the future")):
        train_model(tmp_path, "    causal = False\n")
    assert not (tmp_path / "run").exists()


def test_training_refuses_a_loss_that_is_a_scalar_for_one_row_only(tmp_path: Path) -> None:
    body = """
    def loss(self, logits, targets):
        return torch.stack([super(Model, self).loss(*row) for row in zip(logits[:, None], targets)]).squeeze()
    """
    with pytest.raises(ConfigError, match="must return the mean loss, a scalar tensor"):
        train_model(tmp_path, body)


class Momentum(torch.optim.Optimizer):
    """Gradient descent with momentum and a count of steps."""

    counts_with_tensors = True

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                first = torch.zeros(()) if self.counts_with_tensors else 0
                state["steps"] = state.get("steps", first) + 1
                state["mean"] = state.get("mean", torch.zeros_like(p)).lerp(p.grad, 0.1)
                p.add_(state["mean"], alpha=-group["lr"])


class Forgetful(Momentum):
    counts_with_tensors = False


class CountsInGroups(Momentum):
    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1


class GrowsInPlace(Momentum):
    """Has a tensor in its groups that changes from the second step on, and numbers that do not."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__([{**group, "d": torch.zeros(1), "betas": (0.9, 0.95)} for group in groups])

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["d"] += bool(self.state)
        super().step()


class OwnOptimizer(Good):
    """Makes what a test puts here of the groups that it is given."""

    make: Callable[[list[dict[str, Any]]], Any] = Momentum

    def make_optimizers(self, groups: list[dict[str, Any]]) -> Any:
        return type(self).make(groups)


def small_config() -> Config:
    rows = {"data": {"seq_len": LENGTH}, "training": {"tokens_per_step": LENGTH}, "evaluation": {"stride": LENGTH}}
    return load_config(recipe="demo", python=rows, environment={}).config


def refusal_of(make: Callable[[list[dict[str, Any]]], Any]) -> str:
    class Model(OwnOptimizer):
        pass

    Model.make = staticmethod(make)  # type: ignore[method-assign]
    config = small_config()
    with pytest.raises(ConfigError) as refused:
        own_model.check_custom_optimizers(Model(), "mine.py", VOCAB, config)
    return str(refused.value)


def test_optimizers_of_ones_own_are_checked_by_a_step() -> None:
    config = small_config()
    own_model.check_custom_optimizers(OwnOptimizer(), "mine.py", VOCAB, config)
    assert "Forgetful stores 'steps' of embed.weight as int; store it as a tensor" in refusal_of(Forgetful)
    assert "must return a torch.optim.Optimizer or a list" in refusal_of(lambda groups: None)
    assert "parameter exactly once" in refusal_of(lambda groups: Momentum(groups[1:]))
    nameless = refusal_of(lambda groups: Momentum([{"params": group["params"], "lr": 0.1} for group in groups]))
    assert "group names" in nameless
    assert "make_optimizers(groups) fails: ZeroDivisionError" in refusal_of(lambda groups: 1 / 0)


def test_what_an_optimizer_remembers_in_its_groups_is_refused_since_no_checkpoint_has_it() -> None:
    told = "changes 'k' in param_groups, which checkpoints do not store; store it as a tensor in a parameter's state"
    assert f"a step of CountsInGroups {told}" in refusal_of(CountsInGroups)
    assert "a step of GrowsInPlace changes 'd' in param_groups" in refusal_of(GrowsInPlace)
