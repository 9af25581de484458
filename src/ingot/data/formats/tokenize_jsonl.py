"""JSON lines to gpt-simple's .bin and .idx: a pair for every file, with the same name.

A window has at most `max_length` tokens, the end mark included, and the last one of a document ends with it.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ingot.data.formats.gpt_simple_folder import DTYPES, check_windows, cut_windows, index_bytes, token_width
from ingot.data.store.documents import marks_of
from ingot.data.text.text_files import open_unpacked
from ingot.data.tokenizers import Tokenizer, from_spec, open_tokenizer
from ingot.errors import ConfigError, DataError, IngotError, RunError
from ingot.runtime.files import is_utf8, replace_file, write_atomically
from ingot.runtime.processes import python_command

SUFFIXES = (".jsonl", ".jsonl.gz")
AT_ONCE = 256  # texts encoded per batch
BOOT = "from ingot.data.formats.tokenize_jsonl import run_worker; run_worker()"
Progress = Callable[[int, int], None]  # files done, files in total


@dataclass(frozen=True)
class Windows:
    """Settings for cutting documents into windows and for dropping short ones."""

    max_length: int = 3072
    overlap: int = 256
    probability: float = 1.0  # probability that a document's windows overlap
    least_characters: int = 200

    def overlap_of(self, file: str, line: int) -> int:
        """Return the overlap of a document, drawn at random but always the same for the same file and line."""
        if self.probability >= 1:
            return self.overlap
        drawn = hashlib.blake2b(f"{file}:{line}".encode(), digest_size=8).digest()
        return self.overlap if int.from_bytes(drawn, "little") < self.probability * (1 << 64) else 0


@dataclass
class Counts:
    """The counts, or the error, of one tokenized file."""

    file: str
    documents: int = 0
    windows: int = 0
    tokens: int = 0
    bad_lines: int = 0  # not JSON, not an object, or without a text
    short: int = 0  # shorter than the minimum number of characters
    empty: int = 0  # texts that encode to no tokens
    error: str = ""


def tokenize(
    source: Path,
    output: Path,
    tokenizer: str,
    windows: Windows | None = None,
    workers: int = 1,
    progress: Progress = lambda done, total: None,
) -> list[Counts]:
    """Tokenize every .jsonl and .jsonl.gz of a folder; a file that fails has its `error` set and does not stop the others."""
    windows = windows or Windows()
    check_windows(windows.max_length, windows.overlap)
    if not 0 <= windows.probability <= 1 or windows.least_characters < 0 or workers < 1:
        raise ConfigError("the probability of an overlap is from 0 to 1, the least length 0 or more, and there is a worker")
    jobs = _jobs(source, output)
    opened = open_tokenizer(tokenizer)
    if marks_of(opened).eos is None:
        raise ConfigError(f"{tokenizer} has no token that ends a document; use another tokenizer")
    output.mkdir(parents=True, exist_ok=True)
    found: list[Counts] = []
    for counts in _run(jobs, opened, windows, min(workers, len(jobs))):
        found.append(counts)
        progress(len(found), len(jobs))
    return found


def tokenize_file(path: Path, stem: Path, tokenizer: Tokenizer, windows: Windows) -> Counts:
    """Write STEM.bin and STEM.idx from a file of JSON lines."""
    counts, width = Counts(path.name), token_width(tokenizer.vocab_size)
    offsets, repeats = [0], []
    binary = stem.with_name(f"{stem.name}.bin")
    with replace_file(binary) as file:
        for line, ids in _documents(path, tokenizer, windows, counts):
            for begin, end, again in cut_windows(len(ids), windows.max_length, windows.overlap_of(path.name, line)):
                file.write(ids[begin:end].astype(DTYPES[width]).tobytes())
                offsets.append(offsets[-1] + end - begin)
                repeats.append(again)
            counts.documents += 1
    counts.windows, counts.tokens = len(repeats), offsets[-1]
    if binary.stat().st_size != width * counts.tokens:
        raise DataError(f"{binary} has {binary.stat().st_size:,} bytes instead of {width * counts.tokens:,}; is the disk full?")
    write_atomically(stem.with_name(f"{stem.name}.idx"), index_bytes(offsets, repeats, width))
    return counts


def run_worker() -> None:
    """Run a worker: tokenize the file named by a JSON line on stdin and print its counts as JSON."""
    import sys

    job = json.loads(sys.stdin.readline())
    counts = _attempt(Path(job["path"]), Path(job["stem"]), from_spec(job["tokenizer"]), Windows(**job["windows"]))
    print(json.dumps(asdict(counts)))


def _jobs(source: Path, output: Path) -> dict[Path, Path]:
    """Return the output path, without suffix, for each input file."""
    if not source.is_dir():
        raise DataError(f"there is no folder {source}; give the one with the .jsonl or .jsonl.gz files")
    files = sorted(path for path in source.iterdir() if path.name.endswith(SUFFIXES) and path.is_file())
    if not files:
        raise DataError(f"{source} holds no .jsonl or .jsonl.gz files")
    jobs = {path: output / path.name.removesuffix(".gz").removesuffix(".jsonl") for path in files}
    if len(set(jobs.values())) < len(jobs):
        twice = next(path for path in files if path.name.endswith(".gz") and path.with_suffix("") in jobs)
        raise DataError(f"{twice} and {twice.with_suffix('').name} would become the same pair; take one of them away")
    return jobs


def _run(jobs: dict[Path, Path], tokenizer: Tokenizer, windows: Windows, workers: int) -> Iterator[Counts]:
    if workers == 1:
        for path, stem in jobs.items():
            yield _attempt(path, stem, tokenizer, windows)
        return
    spec = tokenizer.spec()

    def start(job: tuple[Path, Path]) -> Counts:
        asked: dict[str, Any] = {"path": str(job[0].absolute()), "stem": str(job[1].absolute())}
        words = json.dumps({**asked, "tokenizer": spec, "windows": asdict(windows)})
        ended = subprocess.run(python_command(BOOT), input=words + "\n", capture_output=True, text=True, check=False)
        try:
            return Counts(**json.loads(ended.stdout))
        except ValueError:
            said = ended.stderr.strip().splitlines()
            return Counts(job[0].name, error=f"its process ended with {ended.returncode}{': ' + said[-1] if said else ''}")

    with ThreadPoolExecutor(workers) as threads:
        yield from threads.map(start, jobs.items())


def _attempt(path: Path, stem: Path, tokenizer: Tokenizer, windows: Windows) -> Counts:
    try:
        return tokenize_file(path, stem, tokenizer, windows)
    except (IngotError, OSError, UnicodeDecodeError) as error:
        return Counts(path.name, error=f"{path}: {error}")


def _documents(path: Path, tokenizer: Tokenizer, windows: Windows, counts: Counts) -> Iterator[tuple[int, Any]]:
    """Yield the line number and the ids, end mark included, of every document that is kept."""
    mark = np.array([marks_of(tokenizer).eos], np.uint32)
    skip = int(tokenizer.bos is not None)  # the start mark, which these files do not have
    texts = _texts(path, windows, counts)
    while part := list(islice(texts, AT_ONCE)):
        for (line, _), ids in zip(part, tokenizer.encode_documents([text for _, text in part]), strict=True):
            if len(ids) == skip:
                counts.empty += 1
                continue
            yield line, np.concatenate([ids[skip:].astype(np.uint32), mark])


def _texts(path: Path, windows: Windows, counts: Counts) -> Iterator[tuple[int, str]]:
    """Yield the line number and text of every text that is long enough; count the others."""
    with open_unpacked(path, lambda _: None) as stream:
        for number, line in enumerate(stream, 1):
            if line.isspace():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            text = record.get("text") if isinstance(record, dict) else None
            if not isinstance(text, str) or not is_utf8(text):
                counts.bad_lines += 1
            elif len(text) < windows.least_characters:
                counts.short += 1
            else:
                yield number, text


def refuse_failed(found: list[Counts]) -> None:
    """Raise an error that lists the failed files, after all others are done."""
    if failed := [counts for counts in found if counts.error]:
        raise RunError(f"{len(failed)} of {len(found)} files could not be tokenized: {'; '.join(one.error for one in failed)}")
