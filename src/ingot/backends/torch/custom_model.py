"""Check a custom model before the first step, above all that it is causal: a leak of future tokens makes the loss too low.

The checks run in float32, uncompiled, on one row of random tokens and on a copy of the model. They run with the initial weights
and again after adding noise, because a zero-initialised head would hide any leak.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ingot.backends.torch.build import build_model, set_numbers
from ingot.config.schema import Config
from ingot.errors import ConfigError, Setting
from ingot.model.registry import error_location
from ingot.optim.groups import has_custom_optimizers, make_optimizers
from ingot.runtime.tensors import IGNORED

LEAK_TOLERANCE = 1e-4  # changes up to this fraction of the largest logit are not leaks; 1,000 times the rounding error of float32
MEAN_TOLERANCE = 1e-3  # largest accepted relative difference between the loss of a row and the sum of the losses of its two parts
OPTIMIZER_STEPS = 2  # some custom optimizers create state only in their second step
SET_BY_RUN = {"params", "lr", "weight_decay", "momentum", "name"}  # parameter-group entries that the run sets
T = TypeVar("T")


def check_custom_model(config: Config, file: str, vocab_size: int, device: torch.device) -> None:
    """Raise ConfigError if a config's custom model cannot be trained or evaluated."""
    model = build_model(config, vocab_size).to(device)
    stages = [stage.model for stage in config.training.stages]
    check(model, file, vocab_size, config.data.seq_len, config.data.document_mask, stages)
    if has_custom_optimizers(model):
        check_custom_optimizers(model, file, vocab_size, config)


def check(
    model: nn.Module, file: str, vocab_size: int, seq_len: int, documents: bool, stages: Sequence[Mapping[str, float]] = ()
) -> None:
    """Raise ConfigError if a model is not causal, its loss is not the mean over targets other than -1, or a parameter is unused.

    `stages` holds the values that each stage passes to `set`; the last stage's are already set. The check modifies the weights.
    """
    checker = _Checker(model, file, vocab_size, seq_len, documents)
    checker.values()
    reached: set[str] = set()
    for numbers in stages or [{}]:
        set_numbers(model, numbers, "training.stages")
        checker.backward()
        reached |= {name for name, p in model.named_parameters() if p.grad is not None}  # even if the gradient is zero
    if untrained := [name for name, p in model.named_parameters() if p.requires_grad and name not in reached]:
        more = f" and {len(untrained) - 1:,} more" if len(untrained) > 1 else ""
        raise checker.refused(
            f"the loss does not depend on {untrained[0]}{more}; use it in forward or freeze it with requires_grad_(False)"
        )
    with torch.no_grad():
        for p in (p for p in model.parameters() if p.is_floating_point() or p.is_complex()):  # frozen parameters may be integers
            p.add_(torch.randn_like(p), alpha=0.1 if p.ndim < 2 else p.shape[-1] ** -0.5)
    checker.values(insist=False)


def check_custom_optimizers(model: nn.Module, file: str, vocab_size: int, config: Config) -> None:
    """Raise ConfigError if a custom optimizer cannot take a step or has state that checkpoints cannot store."""
    checker = _Checker(model, file, vocab_size, config.data.seq_len, config.data.document_mask)
    device = checker.tokens.device
    optimizers = checker.called("make_optimizers(groups)", lambda: make_optimizers(model, config.optimizer, device))
    checker.backward()
    names: dict[Any, str] = {p: name for name, p in model.named_parameters()}
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        before = _group_entries(optimizer)
        for _ in range(OPTIMIZER_STEPS):
            checker.called(f"a step of {kind}", optimizer.step)
        for p, state in optimizer.state.items():
            for key, value in state.items():
                if not isinstance(value, Tensor):
                    raise checker.refused(
                        f"{kind} stores {key!r} of {names[p]} as {type(value).__name__}; "
                        "store it as a tensor, or a resumed run would lose it"
                    )
        after = _group_entries(optimizer)
        if changed := [entry[1] for entry in after if entry not in before or after[entry] != before[entry]]:
            raise checker.refused(
                f"a step of {kind} changes {changed[0]!r} in param_groups, which checkpoints do not store; "
                "store it as a tensor in a parameter's state, or a resumed run would lose it"
            )


def _group_entries(optimizer: torch.optim.Optimizer) -> dict[tuple[int, Any], Any]:
    """Return all entries of an optimizer's parameter groups that the run does not set itself, keyed by (group index, key)."""

    def comparable(value: Any) -> Any:  # copies tensors to bytes, because a step may modify them in place
        return value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes() if isinstance(value, Tensor) else value

    groups = enumerate(optimizer.param_groups)
    entries = {(number, key): entry for number, group in groups for key, entry in group.items() if key not in SET_BY_RUN}
    return {place: tree_map(comparable, entry) for place, entry in entries.items()}


