"""The tokenizers of a golf export: read from a JSON file of specs, then learned from the documents, taken from a file, or fixed.

Mistakes in the file are found before anything is downloaded, and unknown keys are refused: a setting that is ignored makes data
that looks right. The same documents give golf's own vocabulary: its trainer ignores documents longer than 4,192 bytes and those
with U+2585 in them, and reads the others stripped, while the exported text is not stripped.
"""

from __future__ import annotations

import json
import lzma
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import files as resources
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ingot.data.store.documents import marks_of
from ingot.data.tokenizers import ByteTokenizer, GPT2Tokenizer, SentencePieceTokenizer, Tokenizer
from ingot.data.tokenizers.gpt2_bpe import END_OF_TEXT
from ingot.data.tokenizers.hf_json import from_json
from ingot.data.tokenizers.learn_vocabulary import learn
from ingot.data.tokenizers.plain import byte_file
from ingot.data.tokenizers.tokenizer_base import NARROW
from ingot.errors import ConfigError, DataError
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
FIXED = {BYTE: 260, TIKTOKEN: 50_257}  # sizes of vocabularies that are not learned
# The default name, dataset suffix and file of each kind, by the size of its vocabulary.
DEFAULTS = {
    BYTE: ("pure_byte_260", "byte260", "fineweb_pure_byte_260.json"),
    SENTENCEPIECE: ("sp_bpe_{}", "sp{}", "fineweb_{}_bpe.model"),
    HF_BPE: ("hf_bpe_{}", "hfbpe{}", "fineweb_{}_hf_bpe.json"),
    TIKTOKEN: ("gpt2", "gpt2", "gpt2.tiktoken"),
}
NOT_OF = {  # keys that a kind has no use for
    BYTE: ("model_prefix", "reuse_model_path", "trainer_overrides"),
    SENTENCEPIECE: ("filename",),
    HF_BPE: ("model_prefix",),
    TIKTOKEN: ("model_prefix", "reuse_model_path", "trainer_overrides"),
}
RESERVED = ("input", "sentence_iterator", "model_prefix", "model_writer")  # trainer settings that the export sets itself
MAX_SENTENCE_BYTES = 4192  # SentencePiece learns nothing from longer texts, unless max_sentence_length says otherwise
BOUNDARY = "\u2585"  # SentencePiece's own mark, which no text may hold
FileName = Annotated[str, Field(pattern=r"^\w[\w.-]*$")]


