"""Text that is prepared at its first use, into a cache folder: the sample that comes with the package, and files of JSON lines.

The name of the folder holds a hash of the text and the tokenizer: of a sample the packaged text, so that it is never of another
version; of files their names, sizes and times and how they lie in buckets, so that other files are other data and a resumed run
finds its own again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import lzma
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files as resources
from pathlib import Path

from ingot.data.prepare.pipeline import prepare, write_dataset
from ingot.data.store.dataset import VERSION, Dataset, prepare_command
from ingot.data.text.records import TEXT_FIELD
from ingot.data.text.text_files import Buckets, file_bytes, file_identity
from ingot.data.tokenizers import CharTokenizer, Tokenizer, digest, open_unless_made
from ingot.data.tokenizers.by_name import CHAR, learn_bpe
from ingot.errors import DataError, IngotError, Setting
from ingot.runtime.files import reading
from ingot.runtime.locks import FolderLock
from ingot.runtime.machine import cache_root

log = logging.getLogger(__name__)

PREFIX = "sample:"
SAMPLES = {"shakespeare": "shakespeare.jsonl.xz"}
SUFFIXES = (".jsonl", ".jsonl.gz")


def sample_path(name: str, tokenizer: str) -> Path:
    """The folder of a bundled sample, prepared now if it is not in the cache; processes may do so at once."""
    packed = _packed(name)
    opened = open_unless_made(tokenizer)
    key = hashlib.sha256(packed + (opened.fingerprint() if opened else tokenizer).encode()).hexdigest()[:12]
    problem: IngotError | None = None
    for root in (cache_root(), Path(tempfile.gettempdir()) / f"ingot-{os.getuid()}"):
        folder = root / f"{name}-{opened.kind if opened else tokenizer.replace(':', '')}-v{VERSION}-{key}"
        if problem is not None:
            log.warning("%s; the sample goes to %s, choose a place with INGOT_CACHE", problem, folder)
        if not is_own(root, folder):
            problem = DataError(f"{folder} was made by another user, who may have put any text there")
            continue
        if is_sound(folder):
            return folder
        try:
            with _alone(folder):
                if not is_sound(folder):  # otherwise another process was faster
                    shutil.rmtree(folder, ignore_errors=True)  # damaged, if it is there at all
                    _write_sample(packed, folder, name, opened or tokenizer)
        except IngotError as error:
            problem = error
            continue
        return folder
    assert problem is not None
    raise problem


def sample_bytes(name: str) -> int:
    """The size of a bundled sample, with what is held out of it."""
    return len(lzma.decompress(_packed(name)))


def _packed(name: str) -> bytes:
    if name not in SAMPLES:
        raise DataError(f"no sample {name!r}; the samples are {', '.join(PREFIX + known for known in SAMPLES)}")
    return (resources("ingot.data") / "samples" / SAMPLES[name]).read_bytes()


def is_own(*folders: Path) -> bool:
    """Whether folders and what is in them, as far as they exist, were made by this user or by root."""
    with reading(folders[0]):
        there = [folder for folder in folders if os.path.lexists(folder)]
        inside = there[-1].iterdir() if len(there) == len(folders) and there[-1].is_dir() else ()
        return {path.lstat().st_uid for path in (*there, *inside)} <= {os.getuid(), 0}


def is_sound(folder: Path) -> bool:
    """Whether a folder holds prepared data that can be opened."""
    try:
        Dataset.open(folder)
    except (DataError, OSError):  # it may not be looked into, for one
        return False
    return True


def _write_sample(packed: bytes, folder: Path, name: str, tokenizer: Tokenizer | str) -> None:
    works = [json.loads(line) for line in lzma.decompress(packed).splitlines()]
    if tokenizer == CHAR:
        tokenizer = CharTokenizer(character for work in works for character in set(work["text"]))
    elif isinstance(tokenizer, str):
        tokenizer = learn_bpe(tokenizer, (work["text"].encode() for work in works if work["split"] == "train"))
    pieces: Iterator[tuple[str, str]] = ((work["split"], work["text"]) for work in works)
    write_dataset(pieces, folder, tokenizer, source={"sample": name})


def prepared_lines(path: Path, buckets: Buckets, tokenizer: str | None) -> Path:
    """The folder that a file of JSON lines, or buckets of such files, become; made now if it is not in the cache."""
    files = [file for of_split in buckets.values() for some in of_split.values() for file in some] or [path]
    if not any(file_bytes(file) for file in files):
        raise DataError(f"{path} is empty; give a file with text")
    if tokenizer is None:
        raise DataError(
            f"{path} holds text; name the tokenizer that it is to be prepared with by {{0}}", Setting("data.tokenizer")
        )
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
        try:
            prepare([path], folder, tokenizer, buckets=buckets or None)
        except DataError as error:
            if TEXT_FIELD not in error.settings:
                raise
            command = f"{prepare_command(path, 'DIR', tokenizer)} {TEXT_FIELD.path} NAME{' --buckets' if buckets else ''}"
            raise DataError(f"{error.what}; where the text has another name, prepare it with: {command}") from None
    return folder


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other process prepares this folder: of many ranks one does the work."""
    place = folder.with_name(f".{folder.name}.lock")
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"cannot write {place}: {error.strerror}; choose a place with INGOT_CACHE") from None
    lock = FolderLock(place)
    lock.acquire(None, lambda: log.warning("another process is preparing %s; waiting", folder))
    try:
        yield
    finally:
        lock.release()
