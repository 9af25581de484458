"""Export models as GGUF for llama.cpp, with a Modelfile for ollama. This needs the package `gguf`.

llama.cpp's rotary embedding rotates the dimensions of a head in adjacent pairs (2i, 2i + 1); Ingot's rotates the pairs
(i, i + D / 2), where D is the head size. The rows of the q and k matrices are therefore reordered.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.artifact.hf_tokenizer import NORMAL, SPECIALS, THEIRS, SentencePieceFile, gpt2_files
from ingot.artifact.huggingface import refuse_unportable
from ingot.artifact.quantise import quantise
from ingot.data.store.documents import ends_of
from ingot.data.tokenizers import ByteTokenizer, GPT2Tokenizer, HFTokenizer, from_spec
from ingot.data.tokenizers.gpt2_bpe import END_OF_TEXT
from ingot.data.tokenizers.sentencepiece import BPE, CONTROL, SentencePieceTokenizer
from ingot.data.tokenizers.tokenizer_base import byte_alphabet
from ingot.errors import CheckpointError, ConfigError
from ingot.model.settings import mlp_width
from ingot.runtime.files import replace_folder, write_atomically
from ingot.runtime.tensors import TensorRecord, to_array

UNUSED = 5  # GGUF's token type for embedding rows without a token


def vocabulary_of(spec: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """Return a tokenizer's GGUF metadata, its vocabulary padded to `rows` tokens; GGUFWriter.add_KEY writes the value of a KEY.

    Raise ConfigError if llama.cpp does not support the tokenizer.
    """
    tokenizer = from_spec(spec)
    merges, more = list[str](), dict[str, Any]()
    if isinstance(tokenizer, GPT2Tokenizer):
        words, listed = gpt2_files(tokenizer)
        tokens, merges = list(json.loads(words)), listed.decode().splitlines()[1:]
        kinds = [CONTROL if token == END_OF_TEXT else NORMAL for token in tokens]
    elif isinstance(tokenizer, ByteTokenizer):
        letters = {byte: letter for letter, byte in byte_alphabet().items()}
        tokens, kinds = [*SPECIALS, *(letters[byte] for byte in range(256))], [CONTROL] * len(SPECIALS) + [NORMAL] * 256
        # llama.cpp requires at least one merge. This merge joins two bytes that never occur in UTF-8.
        merges = [f"{letters[0xFF]} {letters[0xFF]}"]
    elif isinstance(tokenizer, SentencePieceTokenizer):
        file = SentencePieceFile(tokenizer.contents)
        if tokenizer.marks_capitals:
            raise ConfigError("this SentencePiece model encodes capital letters as markers, which GGUF cannot decode")
        if file.algorithm != BPE or not file.has_bytes:
            raise ConfigError(
                "among SentencePiece models, GGUF supports only BPE with byte fallback",
                advice="--format huggingface supports this model",
            )
        tokens, kinds = [piece.text for piece in file.pieces], [piece.kind for piece in file.pieces]
        scores = [piece.score for piece in file.pieces] + [0.0] * (rows - len(tokens))
        more = {"token_scores": scores, "add_space_prefix": file.adds_prefix, "unk_token_id": file.unknown}
    elif isinstance(tokenizer, HFTokenizer):
        config = json.loads(tokenizer.contents)
        splits, model, added = config.get("pre_tokenizer") or {}, config["model"], config.get("added_tokens") or ()
        by_rule = splits.get("type") == "ByteLevel" and splits.get("use_regex", True) and not splits.get("add_prefix_space")
        if model.get("type") != "BPE" or not by_rule or config.get("normalizer") or not tokenizer.lossless:
            raise ConfigError(
                f"GGUF does not support the kind of tokenizer in this model's {THEIRS}",
                advice="GGUF supports byte-level BPE with GPT-2's pre-tokenizer; --format huggingface supports any tokenizer",
            )
        names = {i: name for name, i in model["vocab"].items()} | {token["id"]: token["content"] for token in added}
        special = {token["id"] for token in added if token.get("special")}
        tokens = [names.get(i, f"[unused {i}]") for i in range(tokenizer.vocab_size)]
        kinds = [CONTROL if i in special else NORMAL if i in names else UNUSED for i in range(tokenizer.vocab_size)]
        merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    else:
        raise ConfigError(
            f"GGUF does not support a {tokenizer.kind} tokenizer",
            advice="GGUF supports byte, gpt2, SentencePiece BPE and byte-level BPE; --format huggingface also supports char",
        )
    unused = range(len(tokens), rows)  # embedding rows without a token: llama.cpp requires one token per row
    return {
        "tokenizer_model": "llama" if more else "gpt2",  # GGUF's names: "llama" for SentencePiece, "gpt2" for byte-level BPE
        "token_list": tokens + [f"[unused {row}]" for row in unused],
        "token_types": kinds + [UNUSED] * len(unused),
        **(more or {"tokenizer_pre": "gpt-2", "token_merges": merges}),
        **({"bos_token_id": tokenizer.bos} if tokenizer.bos is not None else {}),
        # llama.cpp stops generation at the EOS and the EOT token, so store up to two end tokens.
        **dict(zip(("eos_token_id", "eot_token_id"), ends_of(tokenizer), strict=False)),
        "add_bos_token": tokenizer.bos is not None,  # `ingot generate` also puts BOS before the prompt
        "add_eos_token": False,
    }


def is_normalised(spec: Mapping[str, Any]) -> bool:
    """Return True for a SentencePiece tokenizer that normalises text; llama.cpp does not normalise text."""
    tokenizer = from_spec(spec)
    file = SentencePieceFile(tokenizer.contents) if isinstance(tokenizer, SentencePieceTokenizer) else None
    return file is not None and (bool(file.rules) or file.folds_spaces)


FILE, MODELFILE = "model.gguf", "Modelfile"
DTYPES = {"fp32": "F32", "fp16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}
GROUP = 32  # number of adjacent weights in a row that share a scale in q8_0
# Maps parts of our tensor names, for both model families, to the corresponding parts of GGUF's names.
BLOCK = {
    "attn.c_attn": "attn_qkv", "attn.q_proj": "attn_q", "attn.k_proj": "attn_k", "attn.v_proj": "attn_v",
    "attn.c_proj": "attn_output", "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down", "mlp.c_up": "ffn_up", "mlp.c_gate": "ffn_gate",
    "mlp.c_down": "ffn_down", "ln_1": "attn_norm", "ln_2": "ffn_norm",
}  # fmt: skip
ENDS = {"wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm", "lm_head": "output"}


def write_gguf(
    folder: Path,
    records: Iterable[TensorRecord],
    settings: Mapping[str, Any],
    tokenizer: Mapping[str, Any] | None,
    dtype: str = "fp32",
    name: str = "ingot",
) -> int:
    """Write model.gguf and a Modelfile to a folder; return their size in bytes. `settings` is a complete `model` section."""
    if dtype not in DTYPES:
        raise ConfigError(f"GGUF export does not support the dtype {dtype!r}; choose one of {', '.join(DTYPES)}")
    refuse_unportable(settings, "gguf")
    try:
        import gguf
    except ImportError:
        raise ConfigError("--format gguf needs the package gguf", advice="pip install 'ingot-lm[gguf]'") from None
    if tokenizer is None:
        raise ConfigError("a GGUF file must contain a tokenizer, but this export has none; add --tokenizer")
    tensors = _tensors(records, settings)
    keys = _model_keys(gguf, settings, tensors, dtype, name)
    vocabulary = vocabulary_of(tokenizer, tensors["token_embd.weight"].shape[0])
    with replace_folder(folder) as partial:
        writer = gguf.GGUFWriter(partial / FILE, settings["family"])
        for key, value in (keys | vocabulary).items():
            getattr(writer, f"add_{key}")(value)
        for key, array in tensors.items():
            exact = array.ndim < 2 or key.startswith("position_embd")  # kept in fp32: gains, biases and position embeddings
            # q8_0 needs rows whose length is a multiple of GROUP; matrices with other row lengths are stored as fp16.
            stored = "fp32" if exact else "fp16" if dtype == "q8_0" and array.shape[-1] % GROUP else dtype
            if stored == "fp16" and np.abs(array).max(initial=0.0) > np.finfo(np.float16).max:
                raise CheckpointError(f"{key} contains values outside fp16's range; choose the dtype bf16 or fp32")
            kind = gguf.GGMLQuantizationType[DTYPES[stored]]
            writer.add_tensor(key, gguf.quants.quantize(np.ascontiguousarray(array, np.float32), kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        modelfile = f"FROM ./{FILE}\nTEMPLATE {{{{ .Prompt }}}}\nPARAMETER num_ctx {keys['context_length']}\n"
        write_atomically(partial / MODELFILE, modelfile)
        return (partial / FILE).stat().st_size + len(modelfile)


def _tensors(records: Iterable[TensorRecord], settings: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Return the tensors with GGUF's names and row order; biases that GGUF requires for GPT-2 are zero if the model has none."""
    stored, _ = quantise(records, "none", "fp32")  # raises an error if a tensor contains NaN
    found: dict[str, NDArray[Any]] = {}
    for record in stored:
        part, _, kind = record.name.removeprefix("transformer.").rpartition(".")
        array = to_array(record)
        if part in ENDS:
            found[f"{ENDS[part]}.{kind}"] = array
            continue
        _, layer, inner = part.split(".", 2)
        if inner in ("attn.q_proj", "attn.k_proj"):
            heads = settings["heads"] if inner == "attn.q_proj" else settings["kv_heads"] or settings["heads"]
            halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
            array = halves.swapaxes(1, 2).reshape(array.shape)  # rows i and i + D / 2 of a head become rows 2i and 2i + 1
        found[f"blk.{layer}.{BLOCK[inner]}.{kind}"] = array
    if settings["family"] == "gpt2":
        for name, array in list(found.items()):
            if name.endswith(".weight") and not name.startswith(("token_embd", "position_embd")):
                found.setdefault(name.replace(".weight", ".bias"), np.zeros(array.shape[0], np.float32))
    return found


