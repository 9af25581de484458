"""`ingot export`: a trained model as one file for others, with the size and the score of that very file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ingot.cli.generate import DeviceName, ModelPath
from ingot.cli.options import AsJson
from ingot.cli.verbs import app
from ingot.console.entry import warn
from ingot.console.output import print_columns, print_json
from ingot.console.progress import progress_bar
from ingot.errors import CheckpointError, ConfigError, IngotError, RunError, shown
from ingot.runtime.files import write_atomically, writing_output

if TYPE_CHECKING:
    from ingot.config.schema import ArtifactSection
    from ingot.inference.model import Weights
    from ingot.runtime.tensors import TensorRecord

BY_RUN = "Default: as the run's config says."


WhichOne = Annotated[
    str, typer.Option("--which", "--checkpoint", metavar="latest|best", help="Which checkpoint of a run folder.")
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", metavar="FILE|DIR", help="Default: in artifact/ of the run folder, as model.ingot or FORMAT/."
    ),
]
Format = Annotated[
    Literal["ingot", "huggingface", "gguf", "nanogpt", "gpt-simple"],
    typer.Option(
        "--format",
        help="ingot: one file. Of the gpt2 and llama families: huggingface, a folder for transformers; gguf, one for llama.cpp "
        "and ollama. Of gpt2: nanogpt, ckpt.pt. Of llama: gpt-simple, a checkpoint folder.",
    ),
]
Quantiser = Annotated[str | None, typer.Option(metavar="none|int8|int8-golf|std|gptq", help=f"Bytes per weight. {BY_RUN}")]
Codec = Annotated[str | None, typer.Option(metavar="none|zlib|lzma|rans", help=f"Compression. {BY_RUN}")]
Dtype = Annotated[
    str | None,
    typer.Option(metavar="fp32|bf16|fp16|q8_0", help=f"Number format where the quantiser is none; q8_0: of gguf alone. {BY_RUN}"),
]
WithTokenizer = Annotated[bool | None, typer.Option("--tokenizer/--no-tokenizer", help=f"Put it into the file. {BY_RUN}")]
Limit = Annotated[int | None, typer.Option(metavar="BYTES", help="Most bytes allowed. Default: budget.artifact_bytes.", min=1)]
WithScore = Annotated[bool, typer.Option("--score/--no-score", help="Read the file in a process of its own and score it.")]
Data = Annotated[str | None, typer.Option(metavar="DIR", help="Prepared folder; the file is scored on it. Default: the run's.")]
Force = Annotated[bool, typer.Option("--force", help="Replace files that are there; other files in a folder stay.")]


@app.command("export")
def export(
    path: ModelPath,
    which: WhichOne = "latest",
    output: Output = None,
    layout: Format = "ingot",
    quantiser: Quantiser = None,
    codec: Codec = None,
    dtype: Dtype = None,
    tokenizer: WithTokenizer = None,
    limit: Limit = None,
    score: WithScore = True,
    data: Data = None,
    device: DeviceName = "auto",
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Write a trained model as one file, check its size, and score that file; or in the layout of another program."""
    from ingot.backends.open import find_device
    from ingot.inference.model import open_weights

    source = open_weights(path, which)
    asked = {"quantiser": quantiser, "codec": codec, "dtype": dtype, "tokenizer": tokenizer}
    made = source.config.artifact.model_copy(update={name: value for name, value in asked.items() if value is not None})
    facts = source.facts if made.tokenizer else {**source.facts, "tokenizer": None}
    if layout in ("huggingface", "gguf"):
        if quantiser or codec or data:
            raise ConfigError(
                f"--format {layout} has no quantiser and no codec and is not scored; leave these out, --dtype makes it smaller"
            )
        export_layout = _export_folder if layout == "huggingface" else _export_gguf
        found = export_layout(source, facts, made.dtype, output, force) | {"limit": limit}
    elif layout in ("nanogpt", "gpt-simple"):
        if quantiser or codec or dtype or data:
            raise ConfigError(
                f"--format {layout} is the model as it is, and is not scored; give no quantiser, codec, dtype or data"
            )
        write = _export_ckpt if layout == "nanogpt" else _export_gpt_simple
        found = write(source, output, force) | {"limit": limit}
    else:
        if score and data is None and not facts["data_fingerprint"]:
            raise ConfigError(f"{path} names no text it could be scored on; give --data DIR or --no-score")
        if score and device not in ("auto", "cpu"):  # which are everywhere; to look for another loads its framework
            find_device(device)
        found = _export_file(source, facts, made, limit or source.config.budget.artifact_bytes, output, force, device)
        if score and (data is not None or _has_text(source)):
            try:
                found |= _scores(source, Path(found["artifact"]), data, device)
            except IngotError:
                _report(found, as_json)  # the file is there, whatever is wrong with the score
                raise
    _report(found, as_json)


