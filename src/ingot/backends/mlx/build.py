"""Build the model of a config for MLX. torch builds it and draws its weights, so that a seed gives the same start everywhere.

Only an outline of torch's model without values is kept: its tensors, their kinds, and its FLOPs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from ingot.backends.limits import refuse_precision, refuse_torch_only
from ingot.backends.mlx.models import (
    Pass,
    Weights,
    document_mask,
    golf_hidden,
    gpt2_hidden,
    head_logits,
    head_loss,
    llama_hidden,
)
from ingot.backends.torch.build import build_model, build_outline, flops_per_token
from ingot.backends.torch.state import NAMES as TORCH_NAMES
from ingot.backends.torch.state import check_fits, model_records
from ingot.config.schema import Config, OptimizerSection
from ingot.optim.assign import ParameterGroup
from ingot.optim.groups import members
from ingot.runtime.tensors import TensorRecord, to_array

NAMES = {mx.float32: "F32", mx.bfloat16: "BF16", mx.float16: "F16"}
DTYPES = {name: dtype for dtype, name in NAMES.items()}


def record(name: str, value: mx.array) -> TensorRecord:
    """Return a record with a copy of an array."""
    bits = value.view(mx.uint16) if value.dtype == mx.bfloat16 else value  # numpy has no bfloat16
    data = np.array(bits).reshape(-1).view(np.uint8).data
    return TensorRecord(name, NAMES[value.dtype], tuple(value.shape), data)


def number(value: mx.array) -> float:
    """Wait for an array of one number and return its value."""
    return float(np.array(value))


def records(values: Mapping[str, mx.array]) -> list[TensorRecord]:
    """Return records with copies of arrays, by name."""
    return [record(name, value) for name, value in values.items()]


def array(source: TensorRecord, dtype: mx.Dtype | None = None) -> mx.array:
    """Return an array with a record's values, in its dtype or another."""
    return mx.array(to_array(source)).astype(dtype or DTYPES.get(source.dtype, mx.float32))


FAMILIES: dict[str, tuple[Callable[..., mx.array], str]] = {
    "golf": (golf_hidden, "tok_emb.weight"),
    "gpt2": (gpt2_hidden, "transformer.wte.weight"),
    "llama": (llama_hidden, "wte.weight"),
}
PRECISIONS = {"fp32": mx.float32, "bf16": mx.bfloat16}


@dataclass(frozen=True)
class MLXModel:
    """Functions over the weights of a family, and torch's outline of it."""

    settings: Any
    outline: Any  # torch's model, on the meta device
    loss_chunk: int | None

    def losses(self, weights: Weights, tokens: mx.array, targets: mx.array, *documents: mx.array, run: Pass) -> mx.array:
        """Return the summed loss of the targets that count."""
        if documents:
            run = replace(run, mask=document_mask(documents[0]))
        hidden = self._hidden(weights, tokens, run)
        weight, softcap = self._head(weights)
        return head_loss(hidden, weight, targets, softcap, run.dtype, self.loss_chunk)

    def logits_from(self, weights: Weights, tokens: mx.array, first: int, run: Pass) -> mx.array:
        """Return the logits (B, N, V) after each token from position `first` on; -1: after the last."""
        weight, softcap = self._head(weights)
        return head_logits(self._hidden(weights, tokens, run)[:, first:], weight, softcap, run.dtype)

    def _hidden(self, weights: Weights, tokens: mx.array, run: Pass) -> mx.array:
        return FAMILIES[self.settings.family][0](self.settings, weights, tokens, run)

    def _head(self, weights: Weights) -> tuple[mx.array, float | None]:
        """Return the weight of the head, which may be the embedding's, and the softcap of its logits."""
        own = weights.get("lm_head.weight")
        return weights[FAMILIES[self.settings.family][1]] if own is None else own, getattr(self.settings, "softcap", None)

    def groups(self, settings: OptimizerSection) -> list[tuple[ParameterGroup, list[str]]]:
        """Return every optimizer group that has parameters, with their names."""
        return [(group, list(parameters)) for group, parameters in members(self.outline, settings)]

    def flops_per_token(self, seq_len: int) -> float:
        return flops_per_token(self.outline, seq_len)

    def read(self, records: Mapping[str, TensorRecord], where: str) -> Weights:
        """Return the weights in records, in the model's dtypes; CheckpointError says what does not fit."""
        check_fits(self.outline, records, where)
        dtypes = {name: DTYPES[TORCH_NAMES[value.dtype]] for name, value in self.outline.state_dict().items()}
        return {name: array(source, dtypes[name]) for name, source in records.items()}


def outline(config: Config, vocab_size: int) -> MLXModel:
    """Build the model of a config, still without weights."""
    refuse_torch_only(config)
    model = build_outline(config, vocab_size)
    return MLXModel(config.model, model, config.training.loss_chunk)


def build(config: Config, vocab_size: int) -> tuple[MLXModel, Weights]:
    """Build the model of a config and its initial weights, which depend on training.seed alone."""
    refuse_torch_only(config)
    refuse_precision(config)
    drawn = build_model(config, vocab_size)
    initial = {record.name: record for record in model_records(drawn)}
    model = MLXModel(config.model, drawn.to("meta"), config.training.loss_chunk)
    return model, model.read(initial, "the initial model")
