"""From a spec to a tokenizer: learned from the documents as golf learns it, taken from a file, or fixed.

The same documents give golf's own vocabulary: its trainer passes over documents longer than 4,192 bytes and over those with
U+2585 in them, and reads the others stripped, while what is exported is the text as it is.
"""

from __future__ import annotations

import lzma
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.resources import files as resources
from itertools import islice
from pathlib import Path
from typing import Any

from ingot.compat.golf.data.docs import Docs, Notify, Progress, read_docs
from ingot.compat.golf.data.specs import BYTE, HF_BPE, SENTENCEPIECE, TIKTOKEN, Spec, files_of
from ingot.data.formats.documents import marks_of
from ingot.data.text.text_files import adding_up
from ingot.data.tokenizers import ByteTokenizer, GPT2Tokenizer, SentencePieceTokenizer, Tokenizer
from ingot.data.tokenizers.gpt2_bpe import END_OF_TEXT
from ingot.data.tokenizers.hf_json import from_json
from ingot.data.tokenizers.learn_vocabulary import learn
from ingot.data.tokenizers.plain import byte_file
from ingot.errors import DataError

LONGEST = 4192  # bytes of a text that SentencePiece learns from, unless it is told otherwise
BOUNDARY = "\u2585"  # its own mark, which no text may hold


@dataclass(frozen=True)
class Built:
    """A tokenizer, its files below tokenizers/, and what the manifest says of it."""

    spec: Spec
    tokenizer: Tokenizer
    files: dict[str, bytes]
    entry: dict[str, Any]


def build(spec: Spec, docs: Docs, notify: Notify, progress: Progress) -> Built:
    """The tokenizer of a spec."""
    with _named(spec):
        files = _files(spec, docs, notify, progress)
        tokenizer = _open(spec, files[spec.file])
    if tokenizer.vocab_size != spec.vocab_size:
        notify(
            f"warning: tokenizer {spec.name} has {tokenizer.vocab_size:,} ids instead of {spec.vocab_size:,}, which is all that "
            "these documents and settings give"
        )
    return Built(spec, tokenizer, files, _entry(spec, tokenizer))


def check_reused(spec: Spec) -> None:
    """Refuse a file to be used again that cannot be."""
    if spec.reuse is not None:
        with _named(spec):
            _reused(spec, spec.reuse)


@contextmanager
def _named(spec: Spec) -> Iterator[None]:
    try:
        yield
    except DataError as error:
        raise DataError(f"tokenizer {spec.name}: {error.render(lambda option: option.strip('-').replace('-', '_'))}") from None


def bigram_size(vocab_size: int) -> int:
    """The rows that golf recommends for a table of pairs: five times the vocabulary, rounded up to 128."""
    return 5 * 128 * -(-vocab_size // 128)


def vocabulary_lines(model: bytes) -> bytes:
    """The .vocab file of a SentencePiece model, as its trainer writes it."""
    import sentencepiece  # type: ignore[import-untyped]

    pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
    ids = range(pieces.vocab_size())
    return "".join(f"{pieces.id_to_piece(i)}\t{pieces.get_score(i):g}\n" for i in ids).encode()


def _entry(spec: Spec, tokenizer: Tokenizer) -> dict[str, Any]:
    entry = {
        "name": spec.name,
        "kind": spec.kind,
        "vocab_size": tokenizer.vocab_size,
        "bos_id": tokenizer.bos,
        "eos_id": marks_of(tokenizer).eos,
        "recommended_bigram_vocab_size": bigram_size(tokenizer.vocab_size),
        "source_spec": spec.given,
    }
    paths = [f"tokenizers/{name}" for name in files_of(spec)]
    if spec.kind == SENTENCEPIECE:
        return {**entry, "model_path": paths[0], "vocab_path": paths[1]}
    pad, unknown = (0, 3) if spec.kind == BYTE else (None, None)
    return {**entry, "path": paths[0], "pad_id": pad, "unk_id": unknown}


def _open(spec: Spec, contents: bytes) -> Tokenizer:
    if spec.kind == SENTENCEPIECE:
        tokenizer: Tokenizer = SentencePieceTokenizer(contents)
    elif spec.kind == HF_BPE:
        tokenizer = from_json(contents, None if spec.reuse else END_OF_TEXT)
    else:
        tokenizer = ByteTokenizer() if spec.kind == BYTE else GPT2Tokenizer()
    if tokenizer.bos is None:
        raise DataError("it has no id for the start of a document, which stands in front of every one")
    return tokenizer


def _files(spec: Spec, docs: Docs, notify: Notify, progress: Progress) -> dict[str, bytes]:
    if spec.kind == SENTENCEPIECE:
        return _sentencepiece(spec, docs, notify, progress)
    if spec.kind == BYTE:
        return {spec.file: byte_file()}
    if spec.kind == TIKTOKEN:
        return {spec.file: lzma.decompress((resources("ingot.data.tokenizers") / "gpt2.tiktoken.xz").read_bytes())}
    if spec.reuse is not None:
        return {spec.file: _reused(spec, spec.reuse)}
    return {spec.file: _learned(learn("bpe", _documents(spec, docs, progress), spec.vocab_size, spec.overrides))}


def _sentencepiece(spec: Spec, docs: Docs, notify: Notify, progress: Progress) -> dict[str, bytes]:
    model_file, vocab_file = files_of(spec)
    if spec.reuse is not None:
        model = _reused(spec, spec.reuse)
        beside = spec.reuse.with_suffix(".vocab")
        return {model_file: model, vocab_file: beside.read_bytes() if beside.is_file() else vocabulary_lines(model)}
    settings = {"max_sentence_length": LONGEST, **spec.overrides}
    texts = _Sentences(_documents(spec, docs, progress), settings["max_sentence_length"])
    model = _learned(learn("sentencepiece", texts, spec.vocab_size, settings))
    if texts.long:
        notify(
            f"tokenizer {spec.name}: {texts.long:,} of {texts.count:,} documents are longer than {texts.longest:,} bytes, and "
            "SentencePiece learns nothing from them; max_sentence_length in trainer_overrides changes that"
        )
    return {model_file: model, vocab_file: vocabulary_lines(model)}


class _Sentences:
    """The documents that SentencePiece would learn from, as golf gives them to it."""

    def __init__(self, documents: Iterable[str], longest: Any) -> None:
        self.count = self.long = 0
        self.longest = longest if isinstance(longest, int) else LONGEST
        self._documents = documents

    def __iter__(self) -> Iterator[str]:
        for document in self._documents:
            self.count += 1
            text = document.replace("\0", " ").strip()
            if len(text) > self.longest or len(text.encode()) > self.longest:
                self.long += 1
            elif BOUNDARY not in text:
                yield text


def _documents(spec: Spec, docs: Docs, progress: Progress) -> Iterator[str]:
    advance = adding_up(partial(progress, f"reading for {spec.name}"), docs.path.stat().st_size)
    yield from islice(read_docs(docs.path, advance=advance), spec.train_documents)


def _learned(contents: bytes | None) -> bytes:
    if contents is None:
        raise DataError("the documents hold no text to learn from")
    return contents


def _reused(spec: Spec, path: Path) -> bytes:
    try:
        contents = path.read_bytes()
        size = _open(spec, contents).vocab_size
    except OSError as error:
        raise DataError(f"cannot read {path}, which is to be used again: {error.strerror}") from None
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    if size != spec.vocab_size:
        raise DataError(f"{path} has {size:,} ids and vocab_size says {spec.vocab_size:,}")
    return contents
