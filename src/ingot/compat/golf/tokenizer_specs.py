"""The tokenizers of a golf export: read from a JSON file of specs, then learned from the documents, taken from a file, or fixed.

Mistakes in the file are found before anything is downloaded, and unknown keys are refused: a setting that is ignored makes data
that looks right. The same documents give golf's own vocabulary: its trainer ignores documents longer than 4,192 bytes and those
with U+2585 in them, and reads the others stripped, while the exported text is not stripped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ingot.data.store.documents import marks_of
from ingot.data.tokenizers import ByteTokenizer, SentencePieceTokenizer, Tokenizer
from ingot.data.tokenizers.learn_vocabulary import learn
from ingot.data.tokenizers.plain import byte_file
from ingot.data.tokenizers.tokenizer_base import NARROW
from ingot.errors import ConfigError, DataError
from ingot.runtime.files import reading, user_path

VERSION = "10B"


class Kind(NamedTuple):
    """Default names of a kind of tokenizer, by the size of its vocabulary; `size` is fixed where it is not learned."""

    name: str
    dataset_suffix: str
    file: str
    size: int | None = None


BYTE, SENTENCEPIECE = "byte", "sentencepiece_bpe"
KINDS = {
    BYTE: Kind("pure_byte_260", "byte260", "fineweb_pure_byte_260.json", 260),
    SENTENCEPIECE: Kind("sp_bpe_{}", "sp{}", "fineweb_{}_bpe.model"),
}
ALIASES = {
    "pure_byte": BYTE,
    "sentencepiece": SENTENCEPIECE,
    # Functions of golf's own module, which older files name as the builder.
    "build_pure_byte_tokenizer": BYTE,
    "build_sentencepiece_tokenizer": SENTENCEPIECE,
    "build_sentencepiece_bpe_tokenizer": SENTENCEPIECE,
}
MAX_SENTENCE_BYTES = 4192  # SentencePiece learns nothing from longer texts, unless max_sentence_length says otherwise
BOUNDARY = "\u2585"  # SentencePiece's own mark, which no text may hold
FileName = Annotated[str, Field(pattern=r"^\w[\w.-]*$")]
Text = Annotated[str, Field(pattern=r"\S")]


class Spec(BaseModel):
    """One tokenizer as the file writes it; what it leaves out follows from its kind."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: Text | None = None
    kind: str | None = None
    builder: str | None = None
    dataset_suffix: FileName | None = None
    vocab_size: Annotated[int, Field(ge=1, le=NARROW)] | None = None  # shards have 16 bits for a token
    tokenizer_train_docs: Annotated[int, Field(ge=1)] | None = None
    filename: FileName | None = None
    model_prefix: FileName | None = None
    reuse_model_path: Text | None = None
    trainer_overrides: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.tokenizer_kind not in KINDS:
            raise ValueError(f"unknown kind {self.tokenizer_kind!r}; give one of {', '.join(KINDS)}, or a vocab_size")
        size = KINDS[self.tokenizer_kind].size
        if size is None and self.vocab_size is None:
            raise ValueError(f"a {self.tokenizer_kind} tokenizer needs a vocab_size")
        if size is not None and self.vocab_size not in (None, size):
            raise ValueError(f"vocab_size of a {self.tokenizer_kind} tokenizer is {self.vocab_size}; it must be {size}")
        return self

    @property
    def tokenizer_kind(self) -> str:
        """The kind: as given, else by the builder, else by the dataset, else SentencePiece if there is a size."""
        if self.kind is not None or self.builder is not None:
            name = self.kind if self.kind is not None else re.split(r"[:.]", self.builder or "")[-1]
            return ALIASES.get(name, name)
        if self.dataset_suffix == KINDS[BYTE].dataset_suffix:
            return BYTE
        return SENTENCEPIECE if self.vocab_size is not None else ""

    @property
    def size(self) -> int:
        """The number of ids asked for."""
        return KINDS[self.tokenizer_kind].size or self.vocab_size or 0

    @property
    def title(self) -> str:
        """The name in the manifest."""
        return self.name or KINDS[self.tokenizer_kind].name.format(self.size)

    @property
    def dataset(self) -> str:
        """The folder of the shards."""
        return f"fineweb{VERSION}_{self.dataset_suffix or KINDS[self.tokenizer_kind].dataset_suffix.format(self.size)}"

    @property
    def files(self) -> tuple[str, ...]:
        """The names below tokenizers/, the one to open first."""
        file = KINDS[self.tokenizer_kind].file.format(self.size)
        if self.tokenizer_kind == BYTE:
            return (self.filename or file,)
        stem = self.model_prefix or Path(file).stem
        return f"{stem}.model", f"{stem}.vocab"

    @property
    def given(self) -> dict[str, Any]:
        """The keys and values of the file, which the manifest repeats."""
        return self.model_dump(exclude_unset=True)


