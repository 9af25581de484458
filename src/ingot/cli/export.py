"""`ingot export` writes a trained model in Ingot's or another program's format; `ingot import` reads models of other programs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Option

from ingot.cli.arguments import AsJson, DeviceName, ModelPath
from ingot.compat.nanogpt import is_ckpt
from ingot.console.entry import warn
from ingot.console.output import check_target, print_columns, print_json
from ingot.console.progress import progress_bar
from ingot.errors import CheckpointError, ConfigError, IngotError, RunError, shown
from ingot.runtime.files import read_dict, user_path, write_atomically, writing_output

if TYPE_CHECKING:
    from ingot.config.schema import ArtifactSection
    from ingot.data.tokenizers import Tokenizer
    from ingot.inference.model import Weights

BY_RUN = "Default: as in the run's config."
# Pairs (quantiser, dtype), least lossy first. std and gptq need calibration text, so they are only suggested, not tried.
WAYS = (("none", "fp32"), ("none", "fp16"), ("none", "bf16"), ("int8", "fp32"), ("int8-golf", "fp32"))


def export(
    path: ModelPath,
    which: Annotated[
        str, Option("--which", "--checkpoint", metavar="latest|best", help="Which checkpoint of a run to export.")
    ] = "latest",
    output: Annotated[
        Path | None,
        Option("--output", "-o", metavar="FILE|DIR", help="Output path. Default: in the run's artifact/ folder."),
    ] = None,
    layout: Annotated[
        Literal["ingot", "huggingface", "gguf", "onnx", "web", "nanogpt", "gpt-simple"],
        Option(
            "--format",
            help="ingot: one file. huggingface: a folder for transformers (any family). gguf: a folder for "
            "llama.cpp and ollama (gpt2 and llama). onnx: a folder for onnxruntime (any model). web: a folder "
            "with a page that runs the model in a browser. nanogpt: ckpt.pt (gpt2). gpt-simple: a checkpoint folder (llama).",
        ),
    ] = "ingot",
    quantiser: Annotated[str | None, Option(metavar="none|int8|int8-golf|std|gptq", help=f"Quantisation. {BY_RUN}")] = None,
    codec: Annotated[str | None, Option(metavar="none|zlib|lzma|rans", help=f"Compression of the file. {BY_RUN}")] = None,
    dtype: Annotated[
        str | None,
        Option(
            metavar="fp32|bf16|fp16|int8|q8_0",
            help=f"dtype of the weights; int8 is for onnx and web (web's default), q8_0 for gguf. {BY_RUN}",
        ),
    ] = None,
    tokenizer: Annotated[bool | None, Option("--tokenizer/--no-tokenizer", help=f"Include the tokenizer. {BY_RUN}")] = None,
    limit: Annotated[int | None, Option(metavar="BYTES", help="File size limit. Default: budget.artifact_bytes.", min=1)] = None,
    score: Annotated[bool, Option("--score/--no-score", help="Load the written file in a new process and score it.")] = True,
    data: Annotated[str | None, Option(metavar="DIR", help="Prepared folder to score on. Default: the run's data.")] = None,
    device: DeviceName = "auto",
    push: Annotated[
        str | None, Option(metavar="ORG/NAME", help="Also upload the folder to the Hugging Face hub (--format huggingface).")
    ] = None,
    force: Annotated[bool, Option("--force", help="Replace existing output files, but no others.")] = False,
    open_page: Annotated[bool, Option("--open", help="With --format web: open the page in a browser, until Ctrl-C.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a trained model to one file, check the file's size and score it; with --format, convert it for another program."""
    from ingot.inference.model import open_weights

    if open_page and layout != "web":
        raise ConfigError("--open needs --format web")
    source = open_weights(path, which)
    given = {"quantiser": quantiser, "codec": codec, "dtype": dtype, "tokenizer": tokenizer}
    section = source.config.artifact.model_copy(update={name: value for name, value in given.items() if value is not None})
    facts = source.facts if section.tokenizer else {**source.facts, "tokenizer": None}
    if push is not None and layout != "huggingface":
        raise ConfigError("--push needs --format huggingface")
    if layout != "ingot":
        if quantiser or codec or data:
            raise ConfigError(f"--format {layout} is neither compressed nor scored; leave --quantiser, --codec and --data out")
        if dtype and layout in ("nanogpt", "gpt-simple"):
            raise ConfigError(f"--format {layout} keeps the dtype of the weights; leave --dtype out")
        dtype = dtype or ("int8" if layout == "web" else section.dtype)
        with ExitStack() as stack:
            record: dict[str, Any] = {"checkpoint": str(source.path), "limit": limit}
            if push is not None:
                from ingot.cli.layouts import open_hub

                hub = open_hub(push)
                if output is None and source.run is None:
                    output = Path(stack.enter_context(TemporaryDirectory())) / "huggingface"
            target, record["bytes"] = _export_layout(source, facts, layout, dtype, output, force, push)
            record["artifact"] = str(target)
            if push is not None and (limit is None or record["bytes"] <= limit):
                from ingot.artifact.huggingface import CODE, CONFIG, WRITTEN_FILES

                # Upload model code only if this model needs it: an earlier export may have left the code of another model there.
                has_code = "auto_map" in (read_dict(target / CONFIG) or {})
                record["pushed"] = hub.upload(target, [name for name in WRITTEN_FILES if name != CODE or has_code])
        _report(record, as_json)
        if open_page:
            from ingot.ui.model_page import serve_page

            serve_page(target)
        return
    if score and data is None and not source.names_data:
        raise ConfigError(f"{path} does not record which data it was trained on; give --data DIR or --no-score")
    if score and device not in ("auto", "cpu"):  # fail before the export if the device is missing
        from ingot.backends.open import find_device

        find_device(device)
    record = _export_file(source, facts, section, limit or source.config.budget.artifact_bytes, output, force, device)
    if score and (data is not None or _has_validation_text(source)):
        from ingot.artifact.fresh_process import SCORING, score_in_fresh_process

        try:
            with progress_bar(SCORING, unit="rows") as progress:
                scored = score_in_fresh_process(Path(record["artifact"]), data, device, progress=progress)
            before = source.facts["val_bpb"] if data is None else None
            if before is None:
                from ingot.api import load

                with progress_bar("scoring the original model", unit="rows") as progress:
                    before = load(source.path, device=device, data=data).evaluate(data, progress=progress).bits_per_byte
        except IngotError:
            _report(record, as_json)  # report the written file even if it could not be scored
            raise
        record |= {"val_loss": scored["val_loss"], "val_bpb": scored["val_bpb"], "checkpoint_val_bpb": before}
    _report(record, as_json)


