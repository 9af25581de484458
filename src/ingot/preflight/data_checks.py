"""Inspect the data at `data.path`: splits, buckets, files and tokens, and any problems with them.

A folder of buckets is checked file by file, so that everything missing is reported at once. Other data is opened as in training.
JSON lines are not tokenized for the check, so their token count stays unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ingot.config.schema import Config
from ingot.data import SPLITS
from ingot.data.formats.gpt_simple_folder import Pair
from ingot.data.loading.data_path import open_dataset, resolve
from ingot.data.prepare.cached import PREFIX
from ingot.data.store.dataset import MANIFEST, Dataset
from ingot.data.tokenizers import Tokenizer, open_tokenizer
from ingot.data.tokenizers.by_name import is_learned
from ingot.errors import DataError, IngotError, Setting
from ingot.preflight.findings import Finding, Findings

PATH, TOKENIZER = Setting("data.path"), Setting("data.tokenizer")
JSON_LINES = (".jsonl", ".jsonl.gz")


@dataclass(frozen=True)
class BucketFacts:
    """A bucket of a split; a split without buckets is one named "all"."""

    files: int
    tokens: int | None  # None: not counted yet
    documents: int | None


@dataclass
class DataFacts:
    """Facts about the data at data.path."""

    path: str
    format: str = ""
    splits: dict[str, dict[str, BucketFacts]] = field(default_factory=dict)
    tokenizer: Tokenizer | None = None
    dataset: Dataset | None = None
    has_buckets: bool = False

    def tokens(self, split: str = "train") -> int | None:
        """Return the number of tokens of a split; None if they are not counted."""
        counts = [bucket.tokens for bucket in self.splits.get(split, {}).values()]
        return None if not counts or None in counts else sum(count or 0 for count in counts)


def look_at_data(config: Config, findings: Findings) -> DataFacts:
    """Inspect the data at data.path; problems are added to the findings."""
    data = config.data
    facts = DataFacts(data.path)
    before = len(findings)
    if not data.path.strip():
        findings.add("data.path.empty", "error", "{0} is empty; nothing says what to train on", PATH)
    else:
        folder = resolve(data.path) if not data.path.startswith(PREFIX) else None
        if folder is not None and any((folder / split).is_dir() for split in SPLITS) and not (folder / MANIFEST).is_file():
            _look_at_buckets(folder, facts, findings)
        elif folder is not None and folder.name.endswith(JSON_LINES) and folder.is_file():
            facts.format, facts.splits["train"] = "jsonl", {"all": BucketFacts(1, None, None)}
    if facts.format == "jsonl":
        message = f"{data.path} is JSON lines, whose tokens are not counted before training prepares them"
        findings.add("data.format.jsonl", "info", message, PATH)
    if len(findings) == before and facts.format != "jsonl":
        _open(config, facts, findings)
    if facts.tokenizer is None:
        _look_at_tokenizer(config, facts, findings)
    return facts


def _open(config: Config, facts: DataFacts, findings: Findings) -> None:
    data = config.data
    if facts.has_buckets and data.tokenizer is None:
        message = f"{data.path} holds tokens and does not say their tokenizer; name it with {{0}}"
        findings.add("data.tokenizer_unknown", "error", message, TOKENIZER)
        return
    try:
        dataset = open_dataset(data.path, data.tokenizer, data.trust_tokens, config.suggested_tokenizer)
    except IngotError as error:
        if (code := _code(config, error)) is not None:
            findings.append(Finding.of(code, error))
        return
    facts.dataset, facts.tokenizer = dataset, dataset.tokenizer
    facts.format = facts.format or "tokens"
    for split, record in ((name, one.record) for name, one in dataset.splits.items()):
        if facts.has_buckets:  # buckets were checked one by one
            break
        known = {one.name: (one.tokens, one.documents) for one in record.buckets} or {"all": (record.tokens, record.documents)}
        facts.splits[split] = {name: BucketFacts(len(record.shards), *counts) for name, counts in known.items()}
    facts.has_buckets = facts.has_buckets or any(one.record.buckets for one in dataset.splits.values())


def _code(config: Config, error: IngotError) -> str | None:
    """Return the finding code for data that cannot be opened; None if the tokenizer is the cause, which has its own finding."""
    folder = None if config.data.path.startswith(PREFIX) else resolve(config.data.path)
    if folder is not None and not folder.exists():
        return "data.path.missing"
    if config.data.tokenizer is not None and not is_learned(config.data.tokenizer):
        try:
            open_tokenizer(config.data.tokenizer)
        except IngotError:
            return None
    if any(setting.path in ("data.tokenizer", "data.trust_tokens") for setting in error.settings):
        return "data.tokenizer_mismatch"
    if folder is not None and folder.is_dir() and not any(folder.glob("*.bin")) and not (folder / MANIFEST).is_file():
        return "data.train.missing"
    return "data.unreadable"


def _look_at_tokenizer(config: Config, facts: DataFacts, findings: Findings) -> None:
    name = config.data.tokenizer
    if name is None or is_learned(name):
        return
    with findings.noting("tokenizer.load_failed"):
        facts.tokenizer = open_tokenizer(name)


def _look_at_buckets(folder: Path, facts: DataFacts, findings: Findings) -> None:
    """Check a folder with train/ and val/, each with one folder per bucket."""
    facts.has_buckets = True
    for split in SPLITS:
        if not (folder / split).is_dir():
            message = f"{folder} has no folder {split}/; {'training' if split == 'train' else 'validation'} data lie there"
            findings.add(f"data.{split}.missing", "error", message, PATH)
            return
    names = sorted(path.name for path in (folder / "train").iterdir() if path.is_dir())
    if not names:
        findings.add("data.buckets.empty", "error", f"{folder / 'train'} has no folders; each bucket is one", PATH)
        return
    files = {split: {name: _files(folder / split / name) for name in names} for split in SPLITS}
    every = [file for buckets in files.values() for found in buckets.values() for file in found or ()]
    facts.format = "jsonl" if every and all(file.name.endswith(JSON_LINES) for file in every) else "tokens"
    for split, buckets in files.items():
        facts.splits[split] = {}
        for name, found in buckets.items():
            if (known := _bucket(folder / split / name, f"data.{split}.{name}", found, findings)) is not None:
                facts.splits[split][name] = known


def _files(bucket: Path) -> list[Path] | None:
    """Return the text or token files of a bucket; None if the bucket does not exist."""
    if not bucket.is_dir():
        return None
    return sorted(file for file in bucket.iterdir() if file.name.endswith((".bin", ".idx", *JSON_LINES)) and file.is_file())


def _bucket(folder: Path, code: str, files: Sequence[Path] | None, findings: Findings) -> BucketFacts | None:
    if files is None:
        message = f"there is no folder {folder}; every bucket is needed in train/ and in val/"
        findings.add(f"{code}.missing", "error", message, PATH)
        return None
    if not files:
        findings.add(f"{code}.no_shards", "error", f"{folder} holds no .bin with its .idx and no .jsonl", PATH)
        return BucketFacts(0, 0, 0)
    if all(file.name.endswith(JSON_LINES) for file in files):
        return BucketFacts(len(files), None, None)
    pairs = sorted({file.with_suffix(".bin") for file in files if file.suffix in (".bin", ".idx")})
    tokens = documents = 0
    for path in pairs:
        try:
            pair = Pair(path)
        except DataError as error:
            findings.append(Finding.of(f"{code}.idx_error", error))
            return None
        tokens, documents = tokens + pair.tokens, documents + len(pair.repeats)
    return BucketFacts(len(pairs), tokens, documents)
