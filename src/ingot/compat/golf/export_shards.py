"""Tokenize golf's documents with one or more tokenizers; write a folder of shards per tokenizer and a manifest of all folders.

The documents are docs_selected.jsonl from the Hub, with their count and sha256 in a sidecar file. The first documents are the
validation split, so their order matters. Running the same command again resumes an export and keeps finished datasets.

A JSON file specifies the tokenizers. Each is trained on the documents, loaded from a file or a byte tokenizer. Training on the
same documents reproduces golf's vocabulary: as in golf, documents longer than 4,192 bytes or with U+2585 in them are left out,
and whitespace is stripped from both ends of all others. The exported text is not stripped.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ingot.compat.golf import DOCS, DOCS_SOURCE, PREFIX, PREFIX_VARIABLE, REPO, REPO_VARIABLE
from ingot.compat.golf.download import place
from ingot.console.entry import explained
from ingot.console.output import Parser, print_json
from ingot.console.progress import work_line
from ingot.data import SHARD_TOKENS
from ingot.data.formats.shard_folder import parse_manifest
from ingot.data.hub import Hub
from ingot.data.prepare.blocks import EveryText, text_blocks
from ingot.data.prepare.pipeline import RuledBlocks, fill_folder, first_documents
from ingot.data.prepare.workers import workers_for
from ingot.data.store import dataset as prepared
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
from ingot.runtime.files import file_sha256, read_json, readable, reading, to_json, user_path, write_atomically
from ingot.runtime.machine import made_by

VERSION = "10B"
BYTE, SENTENCEPIECE = "byte", "sentencepiece_bpe"
BYTE_IDS = 260
ALIASES = {
    "pure_byte": BYTE,
    "sentencepiece": SENTENCEPIECE,
    # Functions in the challenge's own export script; older spec files name one of them as the value of `builder`.
    "build_pure_byte_tokenizer": BYTE,
    "build_sentencepiece_tokenizer": SENTENCEPIECE,
    "build_sentencepiece_bpe_tokenizer": SENTENCEPIECE,
}
MAX_SENTENCE_BYTES = 4192  # SentencePiece's default for max_sentence_length: training skips longer texts
BOUNDARY = "\u2585"  # SentencePiece's placeholder for unknown characters; its trainer skips texts that contain it
FileName = Annotated[str, Field(pattern=r"^\w[\w.-]*$")]
Text = Annotated[str, Field(pattern=r"\S")]


class Spec(BaseModel):
    """Specification of one tokenizer in the JSON file; missing entries get defaults that depend on `kind`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: Text = ""
    kind: str = ""
    builder: str = ""
    dataset_suffix: FileName = ""
    vocab_size: Annotated[int, Field(ge=1, le=NARROW)] = 0  # shards store tokens as 16-bit integers
    tokenizer_train_docs: Annotated[int, Field(ge=1)] | None = None
    filename: FileName = ""
    model_prefix: FileName = ""
    reuse_model_path: Text = ""
    trainer_overrides: dict[str, Any] = {}
    _given: dict[str, Any] = {}  # the entries given in the spec file, which the manifest repeats

    @model_validator(mode="after")
    def _complete(self) -> Self:
        """Fill in missing entries; `kind` is derived from `builder`, else from `dataset_suffix`, else from `vocab_size`."""
        self._given = self.model_dump(exclude_unset=True)
        kind = self.kind or re.split(r"[:.]", self.builder)[-1]
        if not kind and (self.vocab_size or self.dataset_suffix == "byte260"):
            kind = BYTE if self.dataset_suffix == "byte260" else SENTENCEPIECE
        self.kind = ALIASES.get(kind, kind)
        if self.kind not in (BYTE, SENTENCEPIECE):
            raise ValueError(f"unknown kind {self.kind!r}; give {BYTE} or {SENTENCEPIECE}, or a vocab_size")
        if self.kind == SENTENCEPIECE and not self.vocab_size:
            raise ValueError(f"a {self.kind} tokenizer needs a vocab_size")
        if self.kind == BYTE and self.vocab_size not in (0, BYTE_IDS):
            raise ValueError(f"vocab_size of a {BYTE} tokenizer must be {BYTE_IDS}, not {self.vocab_size}")
        self.vocab_size = self.vocab_size or BYTE_IDS
        self.name = self.name or f"{'pure_byte' if self.kind == BYTE else 'sp_bpe'}_{self.vocab_size}"
        self.dataset_suffix = self.dataset_suffix or f"{'byte' if self.kind == BYTE else 'sp'}{self.vocab_size}"
        return self

    @property
    def dataset(self) -> str:
        """Return the name of the folder for this tokenizer's shards."""
        return f"fineweb{VERSION}_{self.dataset_suffix}"

    @property
    def files(self) -> tuple[str, ...]:
        """Return the names of the tokenizer's files in tokenizers/; the first file holds the tokenizer itself."""
        if self.kind == BYTE:
            return (self.filename or f"fineweb_pure_byte_{self.vocab_size}.json",)
        stem = self.model_prefix or f"fineweb_{self.vocab_size}_bpe"
        return f"{stem}.model", f"{stem}.vocab"


