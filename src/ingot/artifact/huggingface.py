"""Read and write models in Hugging Face's layout (config.json and model.safetensors) without the transformers library.

Each family's `Layout` describes its keys, tensor names and shapes.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from ingot.artifact.hf_tokenizer import MERGES, OURS, THEIRS, VOCABULARY, check_no_other_tokenizer, tokenizer_files
from ingot.artifact.hf_tokenizer import SETTINGS as TOKENIZER_SETTINGS
from ingot.config.schema import FAMILIES
from ingot.data.store.documents import ends_of
from ingot.errors import CheckpointError, ConfigError, DataError, IngotError, Setting
from ingot.model.settings import ModelSettings, mlp_width
from ingot.runtime.files import read_object, readable, replace_folder, write_atomically
from ingot.runtime.machine import made_by
from ingot.runtime.tensors import FLOATS, ITEM_BYTES, TensorRecord, read_tensors, write_tensors

# Maps a tensor's name in Hugging Face's files to its name in our checkpoints and its shape in Hugging Face's files.
Tensors = dict[str, tuple[str, tuple[int, ...]]]
HEAD = "lm_head.weight"
GELU = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "erf"}
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu", "relu": "relu"}
# Sizes in our `model` section, and their keys in config.json.
GPT2_SIZES = {"layers": "n_layer", "heads": "n_head", "width": "n_embd", "vocab_size": "vocab_size", "context": "n_positions"}
LLAMA_SIZES = {
    "layers": "num_hidden_layers", "heads": "num_attention_heads", "width": "hidden_size", "vocab_size": "vocab_size",
    "context": "max_position_embeddings", "inner_width": "intermediate_size",
}  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """Hugging Face's file format for one model family. Tensor names here omit `prefix`, which only some files use."""

    prefix: str
    written_prefix: str  # prefix in files that we write; empty for GPT-2 (as on the hub): MLX cannot read prefixed GPT-2 files
    embedding: str
    transposed: tuple[str, ...]
    buffers: re.Pattern[str]  # buffers in old files, ignored because the settings determine them
    fixed: Mapping[str, tuple[object, ...]]  # keys of config.json that affect the architecture, and the values that we support
    settings: Callable[[Mapping[str, Any], Path], dict[str, Any]]  # converts Hugging Face's config.json to our `model` section
    config: Callable[[Mapping[str, Any]], dict[str, Any]]  # converts our `model` section to Hugging Face's config.json
    tensors: Callable[[Mapping[str, Any]], Tensors]


def _number(config: Mapping[str, Any], path: Path, name: str, default: float | None = None) -> Any:
    """Return a positive number from config.json: an integer, or a float if a default is given."""
    kinds, limit = ((int,), 1 << 31) if default is None else ((int, float), math.inf)
    value = config.get(name, default)
    if type(value) not in kinds or not 0 < value < limit:
        raise CheckpointError(f"{path}: {name} is {value!r:.60}, but must be a number above 0")
    return value if default is None else float(value)


def _word(config: Mapping[str, Any], path: Path, name: str, default: str, known: Mapping[str, str]) -> str:
    value = config.get(name, default)
    if not isinstance(value, str) or value not in known:
        raise ConfigError(f"{path}: {name} is {value!r:.60}; only {', '.join(known)} are supported")
    return known[value]


def _gpt2_settings(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    gelu = _word(config, path, "activation_function", "gelu_new", GELU)
    settings: dict[str, Any] = {"family": "gpt2", "bias": True, "gelu": gelu, "dropout": 0.0}
    settings |= {ours: _number(config, path, theirs) for ours, theirs in GPT2_SIZES.items()}
    if config.get("n_inner") not in (None, 4 * settings["width"]):
        raise ConfigError(f"{path}: n_inner is {config['n_inner']!r:.60}, but only {4 * settings['width']} is supported")
    return settings


def _gpt2_config(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **{theirs: settings[ours] for ours, theirs in GPT2_SIZES.items()},
        "n_ctx": settings["context"],
        "n_inner": None,
        "activation_function": "gelu_new" if settings["gelu"] == "tanh" else "gelu",
        "layer_norm_epsilon": 1e-5,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), settings["dropout"]),
        "tie_word_embeddings": True,
    }


