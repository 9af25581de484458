"""Turn documents into a prepared folder: hold some out for validation, encode and write them, and resume if interrupted.

Text is streamed in blocks, so memory is bounded by the longest document. The folder is created atomically (staging.py). Every
33.5 million tokens the written files are synced and their sizes recorded. After an interruption, the same command resumes from
the last such record: it reads the earlier text again but does not encode it.
"""

from __future__ import annotations

import codecs
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any

import numpy as np

from ingot.data import SHARD_TOKENS, SPLITS
from ingot.data.prepare.blocks import BLOCK_BYTES, Block, read_blocks, text_blocks, texts_of
from ingot.data.prepare.workers import local_engine, workers_for
from ingot.data.store.dataset import Manifest, SplitCounts
from ingot.data.store.staging import JOURNAL, StagedFolder, check_output, staged
from ingot.data.store.writer import SAVE_TOKENS, Point, SplitWriter, is_sound, write_manifest
from ingot.data.text.text_files import (
    UTF8,
    WHAT,
    Buckets,
    NotUtf8,
    Progress,
    adding_up,
    commits,
    count_documents,
    file_bytes,
    file_identity,
    find_files,
    is_readable,
    read_documents,
)
from ingot.data.tokenizers import Tokenizer
from ingot.data.tokenizers.by_name import CHAR, learn_from, open_unless_learned
from ingot.errors import ConfigError, DataError
from ingot.runtime.machine import made_by

log = logging.getLogger(__name__)

SMALL_TEXT_BYTES, LARGER_TEXT = 1 << 19, "bpe:2048"  # default tokenizer: bytes for text up to this size, bpe:2048 for larger text
FEW_DOCUMENTS = 20  # up to this many documents, the end of each is held out; with more, whole documents are held out
VAL_FRACTION = 0.1
Piece = tuple[str, str]  # (split, text)
Rule = Callable[[int], str]  # maps a document's index to its split, independently of workers and interruptions
RuledBlocks = Iterator[tuple[Rule, Block]]


@dataclass(frozen=True)
class Into:
    """A rule that assigns all documents to one split and, optionally, to one bucket of that split."""

    split: str
    bucket: str | None = None

    def __call__(self, number: int) -> str:
        return self.split


def first_documents(count: int) -> Rule:
    """Return a rule that holds out the first `count` documents."""
    return lambda number: "val" if number < count else "train"