class _Checker:
    def __init__(self, model: nn.Module, file: str, vocab_size: int, seq_len: int, documents: bool):
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.model, self.file, self.vocab_size, self.length = model, file, vocab_size, seq_len
        self.tokens = torch.randint(vocab_size, (1, seq_len), device=device)
        self.targets = torch.randint(vocab_size, (1, seq_len), device=device)
        self.more: tuple[Tensor, ...] = (torch.zeros_like(self.tokens),) if documents else ()

    def refused(self, what: str) -> ConfigError:
        return ConfigError(f"{{0}}: {what}", Setting("model.file", self.file))

    @torch.no_grad()
    def values(self, insist: bool = True) -> None:
        """Check causality, and that the loss is the mean over targets other than -1; if `insist`, require finite values."""
        self.model.eval()
        logits = self._logits(self.tokens)
        if not (insist or logits.isfinite().all()):
            return
        for first in sorted({max(1, self.length // 3), self.length - 1} - {0}):
            changed = self.tokens.clone()
            changed[:, first:] = (changed[:, first:] + 1) % self.vocab_size
            differ = (self._logits(changed)[:, :first] - logits[:, :first]).abs().amax(-1)[0]
            leaks = differ > LEAK_TOLERANCE * logits.abs().max()
            if leaks.any():
                position = int(leaks.nonzero()[0, 0])
                raise self.refused(
                    f"Model sees the future: changing tokens from position {first} on changes the logits of position {position}; "
                    "let each position attend only to itself and to earlier positions (is_causal=True)"
                )
        part = max(1, self.length // 3)
        early, late = self.targets.clone(), self.targets.clone()
        early[:, part:], late[:, :part] = IGNORED, IGNORED
        whole = float(self._loss(self.targets)) * self.length
        if not math.isfinite(whole):
            if not insist:
                return
            raise self.refused(f"the loss of the initial weights is {whole / self.length}; check their initialisation")
        parts = float(self._loss(early)) * part + (float(self._loss(late)) * (self.length - part) if self.length > 1 else 0.0)
        if not abs(parts - whole) <= MEAN_TOLERANCE * abs(whole):
            raise self.refused(
                "the loss is not the mean over the targets that are not -1; compute it with "
                "F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)"
            )

    def backward(self) -> None:
        """Run a forward and backward pass, which sets the gradients of the parameters."""
        self.model.train()
        self.model.zero_grad(set_to_none=True)
        what = "a backward pass through forward(tokens, targets)"
        self.called(what, lambda: torch.autograd.backward(self._loss(self.targets)))

    def _logits(self, tokens: Tensor) -> Tensor:
        more = (None, *self.more) if self.more else ()
        logits = self.called("forward(tokens)", lambda: self.model(tokens, *more))
        wanted = f"logits of shape (1, {self.length}, {self.vocab_size} or more) for one row"
        if not isinstance(logits, Tensor):
            raise self.refused(f"forward(tokens) returns a {type(logits).__name__}; it must return {wanted}")
        if logits.ndim != 3 or logits.shape[:2] != tokens.shape or logits.shape[2] < self.vocab_size:
            raise self.refused(f"forward(tokens) returns shape {tuple(logits.shape)}; it must return {wanted}")
        return logits.float()

    def _loss(self, targets: Tensor) -> Tensor:
        loss = self.called("forward(tokens, targets)", lambda: self.model(self.tokens, targets, *self.more))
        if not isinstance(loss, Tensor) or loss.ndim:
            actual = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise self.refused(f"forward(tokens, targets) returns {actual}; it must return the mean loss, a scalar")
        return loss

    def called(self, what: str, call: Callable[[], T]) -> T:
        """Run `call`, which uses the custom model; turn an exception into a ConfigError that gives its file and line."""
        try:
            return call()
        except (ConfigError, MemoryError, torch.OutOfMemoryError):
            raise
        except (Exception, SystemExit) as error:
            hint = " (targets of -1 must be ignored)" if isinstance(error, IndexError) and "-1" in str(error) else ""
            message = f"{type(error).__name__}: {' '.join(str(error).split())}{hint}"
            raise ConfigError(
                f"{{0}}: {what} fails: {message}", Setting("model.file", error_location(self.file, error))
            ) from error