def _gpt2_tensors(settings: Mapping[str, Any]) -> Tensors:
    C = settings["width"]
    block = {
        "ln_1.weight": (C,), "ln_1.bias": (C,), "attn.c_attn.weight": (C, 3 * C), "attn.c_attn.bias": (3 * C,),
        "attn.c_proj.weight": (C, C), "attn.c_proj.bias": (C,), "ln_2.weight": (C,), "ln_2.bias": (C,),
        "mlp.c_fc.weight": (C, 4 * C), "mlp.c_fc.bias": (4 * C,), "mlp.c_proj.weight": (4 * C, C), "mlp.c_proj.bias": (C,),
    }  # fmt: skip
    blocks = {f"h.{i}.{name}": shape for i in range(settings["layers"]) for name, shape in block.items()}
    ends = {"wte.weight": (settings["vocab_size"], C), "wpe.weight": (settings["context"], C)}
    shapes = {**ends, **blocks, "ln_f.weight": (C,), "ln_f.bias": (C,)}
    return {name: (f"transformer.{name}", shape) for name, shape in shapes.items()}


def _llama_settings(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    sizes = {ours: _number(config, path, theirs) for ours, theirs in LLAMA_SIZES.items()}
    head_size = sizes["width"] // sizes["heads"]
    if config.get("head_dim") not in (None, head_size):
        raise ConfigError(f"{path}: head_dim is {config['head_dim']!r:.60}, but only {head_size} is supported")
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}  # transformers 5 also stores the RoPE base here
    if not isinstance(rotary, dict):
        raise CheckpointError(f"{path}: rope_parameters or rope_scaling is {rotary!r:.60}, but must be a mapping")
    kind = rotary.get("rope_type", rotary.get("type", "default"))
    if kind not in ("default", "linear") or rotary.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(f"{path}: rope_type is {kind!r:.60}; only default and linear, over all dimensions, are supported")
    return {
        "family": "llama",
        **sizes,
        "dropout": 0.0,
        "kv_heads": sizes["heads"] if config.get("num_key_value_heads") is None else _number(config, path, "num_key_value_heads"),
        "rope_base": _number(rotary if "rope_theta" in rotary else config, path, "rope_theta", 10000.0),
        "bias": False,
        "qkv_bias": bool(config.get("attention_bias")),
        "attention_out_bias": bool(config.get("attention_bias")),
        "mlp_bias": bool(config.get("mlp_bias")),
        "activation": _word(config, path, "hidden_act", "silu", ACTIVATIONS),
        "mlp": "gated",
        "norm": "rmsnorm",
        "norm_epsilon": _number(config, path, "rms_norm_eps", 1e-6),
        "tied": bool(config.get("tie_word_embeddings", False)),
        "rope_scaling": "linear" if kind == "linear" else None,
        "rope_factor": _number(rotary, path, "factor", 1.0) if kind == "linear" else 1.0,
    }


def _llama_config(settings: Mapping[str, Any]) -> dict[str, Any]:
    linear = settings["rope_scaling"] == "linear"
    stretched = settings["rope_factor"] if settings["rope_scaling"] == "ntk" else 1.0
    attention, mlp = _biases(settings)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{theirs: settings[ours] for ours, theirs in LLAMA_SIZES.items()},
        "intermediate_size": mlp_width(settings["width"], settings["inner_width"]),
        "num_key_value_heads": settings["kv_heads"] or settings["heads"],
        "hidden_act": {"gelu": "gelu_pytorch_tanh"}.get(settings["activation"], settings["activation"]),
        "rms_norm_eps": settings["norm_epsilon"],
        "rope_theta": settings["rope_base"] * stretched,
        "rope_scaling": {"rope_type": "linear", "type": "linear", "factor": settings["rope_factor"]} if linear else None,
        "attention_bias": attention,
        "attention_dropout": settings["dropout"],
        "mlp_bias": mlp,
        "tie_word_embeddings": settings["tied"],
    }


