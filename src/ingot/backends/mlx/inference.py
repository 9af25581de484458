"""Inference with MLX: the device, and a model for generation and scoring, with averaged weights if there are any.

Torch builds the model and initialises its weights, so that a seed gives the same initial weights on every backend. Only an
outline of the torch model, on the meta device, is kept: tensor shapes and dtypes, parameter groups and FLOPs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ingot.backends.base import Rounder
from ingot.backends.mlx.models import (
    Cached,
    Pass,
    Weights,
    frontier_hidden,
    golf_hidden,
    gpt2_hidden,
    head_logits,
    head_loss,
    llama_hidden,
)
from ingot.backends.sampling import RowScores, Sampling
from ingot.backends.torch.build import build_model, build_outline, flops_per_token
from ingot.backends.torch.state import NAMES as TORCH_NAMES
from ingot.backends.torch.state import check_fits, model_records
from ingot.config.schema import Config
from ingot.errors import ConfigError, DataError, RunError, Setting
from ingot.optim.assign import ParameterGroup
from ingot.optim.groups import members
from ingot.runtime.devices import Device
from ingot.runtime.ranks import Ranks
from ingot.runtime.tensors import IGNORED, Batch, TensorRecord, to_array

VERSION = metadata.version("mlx")
NAMES = {mx.float32: "F32", mx.bfloat16: "BF16", mx.float16: "F16"}
DTYPES = {name: dtype for dtype, name in NAMES.items()}


def record(name: str, value: mx.array) -> TensorRecord:
    """Copy an array into a TensorRecord."""
    bits = value.view(mx.uint16) if value.dtype == mx.bfloat16 else value  # numpy has no bfloat16
    data = np.array(bits).reshape(-1).view(np.uint8).data
    return TensorRecord(name, NAMES[value.dtype], tuple(value.shape), data)


def number(value: mx.array) -> float:
    """Evaluate a one-element array and return its value."""
    return float(np.array(value))


def records(values: Mapping[str, mx.array]) -> list[TensorRecord]:
    """Copy named arrays into TensorRecords."""
    return [record(name, value) for name, value in values.items()]


def array(source: TensorRecord, dtype: mx.Dtype | None = None) -> mx.array:
    """Return the values of a TensorRecord as an array, converted to `dtype` if given."""
    return mx.array(to_array(source)).astype(dtype or DTYPES.get(source.dtype, mx.float32))


FAMILIES: dict[str, tuple[Callable[..., mx.array], str]] = {
    "frontier": (frontier_hidden, "embedding.weight"),
    "golf": (golf_hidden, "tok_emb.weight"),
    "gpt2": (gpt2_hidden, "transformer.wte.weight"),
    "llama": (llama_hidden, "wte.weight"),
}
PRECISIONS = {"fp32": mx.float32, "bf16": mx.bfloat16}


def find_mlx_device() -> Device:
    """Return the MLX device (a Mac's GPU, else the CPU) with its supported precisions in order of preference."""
    if mx.metal.is_available():
        return Device("mlx", 0, f"mlx {VERSION}, {mx.device_info().get('device_name', 'GPU')}", None, ("bf16", "fp32"))
    return Device("mlx", 0, f"mlx {VERSION}, CPU", None, ("fp32", "bf16"))


def make_matmul() -> tuple[int, Callable[[], object]]:
    """Return the size of a large square float32 matmul and a function that runs it."""
    size = 1024 if mx.metal.is_available() else 256
    a = mx.ones((size, size))
    return size, lambda: mx.eval(a @ a)


def choose(scores: NDArray[Any], sampling: Sampling, draw: np.random.Generator) -> int:
    """Sample the next token from the logits (V) of one row, or take the likeliest if sampling is greedy."""
    if sampling.greedy:
        return int(scores.argmax())
    ids = np.argsort(-scores, kind="stable")
    if 0 < sampling.top_k < len(ids):
        ids = ids[: sampling.top_k]
    p = np.exp((scores[ids].astype(np.float64) - scores[ids[0]]) / sampling.temperature)
    p /= p.sum()
    if sampling.top_p < 1:
        p[p.cumsum() - p >= max(sampling.top_p, 1e-9)] = 0.0  # drop a token if the likelier ones already add up to top_p
    sums = p.cumsum()
    index = int(np.searchsorted(sums, draw.random() * sums[-1], side="right"))
    return int(ids[min(index, int(np.flatnonzero(p)[-1]))])


def draw(config: Config, vocab_size: int) -> tuple[Any, dict[str, TensorRecord], list[tuple[ParameterGroup, list[str]]]]:
    """Return a config's torch model on the meta device, its initial weights (from training.seed) and its optimizer groups."""
    model = build_model(config, vocab_size)
    initial = {record.name: record for record in model_records(model)}
    groups = [(group, list(parameters)) for group, parameters in members(model, config.optimizer)]
    return model.to("meta"), initial, groups


class MLXInference:
    """The MLX implementation of Inference (methods documented in base.py); the model is a function of the weights."""

    def __init__(self, config: Config, outline: Any, vocab_size: int, precision: str, ranks: Ranks):
        self.device = find_mlx_device()
        self.ranks, self.vocab_size, self.precision = ranks, vocab_size, precision
        window = {"window": outline.window} if hasattr(outline, "window") else {}  # value of the last of training.stages
        self._settings: Any = config.model.model_copy(update=window)
        self._outline, self._loss_chunk = outline, config.training.loss_chunk
        self.parameters = sum(p.numel() for p in outline.parameters())
        self._dtype = PRECISIONS[precision]
        self._weights: Weights = {}
        self._average: Weights | None = None

    @classmethod
    def of(cls, config: Config, vocab_size: int) -> MLXInference:
        """Build the model of a config without loading weights."""
        precision = "bf16" if config.training.precision == "bf16" else "fp32"  # a model trained in fp16 is scored in fp32
        return cls(config, build_outline(config, vocab_size), vocab_size, precision, Ranks())

    def maximum(self, values: Sequence[float]) -> list[float]:
        return list(values)  # there is only one rank

    total = maximum

    def broadcast(self, text: str) -> str:
        return text

    def close(self) -> None:
        """Do nothing: there are no resources to release besides memory."""

    def _losses(self, weights: Weights, run: Pass, tokens: mx.array, targets: mx.array, *documents: mx.array) -> mx.array:
        """Return the summed loss of the targets that are not -1."""
        if documents:
            same = documents[0][:, None, :, None] == documents[0][:, None, None, :]
            T = tokens.shape[1]
            run = replace(run, mask=same & mx.tri(T, T, 0, dtype=mx.bool_))
        hidden, head, softcap = self._hidden(weights, run, tokens)
        return head_loss(hidden, head, targets, softcap, run.dtype, self._loss_chunk)

    def _logits(self, weights: Weights, run: Pass, tokens: mx.array, first: int) -> mx.array:
        """Return the next-token logits (B, N, V) at every position from `first` on (-1: only the last position)."""
        hidden, head, softcap = self._hidden(weights, run, tokens)
        return head_logits(hidden[:, first:], head, softcap, run.dtype)

    def _hidden(self, weights: Weights, run: Pass, tokens: mx.array) -> tuple[mx.array, mx.array, float | None]:
        """Return the hidden states, the weight of the output head (the embedding, if tied) and the softcap of the logits."""
        hidden, embedding = FAMILIES[self._settings.family]
        states, own = hidden(self._settings, weights, tokens, run), weights.get("lm_head.weight")
        return states, weights[embedding] if own is None else own, getattr(self._settings, "softcap", None)

    def flops_per_token(self, seq_len: int) -> float:
        return flops_per_token(self._outline, seq_len)

    def score(self, batch: Batch) -> float:
        if not np.count_nonzero(batch[:, 1] != IGNORED):
            return 0.0
        return number(self._losses(self._shown(), Pass(self._dtype), *self._upload(batch)))

    def generate(self, prompts: list[list[int]], sampling: Sampling) -> Iterator[list[int]]:
        """Yield the next token of every prompt, indefinitely; prompts run as one batch only if all have the same length."""
        weights, seeds = self._shown(), sampling.row_seeds(len(prompts))
        if len({len(prompt) for prompt in prompts}) <= 1:
            return self._write(weights, prompts, seeds, sampling)
        alone = [self._write(weights, [prompt], (seed,), sampling) for prompt, seed in zip(prompts, seeds, strict=True)]
        return ([row[0] for row in rows] for rows in zip(*alone, strict=True))

    def _write(self, weights: Weights, prompts: list[list[int]], seeds: Sequence[int], sampling: Sampling) -> Iterator[list[int]]:
        """Yield the next token of every prompt, indefinitely; once the context is full, each token recomputes all of it."""
        draws = [np.random.default_rng(seed) for seed in seeds]
        written: list[set[int]] = [set() for _ in prompts]
        seen = new = np.array(prompts, dtype=np.int32)  # (B, T)
        cache: list[Cached] = []
        cached, context = sampling.use_cache, self._outline.context
        while True:
            seen = seen[:, -context:]
            held = cache[0][0].shape[2] if cache else 0
            cached = cached and held + new.shape[1] <= context  # once the context is full, cached keys have wrong positions
            run = Pass(self._dtype, cache=cache if cached else None)
            logits = self._logits(weights, run, mx.array(new if cached else seen), -1)
            scores, cache = np.array(logits)[:, 0, : self.vocab_size], run.grown
            if not np.isfinite(scores).all():
                raise RunError("the logits are not finite, so generation stops: the weights are damaged or training diverged")
            if (penalty := sampling.repetition_penalty) != 1:
                for row, earlier in zip(scores, written, strict=True):
                    ids = sorted(earlier)
                    row[ids] = np.where(row[ids] < 0, row[ids] * penalty, row[ids] / penalty)
            tokens = [choose(row, sampling, draw) for row, draw in zip(scores, draws, strict=True)]
            for earlier, token in zip(written, tokens, strict=True):
                earlier.add(token)
            new = np.array(tokens, dtype=np.int32)[:, None]
            seen = np.concatenate([seen, new], axis=1)
            yield tokens

    def score_rows(self, rows: Sequence[Sequence[int]], firsts: Sequence[int], top: int) -> list[RowScores]:
        weights, scored = self._shown(), []
        for row, first in zip(rows, firsts, strict=True):
            tokens = mx.array(np.array([row[:-1]], dtype=np.int32))
            logits = self._logits(weights, Pass(self._dtype), tokens, first - 1).astype(mx.float32)
            scores = np.array(logits)[0].astype(np.float64)
            scores -= scores.max(-1, keepdims=True)
            scores = (scores - np.log(np.exp(scores).sum(-1, keepdims=True))).astype(np.float32)  # (N, V)
            ids = np.argsort(-scores[:, : self.vocab_size], axis=-1, kind="stable")[:, :top]
            chosen = np.take_along_axis(scores, np.array(row[first:], dtype=np.int64)[:, None], -1)[:, 0]
            scored.append(RowScores(first, chosen, ids, np.take_along_axis(scores, ids, -1)))
        return scored

    def cast(self, precision: str) -> bool:
        if precision not in PRECISIONS:
            return False
        self._dtype = PRECISIONS[precision]
        self._weights = {name: w.astype(self._dtype) for name, w in self._weights.items()}
        return True

    def weights(self) -> list[TensorRecord]:
        return records(self._shown())

    def rounder(self, batches: Iterable[Batch]) -> Rounder:
        """Raise ConfigError: MLX does not support low-bit quantisation."""
        on_mlx, advice = Setting("training.device", "mlx"), "export the run with --device cpu"
        raise ConfigError("{0} does not support low-bit quantisation", on_mlx, advice=advice)

    def load_weights(self, weights: Mapping[str, TensorRecord], where: str) -> None:
        check_fits(self._outline, weights, where)
        dtypes = {name: DTYPES[TORCH_NAMES[value.dtype]] for name, value in self._outline.state_dict().items()}
        self._weights = {name: array(source, dtypes[name]) for name, source in weights.items()}

    def _shown(self) -> Weights:
        """Return the moving average, cast to the dtypes of the weights, or the weights themselves if no average is kept."""
        average = self._average or {}
        return {name: average[name].astype(w.dtype) if name in average else w for name, w in self._weights.items()}

    def _upload(self, batch: Batch) -> list[mx.array]:
        if (largest := batch[:, :2].max()) >= self.vocab_size:
            raise DataError(f"the data contains token {largest}, outside the vocabulary; check the data with: ingot data verify")
        return [mx.array(np.ascontiguousarray(batch[:, plane])) for plane in range(batch.shape[1])]
