"""Tokenize golf's documents with any number of tokenizers: one folder of shards each, and a manifest that lists them.

The documents are docs_selected.jsonl from the Hub, with their number and sha256 in a file beside it. The first documents are the
validation split, so their order matters. The manifest is rewritten after each dataset and lists only complete ones. Running
the same command again resumes an interrupted export and keeps finished datasets.

A JSON file specifies the tokenizers, each of which is trained on the documents, loaded from a file, or fixed. The file is checked
before anything is downloaded. Unknown keys are errors: a setting that is ignored would silently produce wrong data. The same
documents give golf's own vocabulary: its trainer skips documents longer than 4,192 bytes or containing U+2585, and strips the
others, while the exported text is not stripped.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ingot.compat.golf import DOCS, DOCS_SOURCE, PREFIX, PREFIX_VARIABLE, PREVIOUS, REPO, REPO_VARIABLE
from ingot.compat.golf.download import place
from ingot.console.entry import explained
from ingot.console.output import Parser, print_json
from ingot.console.progress import work_line
from ingot.data import SHARD_TOKENS
from ingot.data.formats.shard_folder import MANIFEST, parse_manifest
from ingot.data.hub import Hub
from ingot.data.prepare.blocks import EveryText, first_documents, text_blocks
from ingot.data.prepare.pipeline import RuledBlocks, fill_folder
from ingot.data.prepare.workers import local_engine, workers_for
from ingot.data.store.dataset import Dataset, Manifest
from ingot.data.store.documents import marks_of
from ingot.data.store.shards import MAX_TOKENS
from ingot.data.store.staging import alone_in, check_output, staged, writing
from ingot.data.store.writer import Point, is_sound
from ingot.data.text.text_files import adding_up
from ingot.data.tokenizers import ByteTokenizer, SentencePieceTokenizer, Tokenizer
from ingot.data.tokenizers.learn_vocabulary import learn
from ingot.data.tokenizers.plain import byte_file
from ingot.data.tokenizers.tokenizer_base import NARROW
from ingot.errors import ConfigError, DataError
from ingot.runtime.files import file_sha256, reading, user_path, write_atomically
from ingot.runtime.machine import made_by

VERSION = "10B"


class Kind(NamedTuple):
    """Default names for a kind of tokenizer, by vocabulary size; `size` is set if the kind has a fixed size."""

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
    # Functions in golf's own module; older files give these as the builder.
    "build_pure_byte_tokenizer": BYTE,
    "build_sentencepiece_tokenizer": SENTENCEPIECE,
    "build_sentencepiece_bpe_tokenizer": SENTENCEPIECE,
}
MAX_SENTENCE_BYTES = 4192  # SentencePiece skips longer texts in training, unless max_sentence_length says otherwise
BOUNDARY = "\u2585"  # SentencePiece's whitespace marker; its trainer skips texts that contain it
FileName = Annotated[str, Field(pattern=r"^\w[\w.-]*$")]
Text = Annotated[str, Field(pattern=r"\S")]


class Spec(BaseModel):
    """Specification of one tokenizer in the JSON file; missing entries get the defaults of its kind."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: Text | None = None
    kind: str | None = None
    builder: str | None = None
    dataset_suffix: FileName | None = None
    vocab_size: Annotated[int, Field(ge=1, le=NARROW)] | None = None  # shards store tokens as 16-bit integers
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
        """Return the kind: explicit, else from the builder, else from the dataset name, else SentencePiece if a size is given."""
        if self.kind is not None or self.builder is not None:
            name = self.kind if self.kind is not None else re.split(r"[:.]", self.builder or "")[-1]
            return ALIASES.get(name, name)
        if self.dataset_suffix == KINDS[BYTE].dataset_suffix:
            return BYTE
        return SENTENCEPIECE if self.vocab_size is not None else ""

    @property
    def size(self) -> int:
        """Return the requested vocabulary size."""
        return KINDS[self.tokenizer_kind].size or self.vocab_size or 0

    @property
    def title(self) -> str:
        """Return the tokenizer's name in the manifest."""
        return self.name or KINDS[self.tokenizer_kind].name.format(self.size)

    @property
    def dataset(self) -> str:
        """Return the name of the folder for the shards."""
        return f"fineweb{VERSION}_{self.dataset_suffix or KINDS[self.tokenizer_kind].dataset_suffix.format(self.size)}"

    @property
    def files(self) -> tuple[str, ...]:
        """Return the file names below tokenizers/; the first is the one that is opened."""
        file = KINDS[self.tokenizer_kind].file.format(self.size)
        if self.tokenizer_kind == BYTE:
            return (self.filename or file,)
        stem = self.model_prefix or Path(file).stem
        return f"{stem}.model", f"{stem}.vocab"

    @property
    def given(self) -> dict[str, Any]:
        """Return the entries set in the tokenizer specs, which are copied into the manifest."""
        return self.model_dump(exclude_unset=True)


