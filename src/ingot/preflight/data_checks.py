"""Preflight findings, and the data checks: can the data be opened, and does it have the named buckets and enough tokens?

Each finding has a code with a fixed meaning (see docs/validate.md). A finding of severity `error` or `budget` keeps a run
from starting. A folder of buckets is checked file by file, so that all missing files are reported at once. Other data is opened
as in training. JSON lines and .txt files are not tokenized for the check, so their token count stays unknown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ingot.config.schema import Config
from ingot.data import SPLITS
from ingot.data.formats.gpt_simple_folder import Pair
from ingot.data.loading.data_path import open_dataset, resolve
from ingot.data.prepare.cached import FILE_SUFFIXES, PREFIX
from ingot.data.prepare.cached import SUFFIXES as JSON_LINES
from ingot.data.store.dataset import MANIFEST, Dataset
from ingot.data.tokenizers import Tokenizer, open_tokenizer
from ingot.data.tokenizers.by_name import is_learned
from ingot.errors import CheckpointError, ConfigError, DataError, IngotError, Rename, Setting
from ingot.train.step_plan import shapes

PATH, TOKENIZER = Setting("data.path"), Setting("data.tokenizer")
MAX_STEPS, PHASES, EPOCHS = Setting("training.max_steps"), Setting("data.phases"), Setting("data.epochs")
MANY_PASSES = 300  # more epochs than this give a warning; nanoGPT's smallest preset trains for 82 epochs
TOLERANCE = 0.05  # relative difference allowed between the total tokens of the phases and of the steps


Severity = Literal["error", "budget", "warning", "info"]
# The class of the error that a blocking finding raises, by the first part of the finding's code; the default is ConfigError.
KINDS: dict[str, type[IngotError]] = {"data": DataError, "curriculum": DataError, "resume": CheckpointError}
CLEAN, BLOCKED, WARNED = 0, 1, 2  # exit codes of `validate`


@dataclass(frozen=True)
class Finding:
    """One result of the checks; `cause` holds the message and is raised if the finding keeps a run from starting."""

    code: str
    severity: Severity
    cause: IngotError

    @property
    def blocks(self) -> bool:
        return self.severity in ("error", "budget")

    def render(self, name: Rename = str, advise: Rename = str) -> str:
        """Return the message, with settings renamed by `name` and advice replaced by `advise`."""
        return self.cause.render(name, advise)

    def record(self, name: Rename = str, advise: Rename = str) -> dict[str, Any]:
        """Return the finding as a JSON object; its `setting` is the first setting that the message names."""
        setting = name(self.cause.settings[0].path) if self.cause.settings else ""
        return {"code": self.code, "severity": self.severity, "message": self.render(name, advise), "setting": setting}


class Findings(list[Finding]):
    """The findings of a run's checks so far, in order."""

    def add(self, code: str, severity: Severity, message: str, *settings: Setting, advice: str = "") -> None:
        """Add a finding; {0} in its message and advice stands for the first of `settings`, {1} for the second, and so on."""
        self.append(Finding(code, severity, IngotError(message, *settings, advice=advice)))

    @contextmanager
    def noting(self, code: str, kind: type[IngotError] = IngotError) -> Iterator[None]:
        """Turn an error of class `kind` that is raised in the `with` block into a finding."""
        try:
            yield
        except kind as error:
            self.append(Finding(code, "error", error))

    @property
    def blocked(self) -> bool:
        """Return True if any finding keeps a run from starting."""
        return any(finding.blocks for finding in self)

    def exit_code(self, strict: bool = False) -> int:
        """Return the exit code of `validate`: 1 if a run cannot start, 2 if there are warnings (1 if `strict`), otherwise 0."""
        if self.blocked:
            return BLOCKED
        return (BLOCKED if strict else WARNED) if any(finding.severity == "warning" for finding in self) else CLEAN

    def refuse(self) -> None:
        """Raise the error of the first finding that keeps a run from starting; return if no finding does."""
        for finding in self:
            if finding.blocks:
                kind, cause = KINDS.get(finding.code.partition(".")[0], ConfigError), finding.cause
                if isinstance(cause, kind):
                    raise cause
                raise kind(cause.what, *cause.settings, advice=cause.advice, where=cause.where)


