"""From `data.path` to the data it names: a prepared folder, tokens of another program, JSON lines, or a sample."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from ingot.data.formats.foreign import open_foreign
from ingot.data.prepare.cached import PREFIX, SUFFIXES, prepared_lines, sample_bytes, sample_path
from ingot.data.store.dataset import MANIFEST, Dataset
from ingot.data.text.text_files import file_bytes, find_buckets
from ingot.data.tokenizers import Tokenizer, open_tokenizer
from ingot.data.tokenizers.by_name import is_learned, is_learned_as
from ingot.errors import DataError, Setting
from ingot.runtime.files import allow_open_files, user_path


def open_dataset(path: str, tokenizer: str | None = None, trust_tokens: bool = False, fitting: str = "byte") -> Dataset:
    """Opens what `data.path` names, preparing text if need be; a given tokenizer must be the dataset's.

    `trust_tokens`: tokens of other programs are not held against it. `fitting`: the tokenizer to advise where there is no data.
    """
    allow_open_files()
    folder = resolve(path, tokenizer)
    if not (folder / MANIFEST).is_file():
        if (foreign := open_foreign(folder, tokenizer, trust_tokens)) is not None:
            return foreign
        buckets = find_buckets(folder, lambda file: file.name.endswith(SUFFIXES))
        if buckets or (folder.is_file() and folder.name.endswith(SUFFIXES)):
            return Dataset.open(prepared_lines(folder, buckets, tokenizer))
    _refuse_missing_published(folder, fitting)
    dataset = Dataset.open(folder, fitting)
    if tokenizer is not None and not path.startswith(PREFIX):
        _check_same(tokenizer, dataset, path)
    return dataset


def text_bytes(path: str) -> int | None:
    """About how many bytes of text `data.path` names; None where it is tokens already, or names a tokenizer."""
    if path.startswith(PREFIX):
        name, own = _sample(path)
        return sample_bytes(name) if own is None else None
    folder = user_path(path)
    if (folder / MANIFEST).is_file():
        return None
    buckets = find_buckets(folder, lambda file: file.name.endswith(SUFFIXES))
    files = [file for some in buckets.get("train", {}).values() for file in some]
    files = files or ([folder] if folder.is_file() and folder.name.endswith(SUFFIXES) else [])
    return sum(map(file_bytes, files)) or None


def resolve(path: str, tokenizer: str | None = None) -> Path:
    """The folder that `path` names: a folder of tokens, or sample:NAME, which may bring a tokenizer for where none is given."""
    if path.startswith(PREFIX):
        name, own = _sample(path)
        return sample_path(name, tokenizer or own or "byte")
    return user_path(path)


def _sample(path: str) -> tuple[str, str | None]:
    """The name in sample:NAME+TOKENIZER, and the tokenizer, if there is one."""
    name, _, own = path.removeprefix(PREFIX).partition("+")
    return name, own or None


def _refuse_missing_published(folder: Path, tokenizer: str) -> None:
    """Refuse a folder of golf's published data that is not here, if no text could be prepared with its tokenizer either."""
    published = re.fullmatch(r"fineweb10B_(\w+)", folder.name)
    if published and folder.parent.name == "datasets" and not folder.exists() and not user_path(tokenizer).exists():
        command = f"ingot data download --variant {published[1]} --output {shlex.quote(str(folder.parent.parent))}"
        raise DataError(f"no data at {folder}: there is no such folder; download it and its tokenizer with: {command}")


def _check_same(name: str, dataset: Dataset, path: str) -> None:
    found, source = dataset.tokenizer, dataset.manifest.source
    told = source.get("tokenizer") if isinstance(source, dict) else None
    asked = told if isinstance(told, str) and is_learned(told) else None
    if is_learned(name):
        if is_learned_as(name, found, asked):
            return
        given = name
    else:
        opened = open_tokenizer(name)
        if opened.fingerprint() == found.fingerprint():
            return
        given = f"{name} ({_shown(opened)})"
    raise DataError(
        f"{{0}} is {given} and {path} was prepared with {f'{asked} ({_shown(found)})' if asked else _shown(found)}",
        Setting("data.tokenizer"),
        advice=f"leave {{0}} out or prepare the text again with --tokenizer {name}",
    )


def _shown(tokenizer: Tokenizer) -> str:
    return f"{tokenizer.kind}, {tokenizer.vocab_size:,} ids, fingerprint {tokenizer.fingerprint()[:12]}"