def load_specs(
    path: Path, *, skip_byte: bool = False, train_documents: int | None = None, reuse: Sequence[str] = ()
) -> list[Spec]:
    """Return the tokenizers of a file; `reuse` are VOCAB=MODEL pairs for its SentencePiece vocabularies."""
    models: dict[int, str] = {}
    for pair in reuse:
        vocabulary, equals, model = pair.partition("=")
        if not (vocabulary.strip().isdecimal() and equals and model.strip()):
            raise ConfigError(f"--reuse-sp-model {pair!r} is not VOCAB=MODEL, such as 1024=tokenizers/fineweb_1024_bpe.model")
        if int(vocabulary) in models:
            raise ConfigError(f"--reuse-sp-model gives two models for a vocabulary of {int(vocabulary)}; give one")
        models[int(vocabulary)] = str(Path(model.strip()).absolute())
    specs = []
    for number, record in enumerate(_read_records(path), 1):
        try:
            spec = Spec.model_validate(record)
        except ValidationError as error:
            mistake = error.errors()[0]
            key = f"{mistake['loc'][0]}={mistake['input']!r}: " if mistake["loc"] else ""
            raise ConfigError(f"{path}, tokenizer {number}: {key}{mistake['msg'].removeprefix('Value error, ')}") from None
        changes: dict[str, Any] = {} if train_documents is None else {"tokenizer_train_docs": train_documents}
        if spec.tokenizer_kind == SENTENCEPIECE and spec.size in models:
            changes["reuse_model_path"] = models[spec.size]
        if not (skip_byte and spec.tokenizer_kind == BYTE):
            specs.append(spec.model_copy(update=changes))
    if not specs:
        raise ConfigError(f"{path} lists only byte tokenizers and --skip-byte is given; nothing is left to export")
    for what, names in (
        ("tokenizer", [spec.title for spec in specs]),
        ("dataset", [spec.dataset for spec in specs]),
        ("file", [name.lower() for spec in specs for name in spec.files]),
    ):
        if twice := [name for number, name in enumerate(names) if name in names[:number]]:
            raise ConfigError(f"{path} names the {what} {twice[0]} twice; give each its own name")
    if unused := set(models) - {spec.size for spec in specs if spec.tokenizer_kind == SENTENCEPIECE}:
        raise ConfigError(f"--reuse-sp-model {min(unused)}=...: {path} lists no SentencePiece tokenizer of this vocab_size")
    for spec in specs:
        if spec.reuse_model_path and not user_path(spec.reuse_model_path).is_file():
            raise ConfigError(f"tokenizer {spec.title}: there is no file {spec.reuse_model_path} to reuse")
    return specs


def _read_records(path: Path) -> list[Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"cannot read the tokenizer specs {path}: {error.strerror}; give the file with --tokenizer-config"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    records = content.get("tokenizer_specs", content.get("tokenizers")) if isinstance(content, dict) else content
    if not isinstance(records, list) or not records:
        raise ConfigError(f"{path} lists no tokenizers; it must be a list of them, or an object with the list under tokenizers")
    return records


@dataclass(frozen=True)
class Built:
    """A tokenizer, its files below tokenizers/, and its entry in the manifest."""

    spec: Spec
    tokenizer: Tokenizer
    files: dict[str, bytes]
    entry: dict[str, Any]


def build(spec: Spec, documents: Iterable[str], notify: Callable[[str], None]) -> Built:
    """Return the tokenizer of a spec, learned from the documents where it is not fixed or reused."""
    try:
        if spec.tokenizer_kind == BYTE:
            tokenizer: Tokenizer = ByteTokenizer()
            files = {spec.files[0]: byte_file()}
        else:
            model, vocabulary = _sentencepiece_files(spec, islice(documents, spec.tokenizer_train_docs))
            tokenizer = SentencePieceTokenizer(model)
            files = dict(zip(spec.files, (model, vocabulary or vocabulary_lines(model)), strict=True))
        if tokenizer.bos is None:
            raise DataError("it has no token for the start of a document, and every document needs one")
        if spec.reuse_model_path and tokenizer.vocab_size != spec.size:
            raise DataError(f"{spec.reuse_model_path} has {tokenizer.vocab_size:,} ids and vocab_size says {spec.size:,}")
    except DataError as error:
        raise DataError(f"tokenizer {spec.title}: {error.render(lambda option: option.strip('-').replace('-', '_'))}") from None
    if tokenizer.vocab_size != spec.size:
        notify(
            f"warning: tokenizer {spec.title} has {tokenizer.vocab_size:,} ids instead of {spec.size:,}: these documents "
            "and settings give no more"
        )
    entry: dict[str, Any] = {
        "name": spec.title,
        "kind": spec.tokenizer_kind,
        "vocab_size": tokenizer.vocab_size,
        "bos_id": tokenizer.bos,
        "eos_id": marks_of(tokenizer).eos,
        "recommended_bigram_vocab_size": 5 * 128 * -(-tokenizer.vocab_size // 128),
        "source_spec": spec.given,
    }
    paths = [f"tokenizers/{name}" for name in spec.files]
    if spec.tokenizer_kind == SENTENCEPIECE:
        return Built(spec, tokenizer, files, entry | {"model_path": paths[0], "vocab_path": paths[1]})
    return Built(spec, tokenizer, files, entry | {"path": paths[0], "pad_id": 0, "unk_id": 3})


def _sentencepiece_files(spec: Spec, documents: Iterable[str]) -> tuple[bytes, bytes | None]:
    """Return the model, reused or learned, and the vocabulary beside it, if there is one."""
    if spec.reuse_model_path:
        path = user_path(spec.reuse_model_path)
        beside = path.with_suffix(".vocab")
        with reading(path):
            return path.read_bytes(), beside.read_bytes() if beside.is_file() else None
    settings = {"max_sentence_length": MAX_SENTENCE_BYTES, **(spec.trainer_overrides or {})}
    longest = settings["max_sentence_length"]
    stripped = (document.replace("\0", " ").strip() for document in documents)
    sentences = (text for text in stripped if len(text.encode()) <= longest and BOUNDARY not in text)
    model = learn("sentencepiece", sentences, spec.size, settings)
    if model is None:
        raise DataError("the documents hold no text to learn from")
    return model, None


def vocabulary_lines(model: bytes) -> bytes:
    """Return the .vocab file of a SentencePiece model, as its trainer writes it."""
    import sentencepiece  # type: ignore[import-untyped]

    pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
    ids = range(pieces.vocab_size())
    return "".join(f"{pieces.id_to_piece(i)}\t{pieces.get_score(i):g}\n" for i in ids).encode()
