"""Documents to a prepared folder: who is held out, how shards are filled, and how the folder appears all at once.

Documents pass in small batches, so memory is bounded by the longest. Everything is written in a hidden folder beside the target,
which takes the target's name when it is complete; whatever goes wrong, there is the whole dataset or none.
"""

from __future__ import annotations

import errno
import fcntl
import importlib.metadata
import json
import logging
import math
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from ingot.data.dataset import MANIFEST, SPLITS, Manifest, SplitWriter, TokenizerRecord, identity
from ingot.data.shards import MAX_TOKENS
from ingot.data.sources import count_documents, file_bytes, find_files, read_documents
from ingot.data.tokenizers import CharTokenizer, Tokenizer, open_tokenizer
from ingot.errors import ConfigError, DataError
from ingot.runtime.files import fsync_dir

log = logging.getLogger(__name__)

FEW_DOCUMENTS = 20  # up to here validation is the end of every document, above it is whole documents
SHARD_TOKENS = 100_000_000
Progress = Callable[[int, int], None]  # bytes done, bytes in all
Piece = tuple[str, str]  # the split and the text of a document


@dataclass(frozen=True)
class SplitSummary:
    """What a split holds; `piece_bytes` is what its tokens stand for, where that was counted."""

    documents: int
    tokens: int
    bytes: int
    piece_bytes: int | None
    bytes_per_token: float | None


@dataclass(frozen=True)
class Summary:
    """What was prepared."""

    folder: Path
    tokenizer: str
    vocab_size: int
    splits: dict[str, SplitSummary]
    empty_documents: int
    ignored_files: int
    fingerprint: str
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return {**asdict(self), "folder": str(self.folder)}


def summarise(manifest: Manifest) -> dict[str, SplitSummary]:
    """The counts of every split."""
    return {
        name: SplitSummary(
            split.documents, split.tokens, split.bytes, split.piece_bytes, split.bytes / split.tokens if split.tokens else None
        )
        for name, split in manifest.splits.items()
    }


