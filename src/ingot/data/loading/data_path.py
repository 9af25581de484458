"""Open the data at `data.path`: a prepared folder, another program's tokens, JSON lines, a .txt file, or a bundled sample."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path

from ingot.data.formats.opener import open_foreign
from ingot.data.prepare.cached import FILE_SUFFIXES, PREFIX, SUFFIXES, is_sound, prepared_lines, sample_bytes, sample_path
from ingot.data.store.dataset import MANIFEST, Dataset, Manifest
from ingot.data.text.text_files import file_bytes, find_buckets
from ingot.data.tokenizers import open_tokenizer
from ingot.data.tokenizers.by_name import is_learned, is_learned_as
from ingot.errors import DataError, Setting
from ingot.runtime.files import allow_open_files, is_url, user_path, write_atomically
from ingot.runtime.remote import Remote, staging


def open_dataset(path: str, tokenizer: str | None = None, trust_tokens: bool = False, fitting: str = "byte") -> Dataset:
    """Open the data at `data.path`, preparing text if necessary; if a tokenizer is given, it must match the dataset's.

    `trust_tokens` skips the check that the tokenizer produced the tokens of another program's data. `fitting` is the tokenizer
    that the error message suggests if no data is found.
    """
    allow_open_files()
    folder = resolve(path, tokenizer)
    if not (folder / MANIFEST).is_file():
        if (foreign := open_foreign(folder, tokenizer, trust_tokens)) is not None:
            return foreign
        buckets = find_buckets(folder, lambda file: file.name.endswith(SUFFIXES))
        if buckets or (folder.is_file() and folder.name.endswith(FILE_SUFFIXES)):
            return Dataset.open(prepared_lines(folder, buckets, tokenizer))
    published = re.fullmatch(r"fineweb10B_(\w+)", folder.name)  # golf's data, which `ingot data download` can fetch
    if published and folder.parent.name == "datasets" and not folder.exists() and not user_path(fitting).exists():
        command = f"ingot data download --variant {published[1]} --output {shlex.quote(str(folder.parent.parent))}"
        raise DataError(f"no data at {folder}: the folder does not exist; download it and its tokenizer with: {command}")
    dataset = Dataset.open(folder, fitting)
    if tokenizer is None or path.startswith(PREFIX):
        return dataset
    source = dataset.manifest.source
    recorded = source.get("tokenizer") if isinstance(source, dict) else None
    trained = recorded if isinstance(recorded, str) and is_learned(recorded) else None
    if is_learned(tokenizer):
        same = is_learned_as(tokenizer, dataset.tokenizer, trained)
    else:
        same = open_tokenizer(tokenizer).fingerprint() == dataset.tokenizer.fingerprint()
    if not same:
        made_by = trained or f"{dataset.tokenizer.kind} with {dataset.tokenizer.vocab_size:,} ids"
        problem = f"{{0}} is {tokenizer} but {path} was prepared with another tokenizer, {made_by}"
        advice = f"leave {{0}} out or prepare the text again with --tokenizer {tokenizer}"
        raise DataError(problem, Setting("data.tokenizer"), advice=advice)
    return dataset


@cache  # a process opens its data several times
def fetch(url: str) -> Path:
    """Return the local copy of the prepared folder at a URL; its files are downloaded once and verified with their checksums."""
    with staging(url, DataError) as folder:
        remote = Remote(url, DataError)
        if MANIFEST not in remote.sizes():
            raise DataError(f"{url} has no {MANIFEST}", advice="upload a folder that `ingot data prepare` has written")
        content, manifest = remote.read(MANIFEST), folder / MANIFEST
        if is_sound(folder) and manifest.read_bytes() == content:
            return folder
        try:
            splits = Manifest.model_validate_json(content).splits.values()
        except ValueError:
            raise DataError(f"{url}/{MANIFEST} is damaged; upload the prepared folder again") from None
        for split in splits:
            files = {shard.file: shard.sha256 for shard in split.shards}
            for name, sha256 in {**files, split.document_index: split.document_index_sha256}.items():
                remote.download(name, folder / name, sha256)
        write_atomically(manifest, content)  # written last: its presence marks the copy as complete
    return folder


def text_bytes(path: str) -> int | None:
    """Return the approximate size in bytes of the text at `data.path`; None if it holds tokens or is sample:NAME+TOKENIZER."""
    if path.startswith(PREFIX):
        name, _, own = path.removeprefix(PREFIX).partition("+")
        return None if own else sample_bytes(name)
    folder = resolve(path)
    if (folder / MANIFEST).is_file():
        return None
    buckets = find_buckets(folder, lambda file: file.name.endswith(SUFFIXES))
    files = [file for bucket in buckets.get("train", {}).values() for file in bucket]
    files = files or ([folder] if folder.is_file() and folder.name.endswith(FILE_SUFFIXES) else [])
    return sum(map(file_bytes, files)) or None


def resolve(path: str, tokenizer: str | None = None) -> Path:
    """Return the file or folder that `path` names, preparing samples; `tokenizer` replaces TOKENIZER in sample:NAME+TOKENIZER."""
    if path.startswith(PREFIX):
        name, _, own = path.removeprefix(PREFIX).partition("+")
        return sample_path(name, tokenizer or own or "byte")
    return fetch(path) if is_url(path) else user_path(path)
