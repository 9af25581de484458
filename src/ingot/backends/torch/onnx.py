"""Export models as ONNX for onnxruntime, with the key-value cache of built-in models as inputs and outputs.

One graph must serve every batch size and any number of cached and new tokens, so nothing in it may depend on a Python branch on
those sizes. A cache with `position` set makes the models compute positions and masks as tensors.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from contextlib import redirect_stderr
from importlib.util import find_spec
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ingot.errors import ConfigError
from ingot.model.layers import LanguageModel, LayerCache
from ingot.runtime.files import write_atomically

OPSET = 18  # version of the ONNX operator set; onnxruntime-web 1.20 supports it
MOST_BYTES = 2**31 - 2**24  # limit on the weights: protobuf's 2 GiB, minus room for the graph
TOLERANCES = {"fp32": 1e-3, "fp16": 3e-2, "int8": 0.25}  # largest accepted error of a logit, relative to the largest logit


class GraphCache(LayerCache):
    """A layer's cache in the exported graph: the past keys and values are inputs, and the extended ones are outputs."""

    def __init__(self, keys: Tensor, values: Tensor, position: Tensor):
        self._past, self.position = (keys, values), position
        self.keys = F.pad(keys, (0, 0, 0, position.size(1)))  # masks are computed from the size of `keys` before `extend` runs

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.keys, self.values = (torch.cat([past, new], dim=2) for past, new in zip(self._past, (k, v), strict=True))
        return self.keys, self.values