def load_specs(
    path: Path, *, skip_byte: bool = False, train_documents: int | None = None, reuse: Sequence[str] = ()
) -> list[Spec]:
    """Read the tokenizer specs in a file; `reuse` are VOCAB=MODEL pairs of existing SentencePiece models."""
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
    """A built tokenizer, its files below tokenizers/, and its manifest entry."""

    spec: Spec
    tokenizer: Tokenizer
    files: dict[str, bytes]
    entry: dict[str, Any]


def build(spec: Spec, documents: Iterable[str], notify: Callable[[str], None]) -> Built:
    """Build the tokenizer of a spec, training it on the documents unless it is fixed or reused."""
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
    """Return the SentencePiece model, reused or newly trained, and its .vocab file if there is one."""
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
    """Return the .vocab file for a SentencePiece model, as SentencePiece's trainer writes it."""
    import sentencepiece  # type: ignore[import-untyped]

    pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
    ids = range(pieces.vocab_size())
    return "".join(f"{pieces.id_to_piece(i)}\t{pieces.get_score(i):g}\n" for i in ids).encode()


# Exporting.

VAL_DOCUMENTS = 50_000
BATCH = 1024  # documents encoded per batch
REPORT_DOCUMENTS = 100_000
EXPORTED_SPECS = "tokenizer_config.export.json"
THREADS, BATCH_SIZE = "MATCHED_FINEWEB_TOKENIZER_THREADS", "MATCHED_FINEWEB_SP_BATCH_SIZE"
VARIABLES = f"""variables:
  {REPO_VARIABLE}, {PREFIX_VARIABLE}
                        the repository and the folder in it, unless options give them
  {THREADS}
                        processes that encode (one per processor)
  {BATCH_SIZE}
                        documents encoded at once ({BATCH})
"""
Notify = Callable[[str], None]
Progress = Callable[[str, int, int], None]  # description, amount done, total


@dataclass(frozen=True)
class Docs:
    """The verified documents; `sidecar` is the file beside them; `repo` and `root` are None if they are not from a repository."""

    path: Path
    documents: int
    sha256: str
    sidecar: dict[str, Any]
    repo: str | None
    root: str | None


def export(
    output: Path,
    specs: Sequence[Spec],
    hub: Hub,
    root: str,
    *,
    val_documents: int | None = None,
    chunk_tokens: int = SHARD_TOKENS,
    workers: int | None = None,
    batch: int | None = None,
    notify: Notify = lambda line: None,
    progress: Progress = lambda what, done, total: None,
) -> dict[str, Any]:
    """Write the documents, tokenizers and shards to a folder in golf's layout; return the record that --json prints.

    `workers` is the number of encoding processes, one per processor by default. It does not affect the output, nor does `batch`.
    """
    started, warnings, kept, root = time.monotonic(), list[str](), list[str](), root.strip("/")
    if root and {".", "..", ""} & set(root.split("/")):
        raise ConfigError(f"--remote-root {root!r} is not a folder of a repository")
    if val_documents is not None and val_documents < 0:
        raise ConfigError(f"--num-val-docs {val_documents} is negative; give 0 or more")
    if not 1 <= chunk_tokens <= MAX_TOKENS:
        raise ConfigError(f"--chunk-tokens {chunk_tokens:,} is out of range; give 1 to {MAX_TOKENS:,}")

    def report(line: str) -> None:
        if line.startswith("warning: "):
            warnings.append(line.removeprefix("warning: "))
        notify(line)

    with alone_in(output, report):
        for spec in specs:
            check_output(output / "datasets" / spec.dataset, overwrite=True)
        docs = _find_docs(output, hub, root, report, progress)
        held_out: int = next(n for n in (val_documents, docs.sidecar.get("docs_val"), VAL_DOCUMENTS) if n is not None)
        if held_out > docs.documents:
            raise ConfigError(
                f"validation needs {held_out:,} documents and {docs.path} has {docs.documents:,}; give fewer with --num-val-docs"
            )
        tokenizers = [build(spec, read_docs(docs.path, f"reading for {spec.title}", progress), report) for spec in specs]
        _write_json(output / EXPORTED_SPECS, {"tokenizers": [spec.given for spec in specs]})
        _keep_previous(output, specs, report)
        listing = _listing(output, docs, held_out, chunk_tokens, specs)
        for built in tokenizers:
            manifest, is_new = _export_dataset(
                built, docs, held_out, chunk_tokens, workers, batch or BATCH, output, report, progress
            )
            kept += [] if is_new else [built.spec.dataset]
            for name, content in built.files.items():
                path = output / "tokenizers" / name
                with writing(path):
                    path.parent.mkdir(exist_ok=True)
                    write_atomically(path, content)
            listing["tokenizers"].append(_relative(built.entry, output))
            listing["datasets"].append(_dataset_entry(built, manifest))
            _write_json(output / MANIFEST, listing)
    seconds = round(time.monotonic() - started, 3)
    return {"folder": str(output), "manifest": listing, "kept": kept, "warnings": warnings, "seconds": seconds}