def _export_file(
    source: Weights,
    facts: Mapping[str, Any],
    section: ArtifactSection,
    limit: int | None,
    output: Path | None,
    force: bool,
    device: str,
) -> dict[str, Any]:
    from ingot.artifact.codecs import check_codec
    from ingot.artifact.container import artifact_name, write_artifact
    from ingot.artifact.quantise import BY_MODEL
    from ingot.inference.model import model_file, settings_on

    check_codec(section.codec)
    target = _target(source, output, artifact_name(section.codec), force)
    if source.config.model.family == "file":  # a custom model: its Python file must be next to the artifact or in the run folder
        file = model_file(source)
        copy = target.parent / file.name
        if target.parent.name != "artifact" or file.parent != target.resolve().parent.parent:  # outside the run folder
            if copy.exists() and copy.read_bytes() != file.read_bytes():
                raise ConfigError(f"{copy} already exists, but this model's code must be written there; choose another --output")
            write_atomically(copy, file.read_bytes())
    tensors = list(source.tensors.values())
    codes: dict[str, list[Any]] = {}
    if section.quantiser in BY_MODEL:  # this quantiser is calibrated on text from the dataset of the run
        from ingot.data.loading.data_path import open_dataset
        from ingot.train.fit_artifact import find_codes

        config = settings_on(source, device).model_copy(update={"artifact": section})
        dataset = open_dataset(config.data.path, config.data.tokenizer, config.data.trust_tokens)
        codes = find_codes(config, tensors, facts, dataset, limit, partial(typer.echo, err=True))
    with progress_bar("compressing", in_bytes=True) as progress, writing_output(target):
        report = write_artifact(target, tensors, facts, section.quantiser, section.codec, section.dtype, progress, codes)
    record = {"artifact": str(target), "checkpoint": str(source.path), **vars(report), "limit": limit}
    return record | (_alternatives(source, facts, limit) if limit is not None and report.bytes > limit else {})


def _has_validation_text(source: Weights) -> bool:
    """Return True if the run has validation text, and also if its data cannot be opened, so that scoring reports the error."""
    from ingot.data.loading.data_path import open_dataset

    data = source.config.data
    try:
        return open_dataset(data.path, data.tokenizer, data.trust_tokens).split("val").tokens > 1
    except IngotError:
        return True


def _alternatives(source: Weights, facts: Mapping[str, Any], limit: int) -> dict[str, Any]:
    """Try quantisers and codecs; return the least lossy combination within the size limit, or the smallest if none fits."""
    from ingot.artifact.codecs import CODECS
    from ingot.artifact.container import artifact_sizes

    tried: list[tuple[int, str]] = []
    for quantiser, dtype in WAYS:
        # For float weights, rans is slower than lzma and compresses no better.
        codecs = [codec for codec in CODECS if codec != "none" and (codec != "rans" or quantiser != "none")]
        options = f"--quantiser {quantiser}" + (f" --dtype {dtype}" if quantiser == "none" else "")
        with progress_bar(f"trying {quantiser} {dtype}", in_bytes=True) as progress:
            try:
                for codec, size in artifact_sizes(source.tensors.values(), facts, quantiser, codecs, dtype, progress):
                    tried.append((size, f"{options} --codec {codec}"))
                    if size <= limit:
                        return {"would_fit": {"options": tried[-1][1], "bytes": size}}
            except CheckpointError:  # the weights exceed the range of fp16
                continue
    size, options = min(tried)
    return {"would_fit": None, "smallest": {"options": options, "bytes": size}}