def _biases(settings: Mapping[str, Any]) -> tuple[bool, bool]:
    names = ("qkv_bias", "attention_out_bias", "mlp_bias")
    qkv, out, mlp = (settings["bias"] if settings[name] is None else settings[name] for name in names)
    return qkv or out, mlp


def _llama_tensors(settings: Mapping[str, Any]) -> Tensors:
    C, F, V = settings["width"], mlp_width(settings["width"], settings["inner_width"]), settings["vocab_size"]
    K = (settings["kv_heads"] or settings["heads"]) * (C // settings["heads"])
    attention, mlp = _biases(settings)
    block = {
        "input_layernorm": ("ln_1", (C,), False), "post_attention_layernorm": ("ln_2", (C,), False),
        "self_attn.q_proj": ("attn.q_proj", (C, C), attention), "self_attn.k_proj": ("attn.k_proj", (K, C), attention),
        "self_attn.v_proj": ("attn.v_proj", (K, C), attention), "self_attn.o_proj": ("attn.c_proj", (C, C), attention),
        "mlp.gate_proj": ("mlp.c_gate", (F, C), mlp), "mlp.up_proj": ("mlp.c_up", (F, C), mlp),
        "mlp.down_proj": ("mlp.c_down", (C, F), mlp),
    }  # fmt: skip
    tensors: Tensors = {"embed_tokens.weight": ("wte.weight", (V, C)), "norm.weight": ("ln_f.weight", (C,))}
    for i in range(settings["layers"]):
        for theirs, (ours, shape, biased) in block.items():
            tensors[f"layers.{i}.{theirs}.weight"] = f"h.{i}.{ours}.weight", shape
            if biased:
                tensors[f"layers.{i}.{theirs}.bias"] = f"h.{i}.{ours}.bias", shape[:1]
    return tensors if settings["tied"] else {**tensors, HEAD: (HEAD, (V, C))}


LAYOUTS = {
    "gpt2": Layout(
        "transformer.",
        "",
        "wte.weight",
        ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"),
        re.compile(r"h\.\d+\.attn\.(bias|masked_bias)"),  # the causal mask, which old GPT-2 files contain as a tensor
        {
            "layer_norm_epsilon": (1e-5,),
            "scale_attn_weights": (True,),
            "add_cross_attention": (False,),
            "scale_attn_by_inverse_layer_idx": (False,),
        },
        _gpt2_settings,
        _gpt2_config,
        _gpt2_tensors,
    ),
    "llama": Layout(
        "model.",
        "model.",
        "embed_tokens.weight",
        (),
        re.compile(r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"),
        {"pretraining_tp": (1, None)},
        _llama_settings,
        _llama_config,
        _llama_tensors,
    ),
}


# Check that another program's file format supports a model. For each setting, the schema lists the values that a format supports.

ANY = "any"
SHOWN = {"huggingface": "Hugging Face's layout", "gguf": "GGUF"}


def portable_values(model: type[ModelSettings], name: str, target: str) -> list[Any] | None:
    """Return the values that a file format supports for a setting; None means that it supports all values."""
    extra: Any = model.model_fields[name].json_schema_extra or {}
    values = extra.get("portable", {}).get(target, [])
    return None if values == ANY else list(values)


def refuse_unportable(settings: Mapping[str, Any], target: str) -> None:
    """Raise ConfigError if a file format does not support a `model` section; name the setting and the supported values."""
    model = FAMILIES[settings["family"]]
    for name in sorted(settings, key="family".__ne__):  # the family first, because the other settings depend on it
        values = portable_values(model, name, target)
        if values is not None and settings[name] not in values:
            others = f"only {' and '.join(map(str, values))}; " if values else ""
            what, setting = f"{{0}} is not supported by {SHOWN[target]}", Setting(f"model.{name}", settings[name])
            raise ConfigError(what, setting, advice=f"{others}--format ingot supports any model")


def is_portable(settings: Mapping[str, Any], target: str) -> bool:
    """Return True if a file format supports a `model` section."""
    try:
        refuse_unportable(settings, target)
    except ConfigError:
        return False
    return True


SCORING = "ingot_scoring"  # the key that ingot adds to config.json; transformers keeps the key but does not use it
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
CODE, CARD, INGOT = "modeling_ingot.py", "README.md", "ingot"  # INGOT: model_type of models that come with their code
CARD_MARK = "<!-- Written by `ingot export`, which replaces this file as long as it contains this line. -->"
WHOLE = f"a folder with {CONFIG} and {WEIGHTS}"
MODEL_FILES = (CONFIG, WEIGHTS, INDEX, "model-*.safetensors", THEIRS, VOCABULARY, MERGES, OURS)  # files fetched from the hub
WRITTEN_FILES = (CONFIG, WEIGHTS, THEIRS, VOCABULARY, MERGES, OURS, TOKENIZER_SETTINGS, CODE, CARD)  # files sent to the hub


def fetch_model(name: str) -> Path:
    """Return the local cache folder of a model on the Hugging Face hub; download the model if needed."""
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):
        raise CheckpointError(f"{name} is not a folder; give {WHOLE}")
    from ingot.data.hub import Hub, Unreachable

    try:
        return Hub(name, "model").snapshot(MODEL_FILES)
    except IngotError as error:
        advice = f"; go online once, or give {WHOLE}" if isinstance(error, Unreachable) else ""
        raise DataError(f"{name} is not a folder and cannot be fetched from the hub: {error}{advice}") from None


def cached_model(name: str) -> Path | None:
    """Return the folder of a hub model that is already in the cache, or None if it is missing or incomplete."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=list(MODEL_FILES), local_files_only=True))
    except Exception:  # the client raises many different exceptions for a missing model
        return None
    return folder if all((folder / file).is_file() for file in MODEL_FILES[:2]) else None


def read_model(folder: Path, families: tuple[str, ...] = tuple(LAYOUTS)) -> tuple[list[TensorRecord], dict[str, Any]]:
    """Read a model whose type is in `families`; convert it to our tensor names, tensor shapes and `model` section."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} does not exist; give {WHOLE}")
    path = folder / CONFIG
    config = read_object(path)
    kind = config.get("model_type")
    if kind == INGOT:
        raise ConfigError(f"{path}: this folder was written for transformers; give the run or an artifact of the model instead")
    if not isinstance(kind, str) or kind not in families:
        raise ConfigError(f"{path}: model_type is {kind!r:.60}, but only {' and '.join(map(repr, families))} can be read")
    layout = LAYOUTS[kind]
    for name, allowed in layout.fixed.items():
        if config.get(name, allowed[0]) not in allowed:
            raise ConfigError(f"{path}: {name} is {config.get(name)!r:.60}, but only {allowed[0]!r} is supported")
    settings = layout.settings(config, path)
    found = {name.removeprefix(layout.prefix): record for name, record in _weights(folder).items()}
    embedding = found.get(layout.embedding)
    if settings.get("tied", True) and HEAD in found and embedding is not None:  # some files store the head although it is tied
        head = found.pop(HEAD)
        if (head.dtype, head.data) != (embedding.dtype, embedding.data):
            raise CheckpointError(f"{folder} has a separate output head, although {CONFIG} ties the head to the embedding")
    if settings["layers"] > len(found):
        raise CheckpointError(f"{path} specifies {settings['layers']:,} layers, but the files contain fewer tensors")
    tensors = layout.tensors(settings)
    records = []
    for name, (ours, shape) in tensors.items():
        if (record := found.get(name)) is None:
            raise CheckpointError(f"{folder} has no tensor {name}; it is not a complete {kind} model")
        if record.dtype not in FLOATS:
            raise CheckpointError(f"{folder}: {name} has dtype {record.dtype}; only floating-point weights can be read")
        if record.shape != shape:
            raise CheckpointError(f"{folder}: {name} has shape {list(record.shape)}, but {CONFIG} implies {list(shape)}")
        records.append(_turned(record, ours, name.endswith(layout.transposed)))
    if unknown := sorted(name for name in found.keys() - tensors.keys() if not layout.buffers.fullmatch(name)):
        raise CheckpointError(f"{folder} has a tensor {unknown[0]!r:.100} that {kind} models do not have")
    return records, settings