class _Record(BaseModel):
    """One tokenizer as the file writes it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: Annotated[str, Field(pattern=r"\S")] | None = None
    kind: str | None = None
    builder: str | None = None
    dataset_suffix: FileName | None = None
    vocab_size: Annotated[int, Field(ge=1, le=NARROW)] | None = None  # shards have 16 bits for a token
    tokenizer_train_docs: Annotated[int, Field(ge=1)] | None = None
    filename: FileName | None = None
    model_prefix: FileName | None = None
    reuse_model_path: Annotated[str, Field(pattern=r"\S")] | None = None
    trainer_overrides: dict[str, Any] | None = None


@dataclass(frozen=True)
class Spec:
    """One tokenizer: `file` is its name below tokenizers/, `given` what the manifest repeats."""

    kind: str
    name: str
    dataset: str
    vocab_size: int
    file: str
    train_documents: int | None = None
    reuse: Path | None = None
    overrides: dict[str, Any] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=dict)

    @property
    def files(self) -> tuple[str, ...]:
        """The names below tokenizers/, the one to open first."""
        return (self.file, f"{Path(self.file).stem}.vocab") if self.kind == SENTENCEPIECE else (self.file,)


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
    records = enumerate(_read_records(path), 1)
    specs = [_spec(record, f"{path}, tokenizer {number}", train_documents, models) for number, record in records]
    specs = [spec for spec in specs if not (skip_byte and spec.kind == BYTE)]
    if not specs:
        raise ConfigError(f"{path} lists only byte tokenizers and --skip-byte is given; nothing is left to export")
    for what, names in (
        ("tokenizer", [spec.name for spec in specs]),
        ("dataset", [spec.dataset for spec in specs]),
        ("file", [name.lower() for spec in specs for name in spec.files]),
    ):
        if twice := [name for number, name in enumerate(names) if name in names[:number]]:
            raise ConfigError(f"{path} names the {what} {twice[0]} twice; give each its own name")
    if unused := set(models) - {spec.vocab_size for spec in specs if spec.kind == SENTENCEPIECE}:
        raise ConfigError(f"--reuse-sp-model {min(unused)}=...: {path} lists no SentencePiece tokenizer of this vocab_size")
    for spec in specs:
        if spec.reuse is not None:
            with _named(spec):
                _reused(spec, spec.reuse)
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


def _spec(record: Any, where: str, train_documents: int | None, models: dict[int, str]) -> Spec:
    try:
        _Record.model_validate(record)
    except ValidationError as error:
        mistake = error.errors()[0]
        key = f"{mistake['loc'][0]}={mistake['input']!r}: " if mistake["loc"] else ""
        raise ConfigError(f"{where}: {key}{mistake['msg']}") from None
    given = dict(record)
    kind = _kind(given, where)
    if unused := [key for key in NOT_OF[kind] if given.get(key) is not None]:
        raise ConfigError(f"{where}: a {kind} tokenizer has no {unused[0]!r}; remove it")
    if train_documents is not None:
        given["tokenizer_train_docs"] = train_documents
    size = given.get("vocab_size") or FIXED.get(kind)
    if size is None or size != FIXED.get(kind, size):
        needed = f"{FIXED[kind]:,}" if kind in FIXED else f"1 to {NARROW:,}"
        raise ConfigError(f"{where}: vocab_size of a {kind} tokenizer is {size}; it must be {needed}")
    if kind == SENTENCEPIECE and size in models:
        given["reuse_model_path"] = models[size]
    name, suffix, file = (default.format(size) for default in DEFAULTS[kind])
    file = f"{given['model_prefix']}.model" if given.get("model_prefix") else given.get("filename") or file
    if Path(file).suffix != Path(DEFAULTS[kind][2]).suffix:
        raise ConfigError(f"{where}: filename {file!r} must end in {Path(DEFAULTS[kind][2]).suffix}, by which it is opened")
    overrides = given.get("trainer_overrides") or {}
    if reserved := [key for key in RESERVED if key in overrides]:
        raise ConfigError(f"{where}: trainer_overrides cannot set {reserved[0]}, which the export sets itself")
    return Spec(
        kind=kind,
        name=given.get("name") or name,
        dataset=f"fineweb{VERSION}_{given.get('dataset_suffix') or suffix}",
        vocab_size=size,
        file=file,
        train_documents=given.get("tokenizer_train_docs"),
        reuse=user_path(given["reuse_model_path"]) if given.get("reuse_model_path") else None,
        overrides=overrides,
        given=given,
    )


def _kind(record: dict[str, Any], where: str) -> str:
    """Return the kind of a tokenizer: by its kind, else its builder, else its dataset, else because it has a size."""
    for key, known in (("kind", KINDS), ("builder", BUILDERS)):
        if (value := record.get(key)) is not None:
            name = re.split(r"[:.]", value)[-1] if key == "builder" else value
            if name not in known:
                raise ConfigError(f"{where}: {key} {value!r} is unknown; give one of {', '.join(known)}")
            return known[name]
    if record.get("dataset_suffix") == DEFAULTS[BYTE][1]:
        return BYTE
    if record.get("vocab_size") is not None:
        return SENTENCEPIECE
    raise ConfigError(f"{where} has neither a kind ({', '.join(KINDS)}) nor a vocab_size")


@dataclass(frozen=True)
class Built:
    """A tokenizer, its files below tokenizers/, and its entry in the manifest."""

    spec: Spec
    tokenizer: Tokenizer
    files: dict[str, bytes]
    entry: dict[str, Any]


def build(spec: Spec, documents: Iterable[str], notify: Callable[[str], None]) -> Built:
    """Return the tokenizer of a spec, learned from the documents where it is not fixed or reused."""
    with _named(spec):
        files = _make_files(spec, islice(documents, spec.train_documents), notify)
        tokenizer = _open(spec, files[spec.file])
    if tokenizer.vocab_size != spec.vocab_size:
        notify(
            f"warning: tokenizer {spec.name} has {tokenizer.vocab_size:,} ids instead of {spec.vocab_size:,}: these documents "
            "and settings give no more"
        )
    entry: dict[str, Any] = {
        "name": spec.name,
        "kind": spec.kind,
        "vocab_size": tokenizer.vocab_size,
        "bos_id": tokenizer.bos,
        "eos_id": marks_of(tokenizer).eos,
        "recommended_bigram_vocab_size": 5 * 128 * -(-tokenizer.vocab_size // 128),
        "source_spec": spec.given,
    }
    paths = [f"tokenizers/{name}" for name in spec.files]
    if spec.kind == SENTENCEPIECE:
        return Built(spec, tokenizer, files, entry | {"model_path": paths[0], "vocab_path": paths[1]})
    pad, unknown = (0, 3) if spec.kind == BYTE else (None, None)
    return Built(spec, tokenizer, files, entry | {"path": paths[0], "pad_id": pad, "unk_id": unknown})


@contextmanager
def _named(spec: Spec) -> Iterator[None]:
    try:
        yield
    except DataError as error:
        raise DataError(f"tokenizer {spec.name}: {error.render(lambda option: option.strip('-').replace('-', '_'))}") from None


def _open(spec: Spec, contents: bytes) -> Tokenizer:
    if spec.kind == SENTENCEPIECE:
        tokenizer: Tokenizer = SentencePieceTokenizer(contents)
    elif spec.kind == HF_BPE:
        tokenizer = from_json(contents, None if spec.reuse else END_OF_TEXT)
    else:
        tokenizer = ByteTokenizer() if spec.kind == BYTE else GPT2Tokenizer()
    if tokenizer.bos is None:
        raise DataError("it has no token for the start of a document, and every document needs one")
    return tokenizer


def _make_files(spec: Spec, documents: Iterable[str], notify: Callable[[str], None]) -> dict[str, bytes]:
    if spec.kind == BYTE:
        return {spec.file: byte_file()}
    if spec.kind == TIKTOKEN:
        return {spec.file: lzma.decompress((resources("ingot.data.tokenizers") / "gpt2.tiktoken.xz").read_bytes())}
    if spec.reuse is not None:
        contents: bytes | None = _reused(spec, spec.reuse)
    elif spec.kind == HF_BPE:
        contents = learn("bpe", documents, spec.vocab_size, spec.overrides)
    else:
        settings = {"max_sentence_length": MAX_SENTENCE_BYTES, **spec.overrides}
        sentences = _Sentences(documents, settings["max_sentence_length"])
        contents = learn("sentencepiece", sentences, spec.vocab_size, settings)
        if sentences.too_long:
            notify(
                f"tokenizer {spec.name}: {sentences.too_long:,} of {sentences.count:,} documents are longer than "
                f"{sentences.longest:,} bytes, and SentencePiece learns nothing from them; max_sentence_length in "
                "trainer_overrides changes that"
            )
    if contents is None:
        raise DataError("the documents hold no text to learn from")
    if spec.kind == HF_BPE:
        return {spec.file: contents}
    beside = spec.reuse.with_suffix(".vocab") if spec.reuse else None
    vocabulary = beside.read_bytes() if beside and beside.is_file() else vocabulary_lines(contents)
    return {spec.file: contents, spec.files[1]: vocabulary}


def vocabulary_lines(model: bytes) -> bytes:
    """Return the .vocab file of a SentencePiece model, as its trainer writes it."""
    import sentencepiece  # type: ignore[import-untyped]

    pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
    ids = range(pieces.vocab_size())
    return "".join(f"{pieces.id_to_piece(i)}\t{pieces.get_score(i):g}\n" for i in ids).encode()


class _Sentences:
    """The documents that SentencePiece learns from, as golf passes them to it."""

    def __init__(self, documents: Iterable[str], longest: Any) -> None:
        self.count = self.too_long = 0
        self.longest = longest if isinstance(longest, int) else MAX_SENTENCE_BYTES
        self._documents = documents

    def __iter__(self) -> Iterator[str]:
        for document in self._documents:
            self.count += 1
            text = document.replace("\0", " ").strip()
            if len(text) > self.longest or len(text.encode()) > self.longest:
                self.too_long += 1
            elif BOUNDARY not in text:
                yield text


def _reused(spec: Spec, path: Path) -> bytes:
    try:
        contents = path.read_bytes()
        size = _open(spec, contents).vocab_size
    except OSError as error:
        raise DataError(f"cannot read {path}, the model to reuse: {error.strerror}") from None
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    if size != spec.vocab_size:
        raise DataError(f"{path} has {size:,} ids and vocab_size says {spec.vocab_size:,}")
    return contents