def read_docs(path: Path, what: str, progress: Progress = lambda what, done, total: None) -> Iterator[str]:
    """Yield the documents; a lone surrogate, which is not a valid character, is replaced by a question mark."""
    advance = adding_up(partial(progress, what), path.stat().st_size)
    with reading(path), path.open("rb") as file:
        for number, line in enumerate(file, 1):
            advance(len(line))
            if line.isspace():
                continue
            try:
                text = json.loads(line)["text"].encode(errors="replace").decode()
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                raise DataError(f"{path}:{number} is not a JSON object with a text in its field 'text'") from None
            yield text


def _find_docs(output: Path, hub: Hub, root: str, notify: Notify, progress: Progress) -> Docs:
    """Return the repository's documents, downloaded if they are missing; offline, return those in the output folder."""
    path, beside, start, sha256 = output / DOCS, output / DOCS_SOURCE, f"{root}/" if root else "", None
    if hub.offline:
        if not path.is_file():
            raise DataError(f"HF_HUB_OFFLINE is set and there is no {path}; unset it to download the documents")
        notify(f"HF_HUB_OFFLINE is set; using {path} as it is")
    else:
        listing = hub.listing()
        info = listing.files.get(start + DOCS)
        if info is None:
            raise DataError(f"dataset repository {hub.repo} has no {start}{DOCS}; check --repo-id and --remote-root")
        sha256 = info.sha256
        if not path.is_file():
            advance = adding_up(partial(progress, f"downloading {DOCS}"), info.size or 0)
            place(hub.fetch(start + DOCS, listing.commit, info, advance), path)
        elif info.problem(path):
            raise DataError(
                f"{path} is not that of {hub.repo} and is not replaced; remove it, choose another output, or set "
                "HF_HUB_OFFLINE=1 to use it"
            )
        if start + DOCS_SOURCE in listing.files:
            place(hub.fetch(start + DOCS_SOURCE, listing.commit, listing.files[start + DOCS_SOURCE]), beside)
        else:
            beside.unlink(missing_ok=True)  # it describes other documents
    sidecar = parse_manifest(beside.read_bytes(), str(beside)) if beside.is_file() else {}
    sha256 = sha256 or file_sha256(path)
    if sidecar.get("docs_sha256", sha256) != sha256:
        raise DataError(
            f"{path} has the sha256 {sha256[:12]} and {DOCS_SOURCE} says {str(sidecar['docs_sha256'])[:12]}: one is damaged or "
            "describes other documents; remove both and run the same command, or ask their owner"
        )
    for key in ("num_docs", "docs_val"):
        if (count := sidecar.get(key)) is not None and (type(count) is not int or count < 0):
            raise DataError(f"{beside} says {key}={count!r}, which is not a number of documents")
    documents = sidecar.get("num_docs")
    if documents is None:
        with reading(path), path.open("rb") as file:
            documents = sum(not line.isspace() for line in file)
    if not documents:
        raise DataError(f"{path} holds no documents; it needs a JSON object with a field 'text' in every line")
    return Docs(path, documents, sha256, sidecar, *((None, None) if hub.offline else (hub.repo, root)))