def spread_documents(fraction: float) -> Rule:
    """Return a rule that holds out a fraction of the documents for validation, evenly spaced and beginning with the first."""
    part = Fraction(str(fraction))  # exact, so that 0.1 means every tenth document, however many documents there are
    above, below = part.numerator, part.denominator
    return lambda number: "val" if -(-(number + 1) * above // below) > -(-number * above // below) else "train"


def hold_out_ends(texts: Iterable[str], fraction: float) -> Iterator[Piece]:
    """Yield the start of every document for train and the last `fraction` of its characters for val, rounded as nanoGPT does."""
    for text in texts:
        cut = int(len(text) * (1 - fraction))
        if cut or not text:
            yield "train", text[:cut]
        if cut < len(text):
            yield "val", text[cut:]


@dataclass(frozen=True)
class Prepared:
    """The folder that `prepare` wrote, its tokenizer and counts, and the time taken."""

    folder: Path
    tokenizer: str
    vocab_size: int
    splits: dict[str, SplitCounts]
    empty_documents: int
    ignored_files: int
    continued_documents: int
    fingerprint: str
    seconds: float


def prepare(
    inputs: Sequence[Path],
    output: Path,
    tokenizer: str | None = None,
    *,
    bos: str | None = None,
    val_fraction: float | None = None,
    val_inputs: Sequence[Path] | None = None,
    val_documents: int | None = None,
    buckets: Buckets | None = None,
    text_field: str = "text",
    encoding: str = UTF8,
    skip_unreadable: bool = False,
    shard_tokens: int = SHARD_TOKENS,
    overwrite: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Prepared:
    """Tokenize text files, and folders of them, into a prepared folder for training.

    `tokenizer` is char, bpe:N or a name for `open_tokenizer`, which also receives `bos`; if None, the size of the text decides.
    `encoding` applies to all files; with `skip_unreadable` files that cannot be decoded are skipped. `workers` is the number of
    encoding processes, by default one per CPU for large texts; the result does not depend on this number.
    `buckets` lists the files of each bucket in both splits; `inputs` is then only recorded as the origin of these files.
    """
    started = time.monotonic()
    held_out_by = {
        "--val-input": val_inputs,
        "--val-documents": val_documents,
        "--val-fraction": val_fraction,
        "--buckets": buckets,
    }
    if len(given := [name for name, value in held_out_by.items() if value not in (None, [])]) > 1:
        raise ConfigError(f"{given[0]} and {given[1]} both choose the validation text; give only one of them")
    check_output(output, overwrite)
    opened = open_unless_learned(tokenizer or "byte", bos)  # reject an invalid tokenizer before downloading the inputs
    try:
        "".encode(encoding)  # raises for codecs that are not text encodings
        encoding = codecs.lookup(encoding).name
    except LookupError:
        raise ConfigError(f"--encoding {encoding} is not a text encoding; give a name such as latin-1 or utf-16") from None
    ignored: list[Path] = []
    if buckets:
        files, val_files = ([path for paths in buckets[split].values() for path in paths] for split in SPLITS)
    else:
        files, val_files, ignored = _find(inputs, val_inputs)
    if skip_unreadable:
        for path in (unreadable := {path for path in files + val_files if not is_readable(path, encoding)}):
            log.warning("%s is skipped because it is not %s", path, encoding)
        files, val_files = ([path for path in group if path not in unreadable] for group in (files, val_files))
    total = sum(map(file_bytes, files + val_files))
    if tokenizer is None and total > SMALL_TEXT_BYTES:
        tokenizer, opened = LARGER_TEXT, None
        log.warning("no tokenizer given: learning %s, which works better than bytes on more than 512 KB of text", tokenizer)
    advance = adding_up(progress, 2 * total if tokenizer == CHAR else total)

    def held_out(advance: Callable[[int], None]) -> tuple[str, RuledBlocks]:
        """Return a description of what is held out, and all blocks, each with the rule that assigns its documents to splits."""

        def blocks(rule: Rule, paths: Sequence[Path] = files) -> RuledBlocks:
            return ((rule, block) for block in read_blocks(paths, text_field, advance, encoding))

        if buckets:
            parts = [blocks(Into(split, name), paths) for split in buckets for name, paths in buckets[split].items()]
            return "the buckets of val", chain.from_iterable(parts)
        if val_inputs:
            both = chain(blocks(Into("train")), blocks(Into("val"), val_files))
            return f"the documents of {', '.join(map(str, val_inputs))}", both
        if val_documents is not None:
            return f"the first {val_documents} documents", blocks(first_documents(val_documents))
        fraction = VAL_FRACTION if val_fraction is None else val_fraction
        if count_documents(files, text_field, FEW_DOCUMENTS + 1, encoding) > FEW_DOCUMENTS:
            return f"a fraction of {fraction} of the documents, evenly spaced", blocks(spread_documents(fraction))
        pieces = hold_out_ends(read_documents(files, text_field, advance, encoding), fraction)
        return f"the end of every document ({fraction} of its characters)", _piece_blocks(pieces)

    with _naming_all_unreadable(files + val_files, encoding):
        if not buckets:
            for group, paths in ((files, inputs), (val_files, val_inputs)):
                if paths is not None and not count_documents(group, text_field, 1, encoding):
                    raise DataError(f"no documents in {', '.join(map(str, paths)) or 'the input'}; give files with text: {WHAT}")
        built = opened or learn_from(
            tokenizer,
            lambda: read_documents(files + val_files, text_field, advance, encoding),
            lambda: _training_texts(held_out(lambda size: None)[1]),
        )
        rule, blocks = held_out(advance)
        source = {"inputs": [str(path) for path in inputs], "validation": rule}
        details = {"commits": commits(files + val_files), "tokenizer": tokenizer if opened is None else None}
        work = {  # interrupted work is resumed only if all of this is unchanged; messages show the keys
            "the version of ingot": made_by(),
            "the training files": [file_identity(path) for path in files],
            "the validation files": [file_identity(path) for path in val_files],
            "what is held out": "documents of their own" if val_inputs else rule,
            "the text field": text_field,
            "the encoding": encoding,
            "the tokenizer": built.fingerprint(),
            "the number of tokens per shard": shard_tokens,
            "the size of a block of text": BLOCK_BYTES,
        }
        with staged(output, overwrite, work, is_sound) as stage:
            manifest, last, continued = fill_folder(
                stage,
                lambda begin: islice(blocks, begin.blocks, None),
                built,
                workers or workers_for(built, total),
                source=source | {key: value for key, value in details.items() if value},
                shard_tokens=shard_tokens,
            )
            if not manifest.splits["train"].documents:
                raise DataError("no text is left to train on: all of it is held out for validation; hold out less or add text")
    return Prepared(
        folder=output,
        tokenizer=built.kind,
        vocab_size=built.vocab_size,
        splits={name: SplitCounts.recorded(split) for name, split in manifest.splits.items()},
        empty_documents=last.empty,
        ignored_files=len(ignored),
        continued_documents=continued,
        fingerprint=manifest.fingerprint,
        seconds=time.monotonic() - started,
    )


def _training_texts(blocks: RuledBlocks) -> Iterator[bytes]:
    """Yield the training documents of blocks, skipping those that are held out."""
    count = 0
    for rule, block in blocks:
        documents, _ = texts_of(block)
        yield from (text for number, text in enumerate(documents, count) if rule(number) == "train")
        count += len(documents)


@contextmanager
def _naming_all_unreadable(files: Sequence[Path], encoding: str) -> Iterator[None]:
    """If a file cannot be decoded, log the name of every such file and raise an error that says how many there are."""
    try:
        yield
    except NotUtf8:
        if len(unreadable := [path for path in files if not is_readable(path, encoding)]) < 2:
            raise
        for path in unreadable:
            log.warning("%s is not %s", path, encoding)
        raise DataError(
            f"{len(unreadable)} files are not {encoding}; convert them or use --encoding or --skip-unreadable"
        ) from None


def _find(inputs: Sequence[Path], val_inputs: Sequence[Path] | None) -> tuple[list[Path], list[Path], list[Path]]:
    """Return the training files, the validation files and the ignored files."""
    files, ignored = find_files(inputs)
    val_files, val_ignored = find_files(val_inputs or [])
    seen: set[Path] = set()
    for path in files + val_files:
        if (resolved := path.resolve()) in seen:
            raise DataError(f"{path} is given twice; give each file only once, for training or for validation")
        seen.add(resolved)
    if ignored := ignored + val_ignored:
        log.warning("ignoring %d files (such as %s) that are hidden, named README.md or not %s", len(ignored), ignored[0], WHAT)
    return files, val_files, ignored


def write_dataset(
    pieces: Iterable[Piece],
    output: Path,
    tokenizer: Tokenizer,
    *,
    source: Any,
    shard_tokens: int = SHARD_TOKENS,
) -> Manifest:
    """Write the folder `output` from (split, text) pairs, atomically."""
    with staged(output, False) as stage:
        manifest, _, _ = fill_folder(
            stage, lambda _: _piece_blocks(pieces), tokenizer, 1, source=source, shard_tokens=shard_tokens
        )
    return manifest


def fill_folder(
    stage: StagedFolder,
    blocks_from: Callable[[Point], RuledBlocks],
    tokenizer: Tokenizer,
    workers: int,
    *,
    source: Any,
    shard_tokens: int,
    prefix: str = "",
    tell: Callable[[range], None] = lambda documents: None,
) -> tuple[Manifest, Point, int]:
    """Write a prepared folder, or finish it after an interruption; the names of shards and indexes begin with `prefix`.

    `tell` is called after each block with the indices of the block's documents. Return the manifest, the final numbers of blocks,
    documents and empty texts, and the number of documents kept from an interrupted run.
    """
    begin = Point.model_validate(stage.saved or {})
    for path in stage.folder.iterdir():
        if path.name not in {JOURNAL, *begin.files()}:
            path.unlink()  # the file was written after the resume point
    rules: deque[Rule] = deque()

    def noted() -> Iterator[Block]:
        for rule, block in blocks_from(begin):
            rules.append(rule)
            yield block

    done, documents, empty = begin.blocks, begin.documents, begin.empty
    with ExitStack() as files:
        writers = {}
        for split in SPLITS:
            name = prefix + split
            writers[split] = SplitWriter(stage.folder, name, tokenizer, shard_tokens, files, begin.splits.get(name))
        saved = sum(writer.state.tokens for writer in writers.values())
        with local_engine(tokenizer, workers) as encode:
            for encoded in encode(noted()):
                rule, numbers = rules.popleft(), range(documents, documents + len(encoded.tokens))
                if isinstance(rule, Into) and rule.bucket is not None:
                    writers[rule.split].begin_bucket(rule.bucket)
                splits = np.array([rule(number) for number in numbers])
                for split, writer in writers.items():
                    writer.add(encoded.select(splits == split))
                done, documents, empty = done + 1, numbers.stop, empty + encoded.empty
                tell(numbers)
                written = sum(writer.state.tokens for writer in writers.values())
                if stage.work and written - saved >= SAVE_TOKENS:
                    points = {writer.name: writer.save() for writer in writers.values()}
                    stage.save(Point(blocks=done, documents=documents, empty=empty, splits=points).model_dump())
                    saved = written
        counts = {split: writer.close() for split, writer in writers.items()}
    end = Point(blocks=done, documents=documents, empty=empty)
    return write_manifest(stage.folder, tokenizer, counts, source), end, begin.documents


def _piece_blocks(pieces: Iterable[Piece]) -> RuledBlocks:
    for split, group in groupby(pieces, lambda piece: piece[0]):
        yield from ((Into(split), block) for block in text_blocks((text for _, text in group), BLOCK_BYTES))
