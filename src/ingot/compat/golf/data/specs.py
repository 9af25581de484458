"""The tokenizers that golf's export is asked for: one JSON file, and what the command line says over it.

Every mistake is found here, before a byte is downloaded. Names become file names, so they are checked; a key that is not known is
refused, because a setting that is passed over makes data that looks right.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ingot.data.tokenizers.tokenizer_base import NARROW
from ingot.errors import ConfigError
from ingot.runtime.files import user_path

VERSION = "10B"
BYTE, SENTENCEPIECE, HF_BPE, TIKTOKEN = "byte", "sentencepiece_bpe", "hf_bpe", "tiktoken"
KINDS = {
    "byte": BYTE,
    "pure_byte": BYTE,
    "sentencepiece_bpe": SENTENCEPIECE,
    "sentencepiece": SENTENCEPIECE,
    "hf_bpe": HF_BPE,
    "tiktoken": TIKTOKEN,
    "gpt2": TIKTOKEN,
}
BUILDERS = {  # functions of golf's own module, which older files name
    "build_pure_byte_tokenizer": BYTE,
    "build_sentencepiece_tokenizer": SENTENCEPIECE,
    "build_sentencepiece_bpe_tokenizer": SENTENCEPIECE,
}
FIXED = {BYTE: 260, TIKTOKEN: 50_257}  # vocabularies that are not learned
EVERY = ("name", "kind", "builder", "dataset_suffix", "vocab_size", "tokenizer_train_docs")
LEARNED = ("reuse_model_path", "trainer_overrides")
KEYS = {
    BYTE: (*EVERY, "filename"),
    SENTENCEPIECE: (*EVERY, "model_prefix", *LEARNED),
    HF_BPE: (*EVERY, "filename", *LEARNED),
    TIKTOKEN: (*EVERY, "filename"),
}
NAMES = {BYTE: "pure_byte_260", SENTENCEPIECE: "sp_bpe_{}", HF_BPE: "hf_bpe_{}", TIKTOKEN: "gpt2"}
SUFFIXES = {BYTE: "byte260", SENTENCEPIECE: "sp{}", HF_BPE: "hfbpe{}", TIKTOKEN: "gpt2"}
FILES = {
    BYTE: "fineweb_pure_byte_260.json",
    SENTENCEPIECE: "fineweb_{}_bpe.model",
    HF_BPE: "fineweb_{}_hf_bpe.json",
    TIKTOKEN: "gpt2.tiktoken",
}
OURS = ("input", "sentence_iterator", "model_prefix", "model_writer")  # settings of a trainer that say what it reads and writes
Record = dict[str, Any]


@dataclass(frozen=True)
class Spec:
    """One tokenizer; `file` is its name below tokenizers/, `given` what the manifest repeats."""

    kind: str
    name: str
    dataset: str
    vocab_size: int
    file: str
    train_documents: int | None = None
    reuse: Path | None = None
    overrides: Record = field(default_factory=dict)
    given: Record = field(default_factory=dict)


def load_specs(
    path: Path, *, skip_byte: bool = False, train_documents: int | None = None, reuse: Sequence[str] = ()
) -> list[Spec]:
    """The tokenizers of a file; `reuse` are VOCAB=MODEL pairs for its SentencePiece vocabularies."""
    models = _parse_reuse(reuse)
    specs = []
    for number, record in enumerate(_records(path), 1):
        spec = _spec(record, f"{path}, tokenizer {number}", train_documents, models)
        if not (skip_byte and spec.kind == BYTE):
            specs.append(spec)
    if not specs:
        raise ConfigError(f"{path} lists only byte tokenizers and --skip-byte is given; nothing is left to export")
    for what, names in (
        ("tokenizer", [spec.name for spec in specs]),
        ("data set", [spec.dataset for spec in specs]),
        ("file", [name.lower() for spec in specs for name in files_of(spec)]),
    ):
        if twice := [name for number, name in enumerate(names) if name in names[:number]]:
            raise ConfigError(f"{path} names the {what} {twice[0]} twice; give each its own name")
    if unused := set(models) - {spec.vocab_size for spec in specs if spec.kind == SENTENCEPIECE}:
        raise ConfigError(
            f"--reuse-sp-model {min(unused)}=...: {path} lists no SentencePiece tokenizer of this vocab_size that is exported"
        )
    return specs


def files_of(spec: Spec) -> tuple[str, ...]:
    """The names below tokenizers/ that a tokenizer takes, the one to open first."""
    return (spec.file, f"{Path(spec.file).stem}.vocab") if spec.kind == SENTENCEPIECE else (spec.file,)


def _parse_reuse(pairs: Iterable[str]) -> dict[int, Path]:
    models: dict[int, Path] = {}
    for pair in pairs:
        vocabulary, equals, model = pair.partition("=")
        if not (vocabulary.strip().isdecimal() and equals and model.strip()):
            raise ConfigError(f"--reuse-sp-model {pair!r} is not VOCAB=MODEL, such as 1024=tokenizers/fineweb_1024_bpe.model")
        if int(vocabulary) in models:
            raise ConfigError(f"--reuse-sp-model gives two models for a vocabulary of {int(vocabulary)}; give one")
        models[int(vocabulary)] = Path(model.strip()).absolute()
    return models


def _records(path: Path) -> list[Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"cannot read the tokenizer specs {path}: {error.strerror}; name the file with --tokenizer-config"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    records = content.get("tokenizer_specs", content.get("tokenizers")) if isinstance(content, dict) else content
    if not isinstance(records, list) or not records:
        raise ConfigError(f"{path} lists no tokenizers; it is a list of them, or an object with the list under tokenizers")
    return records


def _spec(record: Any, where: str, train_documents: int | None, models: dict[int, Path]) -> Spec:
    if not isinstance(record, dict):
        raise ConfigError(f"{where} is a {type(record).__name__} instead of an object")
    kind = _kind(record, where)
    for key in record:
        if key not in KEYS[kind]:
            near = get_close_matches(key, KEYS[kind], 1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(KEYS[kind])}"
            raise ConfigError(f"{where}: a {kind} tokenizer has no {key!r}; {hint}")
    given = dict(record)
    if train_documents is not None:
        given["tokenizer_train_docs"] = train_documents
    size = _vocab_size(given, kind, where)
    if kind == SENTENCEPIECE and size in models:
        given["reuse_model_path"] = str(models[size])
    file = _name(given, "filename", FILES[kind].format(size), where)
    if kind == SENTENCEPIECE:
        file = f"{_name(given, 'model_prefix', f'fineweb_{size}_bpe', where)}.model"
    elif Path(file).suffix != Path(FILES[kind]).suffix:
        raise ConfigError(f"{where}: filename {file!r} does not end in {Path(FILES[kind]).suffix}, by which it is opened")
    reuse = given.get("reuse_model_path")
    return Spec(
        kind=kind,
        name=_text(given, "name", NAMES[kind].format(size), where),
        dataset=f"fineweb{VERSION}_{_name(given, 'dataset_suffix', SUFFIXES[kind].format(size), where)}",
        vocab_size=size,
        file=file,
        train_documents=_count(given, "tokenizer_train_docs", where),
        reuse=None if reuse is None else user_path(_text(given, "reuse_model_path", "", where)),
        overrides=_overrides(given, where),
        given=given,
    )


def _kind(record: Record, where: str) -> str:
    """What a tokenizer is: by its kind, else its builder, else its data set, else because it has a size."""
    for key, known in (("kind", KINDS), ("builder", BUILDERS)):
        if (said := record.get(key)) is not None:
            name = re.split(r"[:.]", said)[-1] if key == "builder" and isinstance(said, str) else said
            if not isinstance(name, str) or name not in known:
                raise ConfigError(f"{where}: {key} {said!r} is not known; known are {', '.join(known)}")
            return known[name]
    if record.get("dataset_suffix") == SUFFIXES[BYTE]:
        return BYTE
    if record.get("vocab_size") is not None:
        return SENTENCEPIECE
    raise ConfigError(f"{where} says neither its kind ({', '.join(KINDS)}) nor its vocab_size")


def _vocab_size(record: Record, kind: str, where: str) -> int:
    size = record.get("vocab_size")
    if kind in FIXED:
        if size not in (None, FIXED[kind]):
            raise ConfigError(f"{where}: the {kind} tokenizer has {FIXED[kind]:,} ids, not vocab_size {size}")
        return FIXED[kind]
    if type(size) is not int or not 0 < size <= NARROW:
        raise ConfigError(f"{where}: vocab_size is {size!r}; shards hold 16 bits for a token, so give 1 to {NARROW:,}")
    return size


def _text(record: Record, key: str, default: str, where: str) -> str:
    text = default if record.get(key) is None else record[key]
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"{where}: {key} {text!r} is not text")
    return text


def _name(record: Record, key: str, default: str, where: str) -> str:
    name = _text(record, key, default, where)
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise ConfigError(f"{where}: {key} {name!r} is not a file name; use letters, digits, dots, - and _")
    return name


def _count(record: Record, key: str, where: str) -> int | None:
    count = record.get(key)
    if count is not None and (type(count) is not int or count < 1):
        raise ConfigError(f"{where}: {key} {count!r} leaves nothing to learn from; give 1 or more")
    return count


def _overrides(record: Record, where: str) -> Record:
    overrides = record.get("trainer_overrides") or {}
    if not isinstance(overrides, dict):
        raise ConfigError(f"{where}: trainer_overrides is an object of the trainer's settings, not {overrides!r}")
    if refused := [key for key in OURS if key in overrides]:
        raise ConfigError(f"{where}: trainer_overrides cannot replace {refused[0]}, which says where text and vocabulary are")
    return overrides
