"""Models on the Hugging Face hub, as folders in the hub's own cache."""

from __future__ import annotations

import re
from pathlib import Path

from ingot.errors import CheckpointError, DataError

MODEL_FILES = (
    "config.json", "model.safetensors", "model.safetensors.index.json", "model-*.safetensors", "tokenizer.json", "vocab.json",
    "merges.txt", "ingot-tokenizer.json",
)  # fmt: skip


def fetch_model(name: str) -> Path:
    """The folder of a model, fetched if it is new there."""
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):
        raise CheckpointError(f"there is no folder {name}")
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(MODEL_FILES)))
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


def cached_model(name: str) -> Path | None:
    """The folder of a model that was fetched before, whoever did it; None where it is not there or not whole."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=list(MODEL_FILES), local_files_only=True))
    except Exception:  # not there, in one of the many ways the client has to say so
        return None
    return folder if all((folder / file).is_file() for file in MODEL_FILES[:2]) else None
