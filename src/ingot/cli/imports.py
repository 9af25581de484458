"""`ingot import`: convert other programs' weights to an artifact that every other command accepts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from ingot.cli.arguments import AsJson
from ingot.compat.nanogpt import is_ckpt
from ingot.console.entry import warn
from ingot.console.output import check_target, print_columns, print_json
from ingot.runtime.files import user_path, writing_output

if TYPE_CHECKING:
    from ingot.data.tokenizers import Tokenizer
    from ingot.runtime.tensors import TensorRecord


def import_weights(
    name: Annotated[
        str,
        typer.Argument(
            metavar="PATH|NAME",
            help="A folder with config.json, nanoGPT's ckpt.pt, golf's final_model, a run or checkpoint of gpt-simple, or a name "
            "on the Hugging Face hub.",
        ),
    ],
    output: Annotated[Path, Option("--output", "-o", metavar="FILE|DIR", help="The file to write, or a folder for it.")],
    tokenizer: Annotated[str | None, Option(metavar="NAME", help="Default: the model's own, or GPT-2's.")] = None,
    force: Annotated[bool, Option("--force", help="Replace the file if it exists.")] = False,
    as_json: AsJson = False,
) -> None:
    """Import weights of Hugging Face's GPT-2 and Llama, nanoGPT, golf or gpt-simple. Every other command reads the result."""
    from ingot.artifact.container import artifact_name, write_artifact
    from ingot.inference.model import foreign_weights

    target = output / artifact_name("none") if output.is_dir() else output
    check_target(target, False, force)
    records, model, model_tokenizer, scoring = _read(name, tokenizer)
    weights = foreign_weights(Path(name), records, model, model_tokenizer, tokenizer, scoring)
    with writing_output(target):
        report = write_artifact(target, weights.tensors.values(), {**weights.facts, "imported_from": name}, "none", "none")
    size, parameters, kind = report.bytes, report.parameters, model_tokenizer.kind
    if as_json:
        print_json({"artifact": target, "bytes": size, "parameters": parameters, "tokenizer": kind, "model": model})
        return
    rows = [("artifact", str(target)), ("bytes", f"{size:,}"), ("parameters", f"{parameters:,}"), ("tokenizer", kind)]
    shape = ", ".join(f"{key} {model[key]}" for key in ("layers", "heads", "width", "context", "vocab_size"))
    print_columns([*rows, ("model", f"{model['family']}: {shape}")])


def _read(name: str, tokenizer: str | None) -> tuple[list[TensorRecord], dict[str, Any], Tokenizer, dict[str, Any]]:
    """Return the weights, model settings, tokenizer, and evaluation settings if they are known."""
    from ingot.artifact.gpt_simple import is_checkpoint, saved_checkpoints

    path = user_path(name)
    if path.is_file():
        from ingot.compat.golf.files import import_golf, is_golf

        if is_golf(path):
            return import_golf(path, tokenizer, warn)
    if is_ckpt(path):
        from ingot.compat.nanogpt.checkpoint import ckpt_tokenizer, read_ckpt

        ckpt = read_ckpt(path)
        return list(ckpt.weights.values()), ckpt.settings, ckpt_tokenizer(ckpt, lambda line: None, tokenizer), ckpt.scoring
    if is_checkpoint(path) or saved_checkpoints(path):
        from ingot.inference.model import find_tokenizer as find_own
        from ingot.inference.model import open_weights

        weights = open_weights(path)
        return list(weights.tensors.values()), weights.config.model.model_dump(), find_own(weights, tokenizer), {}
    from ingot.artifact.hf_tokenizer import find_tokenizer
    from ingot.artifact.huggingface import fetch_model, read_model, read_scoring

    folder = path if path.exists() else fetch_model(name)
    records, settings = read_model(folder)
    return records, settings, find_tokenizer(folder, settings["vocab_size"], tokenizer), read_scoring(folder)
