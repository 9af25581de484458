"""Export models as ONNX for onnxruntime, with the key-value cache of built-in models as inputs and outputs.

One graph must serve every batch size and any number of cached and new tokens, so nothing in it may depend on a Python branch on
those sizes. A cache with `position` set makes the models compute positions and masks as tensors.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ingot.errors import ConfigError
from ingot.model.layers import LanguageModel, LayerCache
from ingot.runtime.files import write_atomically

OPSET = 18  # supported by onnxruntime-web 1.20 and torch's exporter
LARGEST_FILE = (1 << 31) - (1 << 24)  # protobuf's limit of 2 GiB, minus room for the graph
# Largest accepted difference of a logit from torch's, as a fraction of the largest logit.
TOLERANCES = {"fp32": 1e-3, "fp16": 3e-2, "int8": 0.25}


class GraphCache(LayerCache):
    """A layer's cache in the exported graph: the past keys and values are inputs, and the extended ones are outputs."""

    def __init__(self, keys: Tensor, values: Tensor, position: Tensor):
        self._past, self.position = (keys, values), position
        self.keys = F.pad(keys, (0, 0, 0, position.size(1)))  # masks are computed from this size before `extend` is called

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
    """Write a model on the CPU as an ONNX file and compare its logits with the model's; return the sizes of its cache.

    Raise ConfigError if torch's exporter cannot trace the model or the file's logits are wrong. The model's dtype may change.
    """
    if dtype not in TOLERANCES:
        raise ConfigError(f"ONNX export does not support the dtype {dtype!r}; choose one of {', '.join(TOLERANCES)}")
    try:
        import onnx  # noqa: F401
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError:
        needed = "--format onnx needs the packages onnx, onnxruntime and onnxscript"
        raise ConfigError(needed, advice="pip install 'ingot-lm[onnx]'") from None
    size = sum(p.numel() for p in model.parameters()) * (2 if dtype == "fp16" else 4)
    if size > LARGEST_FILE:
        advice = "--format ingot has no such limit" if dtype == "fp16" else "choose --dtype fp16"
        raise ConfigError(f"the weights take {size:,} bytes in the graph, but an ONNX file is limited to 2 GiB", advice=advice)
    model = model.eval().float()
    context = int(model.context)  # type: ignore[arg-type]
    tokens = torch.randint(vocab_size, (2, min(context, 48)), generator=torch.Generator().manual_seed(0))
    expected = model(tokens)[..., :vocab_size].float().numpy()
    cache = model.new_cache(2) if isinstance(model, LanguageModel) else []
    heads, head_size = (cache[0].keys.size(1), cache[0].keys.size(3)) if cache else (None, None)
    with _silence():
        _write(model.half() if dtype == "fp16" else model, tokens, cache, vocab_size, path, dtype == "int8")
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    numbers = np.float16 if dtype == "fp16" else np.float32
    T = tokens.size(1)
    for rows, cuts in ((1, (T,)), (2, (T,)), (2, (T // 2, T - T // 2)), (1, (1,) * min(T, 3))):
        past = {name.name: np.zeros((rows, heads, 0, head_size), numbers) for name in session.get_inputs()[1:]}
        parts, start = [], 0
        for count in cuts if cache else (max(cuts),):
            new = tokens[:rows, start : start + count].numpy()
            logits, *present = session.run(None, {"input_ids": new, **past})
            past, start = dict(zip(past, present, strict=True)), start + count
            parts.append(logits)
        error = np.abs(np.concatenate(parts, axis=1) - expected[:rows, :start]).max()
        if not error <= TOLERANCES[dtype] * max(1.0, np.abs(expected).max()):
            advice = "" if dtype == "fp32" else "try --dtype fp32"
            raise ConfigError(f"the exported model's logits differ from the original's by up to {error:.3g}", advice=advice)
    return {"layers": len(cache) or None, "kv_heads": heads, "head_size": head_size, "cache": bool(cache), "context": context}


def _write(model: nn.Module, tokens: Tensor, cache: list[LayerCache], vocab_size: int, path: Path, int8: bool) -> None:
    kind = next(model.parameters()).dtype
    past = [torch.zeros(2, layer.keys.size(1), 5, layer.keys.size(3), dtype=kind) for layer in cache for _ in range(2)]
    names = [f"{i}.{part}" for i in range(len(cache)) for part in ("key", "value")]
    axes = {"tokens": {0: "batch", 1: "tokens"}, "past": [{0: "batch", 2: "past"} for _ in past]}
    dynamic = torch.utils._pytree.tree_map(lambda name: torch.export.Dim.DYNAMIC, axes)
    try:
        traced = torch.export.export(GraphModel(model, vocab_size).eval(), (tokens, past), dynamic_shapes=dynamic, strict=False)
        program = torch.onnx.export(
            traced,
            dynamo=True,
            verbose=False,
            opset_version=OPSET,
            dynamic_shapes=axes,
            input_names=["input_ids", *(f"past_key_values.{name}" for name in names)],
            output_names=["logits", *(f"present.{name}" for name in names)],
        )
    except Exception as error:  # the exporter raises many different exceptions
        reason = next((line.strip() for line in str(error.__cause__ or error).splitlines() if line.strip()), type(error).__name__)
        raise ConfigError(f"torch's exporter cannot convert this model to ONNX: {reason}") from None
    assert program is not None
    proto = program.model_proto
    for node in proto.graph.node:  # the exporter records stack traces with the paths of this machine
        node.ClearField("metadata_props")
        node.ClearField("doc_string")
    proto.graph.ClearField("value_info")
    proto.graph.ClearField("metadata_props")
    write_atomically(path, (_quantise(proto, path) if int8 else proto).SerializeToString())


def _quantise(proto: Any, path: Path) -> Any:
    """Return a model with int8 weights: matmuls by onnxruntime's dynamic quantisation, embeddings with a scale per row."""
    import onnx
    from onnx.numpy_helper import from_array, to_array
    from onnxruntime.quantization import QuantType, quantize_dynamic

    stored = {weight.name: weight for weight in proto.graph.initializer}
    transposes = {n.input[0]: n.output[0] for n in proto.graph.node if n.op_type == "Transpose" and n.input[0] in stored}
    for name, turned in transposes.items():  # quantize_dynamic only quantises weights that are stored as they are used
        proto.graph.initializer.append(from_array(np.ascontiguousarray(to_array(stored[name]).T), turned))
    kept = [node for node in proto.graph.node if node.op_type != "Transpose" or node.input[0] not in stored]
    del proto.graph.node[:]
    proto.graph.node.extend(kept)
    quantize_dynamic(proto, path, ["MatMul", "Gemm"], per_channel=True, weight_type=QuantType.QInt8)
    proto = onnx.load(path)
    stored, nodes = {weight.name: weight for weight in proto.graph.initializer}, []
    for node in proto.graph.node:
        name = node.input[0] if node.op_type == "Gather" else ""
        if name not in stored or len(stored[name].dims) != 2:
            nodes.append(node)
            continue
        w, turned = to_array(stored[name]), f"{transposes.get(name)}_quantized"
        if turned in stored:  # the output head is tied to this embedding: store their codes once
            codes = np.ascontiguousarray(to_array(stored.pop(turned)).T)
            scale = to_array(stored[f"{transposes[name]}_scale"])[:, None]
            nodes.insert(0, onnx.helper.make_node("Transpose", [f"{name}.codes"], [turned], perm=[1, 0]))
        else:
            scale = np.maximum(np.abs(w).max(1, keepdims=True) / 127, np.float32(1e-12))
            codes = np.rint(w / scale).astype(np.int8)
        out = node.output[0]
        for part, array in (("codes", codes), ("scale", scale)):
            stored[f"{name}.{part}"] = from_array(array, f"{name}.{part}")
            nodes.append(onnx.helper.make_node("Gather", [f"{name}.{part}", node.input[1]], [f"{out}.{part}"]))
        nodes.append(onnx.helper.make_node("Cast", [f"{out}.codes"], [f"{out}.cast"], to=onnx.TensorProto.FLOAT))
        nodes.append(onnx.helper.make_node("Mul", [f"{out}.cast", f"{out}.scale"], [out]))
    used = {name for node in nodes for name in node.input}
    del proto.graph.node[:], proto.graph.initializer[:]
    proto.graph.node.extend(nodes)
    proto.graph.initializer.extend(weight for name, weight in stored.items() if name in used)
    return proto


@contextmanager
def _silence() -> Iterator[None]:
    """Hide the warnings and log messages of the exporter and of onnxruntime in the block."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