def load_specs(
    path: Path, *, skip_byte: bool = False, train_documents: int | None = None, reuse: Sequence[str] = ()
) -> list[Spec]:
    """Read the tokenizer specs in a file. Each "SIZE=FILE" in `reuse` names a trained SentencePiece model of that size."""
    models: dict[int, str] = {}
    for pair in reuse:
        vocabulary, _, model = pair.partition("=")
        if not (vocabulary.isdecimal() and model):
            raise ConfigError(f"--reuse-sp-model {pair!r} must be VOCAB=MODEL, such as 1024=tokenizers/fineweb_1024_bpe.model")
        if int(vocabulary) in models:
            raise ConfigError(f"--reuse-sp-model gives two models for the vocabulary size {int(vocabulary)}; give one")
        models[int(vocabulary)] = str(Path(model).absolute())
    with readable(path, ConfigError):
        records = read_json(path)
    if isinstance(records, dict):
        records = records.get("tokenizer_specs", records.get("tokenizers"))
    if not isinstance(records, list) or not records:
        raise ConfigError(f"{path} lists no tokenizers; it must be a list of specs, or an object with a list under tokenizers")
    specs = []
    for number, record in enumerate(records, 1):
        try:
            spec = Spec.model_validate(record)
        except ValidationError as error:
            mistake = error.errors()[0]
            key = f"{mistake['loc'][0]}={mistake['input']!r}: " if mistake["loc"] else ""
            raise ConfigError(f"{path}, tokenizer {number}: {key}{mistake['msg'].removeprefix('Value error, ')}") from None
        if skip_byte and spec.kind == BYTE:
            continue
        if train_documents is not None:
            spec.tokenizer_train_docs = spec._given["tokenizer_train_docs"] = train_documents
        if spec.kind == SENTENCEPIECE and spec.vocab_size in models:
            spec.reuse_model_path = spec._given["reuse_model_path"] = models[spec.vocab_size]
        if spec.reuse_model_path and not user_path(spec.reuse_model_path).is_file():
            raise ConfigError(f"tokenizer {spec.name}: there is no file {spec.reuse_model_path} to reuse")
        specs.append(spec)
    if not specs:
        raise ConfigError(f"{path} lists only byte tokenizers and --skip-byte is given; nothing is left to export")
    for what, names in (
        ("tokenizer", [spec.name for spec in specs]),
        ("dataset", [spec.dataset for spec in specs]),
        ("file", [name.lower() for spec in specs for name in spec.files]),
    ):
        if twice := [name for number, name in enumerate(names) if name in names[:number]]:
            raise ConfigError(f"{path} uses the {what} name {twice[0]} twice; names must be unique")
    if unused := models.keys() - {spec.vocab_size for spec in specs if spec.kind == SENTENCEPIECE}:
        raise ConfigError(f"--reuse-sp-model {min(unused)}=...: {path} lists no SentencePiece tokenizer of this vocab_size")
    return specs