def _export_file(
    source: Weights,
    facts: Mapping[str, Any],
    made: ArtifactSection,
    limit: int | None,
    output: Path | None,
    force: bool,
    device: str,
) -> dict[str, Any]:
    from ingot.artifact.codecs import check_codec
    from ingot.artifact.container import artifact_name, write_artifact

    check_codec(made.codec)
    target = _target(source, output, artifact_name(made.codec), force)
    _bring_code(source, target)
    records = list(source.tensors.values())
    codes = _codes(source, facts, made, limit, device)
    with progress_bar("compressing", in_bytes=True) as progress, writing_output(target):
        report = write_artifact(target, records, facts, made.quantiser, made.codec, made.dtype, progress, codes)
    found = {
        "artifact": str(target),
        "checkpoint": str(source.path),
        "bytes": report.bytes,
        "payload_bytes": report.payload_bytes,
        "parameters": report.parameters,
        "quantiser": made.quantiser,
        "codec": made.codec,
        "limit": limit,
    }
    if limit is None or report.bytes <= limit:
        return found
    return found | _alternatives(source, facts, made, report.bytes, limit, device)


def _codes(
    source: Weights, facts: Mapping[str, Any], made: ArtifactSection, limit: int | None, device: str
) -> dict[str, list[TensorRecord]]:
    """What the quantisers std and gptq make of the large weights, by the text that the run was trained on."""
    from ingot.artifact.quantise import BY_MODEL

    if made.quantiser not in BY_MODEL:
        return {}
    from ingot.data.loading.data_path import open_dataset
    from ingot.inference.model import settings_on
    from ingot.train.fit_artifact import find_codes

    config = settings_on(source, device).model_copy(update={"artifact": made})
    data = config.data
    dataset = open_dataset(data.path, data.tokenizer, data.trust_tokens)
    return find_codes(config, list(source.tensors.values()), facts, dataset, limit, partial(typer.echo, err=True))


def _bring_code(source: Weights, target: Path) -> None:
    """The Python file of a model of one's own goes where its artifact goes."""
    if source.config.model.family != "file":
        return
    from ingot.inference.model import model_file

    file = model_file(source)
    beside = target.parent / file.name
    if target.parent.name == "artifact" and file.parent == target.resolve().parent.parent:
        return  # it lies in its run folder
    if beside.exists() and beside.read_bytes() != file.read_bytes():
        raise ConfigError(f"{beside} is another file than the model's, which goes beside its artifact; give another --output")
    write_atomically(beside, file.read_bytes())


def _has_text(source: Weights) -> bool:
    """Whether the run has validation text; data that cannot be opened is for the score to complain about."""
    from ingot.data.loading.data_path import open_dataset

    try:
        data = source.config.data
        return open_dataset(data.path, data.tokenizer, data.trust_tokens).split("val").tokens > 1
    except IngotError:
        return True


# From the least lossy to the most: how weights may be stored.
WAYS = (("none", "fp32"), ("none", "fp16"), ("none", "bf16"), ("int8", "fp32"), ("int8-golf", "fp32"))


