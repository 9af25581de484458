"""Tokenize JSON lines to gpt-simple's .bin and .idx files: one pair per input file, named after the input.

A document is cut into windows of at most `max_length` tokens; the last one ends with the end-of-document token.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ingot.data.formats.gpt_simple_folder import DTYPES, check_windows, cut_windows, index_bytes, token_width
from ingot.data.prepare.blocks import text_blocks
from ingot.data.prepare.workers import Engine, local_engine
from ingot.data.store.documents import marks_of
from ingot.data.text.text_files import open_unpacked
from ingot.data.tokenizers import Tokenizer, open_tokenizer
from ingot.errors import ConfigError, DataError, IngotError
from ingot.runtime.files import is_utf8, replace_file, write_atomically

SUFFIXES = (".jsonl", ".jsonl.gz")
AT_ONCE = 256  # texts encoded per batch
Progress = Callable[[int, int], None]  # arguments: files done, files in total


@dataclass(frozen=True)
class WindowRule:
    """Settings for splitting documents into windows and for dropping short documents."""

    max_length: int = 3072
    overlap: int = 256
    probability: float = 1.0  # probability that the windows of a document overlap
    least_characters: int = 200

    def overlap_of(self, file: str, line: int) -> int:
        """Return how many tokens a document's windows share: `overlap` or 0, chosen by a hash of file name and line number."""
        if self.probability >= 1:
            return self.overlap
        drawn = hashlib.blake2b(f"{file}:{line}".encode(), digest_size=8).digest()
        return self.overlap if int.from_bytes(drawn, "little") < self.probability * (1 << 64) else 0


@dataclass
class FileCounts:
    """The counts of one tokenized file, or the error that prevented its tokenization."""

    file: str
    documents: int = 0
    windows: int = 0
    tokens: int = 0
    skipped: int = 0  # lines that are not JSON objects with a text field, and texts that are too short or encode to no tokens
    error: str = ""


def tokenize(
    source: Path, output: Path, tokenizer: str, rule: WindowRule, workers: int = 1, progress: Progress = lambda done, total: None
) -> list[FileCounts]:
    """Tokenize every .jsonl and .jsonl.gz file in a folder; if a file fails, record the error in its FileCounts and continue."""
    check_windows(rule.max_length, rule.overlap)
    if not 0 <= rule.probability <= 1 or rule.least_characters < 0 or workers < 1:
        raise ConfigError("overlap_probability must be in [0, 1], min_text_length must be >= 0 and num_workers must be >= 1")
    if not source.is_dir():
        raise DataError(f"there is no folder {source}; give the folder with the .jsonl or .jsonl.gz files")
    files = sorted(path for path in source.iterdir() if path.name.endswith(SUFFIXES) and path.is_file())
    if not files:
        raise DataError(f"{source} holds no .jsonl or .jsonl.gz files")
    stems = [path.name.removesuffix(".gz").removesuffix(".jsonl") for path in files]
    if twice := next((stem for stem in stems if stems.count(stem) > 1), None):
        raise DataError(f"{twice}.jsonl and {twice}.jsonl.gz would be written to the same .bin and .idx; remove one of the two")
    opened = open_tokenizer(tokenizer)
    if marks_of(opened).eos is None:
        raise ConfigError(f"{tokenizer} has no end-of-text token; use another tokenizer")
    output.mkdir(parents=True, exist_ok=True)
    counts: list[FileCounts] = []
    with local_engine(opened, workers) as encode:
        for path, stem in zip(files, stems, strict=True):
            try:
                counts.append(_tokenize_file(path, output / stem, opened, rule, encode))
            except (IngotError, OSError, UnicodeDecodeError) as error:
                counts.append(FileCounts(path.name, error=f"{path}: {error}"))
            progress(len(counts), len(files))
    return counts


def _tokenize_file(path: Path, stem: Path, tokenizer: Tokenizer, rule: WindowRule, encode: Engine) -> FileCounts:
    counts, width = FileCounts(path.name), token_width(tokenizer.vocab_size)
    offsets, repeats, lines = [0], [], deque[int]()
    end_mark, skip = np.array([marks_of(tokenizer).eos], DTYPES[width]), int(tokenizer.bos is not None)  # skip the start token
    with replace_file(stem.with_name(f"{stem.name}.bin")) as file:
        for encoded in encode(text_blocks(_texts(path, rule, counts, lines), documents=AT_ONCE)):
            for document in np.split(encoded.ids, np.cumsum(encoded.tokens)[:-1]):
                line = lines.popleft()
                if len(document) == skip:
                    counts.skipped += 1
                    continue
                ids = np.concatenate([document[skip:].astype(DTYPES[width]), end_mark])
                for begin, end, again in cut_windows(len(ids), rule.max_length, rule.overlap_of(path.name, line)):
                    file.write(ids[begin:end].tobytes())
                    offsets.append(offsets[-1] + end - begin)
                    repeats.append(again)
                counts.documents += 1
    write_atomically(stem.with_name(f"{stem.name}.idx"), index_bytes(offsets, repeats, width))
    counts.windows, counts.tokens = len(repeats), offsets[-1]
    return counts


def _texts(path: Path, rule: WindowRule, counts: FileCounts, lines: deque[int]) -> Iterator[str]:
    """Yield each text that is long enough and append its line number to `lines`; count other non-blank lines as skipped."""
    with open_unpacked(path, lambda _: None) as stream:
        for number, line in enumerate(stream, 1):
            if line.isspace():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            text = record.get("text") if isinstance(record, dict) else None
            if isinstance(text, str) and is_utf8(text) and len(text) >= max(1, rule.least_characters):
                lines.append(number)
                yield text
            else:
                counts.skipped += 1