def build(spec: Spec, documents: Iterable[str]) -> tuple[Tokenizer, dict[str, bytes]]:
    """Return a tokenizer and its files: the byte tokenizer, an existing SentencePiece model, or one trained on the documents."""
    try:
        if spec.kind == BYTE:
            return ByteTokenizer(), {spec.files[0]: byte_file()}
        model: bytes | None
        vocabulary = None
        if spec.reuse_model_path:
            path = user_path(spec.reuse_model_path)
            with reading(path):
                model = path.read_bytes()
                vocabulary = beside.read_bytes() if (beside := path.with_suffix(".vocab")).is_file() else None
        else:
            settings = {"max_sentence_length": MAX_SENTENCE_BYTES, **spec.trainer_overrides}
            longest = settings["max_sentence_length"]
            stripped = (text.replace("\0", " ").strip() for text in islice(documents, spec.tokenizer_train_docs))
            sentences = (text for text in stripped if len(text.encode()) <= longest and BOUNDARY not in text)
            model = learn("sentencepiece", sentences, spec.vocab_size, settings)
        if model is None:
            raise DataError("the documents contain no text to train on")
        tokenizer = SentencePieceTokenizer(model)
        if tokenizer.bos is None:
            raise DataError("the model has no start-of-document token, which every document needs")
        if spec.reuse_model_path and tokenizer.vocab_size != spec.vocab_size:
            raise DataError(f"{spec.reuse_model_path} has {tokenizer.vocab_size:,} ids, but vocab_size is {spec.vocab_size:,}")
    except DataError as error:
        raise DataError(f"tokenizer {spec.name}: {error.render(lambda option: option.strip('-').replace('-', '_'))}") from None
    return tokenizer, dict(zip(spec.files, (model, vocabulary or vocabulary_lines(model)), strict=True))


def vocabulary_lines(model: bytes) -> bytes:
    """Return the .vocab file for a SentencePiece model, as SentencePiece's trainer writes it."""
    import sentencepiece  # type: ignore[import-untyped]

    pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
    ids = range(pieces.vocab_size())
    return "".join(f"{pieces.id_to_piece(i)}\t{pieces.get_score(i):g}\n" for i in ids).encode()


VAL_DOCUMENTS = 50_000
BATCH = 1024  # documents encoded per batch
REPORT_DOCUMENTS = 100_000
THREADS = "MATCHED_FINEWEB_TOKENIZER_THREADS"


