"""Files of JSON lines as `data.path`, prepared at first use into a cache folder.

The name of the folder holds a hash of the files (name, size, time), of the tokenizer and of how they lie in buckets: other files
are other data, and a resumed run finds its own again.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ingot.data.prepare.pipeline import prepare
from ingot.data.prepare.sample import is_own, is_sound
from ingot.data.store.dataset import VERSION
from ingot.data.text.buckets import Buckets
from ingot.data.text.files import file_identity
from ingot.data.tokenizers import digest, open_unless_made
from ingot.errors import DataError, Setting
from ingot.runtime.cache import cache_root
from ingot.runtime.files import writing
from ingot.runtime.locks import FolderLock

log = logging.getLogger(__name__)

SUFFIXES = (".jsonl", ".jsonl.gz")


def prepared_lines(path: Path, buckets: Buckets, tokenizer: str | None) -> Path:
    """The folder that a file of JSON lines, or buckets of such files, become; made now if it is not in the cache."""
    if tokenizer is None:
        raise DataError(
            f"{path} holds text; name the tokenizer that it is to be prepared with by {{0}}", Setting("data.tokenizer")
        )
    files = [file for of_split in buckets.values() for some in of_split.values() for file in some] or [path]
    opened = open_unless_made(tokenizer)
    key = digest(
        {
            "version": VERSION,
            "files": [file_identity(file) for file in files],
            "buckets": {split: {name: len(some) for name, some in of_split.items()} for split, of_split in buckets.items()},
            "tokenizer": opened.fingerprint() if opened else tokenizer,
        }
    )
    folder = cache_root() / f"{path.name.partition('.')[0]}-{opened.kind if opened else tokenizer.replace(':', '')}-{key[:16]}"
    if not is_own(folder.parent, folder):
        raise DataError(f"{folder} was made by another user, who may have put any text there; choose a place with INGOT_CACHE")
    if is_sound(folder):
        return folder
    with _alone(folder):
        if is_sound(folder):  # another process was faster
            return folder
        log.warning("preparing %s into %s, once", path, folder)
        shutil.rmtree(folder, ignore_errors=True)  # damaged, if it is there at all
        prepare([path], folder, tokenizer, buckets=buckets or None)
    return folder


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other process prepares this folder: of many ranks one does the work."""
    place = folder.with_name(f".{folder.name}.lock")
    with writing(place):
        place.mkdir(parents=True, exist_ok=True)
    lock = FolderLock(place)
    lock.acquire(None, lambda: log.warning("another process is preparing %s; waiting", folder))
    try:
        yield
    finally:
        lock.release()