@dataclass(frozen=True)
class BucketFacts:
    """The counts of one bucket of a split (None: not counted); a split without buckets has a single bucket named "all"."""

    files: int
    tokens: int | None
    documents: int | None


@dataclass
class RunData:
    """Facts about the data at data.path."""

    path: str
    format: str = ""
    splits: dict[str, dict[str, BucketFacts]] = field(default_factory=dict)
    tokenizer: Tokenizer | None = None
    dataset: Dataset | None = None
    has_buckets: bool = False

    def tokens(self) -> int | None:
        """Return the number of training tokens; None if the tokens have not been counted."""
        counts = [bucket.tokens for bucket in self.splits.get("train", {}).values()]
        return None if not counts or None in counts else sum(count or 0 for count in counts)


def look_at_data(config: Config, findings: Findings) -> RunData:
    """Return facts about the data at data.path; add problems to `findings`."""
    data, facts, before = config.data, RunData(config.data.path), len(findings)
    folder = None if data.path.startswith(PREFIX) else resolve(data.path)
    problem: Finding | None = None
    if not data.path.strip():
        findings.add("data.path.empty", "error", "{0} is empty; set it to the path of the training data", PATH)
    elif folder is not None and any((folder / split).is_dir() for split in SPLITS) and not (folder / MANIFEST).is_file():
        _look_at_buckets(folder, facts, findings)
    elif folder is not None and folder.name.endswith(FILE_SUFFIXES) and folder.is_file():
        facts.format = "jsonl" if folder.name.endswith(JSON_LINES) else "txt"
        facts.splits["train"] = {"all": BucketFacts(1, None, None)}
    if facts.format in ("jsonl", "txt"):
        message = f"{data.path} is text; its tokens are counted when training prepares it"
        findings.add("data.format.jsonl", "info", message, PATH)
    elif facts.has_buckets and data.tokenizer is None and len(findings) == before:
        message = f"{data.path} contains tokens but does not name their tokenizer; name it with {{0}}"
        findings.add("data.tokenizer_unknown", "error", message, TOKENIZER)
    elif len(findings) == before:
        try:
            dataset = open_dataset(data.path, data.tokenizer, data.trust_tokens, config.suggested_tokenizer)
        except IngotError as error:
            code = "data.unreadable"
            if folder is not None and not folder.exists():
                code = "data.path.missing"
            elif any(setting.path in ("data.tokenizer", "data.trust_tokens") for setting in error.settings):
                code = "data.tokenizer_mismatch"
            elif folder is not None and folder.is_dir() and not any(folder.glob("*.bin")) and not (folder / MANIFEST).is_file():
                code = "data.train.missing"
            problem = Finding(code, "error", error)
        else:
            facts.dataset, facts.tokenizer, facts.format = dataset, dataset.tokenizer, facts.format or "tokens"
            if not facts.has_buckets:  # otherwise _look_at_buckets has already counted the tokens
                for name, split in dataset.splits.items():
                    record = split.record
                    counts = {bucket.name: (bucket.tokens, bucket.documents) for bucket in record.buckets}
                    counts = counts or {"all": (record.tokens, record.documents)}
                    facts.splits[name] = {bucket: BucketFacts(len(record.shards), *some) for bucket, some in counts.items()}
                facts.has_buckets = any(split.record.buckets for split in dataset.splits.values())
    if facts.tokenizer is None and data.tokenizer is not None and not is_learned(data.tokenizer):
        try:
            facts.tokenizer = open_tokenizer(data.tokenizer)
        except IngotError as error:
            # Report a missing path too: the advice of that finding covers both the data and the tokenizer.
            if problem is not None and problem.code == "data.path.missing":
                findings.append(problem)
            problem = Finding("tokenizer.load_failed", "error", error)
    if problem is not None:
        findings.append(problem)
    return facts