def read_scoring(folder: Path) -> dict[str, Any]:
    """Return the scoring settings stored in a folder that ingot wrote; return {} for other folders."""
    found = read_object(folder / CONFIG).get(SCORING)
    return found if isinstance(found, dict) else {}


def write_model(
    folder: Path,
    records: Iterable[TensorRecord],
    settings: Mapping[str, Any],
    tokenizer: Mapping[str, Any] | None,
    scoring: Mapping[str, Any] | None = None,
    card: str | None = None,
) -> int:
    """Write a model and its tokenizer (a spec) to a folder that transformers can load; return the folder's size in bytes.

    `settings` is a complete `model` section; the vocabulary size is taken from the weights. `card` is the text of README.md.
    """
    refuse_unportable(settings, "huggingface")
    layout = LAYOUTS[settings["family"]]
    found = {record.name: record for record in records}
    embedding, places = found.get("wte.weight") or found["transformer.wte.weight"], found.get("transformer.wpe.weight")
    whole = {**settings, "vocab_size": embedding.shape[0], "context": places.shape[0] if places else settings["context"]}
    tensors = layout.tensors(whole)
    if unknown := sorted(found.keys() - {ours for ours, _ in tensors.values()}):
        raise CheckpointError(f"the tensor {unknown[0]} does not belong to a {settings['family']} model")
    stored = []
    for name, (ours, shape) in tensors.items():
        record = found.get(ours)
        if record is None:
            if not name.endswith("bias"):
                raise CheckpointError(f"the model has no tensor {ours}; it is not a complete {settings['family']} model")
            # The format requires a bias that this model lacks.
            zeros = memoryview(bytes(prod(shape) * ITEM_BYTES[embedding.dtype]))
            record = TensorRecord(name, embedding.dtype, shape, zeros)
        written = name if name == HEAD else layout.written_prefix + name
        turned = _turned(record, written, name.endswith(layout.transposed))
        if turned.shape != shape:
            raise CheckpointError(f"{record.name} has shape {list(turned.shape)}, but the settings imply {list(shape)}")
        stored.append(turned)
    config = {**layout.config(whole), "torch_dtype": FLOATS[embedding.dtype]}
    return write_folder(folder, stored, config, whole["context"], tokenizer, scoring, {CARD: card})


