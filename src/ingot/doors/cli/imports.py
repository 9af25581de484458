"""`ingot import`: GPT-2 weights in Hugging Face's layout, from a folder or the hub, as a file that the other verbs read."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from ingot.doors.cli.export import Force, check_target
from ingot.doors.cli.options import AsJson
from ingot.doors.cli.output import print_columns, print_json
from ingot.errors import CheckpointError, ConfigError, DataError

HUB_FILES = (
    "config.json", "model.safetensors", "model.safetensors.index.json", "model-*.safetensors", "tokenizer.json", "vocab.json",
    "merges.txt", "ingot-tokenizer.json",
)  # fmt: skip


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("import")(import_command)


def import_command(
    name: Annotated[str, typer.Argument(metavar="PATH|NAME", help="Folder with config.json, or a model's name on the hub.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE|DIR", help="The file to write, or a folder for it.")],
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", metavar="NAME", help="Default: the folder's own, else GPT-2's.")
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Turn GPT-2 weights in Hugging Face's layout into a file that generate and eval read."""
    from ingot.artifact.container import artifact_name, write_artifact
    from ingot.artifact.hf_tokenizer import find_tokenizer
    from ingot.artifact.huggingface import read_gpt2

    target = output / artifact_name("none") if output.is_dir() else output
    check_target(target, False, force)
    folder = Path(os.path.expanduser(name))  # noqa: PTH111 (Path.expanduser raises for an unknown user)
    if not folder.exists():
        folder = _fetched(name)
    records, settings = read_gpt2(folder)
    found = find_tokenizer(folder, settings["vocab_size"], tokenizer)
    facts: dict[str, Any] = {
        "config": _config(settings, found.kind),
        "tokenizer": found.spec(),
        "tokenizer_fingerprint": found.fingerprint(),
        "vocab_size": found.vocab_size,
        "imported_from": name,
    }
    try:
        report = write_artifact(target, records, facts, "none", "none")
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror or error}") from None
    if as_json:
        told = {"artifact": str(target), "bytes": report.bytes, "parameters": report.parameters, "tokenizer": found.kind}
        print_json({**told, "model": settings})
        return
    shape = ", ".join(f"{key} {settings[key]}" for key in ("layers", "heads", "width", "context", "vocab_size"))
    print_columns(
        [
            ("artifact", str(target)),
            ("bytes", f"{report.bytes:,}"),
            ("parameters", f"{report.parameters:,}"),
            ("model", f"gpt2: {shape}"),
            ("tokenizer", found.kind),
        ]
    )


def _config(settings: dict[str, Any], tokenizer: str) -> dict[str, Any]:
    """A whole config around the model, as every reader expects one."""
    from ingot.config.loading import load_config

    length = settings["context"]
    given = {
        "model": settings,
        "data": {"seq_len": length, "tokenizer": tokenizer if tokenizer in ("byte", "gpt2") else None},
        "training": {"max_steps": 0, "tokens_per_step": length},
    }
    return load_config(python=given, environment={}).config.model_dump()


def _fetched(name: str) -> Path:
    """The folder of a model on the hub, in the hub's own cache."""
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):
        raise CheckpointError(f"there is no folder {name}")
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(HUB_FILES)))
    except GatedRepoError:
        raise DataError(f"the model {name} is for those who accepted its terms; accept them and set HF_TOKEN") from None
    except (RepositoryNotFoundError, HFValidationError):
        raise DataError(
            f"there is no folder {name}, and no model of that name on {constants.ENDPOINT}; check the spelling"
        ) from None
    except LocalEntryNotFoundError:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} does not answer"
        raise DataError(
            f"there is no folder {name}, nor is it in the hub's cache, and {why}; download it elsewhere and give its folder"
        ) from None
    except Exception as error:  # whatever the network came up with
        raise DataError(f"cannot fetch the model {name}: {' '.join(str(error).split())[:200]}") from None
