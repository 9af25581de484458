"""Write a trained model in another program's format, for `ingot export`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingot.artifact.hf_tokenizer import check_no_other_tokenizer, tokenizer_files
from ingot.backends.open import export_onnx
from ingot.console.entry import warn
from ingot.data.store.documents import ends_of
from ingot.inference.model import Weights, as_checkpoint, find_tokenizer, model_file, scoring_of, settings_on
from ingot.runs.folder import RunFolder
from ingot.runtime.files import read_dict, replace_folder, write_atomically

if TYPE_CHECKING:
    from ingot.data.hub import Hub


def open_hub(name: str) -> Hub:
    """Return the repository ORG/NAME on the Hugging Face hub, for uploads; raise ConfigError if no access token is set."""
    from ingot.data.hub import Hub

    hub = Hub(name, "model")
    hub.check_login()
    return hub


def write_layout(
    target: Path, source: Weights, tokenizer: Mapping[str, Any] | None, layout: str, dtype: str, name: str, published: str | None
) -> int:
    """Write a model to a file or folder in another program's format and return its size in bytes.

    `name` is the model's name in a GGUF file, and `published` the name of the repository that a folder will be pushed to.
    """
    if layout == "nanogpt":
        from ingot.compat.nanogpt.checkpoint import keys_of as keys_of_ckpt
        from ingot.compat.nanogpt.checkpoint import write_ckpt

        write_ckpt(target, as_checkpoint(source), keys_of_ckpt(source.config))
        return target.stat().st_size
    if layout == "gpt-simple":
        from ingot.compat.gpt_simple.files import keys_of, write_checkpoint

        return write_checkpoint(target, as_checkpoint(source), keys_of(source.config), tokenizer=True)
    if layout == "onnx":
        return _write_onnx(target, source, tokenizer, dtype)
    if layout == "web":
        from ingot.ui.model_page import check_tokenizer, write_page

        check_tokenizer(tokenizer)
        return _write_onnx(target, source, tokenizer, dtype) + write_page(target)
    settings = source.config.model.model_dump()
    settings["context"] = settings["context"] or source.config.data.seq_len
    if layout == "gguf":
        from ingot.artifact.gguf import is_normalised, write_gguf

        size = write_gguf(target, source.tensors.values(), settings, tokenizer, dtype, name)
        if tokenizer is not None and is_normalised(tokenizer):
            warn("llama.cpp encodes repeated spaces and rare characters differently than Ingot: it does not normalise text")
        return size
    return _write_huggingface(target, source, tokenizer, settings, dtype, published)


def _write_onnx(folder: Path, weights: Weights, tokenizer: Mapping[str, Any] | None, dtype: str) -> int:
    """Write model.onnx, config.json and the files of the tokenizer (a spec, or None) to a folder; return their size in bytes."""
    config = settings_on(weights, "cpu")
    vocab_size = find_tokenizer(weights).vocab_size
    files, known = tokenizer_files(tokenizer, config.model.context or config.data.seq_len) if tokenizer else ({}, None)
    check_no_other_tokenizer(folder, files)
    with replace_folder(folder) as partial:
        about: dict[str, Any] = {"format": "ingot-onnx", "family": config.model.family, "vocab_size": vocab_size, "dtype": dtype}
        about |= export_onnx(config, vocab_size, weights.tensors, partial / "model.onnx", dtype)
        bos, ends = (known.bos, ends_of(known)) if known is not None else (None, [])
        about |= {"bos_token_id": bos, "eos_token_ids": ends, "tokenizer_files": sorted(files)}
        for name, content in {**files, "config.json": json.dumps(about, indent=2).encode()}.items():
            write_atomically(partial / name, content)
        return sum(file.stat().st_size for file in partial.iterdir())


def _write_huggingface(
    target: Path,
    source: Weights,
    tokenizer: Mapping[str, Any] | None,
    settings: dict[str, Any],
    dtype: str,
    published: str | None,
) -> int:
    from ingot.artifact.huggingface import is_portable, model_card, write_model
    from ingot.artifact.model_code import write_model_with_code
    from ingot.artifact.quantise import quantise

    facts = {**source.facts, "tokenizer": tokenizer}
    native, custom = is_portable(settings, "huggingface"), settings["family"] == "file"
    settings["vocab_size"] = settings["vocab_size"] or facts["vocab_size"]
    if custom:
        settings["file"] = (file := model_file(source)).name
    records, _ = quantise(source.tensors.values(), "none", dtype)
    run = RunFolder(source.run) if source.run is not None else None
    result = (read_dict(run.result_path) or {}) if run is not None else {}
    loss = result.get("val_loss") if result.get("val_bpb") == facts["val_bpb"] else None
    trained = run.environment().get("argv") if run is not None else None
    exported = ["ingot", "export", (source.run or source.path).name, "--format", "huggingface"]
    card = model_card(
        published or target.name if source.run is None or target.parent.name != "artifact" else source.run.name,
        settings,
        facts,
        {"val_bpb": facts["val_bpb"], "val_loss": loss if facts["val_bpb"] is not None else None},
        Path(source.config.data.path).name if source.names_data else None,
        [*([trained] if trained else []), exported],
        has_code=not native,
    )
    scoring = scoring_of(source.config.model_dump())
    if native:
        return write_model(target, records, settings, tokenizer, scoring, card)
    stages = [stage.model for stage in source.config.training.stages]
    return write_model_with_code(target, records, settings, stages, file if custom else None, tokenizer, scoring, card)