def write_folder(
    folder: Path,
    stored: Iterable[TensorRecord],
    config: Mapping[str, Any],
    context: int,
    tokenizer: Mapping[str, Any] | None,
    scoring: Mapping[str, Any] | None,
    texts: Mapping[str, str | None],
) -> int:
    """Write the files of a model: weights, config.json, tokenizer and `texts`; return their size in bytes.

    A README.md that a user wrote is kept.
    """
    files, known = tokenizer_files(tokenizer, context) if tokenizer is not None else ({}, None)
    ends = ends_of(known) if known is not None else []
    config = {
        **config,
        "bos_token_id": known.bos if known is not None else None,
        "eos_token_id": ends if len(ends) > 1 else next(iter(ends), None),
    }
    if scoring is not None:
        config[SCORING] = dict(scoring)
    files = {CONFIG: json.dumps(config, indent=2).encode(), **files}
    check_no_other_tokenizer(folder, files)
    own_card = (folder / CARD).exists() and CARD_MARK.encode() not in (folder / CARD).read_bytes()
    files |= {name: text.encode() for name, text in texts.items() if text is not None and not (name == CARD and own_card)}
    with replace_folder(folder) as partial:
        size, _ = write_tensors(partial / WEIGHTS, stored, {"format": "pt"})
        for name, content in files.items():
            write_atomically(partial / name, content)
    return size + sum(map(len, files.values()))