def _alternatives(
    source: Weights, facts: Mapping[str, Any], made: ArtifactSection, size: int, limit: int, device: str
) -> dict[str, Any]:
    """The least lossy way to store the model that fits, tried out; where none does, the smallest."""
    from ingot.artifact.codecs import CODECS
    from ingot.artifact.container import artifact_sizes
    from ingot.artifact.quantise import BY_MODEL

    tried: list[tuple[int, str]] = []
    for quantiser, dtype in WAYS:
        # The entropy of floats is what lzma reaches too, and takes longer to reach.
        codecs = [codec for codec in CODECS if codec != "none" and (codec != "rans" or quantiser != "none")]
        words = f"--quantiser {quantiser}" + (f" --dtype {dtype}" if quantiser == "none" else "")
        with progress_bar(f"trying {quantiser} {dtype}", in_bytes=True) as progress:
            try:
                for codec, found in artifact_sizes(source.tensors.values(), facts, quantiser, codecs, dtype, progress):
                    tried.append((found, f"{words} --codec {codec}"))
                    if found <= limit:
                        return {"would_fit": {"options": tried[-1][1], "bytes": found}}
            except CheckpointError:  # fp16 cannot hold every weight
                continue
    if made.quantiser in BY_MODEL:
        tried.append((size, f"--quantiser {made.quantiser} --codec {made.codec}"))
    untried = ""
    for codec in ("rans", "lzma"):  # which of them makes less of few bits depends on the model's size
        if (made.quantiser, made.codec) == ("std", codec) or min(tried)[0] <= limit:
            continue
        try:
            tried.append(_std_size(source, facts, made, codec, limit, device))
        except IngotError as error:  # the text of the run may be elsewhere
            untried = str(error)
    least, options = min(tried)
    way = {"options": options, "bytes": least}
    return {"would_fit": way} if least <= limit else {"would_fit": None, "smallest": way, "std_untried": untried or None}


def _std_size(
    source: Weights, facts: Mapping[str, Any], made: ArtifactSection, codec: str, limit: int, device: str
) -> tuple[int, str]:
    """The size of what std makes for a limit, which is about that of gptq in a fraction of its time."""
    from ingot.artifact.container import artifact_sizes

    options = f"--quantiser std --codec {codec}"
    typer.echo(f"trying {options}", err=True)
    codes = _codes(source, facts, made.model_copy(update={"quantiser": "std", "codec": codec}), limit, device)
    sizes = artifact_sizes(source.tensors.values(), facts, "std", [codec], made.dtype, codes=codes)
    return next(iter(sizes))[1], options


def _export_folder(source: Weights, facts: Mapping[str, Any], dtype: str, output: Path | None, force: bool) -> dict[str, Any]:
    """Write Hugging Face's layout, and read it back to see that it says the same."""
    from ingot.artifact.huggingface import read_model, write_model
    from ingot.artifact.quantise import quantise
    from ingot.inference.model import scoring_of

    folder = _target(source, output, "huggingface", force)
    records, _ = quantise(source.tensors.values(), "none", dtype)
    with writing_output(folder):
        size = write_model(folder, records, _settings(source), facts["tokenizer"], scoring_of(source.config.model_dump()))
    stored = {record.name: record.data for record in read_model(folder)[0]}
    if any(stored[record.name] != record.data for record in records):
        raise CheckpointError(f"{folder} does not read back as it was written; the disk may be damaged")
    return {"artifact": str(folder), "checkpoint": str(source.path), "bytes": size}


def _export_gguf(source: Weights, facts: Mapping[str, Any], dtype: str, output: Path | None, force: bool) -> dict[str, Any]:
    """Write a GGUF file and its Modelfile."""
    from ingot.artifact.gguf import FILE, is_normalised, write_gguf

    if output is not None and output.suffix == ".gguf":
        raise ConfigError(f"{output}: give a folder with --output; {FILE} and a Modelfile go into it")
    folder = _target(source, output, "gguf", force)
    name = shown((source.run or source.path).resolve().name)
    with writing_output(folder):
        size = write_gguf(folder, source.tensors.values(), _settings(source), facts["tokenizer"], dtype, name)
    if is_normalised(facts["tokenizer"]):
        warn("llama.cpp does not normalise text for this tokenizer: runs of spaces and unusual characters get other ids there")
    return {"artifact": str(folder), "checkpoint": str(source.path), "bytes": size}


def _settings(source: Weights) -> dict[str, Any]:
    """The section `model`, with the context that a config leaves to its data."""
    settings = source.config.model.model_dump()
    return {**settings, "context": settings["context"] or source.config.data.seq_len}


def _export_ckpt(source: Weights, output: Path | None, force: bool) -> dict[str, Any]:
    """Write nanoGPT's file."""
    from ingot.compat.nanogpt.checkpoint import export_ckpt

    target = _target(source, output, "ckpt.pt", force)
    return {"artifact": str(target), "checkpoint": str(source.path), "bytes": export_ckpt(source, target)}


