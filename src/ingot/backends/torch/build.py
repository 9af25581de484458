"""Build the model of a config, with or without weights; set up gradient checkpointing; count FLOPs per token."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from ingot.backends.torch.state import NAMES
from ingot.config.schema import Config
from ingot.errors import ConfigError, Setting
from ingot.model.registry import build
from ingot.optim.groups import untied_heads

DRAWS = {Tensor.normal_, Tensor.uniform_}


def build_model(config: Config, vocab_size: int) -> nn.Module:
    """Build the model of a config; training.seed determines its initial weights."""
    section = config.model.model_dump()
    rows = section["vocab_size"]
    if rows is not None and rows < vocab_size:
        raise ConfigError(
            f"{{0}} is smaller than the tokenizer's vocabulary of {vocab_size}; raise it or set it to null",
            Setting("model.vocab_size", rows),
        )
    section["vocab_size"] = rows or vocab_size
    section["context"] = section["context"] or config.data.seq_len
    torch.manual_seed(config.training.seed)
    try:
        model = build(section)
        state = model.state_dict()
    except ValueError as error:
        raise ConfigError(str(error).replace("model.file", "{0}", 1), Setting("model.file")) from error
    except RecursionError:
        raise ConfigError("{0}: Model contains itself or is nested too deeply", Setting("model.file", section["file"])) from None
    for name, value in state.items():
        if value.dtype not in NAMES:
            raise ConfigError(f"checkpoints cannot store {name} of dtype {value.dtype}; make it a buffer with persistent=False")
    if not hasattr(model, "context"):
        model.context = section["context"]
    if config.training.loss_chunk is not None:
        if not hasattr(model, "loss_chunk"):
            raise ConfigError("training.loss_chunk needs a model with an attribute `loss_chunk`; this custom model has none")
        model.loss_chunk = config.training.loss_chunk  # type: ignore[assignment]
    if config.data.document_mask and "documents" not in inspect.signature(model.forward).parameters:
        raise ConfigError("data.document_mask needs a model whose forward takes `documents`, the document number of each token")
    for number, stage in enumerate(config.training.stages):  # check the values of every stage; those of the last stage remain set
        set_numbers(model, stage.model, f"training.stages.{number}.model")
    return model


def build_outline(config: Config, vocab_size: int) -> nn.Module:
    """Build a config's model on the meta device, where it takes no memory, because an untrusted config may ask for any size."""
    with torch.device("meta"), _Outlines():
        return build_model(config, vocab_size)


def fill_outline(outline: nn.Module, device: torch.device) -> nn.Module:
    """Move an outline (a model on the meta device) to a device; its weights are allocated but not initialised."""
    with _Outlines():
        return outline.to_empty(device=device)


class _Outlines(TorchFunctionMode):
    """A mode that avoids initialisers and empty_like on meta tensors, because they make torch import its compiler (2 s)."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        given = kwargs or {}
        tensor = args[0] if args else given.get("tensor")
        if isinstance(tensor, Tensor) and tensor.is_meta:
            if func in DRAWS or getattr(func, "__module__", None) == nn.init.__name__:
                return tensor
            if func is torch.empty_like:
                return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, **given)
        return func(*args, **given)


def set_numbers(model: nn.Module, numbers: Mapping[str, float], where: str) -> None:
    """Pass a stage's values to the model's method `set`; `where` is the setting to name in error messages."""
    if not numbers:
        return
    if not callable(change := getattr(model, "set", None)):
        raise ConfigError(f"{where} needs a model with a method `set` that takes {', '.join(numbers)}; this model has none")
    try:
        change(**numbers)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: the model's method `set` rejects {dict(numbers)}: {error}") from error


def checkpoint_blocks(model: nn.Module, every: int = 1) -> None:
    """Checkpoint every `every`-th block, starting with the first: recompute its activations in the backward pass."""
    blocks = getattr(model, "blocks", None)
    if blocks is None:
        raise ConfigError("training.gradient_checkpointing needs a model with `blocks`, a ModuleList of its layers")
    for block in list(blocks)[::every]:
        plain = block.forward

        def forward(*args: Any, plain: Any = plain, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return plain(*args, **kwargs)
            return checkpoint(plain, *args, use_reentrant=False, **kwargs)

        block.forward = forward


def flops_per_token(model: nn.Module, seq_len: int) -> float:
    """Return training FLOPs per token: the model's own `flops`, or else 6 * matmul weights + 12 * layers * width * seq_len."""
    if callable(own := getattr(model, "flops", None)):
        return float(own(seq_len))
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    tied = not untied_heads(model)
    lookups = sum(m.weight.numel() for m in embeddings[tied:])  # not used in matmuls, unlike a tied first embedding
    width = embeddings[0].embedding_dim if embeddings else 0
    layers = len(getattr(model, "blocks", ()))
    return 6.0 * (sum(p.numel() for p in model.parameters()) - lookups) + 12.0 * layers * width * seq_len