def _export_layout(
    source: Weights, facts: Mapping[str, Any], layout: str, dtype: str, output: Path | None, force: bool, push: str | None
) -> tuple[Path, int]:
    from ingot.cli.layouts import write_layout

    gguf_file = output if layout == "gguf" and output is not None and output.suffix == ".gguf" else None
    with ExitStack() as stack:
        if gguf_file is not None:  # export to a temporary folder, then move only the .gguf file out of it
            check_target(gguf_file, False, force)
            stack.enter_context(writing_output(gguf_file))
            output = Path(stack.enter_context(TemporaryDirectory(dir=gguf_file.parent, prefix=f".{gguf_file.name}."))) / "gguf"
        target = _target(source, output, "ckpt.pt" if layout == "nanogpt" else layout, force)
        stack.enter_context(writing_output(target))
        name = shown((source.run or source.path).resolve().name)
        size = write_layout(target, source, facts["tokenizer"], layout, dtype, name, push)
        if gguf_file is not None:
            size = (target / "model.gguf").replace(gguf_file).stat().st_size
            target = gguf_file
    return target, size


def _target(source: Weights, output: Path | None, name: str, force: bool) -> Path:
    """Return the output path after checking it. The default path is in the run folder; an artifact there may be overwritten."""
    if output is None and source.run is not None:
        from ingot.artifact.container import read_artifact

        output = source.run / "artifact" / name
        output.parent.mkdir(exist_ok=True)
        try:
            read_artifact(output)  # raises CheckpointError unless Ingot wrote the file
            force = True
        except CheckpointError:
            pass
    if output is None:
        raise ConfigError(f"{source.path} is not in a run folder; give the output path with --output")
    check_target(output, name in ("huggingface", "gguf", "onnx", "web", "gpt-simple"), force)
    return output


def _report(record: dict[str, Any], as_json: bool) -> None:
    limit, size = record["limit"], record["bytes"]
    within = limit is None or size <= limit
    rows = [("artifact", record["artifact"]), ("made from", record["checkpoint"])]
    rows += [("pushed to", record["pushed"])] if "pushed" in record else []
    rows.append(("bytes", f"{size:,}" if limit is None else f"{size:,} of {limit:,}"))
    if "quantiser" in record:
        rows.append(("stored as", f"{record['quantiser']}, {record['codec']}"))
        rows.append(("parameters", f"{record['parameters']:,} in {record['payload_bytes']:,} bytes before compression"))
    if "val_bpb" in record:
        change = record["val_bpb"] - record["checkpoint_val_bpb"]
        rows.append(("val_bpb", f"{record['val_bpb']:.4f}, scored from the written file"))
        rows.append(("before", f"{record['checkpoint_val_bpb']:.4f} ({round(change, 4) + 0.0:+.4f})"))
    print_json({**record, "fits": within}) if as_json else print_columns(rows)
    if not within:
        advice = "--format ingot writes a smaller file"
        if fits := record.get("would_fit"):
            advice = f"use {fits['options']}, which gives {fits['bytes']:,} bytes"
        elif smallest := record.get("smallest"):
            tried = f"the smallest file tried, with {smallest['options']}, has {smallest['bytes']:,} bytes"
            advice = f"{tried}; use --quantiser std or gptq, which make smaller files, or train a smaller model"
        raise RunError(f"{record['artifact']} has {size:,} bytes, {size - limit:,} more than the limit of {limit:,}; {advice}")


def import_weights(
    name: Annotated[
        str,
        typer.Argument(
            metavar="PATH|NAME",
            help="Model to import: a folder with config.json, a name on the Hugging Face hub, nanoGPT's ckpt.pt, golf's "
            "final_model, or a run or checkpoint of gpt-simple.",
        ),
    ],
    output: Annotated[Path, Option("--output", "-o", metavar="FILE|DIR", help="File to write, or the folder to write it to.")],
    tokenizer: Annotated[str | None, Option(metavar="NAME", help="Tokenizer. Default: the model's own, else GPT-2's.")] = None,
    force: Annotated[bool, Option("--force", help="Replace the file if it exists.")] = False,
    as_json: AsJson = False,
) -> None:
    """Convert a model from Hugging Face (GPT-2, Llama), nanoGPT, golf or gpt-simple to an artifact that Ingot can use."""
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


def _read(name: str, tokenizer: str | None) -> tuple[list[Any], dict[str, Any], Tokenizer, dict[str, Any]]:
    """Return the weights, settings and tokenizer of a model to import, and its evaluation settings ({} if unknown)."""
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