def _export_gpt_simple(source: Weights, output: Path | None, force: bool) -> dict[str, Any]:
    """Write a checkpoint folder of gpt-simple's."""
    from ingot.compat.gpt_simple.exporting import export_folder

    folder = _target(source, output, "gpt-simple", force)
    with writing_output(folder):
        size = export_folder(source, folder)
    return {"artifact": str(folder), "checkpoint": str(source.path), "bytes": size}


def _target(source: Weights, output: Path | None, name: str, force: bool) -> Path:
    """Where the result goes, made sure of before anything is computed; in its own run folder an artifact may be made anew."""
    if output is None and source.run is not None:
        output = source.run / "artifact" / name
        output.parent.mkdir(exist_ok=True)
        force = force or _is_artifact(output)
    if output is None:
        raise ConfigError(f"{source.path} belongs to no run folder; say where the result goes with --output")
    check_target(output, name in ("huggingface", "gguf", "gpt-simple"), force)
    return output


def _is_artifact(path: Path) -> bool:
    """Whether a file is one that Ingot wrote, so that nothing of the user's is lost with it."""
    from ingot.artifact.container import read_artifact

    try:
        read_artifact(path)
    except CheckpointError:
        return False
    return True


def check_target(target: Path, folder: bool, force: bool) -> None:
    """Refuse a place where nothing can or should be written."""
    if not target.parent.is_dir():
        raise ConfigError(f"{target} cannot be written: there is no folder {target.parent}; make it first")
    if target.is_dir() and not folder:
        raise ConfigError(f"{target} is a folder; give the name of a file in it")
    taken = os.path.lexists(target)  # also by a link that leads nowhere
    if taken and not force:
        raise ConfigError(f"{target} exists; --force replaces it, --output writes elsewhere")
    if taken and not (target.is_dir() if folder else target.is_file()):
        raise ConfigError(f"{target} is something else than a {'folder' if folder else 'file'}, so it is not replaced")


def _scores(source: Weights, artifact: Path, data: str | None, device: str) -> dict[str, Any]:
    """The bits per byte of the file, by a process that knows nothing else, and those of what it was made from."""
    from ingot.artifact.fresh_process import SCORING, score_in_fresh_process

    with progress_bar(SCORING, unit="rows") as progress:
        found = score_in_fresh_process(artifact, data, device, progress=progress)
    before = source.facts["val_bpb"] if data is None else None
    if before is None:
        from ingot.api import load

        with progress_bar("scoring the model it is made from", unit="rows") as progress:
            before = load(source.path, device=device, data=data).evaluate(data, progress=progress).bits_per_byte
    return {"val_loss": found["val_loss"], "val_bpb": found["val_bpb"], "checkpoint_val_bpb": before}


def _report(found: dict[str, Any], as_json: bool) -> None:
    """Print what came of it; a file over the limit is an error, told after that."""
    limit, size = found["limit"], found["bytes"]
    fits = limit is None or size <= limit
    if as_json:
        print_json({**found, "fits": fits})
    else:
        rows = [("artifact", found["artifact"]), ("made from", found["checkpoint"])]
        rows.append(("bytes", f"{size:,}" if limit is None else f"{size:,} of {limit:,}"))
        if "quantiser" in found:
            rows.append(("stored as", f"{found['quantiser']}, {found['codec']}"))
            rows.append(("parameters", f"{found['parameters']:,} in {found['payload_bytes']:,} bytes before compression"))
        if "val_bpb" in found:
            change = found["val_bpb"] - found["checkpoint_val_bpb"]
            rows.append(("val_bpb", f"{found['val_bpb']:.4f}, read back from the file"))
            rows.append(("before", f"{found['checkpoint_val_bpb']:.4f} ({round(change, 4) + 0.0:+.4f})"))
        print_columns(rows)
    if not fits:
        raise RunError(
            f"{found['artifact']} has {size:,} bytes, {size - limit:,} more than the limit of {limit:,}; {_advice(found)}"
        )


def _advice(found: dict[str, Any]) -> str:
    if "would_fit" not in found:
        return "--format ingot is smaller"
    if fits := found["would_fit"]:
        return f"{fits['options']} fits with {fits['bytes']:,} bytes"
    smallest = f"the smallest is {found['smallest']['options']} with {found['smallest']['bytes']:,} bytes"
    if why := found["std_untried"]:
        return f"nothing that was tried fits: {smallest}; --quantiser std and gptq may fit and were not tried: {why}"
    return f"nothing fits: {smallest}; train a smaller model"