def _model_keys(
    gguf: Any, settings: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]], dtype: str, name: str
) -> dict[str, Any]:
    """Return the GGUF metadata from which llama.cpp builds the model; GGUFWriter.add_KEY writes the value of a KEY."""
    llama = settings["family"] == "llama"
    keys = {
        "type": "model",
        "name": name,
        "quantization_version": gguf.GGML_QUANT_VERSION,
        "file_type": gguf.LlamaFileType[f"{'ALL' if dtype == 'fp32' else 'MOSTLY'}_{DTYPES[dtype]}"],
        "context_length": settings["context"] if llama else tensors["position_embd.weight"].shape[0],
        "embedding_length": settings["width"],
        "block_count": settings["layers"],
        "feed_forward_length": mlp_width(settings["width"], settings["inner_width"]) if llama else 4 * settings["width"],
        "head_count": settings["heads"],
    }
    if not llama:
        return keys | {"layer_norm_eps": 1e-5}
    scaling, factor = settings["rope_scaling"], settings["rope_factor"]
    keys |= {
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "head_count_kv": settings["kv_heads"] or settings["heads"],
        "layer_norm_rms_eps": settings["norm_epsilon"],
        "rope_dimension_count": settings["width"] // settings["heads"],
        "rope_freq_base": settings["rope_base"] * (factor if scaling == "ntk" else 1.0),
    }
    if scaling == "linear":
        keys |= {"rope_scaling_type": gguf.RopeScalingType.LINEAR, "rope_scaling_factor": factor}
    return keys
