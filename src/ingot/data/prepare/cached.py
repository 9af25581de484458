"""Text that is prepared on first use into a cache folder: the bundled sample, JSON lines and .txt files.

The folder's name contains a hash of the tokenizer and of the source: the text of a sample, or the names, sizes, modification
times and buckets of files. Changed files are therefore prepared again, and a resumed run finds the data it started with.
"""

from __future__ import annotations

import hashlib
import json
import logging
import lzma
import shutil
from collections.abc import Callable
from importlib.resources import files as resources
from pathlib import Path

from ingot.data.prepare.pipeline import prepare, write_dataset
from ingot.data.store.dataset import VERSION, Dataset, prepare_command
from ingot.data.text.text_files import TEXT_FIELD, Buckets, file_bytes, file_identity
from ingot.data.tokenizers.by_name import learn_from, open_unless_learned
from ingot.data.tokenizers.tokenizer_base import digest
from ingot.errors import DataError, Setting
from ingot.runtime.locks import FolderLock
from ingot.runtime.machine import cache_root

log = logging.getLogger(__name__)

PREFIX = "sample:"
SAMPLES = {"shakespeare": "shakespeare.jsonl.xz"}
SUFFIXES = (".jsonl", ".jsonl.gz")
FILE_SUFFIXES = (*SUFFIXES, ".txt")  # accepted as a single file; in bucket folders .txt is skipped, because it may be a README


def sample_path(name: str, tokenizer: str) -> Path:
    """Return the folder of a bundled sample, preparing it if it is not cached; safe to call from several processes."""
    packed = _packed(name)
    opened = open_unless_learned(tokenizer)
    key = hashlib.sha256(packed + (opened.fingerprint() if opened else tokenizer).encode()).hexdigest()[:12]
    folder = cache_root() / f"{name}-{opened.kind if opened else tokenizer.replace(':', '')}-v{VERSION}-{key}"

    def write() -> None:
        works = [json.loads(line) for line in lzma.decompress(packed).splitlines()]
        pieces = [(work["split"], work["text"]) for work in works]
        training = (text.encode() for split, text in pieces if split == "train")
        built = opened or learn_from(tokenizer, lambda: (text for _, text in pieces), lambda: training)
        write_dataset(pieces, folder, built, source={"sample": name})

    return _prepared_once(folder, write)


def sample_bytes(name: str) -> int:
    """Return the size in bytes of a bundled sample as uncompressed JSON lines, including the text held out for validation."""
    return len(lzma.decompress(_packed(name)))


def _packed(name: str) -> bytes:
    if name not in SAMPLES:
        raise DataError(f"unknown sample {name!r}; available: {', '.join(PREFIX + sample for sample in SAMPLES)}")
    return (resources("ingot.data") / "samples" / SAMPLES[name]).read_bytes()


def _prepared_once(folder: Path, write: Callable[[], object]) -> Path:
    """Return `folder`, calling `write` first if it holds no valid data; one process writes while any others wait."""
    if is_sound(folder):
        return folder
    lock_folder = folder.with_name(f".{folder.name}.lock")
    try:
        lock_folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"cannot write {lock_folder}: {error.strerror}; set INGOT_CACHE to a writable folder") from None
    lock = FolderLock(lock_folder)
    lock.acquire(None, lambda: log.warning("another process is preparing %s; waiting", folder))
    with lock:
        if not is_sound(folder):  # another process may have written the folder meanwhile
            shutil.rmtree(folder, ignore_errors=True)  # if the folder exists, it is damaged
            write()
    return folder


def is_sound(folder: Path) -> bool:
    """Return True if a folder contains prepared data that can be opened."""
    try:
        Dataset.open(folder)
    except (DataError, OSError):  # OSError: the folder may be unreadable
        return False
    return True


def prepared_lines(path: Path, buckets: Buckets, tokenizer: str | None) -> Path:
    """Return the cache folder prepared from `buckets` or, without buckets, from the file `path`; prepare it if necessary."""
    files = [file for of_split in buckets.values() for of_bucket in of_split.values() for file in of_bucket] or [path]
    if not any(file_bytes(file) for file in files):
        raise DataError(f"{path} is empty; give a file with text")
    if tokenizer is None:
        named = Setting("data.tokenizer", "bpe:2048")
        raise DataError(f"{path} holds text, not tokens", named, advice="train with --recipe auto or set {0}")
    opened = open_unless_learned(tokenizer)
    key = digest(
        {
            "version": VERSION,
            "files": [file_identity(file) for file in files],
            "buckets": {split: {name: len(paths) for name, paths in of_split.items()} for split, of_split in buckets.items()},
            "tokenizer": opened.fingerprint() if opened else tokenizer,
        }
    )
    folder = cache_root() / f"{path.name.partition('.')[0]}-{opened.kind if opened else tokenizer.replace(':', '')}-{key[:16]}"

    def write() -> None:
        log.warning("preparing %s; later runs reuse the result in %s", path, folder)
        try:
            prepare([path], folder, tokenizer, buckets=buckets or None)
        except DataError as error:
            if TEXT_FIELD not in error.settings:
                raise
            command = f"{prepare_command(path, 'DIR', tokenizer)} {TEXT_FIELD.path} NAME{' --buckets' if buckets else ''}"
            raise DataError(f"{error.where}{error.what}; if the text is in another field, prepare it with: {command}") from None

    return _prepared_once(folder, write)