def prepare(
    inputs: Sequence[Path],
    output: Path,
    tokenizer: str,
    *,
    bos: str | None = None,
    val_fraction: float = 0.1,
    val_inputs: Sequence[Path] | None = None,
    val_documents: int | None = None,
    text_field: str = "text",
    shard_tokens: int = SHARD_TOKENS,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Summary:
    """Turns .txt and .jsonl files, and folders of them, into a folder that training reads.

    `tokenizer` is char or whatever `open_tokenizer` takes, `bos` with it.
    """
    started = time.monotonic()
    _check_settings(val_fraction, val_inputs, val_documents, shard_tokens)
    _check_output(output, overwrite)
    files, ignored = find_files(inputs)
    val_files, val_ignored = find_files(val_inputs or [])
    _refuse_doubles(files + val_files)
    if ignored := ignored + val_ignored:
        log.warning("files passed over, being neither .txt nor .jsonl: %d (%s for one)", len(ignored), ignored[0])
    for group, given in ((files, inputs), (val_files, val_inputs)):
        if given is not None and not count_documents(group, text_field, 1):
            raise DataError(f"no documents in {', '.join(map(str, given)) or 'no input'}; give .txt or .jsonl files with text")

    opened = None if tokenizer == "char" and bos is None else open_tokenizer(tokenizer, bos)
    passes = 1 if opened else 2
    reader = _Reader(text_field, passes * sum(map(file_bytes, files + val_files)), progress)
    built = opened or CharTokenizer(reader.alphabet(files + val_files))
    texts = reader.texts(files)
    if val_inputs:
        rule, pieces = f"the documents of {', '.join(map(str, val_inputs))}", hold_out_given(texts, reader.texts(val_files))
    elif val_documents is not None:
        rule, pieces = f"the first {val_documents} documents", hold_out_first(texts, val_documents)
    elif count_documents(files, text_field, FEW_DOCUMENTS + 1) > FEW_DOCUMENTS:
        rule, pieces = f"{val_fraction} of the documents, evenly spread", hold_out_spread(texts, val_fraction)
    else:
        rule, pieces = f"the last {val_fraction} of the characters of every document", hold_out_ends(texts, val_fraction)
    source = {"inputs": [str(path) for path in inputs], "validation": rule}
    manifest = write_dataset(pieces, output, built, source=source, shard_tokens=shard_tokens, overwrite=overwrite)
    return Summary(
        folder=output,
        tokenizer=built.kind,
        vocab_size=built.vocab_size,
        splits=summarise(manifest),
        empty_documents=reader.empty,
        ignored_files=len(ignored),
        fingerprint=manifest.fingerprint,
        seconds=time.monotonic() - started,
    )


def hold_out_given(train: Iterable[str], val: Iterable[str]) -> Iterator[Piece]:
    """The validation documents come from files of their own."""
    for text in train:
        yield "train", text
    for text in val:
        yield "val", text


def hold_out_first(texts: Iterable[str], count: int) -> Iterator[Piece]:
    """The first `count` documents are validation."""
    for number, text in enumerate(texts):
        yield "val" if number < count else "train", text


def hold_out_spread(texts: Iterable[str], fraction: float) -> Iterator[Piece]:
    """Document i, from 0, is validation where ceil(i * fraction) goes up: evenly spread, the first always among them."""
    part = Fraction(str(fraction))  # exact, so that 0.1 is every tenth document however many there are
    for number, text in enumerate(texts):
        yield "val" if math.ceil((number + 1) * part) > math.ceil(number * part) else "train", text


def hold_out_ends(texts: Iterable[str], fraction: float) -> Iterator[Piece]:
    """The last `fraction` of the characters of every document is validation, rounded as nanoGPT does."""
    for text in texts:
        cut = int(len(text) * (1 - fraction))
        if cut:
            yield "train", text[:cut]
        if cut < len(text):
            yield "val", text[cut:]


def write_dataset(
    pieces: Iterable[Piece],
    output: Path,
    tokenizer: Tokenizer,
    *,
    source: Any,
    shard_tokens: int = SHARD_TOKENS,
    overwrite: bool = False,
) -> Manifest:
    """Writes the folder `output` from documents that know their split; it appears complete or not at all."""
    with _new_folder(output, overwrite) as folder, ExitStack() as files:
        writers = {name: SplitWriter(folder, name, tokenizer, shard_tokens, files) for name in SPLITS}
        for split, text in pieces:
            writers[split].add(text)
        record = TokenizerRecord(
            kind=tokenizer.kind,
            vocab_size=tokenizer.vocab_size,
            bos=tokenizer.bos,
            fingerprint=tokenizer.fingerprint(),
            spec=tokenizer.spec(),
        )
        splits = {name: writer.close() for name, writer in writers.items()}
        if not splits["train"].documents:
            raise DataError("nothing is left to train on: all text went to validation; hold out less of it or give more text")
        manifest = Manifest(tokenizer=record, splits=splits, created_by=f"ingot {_version()}", source=source)
        manifest = manifest.model_copy(update={"fingerprint": identity(manifest.model_dump())})
        with (folder / MANIFEST).open("x", encoding="utf-8") as file:
            file.write(json.dumps(manifest.model_dump(), indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
    return manifest


class _Reader:
    """Documents that are not empty, with progress over all passes and a count of the empty ones."""

    def __init__(self, text_field: str, total_bytes: int, progress: Progress | None) -> None:
        self.empty = 0
        self._text_field, self._progress = text_field, progress
        self._done, self._total = 0, total_bytes

    def texts(self, files: Sequence[Path]) -> Iterator[str]:
        for text in read_documents(files, self._text_field, self._advance):
            if text:
                yield text
            else:
                self.empty += 1

    def alphabet(self, files: Sequence[Path]) -> set[str]:
        characters: set[str] = set()
        for text in read_documents(files, self._text_field, self._advance):
            characters.update(text)
        return characters

    def _advance(self, count: int) -> None:
        self._done += count
        if self._progress:
            self._progress(self._done, self._total)


def _check_settings(val_fraction: float, val_inputs: Sequence[Path] | None, val_documents: int | None, shard_tokens: int) -> None:
    if not 0 <= val_fraction < 1:
        raise ConfigError(f"--val-fraction {val_fraction} is not a part of the text; give 0 or more and less than 1")
    if val_inputs and val_documents is not None:
        raise ConfigError("--val-input and --val-documents both say what validation is; give one of them")
    if val_documents is not None and val_documents < 0:
        raise ConfigError(f"--val-documents {val_documents} is negative; give 0 or more")
    if not 1 <= shard_tokens <= MAX_TOKENS:
        raise ConfigError(f"--shard-tokens {shard_tokens:,} is out of range; give 1 to {MAX_TOKENS:,}")


def _refuse_doubles(files: Sequence[Path]) -> None:
    seen: dict[Path, Path] = {}
    for path in files:
        first = seen.setdefault(path.resolve(), path)
        if first is not path:
            raise DataError(f"{path} is given twice; text must not be in the data twice, nor in both training and validation")


OURS = re.compile(rf"{re.escape(MANIFEST)}|({'|'.join(SPLITS)})(_\d{{6}}\.bin|\.index)")


def _check_output(output: Path, overwrite: bool) -> None:
    try:
        if not os.path.lexists(output):
            return
        if not output.is_dir():
            raise DataError(f"output {output} is a file; give a folder that does not exist yet")
        names = sorted(path.name for path in output.iterdir())
    except OSError as error:
        raise DataError(f"cannot read {output}: {error.strerror}") from error
    foreign = [name for name in names if not OURS.fullmatch(name)]
    if names and (MANIFEST not in names or foreign):
        reason = f"holds {foreign[0]}" if foreign else f"has no {MANIFEST}"
        raise DataError(
            f"output {output} exists and {reason}, so it is not only a dataset and is never replaced; give another folder"
        )
    if names and not overwrite:
        raise DataError(f"output {output} exists; replace it with --force or give another folder")


@contextmanager
def _new_folder(output: Path, overwrite: bool) -> Iterator[Path]:
    """A locked folder beside `output` that takes its name when the block succeeds and vanishes when it fails."""
    target = output.resolve()
    try:
        parents = [parent for parent in target.parents if not parent.exists()]
        with ExitStack() as undo:
            for parent in reversed(parents):
                parent.mkdir(exist_ok=True)
                undo.callback(_remove_if_empty, parent)
            prefix = f".{target.name}.partial-"
            _remove_leftovers(target.parent, prefix)
            folder, lock = _locked_folder(target.parent, prefix)
            undo.callback(os.close, lock)
            undo.callback(shutil.rmtree, folder, ignore_errors=True)
            yield folder
            fsync_dir(folder)
            _publish(folder, target, output, overwrite)
            undo.pop_all()
            os.close(lock)
            fsync_dir(target.parent)
    except OSError as error:
        raise DataError(
            f"cannot write {output}: {error.strerror or error}; free space, or give a folder you can write to"
        ) from error


def _locked_folder(parent: Path, prefix: str) -> tuple[Path, int]:
    while True:
        folder = parent / f"{prefix}{secrets.token_hex(4)}"
        folder.mkdir()
        with suppress(FileNotFoundError):  # another process took the folder for a leftover before it was locked
            lock = os.open(folder, os.O_RDONLY)
            if _lock(lock) is not False and folder.exists():
                return folder, lock
            os.close(lock)


def _remove_leftovers(parent: Path, prefix: str) -> None:
    """Removes what killed processes left; a folder that is being written is locked by its writer."""
    for folder in [path for path in parent.iterdir() if path.name.startswith(prefix)]:
        with suppress(OSError):
            lock = os.open(folder, os.O_RDONLY)
            if _lock(lock):
                shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _lock(folder: int) -> bool | None:
    """True: locked until closed. False: another process has it. None: this file system has no locks."""
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _publish(folder: Path, target: Path, output: Path, overwrite: bool) -> None:
    old = folder.with_name(f"{folder.name}-old")
    while True:
        try:
            folder.rename(target)  # succeeds where there is nothing or an empty folder
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            _check_output(output, overwrite)
            shutil.rmtree(old, ignore_errors=True)
            with suppress(FileNotFoundError):
                target.rename(old)
        else:
            shutil.rmtree(old, ignore_errors=True)
            return


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def _version() -> str:
    try:
        return importlib.metadata.version("ingot")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