def _export_dataset(
    built: Built,
    docs: Docs,
    val_documents: int,
    chunk_tokens: int,
    workers: int | None,
    batch: int,
    output: Path,
    notify: Notify,
    progress: Progress,
) -> tuple[Manifest, bool]:
    """Write one tokenizer's shards; return the dataset's manifest, and whether it was written by this call.

    dataset.json and a document index are written next to golf's own files, so that every other Ingot command can read the folder.
    """
    name, target = built.spec.dataset, output / "datasets" / built.spec.dataset
    work = {
        "made_by": made_by(),
        "docs_sha256": docs.sha256,
        "val_documents": val_documents,
        "chunk_tokens": chunk_tokens,
        "tokenizer": built.tokenizer.fingerprint(),
    }
    try:
        manifest = Dataset.open(target).manifest
        if isinstance(manifest.source, dict) and manifest.source.get("golf") == work:
            notify(f"{target} is complete and stays as it is")
            return manifest, False
    except DataError:
        pass  # missing, or made from other data
    if any(target.glob("fineweb_*.bin")):
        notify(f"{target} holds other shards, which are replaced when those of this export are complete")

    def blocks(begin: Point) -> RuledBlocks:
        """Yield the documents after those already written; empty documents count too."""
        if begin.documents:
            notify(f"{target}: continuing after document {begin.documents:,}")
        texts = islice(read_docs(docs.path, f"exporting {name}", progress), begin.documents, None)
        rule = first_documents(val_documents)
        return ((rule, EveryText(block)) for block in text_blocks(texts, documents=batch))

    def report(written: range) -> None:
        if written.stop // REPORT_DOCUMENTS > written.start // REPORT_DOCUMENTS:
            notify(f"{name}: {written.stop:,} of {docs.documents:,} documents")

    source = {"inputs": [str(docs.path)], "validation": f"the first {val_documents} documents", "golf": work}
    engine = local_engine(built.tokenizer, workers or workers_for(built.tokenizer, docs.path.stat().st_size))
    with staged(target, True, work, is_sound) as stage:
        manifest, last, _ = fill_folder(
            stage, blocks, built.tokenizer, engine, source=source, shard_tokens=chunk_tokens, prefix="fineweb_", tell=report
        )
        if last.documents != docs.documents:
            raise DataError(
                f"{docs.path} holds {last.documents:,} documents instead of {docs.documents:,}; it was changed, or "
                "the file beside it is wrong: fetch both again"
            )
    return manifest, True


def _listing(output: Path, docs: Docs, val_documents: int, chunk: int, specs: Sequence[Spec]) -> dict[str, Any]:
    """Return the manifest, still without datasets."""
    meta = {
        "remote_repo_id": docs.repo,
        "remote_root": docs.root,
        "num_docs": docs.documents,
        "docs_sha256": docs.sha256,
        "source_manifest": DOCS_SOURCE if docs.sidecar else None,
    }
    return {
        "version": VERSION,
        "num_docs": docs.documents,
        "num_val_docs": val_documents,
        "shuffle_seed": docs.sidecar.get("shuffle_seed"),
        "shard_size": chunk,
        "append_eos": False,
        "docs_jsonl": DOCS,
        "docs_meta": meta | ({"source_sidecar": _relative(docs.sidecar, output)} if docs.sidecar else {}),
        "tokenizer_specs": [_relative(spec.given, output) for spec in specs],
        "tokenizers": [],
        "datasets": [],
    }


def _dataset_entry(built: Built, manifest: Manifest) -> dict[str, Any]:
    path = f"datasets/{built.spec.dataset}"
    counts = {name: [split.documents, len(split.shards), split.tokens] for name, split in manifest.splits.items()}
    counts["total"] = [sum(column) for column in zip(*counts.values(), strict=True)]
    return {
        "name": built.spec.dataset,
        "tokenizer_name": built.spec.title,
        "tokenizer_kind": built.spec.tokenizer_kind,
        "path": path,
        "train_glob": f"{path}/fineweb_train_*.bin",
        "val_glob": f"{path}/fineweb_val_*.bin",
        **{key: built.entry[key] for key in ("vocab_size", "bos_id", "eos_id", "recommended_bigram_vocab_size")},
        "stats": {
            f"{what}_{name}": counts[name][column]
            for column, what in enumerate(("docs", "files", "tokens"))
            for name in ("total", "val", "train")
        },
    }


def _keep_previous(output: Path, specs: Sequence[Spec], notify: Notify) -> None:
    """Back up a manifest that lists datasets which are not part of this export."""
    path = output / MANIFEST
    if not path.is_file():
        return
    with writing(path):
        content = path.read_bytes()
        listed = parse_manifest(content, str(path)).get("datasets") or ()
        if any(entry.get("name") not in [spec.dataset for spec in specs] for entry in listed):
            write_atomically(output / PREVIOUS, content)
            notify(f"{path} lists other datasets and is replaced by that of this export; it is kept as {PREVIOUS}")