def _look_at_buckets(folder: Path, facts: RunData, findings: Findings) -> None:
    """Fill in `facts` from a folder with train/ and val/, each with one folder per bucket; add problems to `findings`."""
    facts.has_buckets = True
    for split in SPLITS:
        if not (folder / split).is_dir():
            message = f"{folder} has no folder {split}/ with {'training' if split == 'train' else 'validation'} data"
            findings.add(f"data.{split}.missing", "error", message, PATH)
            return
    names = sorted(path.name for path in (folder / "train").iterdir() if path.is_dir())
    if not names:
        findings.add("data.buckets.empty", "error", f"{folder / 'train'} has no bucket folders", PATH)
    for split in SPLITS:
        facts.splits[split] = {}
        for bucket in (folder / split / name for name in names):
            code = f"data.{split}.{bucket.name}"
            if not bucket.is_dir():
                message = f"{bucket} does not exist; every bucket needs a folder in train/ and in val/"
                findings.add(f"{code}.missing", "error", message, PATH)
                continue
            lines = [file for file in bucket.iterdir() if file.name.endswith(JSON_LINES)]
            paths = sorted({file.with_suffix(".bin") for file in bucket.iterdir() if file.suffix in (".bin", ".idx")})
            if paths:
                with findings.noting(f"{code}.idx_error", DataError):
                    pairs = [Pair(path) for path in paths]
                    tokens, windows = sum(pair.tokens for pair in pairs), sum(len(pair.repeats) for pair in pairs)
                    facts.splits[split][bucket.name] = BucketFacts(len(pairs), tokens, windows)
            elif lines:
                facts.splits[split][bucket.name] = BucketFacts(len(lines), None, None)
            else:
                findings.add(f"{code}.no_shards", "error", f"{bucket} contains neither .bin with .idx nor .jsonl files", PATH)
    buckets = [bucket for split in facts.splits.values() for bucket in split.values()]
    facts.format = "jsonl" if buckets and all(bucket.tokens is None for bucket in buckets) else "tokens"


def check_buckets(config: Config, facts: RunData, findings: Findings) -> None:
    """Check that every bucket named in a mix exists, and note the buckets that no mix reads."""
    setting = PHASES if config.data.phases else Setting("data.mix")
    mixes = [phase.mix for phase in config.data.phases] or [config.data.mix]
    if not any(mixes) or not facts.splits:
        return
    codes = [finding.code.split(".") for finding in findings if finding.blocks]
    damaged = {".".join(parts[2:-1]) for parts in codes if parts[:2] == ["data", "train"]}  # buckets already reported
    present = facts.splits.get("train", {}).keys() if facts.has_buckets else set[str]()
    if unknown := sorted(set[str]().union(*mixes) - damaged - present):
        message = f"{{0}} names buckets that {facts.path} does not have: {', '.join(unknown)}; it has "
        findings.add("curriculum.unknown_buckets", "error", message + (", ".join(sorted(present)) or "no buckets"), setting)
    elif unused := sorted(present - {name for mix in mixes for name, weight in mix.items() if weight}):
        message = f"these buckets are not read, because {{0}} gives them no weight: {', '.join(unused)}"
        findings.add("curriculum.unused_buckets", "info", message, setting)


def check_files(facts: RunData, world_size: int, workers: int | None, findings: Findings) -> None:
    """Add gpt-simple's findings about buckets with too few files; Ingot allows this, because ranks share rows, not files."""
    counts = {name: bucket.files for name, bucket in facts.splits.get("train", {}).items() if bucket.files}
    if not facts.has_buckets or facts.format == "jsonl" or not counts or workers is None:
        return
    name = min(counts, key=counts.__getitem__)
    if counts[name] < world_size:
        message = f"bucket {name} has {counts[name]} files for {world_size} ranks, which Ingot allows because ranks share rows"
        findings.add("data.shards.fewer_than_world", "info", message)
    elif workers > counts[name] // world_size:
        message = f"the {counts[name]} files of bucket {name} cannot feed num_workers={workers}; Ingot ignores num_workers"
        findings.add("data.num_workers.will_clamp", "warning", message)