def model_card(
    name: str,
    settings: Mapping[str, Any],
    facts: Mapping[str, Any],
    scores: Mapping[str, Any],
    data: str | None,
    commands: Sequence[Sequence[str]],
    has_code: bool,
) -> str:
    """Return the text of a model card. `settings` is the `model` section; unknown facts and scores are left out."""
    family = settings["family"] if settings["family"] != "file" else "custom"
    tags = ["ingot", family] + ["custom_code"] * has_code
    head = yaml.safe_dump({"library_name": "transformers", "pipeline_tag": "text-generation", "tags": tags}, sort_keys=False)
    fingerprint = facts.get("data_fingerprint")
    rows = {
        "optimizer steps": facts.get("step"),
        **scores,
        "data": f"{data} (fingerprint {str(fingerprint)[:16]})" if data is not None else None,
        "tokenizer": facts["tokenizer"]["kind"] if facts.get("tokenizer") else None,
    }
    shown = {key: f"{value:,.4f}" if isinstance(value, float) else value for key, value in rows.items() if value is not None}
    table = [f"| {key} | {value} |" for key, value in shown.items()]
    arguments = ", trust_remote_code=True" if has_code else ""
    code = ["The code of the model is in `modeling_ingot.py`; it needs torch and transformers, but not Ingot.", ""]
    load = [
        "from transformers import AutoModelForCausalLM, AutoTokenizer", "",
        f'tokenizer = AutoTokenizer.from_pretrained("{name}"{arguments})',
        f'model = AutoModelForCausalLM.from_pretrained("{name}"{arguments})',
        'tokens = tokenizer("Once upon a time", return_tensors="pt")',
        "print(tokenizer.decode(model.generate(**tokens, max_new_tokens=50)[0]))",
    ]  # fmt: skip
    section = yaml.safe_dump({"model": dict(settings)}, sort_keys=False).rstrip()
    return "\n".join([
        "---", head.rstrip(), "---", CARD_MARK, "", f"# {name}", "", f"A {family} model trained with {made_by()}.", "",
        "| | |", "|---|---|", *table, "", "## Use", "", *code * has_code, "```python", *load, "```", "",
        "## Settings", "", "```yaml", section, "```", "", "## Commands", "", "```sh", *map(shlex.join, commands), "```", "",
    ])  # fmt: skip


def _weights(folder: Path) -> dict[str, TensorRecord]:
    files = [WEIGHTS]
    if not (folder / WEIGHTS).is_file() and (folder / INDEX).is_file():
        told = read_object(folder / INDEX).get("weight_map")
        names = set(told.values()) if isinstance(told, dict) and all(isinstance(n, str) for n in told.values()) else set()
        if not names or any(Path(name).name != name for name in names):
            raise CheckpointError(f"{folder / INDEX} is damaged: it does not list the weight files")
        files = sorted(names)
    tensors: dict[str, TensorRecord] = {}
    for file in files:
        with readable(folder / file, CheckpointError):
            if not (folder / file).exists():
                raise CheckpointError(f"{folder / file} does not exist; only safetensors files are read, not pickles")
            tensors |= read_tensors(folder / file)[0]
    return tensors


def _turned(record: TensorRecord, name: str, transposed: bool) -> TensorRecord:
    if not transposed:
        return TensorRecord(name, record.dtype, record.shape, record.data)
    raw = np.frombuffer(record.data, f"u{ITEM_BYTES[record.dtype]}").reshape(record.shape)
    return TensorRecord(name, record.dtype, raw.T.shape, np.ascontiguousarray(raw.T).reshape(-1).view(np.uint8).data)