def _relative(value: Any, output: Path) -> Any:
    """Return a JSON value with absolute paths inside the output folder made relative to it."""
    if isinstance(value, dict):
        return {key: _relative(item, output) for key, item in value.items()}
    if isinstance(value, list):
        return [_relative(item, output) for item in value]
    if isinstance(value, str) and value.startswith("/") and Path(value).is_relative_to(output.absolute()):
        return Path(value).relative_to(output.absolute()).as_posix()
    return value


def _write_json(path: Path, record: Any) -> None:
    with writing(path):
        write_atomically(path, json.dumps(record, indent=2, ensure_ascii=False) + "\n")


def download_hf_docs_and_tokenize(argv: Sequence[str], folder: Path = Path("data")) -> int:
    """Run the challenge's script download_hf_docs_and_tokenize.py and return its exit code."""
    name = "download_hf_docs_and_tokenize.py"
    with explained(name, interrupted="interrupted; the same command continues") as outcome:
        args = _parser(name, folder).parse_args(list(argv))
        specs = load_specs(
            args.tokenizer_config,
            skip_byte=args.skip_byte,
            train_documents=args.tokenizer_train_docs,
            reuse=args.reuse_sp_model,
        )
        with work_line("asking the hub", "bytes") as (notify, show):
            result = export(
                args.output_root,
                specs,
                Hub(args.repo_id),
                args.remote_root,
                val_documents=args.num_val_docs,
                chunk_tokens=args.chunk_tokens,
                workers=_number(THREADS),
                batch=_number(BATCH_SIZE),
                notify=notify,
                progress=show or (lambda what, done, total: None),
            )
        if args.json:
            print_json(result)
            return outcome.code
        for entry in result["manifest"]["datasets"]:
            stats, kept = entry["stats"], " (was complete)" if entry["name"] in result["kept"] else ""
            print(f"{result['folder']}/{entry['path']}: {entry['vocab_size']:,} ids, {stats['docs_total']:,} documents{kept}")
            for split, title in (("train", "train"), ("val", "validation")):
                files, tokens, documents = (stats[f"{what}_{split}"] for what in ("files", "tokens", "docs"))
                print(f"  {title}: {documents:,} documents, {tokens:,} tokens, {files:,} {'shard' if files == 1 else 'shards'}")
        print(f"{result['folder']}/manifest.json lists them, {result['seconds']:.1f} s")
    return outcome.code


def _parser(name: str, folder: Path) -> Parser:
    about = "Download the challenge's documents and export them as shards of one or more tokenizers."
    parser = Parser(name, description=about, epilog=VARIABLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, repo, prefix = parser.add_argument, os.environ.get(REPO_VARIABLE, REPO), os.environ.get(PREFIX_VARIABLE, PREFIX)
    add("--repo-id", default=repo, metavar="ID", help=f"dataset repository on the Hugging Face hub ({repo})")
    add("--remote-root", default=prefix, metavar="DIR", help=f"folder in it that has docs_selected.jsonl ({prefix})")
    add("--output-root", type=Path, required=True, metavar="DIR", help="folder to fill: datasets/, tokenizers/, manifest.json")
    specs = folder / "tokenizer_specs.json"
    add("--tokenizer-config", type=Path, default=specs, metavar="FILE", help=f"JSON file that lists tokenizers ({specs})")
    add("--num-val-docs", type=int, metavar="N", help="the first N documents are validation (what the documents say, or 50000)")
    add("--chunk-tokens", type=int, default=SHARD_TOKENS, metavar="N", help=f"tokens per shard ({SHARD_TOKENS})")
    add("--tokenizer-train-docs", type=int, metavar="N", help="learn vocabularies from the first N documents (all)")
    add("--skip-byte", action="store_true", help="leave byte tokenizers out")
    about = "use this .model for the SentencePiece vocabulary of this size instead of training one; may be repeated"
    add("--reuse-sp-model", action="append", default=[], metavar="VOCAB=MODEL", help=about)
    add("--json", action="store_true", help="print the result as JSON")
    return parser


def _number(variable: str) -> int | None:
    """Return the value of an integer environment variable, at least 1; None if it is unset."""
    if not (text := os.environ.get(variable, "").strip()):
        return None
    try:
        return max(1, int(text))
    except ValueError:
        raise ConfigError(f"{variable}={text!r} is not a whole number") from None