class GraphModel(nn.Module):
    """The function to export: logits of the first `vocab_size` tokens in float32, then each layer's extended keys and values."""

    def __init__(self, model: nn.Module, vocab_size: int):
        super().__init__()
        self.model, self.vocab_size = model, vocab_size

    def forward(self, tokens: Tensor, past: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if not past:
            return (self.model(tokens)[..., : self.vocab_size].float(),)
        start = past[0].size(2)
        position = torch.arange(start, start + tokens.size(1), device=tokens.device)[None]  # (1, T)
        cache = [GraphCache(*pair, position) for pair in zip(past[::2], past[1::2], strict=True)]
        logits = self.model.logits(self.model.hidden(tokens, cache))  # type: ignore[operator]
        return logits[..., : self.vocab_size].float(), *(part for layer in cache for part in (layer.keys, layer.values))


@torch.no_grad()
def write_onnx(model: nn.Module, vocab_size: int, path: Path, dtype: str) -> dict[str, Any]:
    """Write a model on the CPU as an ONNX file and check the file's logits; return the model's context and cache sizes.

    Raise ConfigError if torch's exporter cannot convert the model or the logits are wrong. The model's dtype may change.
    """
    if dtype not in TOLERANCES:
        raise ConfigError(f"ONNX export does not support the dtype {dtype!r}; choose one of {', '.join(TOLERANCES)}")
    if missing := [name for name in ("onnx", "onnxruntime", "onnxscript") if find_spec(name) is None]:
        raise ConfigError(f"--format onnx needs the package {missing[0]}", advice="pip install 'ingot-lm[onnx]'")
    import onnxruntime

    if (size := sum(p.numel() for p in model.parameters()) * (2 if dtype == "fp16" else 4)) > MOST_BYTES:
        raise ConfigError(f"an ONNX file has at most 2 GiB, but the weights take {size:,} bytes", advice="try --dtype fp16")
    model, context = model.eval().float(), int(model.context)  # type: ignore[arg-type]
    tokens = torch.randint(vocab_size, (2, min(context, 48)), generator=torch.Generator().manual_seed(0))
    expected = model(tokens)[..., :vocab_size].float().numpy()
    cache = model.new_cache(2) if isinstance(model, LanguageModel) else []
    past = [layer.keys[:, :, :5].to(torch.float16 if dtype == "fp16" else torch.float32) for layer in cache for _ in range(2)]
    with warnings.catch_warnings(action="ignore"), redirect_stderr(StringIO()):
        logging.disable(logging.WARNING)  # suppresses messages of the exporter and the quantiser
        try:
            proto = _convert(GraphModel(model.half() if dtype == "fp16" else model, vocab_size).eval(), tokens, past)
            write_atomically(path, (_quantise(proto, path) if dtype == "int8" else proto).SerializeToString())
        finally:
            logging.disable(logging.NOTSET)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    T = tokens.size(1)
    for rows, first in (1, T), (2, max(1, T // 2)), (1, max(1, T - 1)), (1, 1):
        feeds = {node.name: keys[:rows, :, :0].numpy() for node, keys in zip(session.get_inputs()[1:], past, strict=True)}
        for start, stop in pairwise(sorted({0, first, T} if cache else {0, first})):
            logits, *present = session.run(None, {"input_ids": tokens[:rows, start:stop].numpy(), **feeds})
            feeds = dict(zip(feeds, present, strict=True))
            error = np.abs(logits - expected[:rows, start:stop]).max()
            if not error <= TOLERANCES[dtype] * max(1.0, np.abs(expected).max()):
                raise ConfigError(f"the exported {dtype} model is wrong: a logit differs by {error:.3g} from the original one")
    heads, head_size = past[0].shape[1::2] if past else (None, None)
    return {"context": context, "layers": len(cache) or None, "kv_heads": heads, "head_size": head_size, "cache": bool(cache)}


def _convert(model: GraphModel, tokens: Tensor, past: list[Tensor]) -> Any:
    """Return the ONNX graph and weights of a model; raise ConfigError if the exporter cannot convert the model."""
    names = [f"{i // 2}.{'value' if i % 2 else 'key'}" for i in range(len(past))]
    inputs, outputs = (["input_ids"] + [f"past_key_values.{n}" for n in names]), (["logits"] + [f"present.{n}" for n in names])
    axes = {"tokens": {0: "batch", 1: "tokens"}, "past": [{0: "batch", 2: "past"} for _ in past]}
    dynamic = tree_map(lambda name: torch.export.Dim.DYNAMIC, axes)
    try:
        traced = torch.export.export(model, (tokens, past), dynamic_shapes=dynamic, strict=False)
        program = torch.onnx.export(
            traced, input_names=inputs, output_names=outputs, opset_version=OPSET, dynamic_shapes=axes, verbose=False
        )
    except Exception as error:  # the exporter raises many different exceptions
        reason = next(iter(str(error.__cause__ or error).strip().splitlines()), type(error).__name__)
        raise ConfigError(f"torch's exporter cannot convert this model to ONNX: {reason}") from None
    proto: Any = program.model_proto  # type: ignore[union-attr]
    for part in (proto.graph, *proto.graph.node):  # the exporter records stack traces, with paths of this machine
        part.ClearField("metadata_props")
    return proto


def _quantise(proto: Any, path: Path) -> Any:
    """Return a model with int8 weights: matmuls use onnxruntime's dynamic quantisation, embeddings have a scale per row."""
    import onnx
    from onnx.helper import make_node
    from onnx.numpy_helper import from_array, to_array
    from onnxruntime.quantization import QuantType, quantize_dynamic

    graph, codes, tied = proto.graph, dict[str, str](), dict[str, str]()
    weights = {weight.name: to_array(weight) for weight in graph.initializer if len(weight.dims) == 2}
    for node in [node for node in graph.node if node.op_type in ("Gather", "Transpose") and node.input[0] in weights]:
        name, out, w = node.input[0], node.output[0], weights[node.input[0]]
        if node.op_type == "Transpose":  # quantize_dynamic needs weights stored as the matmul reads them
            graph.initializer.append(from_array(np.ascontiguousarray(w.T), out))
            graph.node.remove(node)
            if name in codes:  # a tied head: store the codes of the embedding once
                tied[f"{out}_quantized"] = codes[name]
            continue
        scale = np.maximum(np.abs(w).max(1, keepdims=True) / 127, np.float32(1e-12))
        graph.initializer.append(from_array(np.rint(w / scale).astype(np.int8), f"{out}.int8"))
        graph.initializer.append(from_array(scale, f"{out}.scale"))
        at = list(graph.node).index(node)
        node.input[0], node.output[0], codes[name] = f"{out}.int8", f"{out}.codes", f"{out}.int8"
        graph.node.insert(at + 1, make_node("Gather", [f"{out}.scale", node.input[1]], [f"{out}.scales"]))
        graph.node.insert(at + 2, make_node("Cast", [f"{out}.codes"], [f"{out}.float"], to=onnx.TensorProto.FLOAT))
        graph.node.insert(at + 3, make_node("Mul", [f"{out}.float", f"{out}.scales"], [out]))
    del graph.value_info[:]  # quantize_dynamic transposes weights of Gemm without updating their recorded shapes
    quantize_dynamic(proto, path, ["MatMul", "Gemm"], per_channel=True, weight_type=QuantType.QInt8)
    graph = (proto := onnx.load(path)).graph
    for weight in [weight for weight in graph.initializer if weight.name in tied]:
        graph.initializer.remove(weight)
        graph.node.insert(0, make_node("Transpose", [tied[weight.name]], [weight.name], perm=[1, 0]))
    return proto