@dataclass
class Export:
    """An export of golf's documents to a folder in golf's layout."""

    output: Path
    specs: Sequence[Spec]
    hub: Hub
    root: str
    val_documents: int | None = None
    chunk_tokens: int = SHARD_TOKENS
    workers: int | None = None  # number of encoding processes, by default one per processor; it does not affect the output
    notify: Callable[[str], None] = lambda line: None
    progress: Callable[[str, int, int], None] = lambda what, done, total: None  # arguments: task, bytes done, total bytes

    def run(self) -> dict[str, Any]:
        """Write the documents, tokenizers and shards; return the record that --json prints."""
        started, kept, warnings = time.monotonic(), list[str](), list[str]()
        if not 1 <= self.chunk_tokens <= MAX_TOKENS:
            raise ConfigError(f"--chunk-tokens {self.chunk_tokens:,} is out of range; give 1 to {MAX_TOKENS:,}")
        with alone_in(self.output, self.notify):
            for spec in self.specs:
                check_output(self.output / "datasets" / spec.dataset, overwrite=True)
            docs = self._find_docs()
            count, sidecar = docs["num_docs"], docs.get("source_sidecar", {})
            held_out: int = next(n for n in (self.val_documents, sidecar.get("docs_val"), VAL_DOCUMENTS) if n is not None)
            if not 0 <= held_out <= count:
                here = self.output / DOCS
                raise ConfigError(f"validation needs {held_out:,} documents, but {here} has {count:,}; set --num-val-docs")
            built = []
            for spec in self.specs:
                tokenizer, files = build(spec, self._read_docs(f"reading for {spec.name}"))
                built.append((spec, tokenizer, files))
                if tokenizer.vocab_size != spec.vocab_size:
                    ids = f"{tokenizer.vocab_size:,} ids instead of {spec.vocab_size:,}"
                    warnings.append(f"tokenizer {spec.name} has {ids}: these documents do not yield more")
                    self.notify(f"warning: {warnings[-1]}")
            given = [spec._given for spec in self.specs]
            self._write("tokenizer_config.export.json", {"tokenizers": given})
            listing: dict[str, Any] = {
                "version": VERSION,
                "num_docs": count,
                "num_val_docs": held_out,
                "shuffle_seed": sidecar.get("shuffle_seed"),
                "shard_size": self.chunk_tokens,
                "append_eos": False,
                "docs_jsonl": DOCS,
                "docs_meta": docs,
                "tokenizer_specs": given,
                "tokenizers": [],
                "datasets": [],
            }
            for (spec, tokenizer, files), record in zip(built, given, strict=True):
                manifest, is_new = self._dataset(spec, tokenizer, docs, held_out)
                kept += [] if is_new else [spec.dataset]
                for name, content in files.items():
                    self._write(f"tokenizers/{name}", content)
                model = Path(record.get("reuse_model_path", ""))
                if model.is_relative_to(self.output.absolute()):
                    record["reuse_model_path"] = model.relative_to(self.output.absolute()).as_posix()
                tokenizer_entry, dataset_entry = _entries(spec, tokenizer, manifest)
                listing["tokenizers"].append(tokenizer_entry | {"source_spec": record})
                listing["datasets"].append(dataset_entry)
            self._write("manifest.json", listing)
        seconds = round(time.monotonic() - started, 3)
        return {"folder": str(self.output), "manifest": listing, "kept": kept, "warnings": warnings, "seconds": seconds}

    def _write(self, name: str, content: bytes | dict[str, Any]) -> None:
        path = self.output / name
        with writing(path):
            path.parent.mkdir(exist_ok=True)
            write_atomically(path, content if isinstance(content, bytes) else f"{to_json(content, 2, escape=False)}\n")

    def _find_docs(self) -> dict[str, Any]:
        """Return the manifest's docs_meta: the count and hash of the documents, and the content of their sidecar file.

        The documents are downloaded if they are missing; offline, those in the output folder are used.
        """
        path, beside, hub, sha256 = self.output / DOCS, self.output / DOCS_SOURCE, self.hub, None
        root = self.root.strip("/")
        remote, remote_beside = ("/".join(filter(None, (root, name))) for name in (DOCS, DOCS_SOURCE))
        if hub.offline:
            if not path.is_file():
                raise DataError(f"HF_HUB_OFFLINE is set and there is no {path}; unset it to download the documents")
            self.notify(f"HF_HUB_OFFLINE is set; using {path} as it is")
        else:
            listing = hub.listing()
            info = listing.files.get(remote)
            if info is None:
                raise DataError(f"dataset repository {hub.repo} has no {remote}; check --repo-id and --remote-root")
            sha256 = info.sha256
            if not path.is_file():
                advance = adding_up(partial(self.progress, f"downloading {DOCS}"), info.size or 0)
                place(hub.fetch(remote, listing.commit, info, advance), path)
            elif info.problem(path):
                raise DataError(
                    f"{path} differs from the file in {hub.repo} and is not replaced; remove it, choose another output, or set "
                    "HF_HUB_OFFLINE=1 to use it"
                )
            if remote_beside in listing.files:
                place(hub.fetch(remote_beside, listing.commit, listing.files[remote_beside]), beside)
            else:
                beside.unlink(missing_ok=True)  # a sidecar file of an earlier download would describe other documents
        sidecar = parse_manifest(beside.read_bytes(), str(beside)) if beside.is_file() else {}
        sha256 = sha256 or file_sha256(path)
        if sidecar.get("docs_sha256", sha256) != sha256:
            raise DataError(
                f"{path} has the sha256 {sha256[:12]}, but {DOCS_SOURCE} says {str(sidecar['docs_sha256'])[:12]}: one file is "
                "damaged or from another dataset; remove both and run the command again, or ask the owner of the dataset"
            )
        documents = sidecar.get("num_docs")
        if documents is None:
            with path.open("rb") as file:
                documents = sum(not line.isspace() for line in file)
        if not documents:
            raise DataError(f"{path} holds no documents; it needs a JSON object with a field 'text' on every line")
        return {
            "remote_repo_id": None if hub.offline else hub.repo,
            "remote_root": None if hub.offline else root,
            "num_docs": documents,
            "docs_sha256": sha256,
            "source_manifest": DOCS_SOURCE if sidecar else None,
            **({"source_sidecar": sidecar} if sidecar else {}),
        }

    def _read_docs(self, what: str) -> Iterator[str]:
        """Yield the text of each document, with every lone surrogate (not a valid character) replaced by a question mark."""
        path = self.output / DOCS
        advance = adding_up(partial(self.progress, what), path.stat().st_size)
        with reading(path), path.open("rb") as file:
            for number, line in enumerate(file, 1):
                advance(len(line))
                if line.isspace():
                    continue
                try:
                    text = json.loads(line)["text"].encode(errors="replace").decode()
                except (ValueError, LookupError, TypeError, AttributeError):
                    raise DataError(f"{path}:{number} is not a JSON object with a string in its field 'text'") from None
                yield text

    def _dataset(
        self, spec: Spec, tokenizer: Tokenizer, docs: dict[str, Any], val_documents: int
    ) -> tuple[prepared.Manifest, bool]:
        """Write the shards of one tokenizer unless they are complete; return the dataset's manifest and whether it was written.

        dataset.json and a document index are written next to golf's own files, so that other Ingot commands can read the dataset.
        """
        name, target, path = spec.dataset, self.output / "datasets" / spec.dataset, self.output / DOCS
        work = {
            "made_by": made_by(),
            "docs_sha256": docs["docs_sha256"],
            "val_documents": val_documents,
            "chunk_tokens": self.chunk_tokens,
            "tokenizer": tokenizer.fingerprint(),
        }
        try:
            manifest = prepared.Dataset.open(target).manifest
            if isinstance(manifest.source, dict) and manifest.source.get("golf") == work:
                self.notify(f"{target} is already complete and is kept")
                return manifest, False
        except DataError:
            pass  # the dataset is missing or damaged: write it
        if any(target.glob("fineweb_*.bin")):
            self.notify(f"{target} holds different shards, which are replaced once this export is complete")

        def blocks(begin: Point) -> RuledBlocks:
            """Yield blocks of documents from `begin` on, also empty documents, with the rule that assigns documents to splits."""
            if begin.documents:
                self.notify(f"{target}: resuming after document {begin.documents:,}")
            texts = islice(self._read_docs(f"exporting {name}"), begin.documents, None)
            rule = first_documents(val_documents)
            return ((rule, EveryText(block)) for block in text_blocks(texts, documents=BATCH))

        def report(written: range) -> None:
            if written.stop // REPORT_DOCUMENTS > written.start // REPORT_DOCUMENTS:
                self.notify(f"{name}: {written.stop:,} of {docs['num_docs']:,} documents")

        source = {"inputs": [str(path)], "validation": f"the first {val_documents} documents", "golf": work}
        workers = self.workers or workers_for(tokenizer, path.stat().st_size)
        with staged(target, True, work, is_sound) as stage:
            manifest, last, _ = fill_folder(
                stage, blocks, tokenizer, workers, source=source, shard_tokens=self.chunk_tokens, prefix="fineweb_", tell=report
            )
            if last.documents != docs["num_docs"]:
                raise DataError(
                    f"{path} holds {last.documents:,} documents instead of {docs['num_docs']:,}; it was changed, or "
                    f"{DOCS_SOURCE} is wrong: download both again"
                )
        return manifest, True


