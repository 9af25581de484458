"""A model to write with, from wherever nanoGPT's people have theirs: ckpt.pt, GPT-2, or what ingot itself leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ingot.api import load
from ingot.artifact.hf_tokenizer import find_tokenizer
from ingot.backends.torch.saved import DamagedFile
from ingot.config.schema import GPT2_IDS
from ingot.data.formats.nanogpt import META, char_tokenizer
from ingot.data.tokenizers import GPT2Tokenizer, Tokenizer, from_spec, open_tokenizer
from ingot.doors.nanogpt import is_ckpt
from ingot.doors.nanogpt.checkpoint import CKPT, Ckpt, read_ckpt
from ingot.doors.nanogpt.pretrained import pretrained_folder, read_pretrained
from ingot.errors import CheckpointError, DataError
from ingot.runs.checkpoints import newest_sound
from ingot.runs.steps import INDEX
from ingot.trained.model import LoadedModel, open_model
from ingot.trained.weights import foreign_weights

Say = Callable[[str], None]


def open_named(init_from: str, out_dir: Path, device: str, say: Say, warn: Say) -> LoadedModel:
    """What the keys init_from and out_dir name: a ckpt.pt or its folder, a run folder, a checkpoint, an artifact, or GPT-2."""
    if init_from != "resume":
        say(f"loading weights from pretrained gpt: {init_from}")
        records, settings = read_pretrained(init_from)
        folder = pretrained_folder(init_from)
        tokenizer = find_tokenizer(folder, settings["vocab_size"])
        return open_model(foreign_weights(folder, records.values(), settings, tokenizer), tokenizer, device)
    if (out_dir / CKPT).is_file() or is_ckpt(out_dir):
        try:
            return open_ckpt(out_dir / CKPT if out_dir.is_dir() else out_dir, device, say)
        except DamagedFile as error:
            if (newest := newest_sound(out_dir / "checkpoints", warn, look_only=True)) is None:
                raise
            warn(f"{error}; {newest.path} is taken instead")
            return load(newest.path, device=device)
    if not out_dir.is_file() and not (out_dir / "checkpoints").is_dir() and not (out_dir / INDEX).is_file():
        raise CheckpointError(f"there is no {out_dir / CKPT}; train first, or say with --out_dir where it is")
    return load(out_dir, device=device)


def open_ckpt(path: Path, device: str, say: Say, tokenizer: str | None = None) -> LoadedModel:
    """A model from a ckpt.pt, with its own tokenizer or the one that is named."""
    ckpt = read_ckpt(path)
    found = ckpt_tokenizer(ckpt, say, tokenizer)
    return open_model(foreign_weights(path, ckpt.weights.values(), ckpt.settings, found, scoring=ckpt.scoring), found, device)


def ckpt_tokenizer(ckpt: Ckpt, say: Say, name: str | None = None) -> Tokenizer:
    """The tokenizer of a ckpt.pt: the one that is named, its own, that of its dataset, or GPT-2's if its ids can be those."""
    rows, dataset = ckpt.settings["vocab_size"], str(ckpt.config.get("dataset") or "")
    meta = Path("data") / dataset / META
    if name is not None:
        found = open_tokenizer(name)
    elif ckpt.tokenizer is not None:
        found = from_spec(ckpt.tokenizer)
    elif dataset and meta.is_file():
        say(f"Loading meta from {meta}...")
        characters = char_tokenizer(meta)
        if characters is None:
            raise DataError(f"{meta} does not list single characters in their order, so nothing can be written with it")
        found = characters
    elif rows >= GPT2_IDS:
        say("No meta.pkl found, assuming GPT-2 encodings...")
        found = GPT2Tokenizer()
    else:
        raise DataError(
            f"{ckpt.path} has {rows:,} ids, fewer than GPT-2, and its characters are not in {meta}; "
            "prepare its dataset again, and start where the folder data/ is"
        )
    if found.vocab_size > rows:
        raise DataError(f"the {found.kind} tokenizer has {found.vocab_size:,} ids and the model of {ckpt.path} only {rows:,}")
    return found