def total_tokens(config: Config) -> int | None:
    """Return the number of tokens that all steps read; None if the number of steps is not set."""
    steps, stages, total = config.training.max_steps, config.training.stages, 0
    if steps is None:
        return None
    left = steps
    for number, plan in enumerate(shapes(config)):
        is_last = number + 1 >= len(stages)
        length = left if is_last else min(left, stages[number].steps or round((stages[number].share or 0.0) * steps))
        total += length * plan.samples * config.data.seq_len
        left -= length
    return total


def phases_of(config: Config) -> list[dict[str, Any]]:
    """Return the tokens and mix (summing to 1) of each phase, and the tokens read from each bucket by the end of the phase."""
    phases, taken = [], dict[str, float]()
    for phase in config.data.phases:
        mix = shares(phase.mix)
        taken = {name: taken.get(name, 0.0) + mix.get(name, 0.0) * phase.tokens for name in sorted(taken.keys() | mix.keys())}
        phases.append({"tokens": phase.tokens, "mix": mix, "taken": taken})
    return phases


def shares(mix: Mapping[str, float]) -> dict[str, float]:
    """Normalise weights to a sum of 1."""
    whole = sum(mix.values()) or 1.0
    return {name: weight / whole for name, weight in mix.items()}


def check_supply(config: Config, facts: RunData, total: int | None, allow_mismatch: bool, findings: Findings) -> None:
    """Check that the data has enough tokens for the run."""
    epochs, halts, buckets = config.data.epochs, config.data.exhausted == "halt", facts.splits.get("train", {})
    tokens = facts.tokens()
    if not config.data.phases and total is not None and tokens:
        if epochs is None:
            if total > tokens:
                times = f"the data is read {total / tokens:.1f} times"
                message = f"{facts.path} has {count(tokens)} tokens but the run reads {count(total)}: {times}"
                many = total > MANY_PASSES * tokens and config.budget.seconds is None
                advice = "lower {0} or prepare more text" if many else ""
                findings.add("data.repeated", "warning" if many else "info", message, MAX_STEPS, advice=advice)
            return
        supply, halts = float(epochs * tokens), halts and bool(config.data.mix)
        if halts:  # the bucket that is exhausted first ends the run
            needed = {name: share for name, share in shares(config.data.mix).items() if share and name in buckets}
            supply = min((epochs * (buckets[name].tokens or 0) / share for name, share in needed.items()), default=supply)
        if total > supply:
            step = int(supply // max(1, total // max(1, config.training.max_steps or 1)))
            message = f"{facts.path} supplies {count(supply)} tokens, but a run of {{0}} steps reads {count(total)}"
            advice = f"lower {{0}}, raise {{1}} or add data: the run {'halts' if halts else 'ends'} at about step {step:,}"
            findings.add("data.shorter_than_plan", "warning", message, MAX_STEPS, EPOCHS, advice=advice)
    if not config.data.phases:
        return
    for name, demand in phases_of(config)[-1]["taken"].items():
        tokens = buckets[name].tokens if name in buckets else None
        if epochs is not None and tokens is not None and demand > epochs * tokens:
            supply = epochs * tokens
            message = f"{{0}} reads {count(demand)} tokens of bucket {name}, {count(demand - supply)} more than it supplies"
            then = "the run would halt when this bucket is exhausted" if halts else "the other buckets then share its weight"
            findings.add(f"curriculum.shortfall.{name}", "budget" if halts else "warning", f"{message}: {then}", PHASES)
    demand = sum(phase.tokens for phase in config.data.phases)
    if total is not None and abs(total - demand) > TOLERANCE * demand:
        more = "more" if total > demand else "fewer"
        message = f"a run of {{0}} steps reads {count(total)} tokens, {more} than the {count(demand)} of the phases"
        severity: Severity = "warning" if allow_mismatch else "budget"
        advice = "change {0} or the tokens of {1}"
        findings.add("training.budget_mismatch", severity, message, MAX_STEPS, PHASES, advice=advice)


def count(tokens: float) -> str:
    """Format a number of tokens with a unit, as in 1.50M."""
    for limit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if tokens >= limit:
            return f"{tokens / limit:.2f}{letter}"
    return f"{tokens:.0f}"