def _entries(spec: Spec, tokenizer: Tokenizer, manifest: prepared.Manifest) -> tuple[dict[str, Any], dict[str, Any]]:
    facts = {
        "vocab_size": tokenizer.vocab_size,
        "bos_id": tokenizer.bos,
        "eos_id": marks_of(tokenizer).eos,
        "recommended_bigram_vocab_size": 5 * 128 * -(-tokenizer.vocab_size // 128),
    }
    files = [f"tokenizers/{name}" for name in spec.files]
    where: dict[str, Any] = dict(zip(("model_path", "vocab_path"), files, strict=False))
    if spec.kind == BYTE:
        where = {"path": files[0], "pad_id": 0, "unk_id": 3}
    path = f"datasets/{spec.dataset}"
    counts = {name: [split.documents, len(split.shards), split.tokens] for name, split in manifest.splits.items()}
    counts["total"] = [sum(column) for column in zip(*counts.values(), strict=True)]
    return {"name": spec.name, "kind": spec.kind, **facts, **where}, {
        "name": spec.dataset,
        "tokenizer_name": spec.name,
        "tokenizer_kind": spec.kind,
        "path": path,
        "train_glob": f"{path}/fineweb_train_*.bin",
        "val_glob": f"{path}/fineweb_val_*.bin",
        **facts,
        "stats": {
            f"{what}_{name}": counts[name][column]
            for column, what in enumerate(("docs", "files", "tokens"))
            for name in ("total", "val", "train")
        },
    }


def download_hf_docs_and_tokenize(argv: Sequence[str], folder: Path = Path("data")) -> int:
    """Run as the challenge's script download_hf_docs_and_tokenize.py; return the exit code."""
    name, specs_file = "download_hf_docs_and_tokenize.py", folder / "tokenizer_specs.json"
    repo, prefix = os.environ.get(REPO_VARIABLE, REPO), os.environ.get(PREFIX_VARIABLE, PREFIX)
    about = "Download the challenge's documents and export them as shards of one or more tokenizers."
    parser = Parser(name, description=about, epilog=f"The environment variable {THREADS} sets the number of encoding processes.")
    add = parser.add_argument
    add("--repo-id", default=repo, metavar="ID", help=f"dataset repository on the Hugging Face hub (default {repo})")
    add("--remote-root", default=prefix, metavar="DIR", help=f"repository folder with docs_selected.jsonl (default {prefix})")
    add("--output-root", type=Path, required=True, metavar="DIR", help="folder for datasets/, tokenizers/ and manifest.json")
    add("--tokenizer-config", type=Path, default=specs_file, metavar="FILE", help=f"tokenizer specs (default {specs_file})")
    add("--num-val-docs", type=int, metavar="N", help="validate on the first N documents (default: source manifest, else 50000)")
    add("--chunk-tokens", type=int, default=SHARD_TOKENS, metavar="N", help=f"tokens per shard (default {SHARD_TOKENS})")
    add("--tokenizer-train-docs", type=int, metavar="N", help="train tokenizers on the first N documents (default: all)")
    add("--skip-byte", action="store_true", help="skip byte tokenizers")
    about = "use the model file MODEL as the SentencePiece tokenizer with VOCAB ids instead of training one; may be repeated"
    add("--reuse-sp-model", action="append", default=[], metavar="VOCAB=MODEL", help=about)
    add("--json", action="store_true", help="print the result as JSON")
    with explained(name, interrupted="interrupted; run the same command again to continue") as outcome:
        args = parser.parse_args(list(argv))
        try:
            workers = max(1, int(threads)) if (threads := os.environ.get(THREADS, "").strip()) else None
        except ValueError:
            raise ConfigError(f"{THREADS}={threads!r} is not a whole number") from None
        how = {"skip_byte": args.skip_byte, "train_documents": args.tokenizer_train_docs, "reuse": args.reuse_sp_model}
        specs = load_specs(args.tokenizer_config, **how)
        with work_line("asking the hub", "bytes") as (notify, show):
            export = Export(args.output_root, specs, Hub(args.repo_id), args.remote_root, args.num_val_docs, args.chunk_tokens)
            export.workers, export.notify, export.progress = workers, notify, show or export.progress
            result = export.run()
        if args.json:
            print_json(result)
            return outcome.code
        for entry in result["manifest"]["datasets"]:
            stats, kept = entry["stats"], " (was complete)" if entry["name"] in result["kept"] else ""
            print(f"{result['folder']}/{entry['path']}: {entry['vocab_size']:,} ids, {stats['docs_total']:,} documents{kept}")
            for split, title in (("train", "train"), ("val", "validation")):
                files, tokens, documents = (stats[f"{what}_{split}"] for what in ("files", "tokens", "docs"))
                print(f"  {title}: {documents:,} documents, {tokens:,} tokens, {files:,} {'shard' if files == 1 else 'shards'}")
        print(f"manifest: {result['folder']}/manifest.json, written after {result['seconds']:.1f} s")
    return outcome.code
