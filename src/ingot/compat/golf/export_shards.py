"""Golf's documents as shards of any number of tokenizers: a folder for each, and the manifest that lists them.

The documents are docs_selected.jsonl, from the hub or decoded from shards of GPT-2 tokens. The file beside it says how many there
are and their sha256. The first documents are validation, so their order is part of the data. The manifest is written again after
each dataset and lists only complete ones. The same command continues an export that was killed, and keeps datasets that are done.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, cast

from ingot.compat.golf import DOCS, DOCS_SOURCE, PREFIX, PREFIX_VARIABLE, PREVIOUS, REPO, REPO_VARIABLE
from ingot.compat.golf.download import place, read_source
from ingot.compat.golf.tokenizer_specs import TIKTOKEN, VERSION, Built, Spec, build, load_specs
from ingot.console.entry import explained
from ingot.console.output import Parser, print_json
from ingot.console.progress import work_line
from ingot.data import SHARD_TOKENS
from ingot.data.formats.opener import open_tokens
from ingot.data.formats.shard_folder import MANIFEST, parse_manifest
from ingot.data.hub import Hub
from ingot.data.prepare.blocks import EveryText, first_documents, text_blocks
from ingot.data.prepare.pipeline import RuledBlocks, fill_folder, ruled
from ingot.data.prepare.workers import local_engine, workers_for
from ingot.data.store.dataset import Dataset, Manifest
from ingot.data.store.documents import Document, Marks
from ingot.data.store.shards import MAX_TOKENS, TOKEN_BYTES
from ingot.data.store.staging import alone_in, check_output, staged, writing
from ingot.data.store.writer import Point, is_sound
from ingot.data.text.records import TEXT_FIELD, read_lines
from ingot.data.text.text_files import adding_up
from ingot.data.tokenizers import GPT2Tokenizer
from ingot.errors import ConfigError, DataError
from ingot.runtime.files import file_sha256, reading, replace_file, sweep_temporaries, write_atomically
from ingot.runtime.machine import made_by

VAL_DOCUMENTS = 50_000
BATCH, DECODE_BATCH = 1024, 512  # documents that are encoded, or decoded from GPT-2 tokens, at once
REPORT_DOCUMENTS = 100_000
EXPORTED_SPECS = "tokenizer_config.export.json"
HALF_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")  # an escape that is half of a surrogate pair
THREADS, BATCH_SIZE = "MATCHED_FINEWEB_TOKENIZER_THREADS", "MATCHED_FINEWEB_SP_BATCH_SIZE"
TIKTOKEN_THREADS, DECODE_BATCH_SIZE = "MATCHED_FINEWEB_TIKTOKEN_THREADS", "MATCHED_FINEWEB_GPT2_DECODE_BATCH_SIZE"
VARIABLES = f"""variables:
  {REPO_VARIABLE}, {PREFIX_VARIABLE}
                        the repository and the folder in it, unless options give them
  {THREADS}
                        processes that encode (one per processor)
  {TIKTOKEN_THREADS}
                        the same for tokenizers of the kind tiktoken
  {BATCH_SIZE}
                        documents encoded at once ({BATCH})
  {DECODE_BATCH_SIZE}
                        documents of GPT-2 shards decoded at once ({DECODE_BATCH}); if it is set and the repository has no
                        documents, those of OUTPUT/datasets/fineweb{VERSION}_gpt2 are used
"""
Notify = Callable[[str], None]
Progress = Callable[[str, int, int], None]  # what is being done, how much of it is done, and how much there is


@dataclass(frozen=True)
class Docs:
    """The documents, checked; `sidecar` is the file beside them, `repo` and `root` are None if they are not a repository's."""

    path: Path
    documents: int
    sha256: str
    sidecar: dict[str, Any] | None = None
    repo: str | None = None
    root: str | None = None


@dataclass(frozen=True)
class Exported:
    """The outcome of an export; `kept` are the datasets that were complete before."""

    folder: str
    manifest: dict[str, Any]
    kept: list[str]
    warnings: list[str]
    seconds: float


def export(
    output: Path,
    specs: Sequence[Spec],
    hub: Hub,
    root: str,
    *,
    val_documents: int | None = None,
    chunk_tokens: int = SHARD_TOKENS,
    gpt2_shards: Path | None = None,
    workers: int | None = None,
    tiktoken_workers: int | None = None,
    batch: int | None = None,
    decode_batch: int | None = None,
    notify: Notify = lambda line: None,
    progress: Progress = lambda what, done, total: None,
) -> Exported:
    """Fill a folder with the documents, tokenizers and shards of golf's layout.

    `workers` processes encode, one per processor by default. Neither their number nor the batches change the output.
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

    with alone_in(output, report) as alone:
        for folder in (output / "tokenizers", output / "datasets"):
            if folder.exists() and not folder.is_dir():
                raise ConfigError(f"{folder} is a file where a folder belongs; remove it or choose another output")
        for spec in specs:
            check_output(output / "datasets" / spec.dataset, overwrite=True)
        if alone:
            sweep_temporaries(output)
        docs = _find_docs(output, hub, root, gpt2_shards, decode_batch, report, progress)
        val_documents = _val_documents(docs, val_documents)
        tokenizers = [build(spec, _reading(docs, f"reading for {spec.name}", progress), report) for spec in specs]
        _write_json(output / EXPORTED_SPECS, {"tokenizers": [spec.given for spec in specs]})
        _keep_previous(output, specs, report)
        listing = _listing(output, docs, val_documents, chunk_tokens, specs)
        for built in tokenizers:
            processes = (tiktoken_workers if built.spec.kind == TIKTOKEN else None) or workers
            _write_tokenizer(built, output, report, replace=False)
            manifest, is_new = _export_dataset(
                built, docs, val_documents, chunk_tokens, processes, batch or BATCH, output, report, progress
            )
            kept += [] if is_new else [built.spec.dataset]
            _write_tokenizer(built, output, report, replace=True)
            listing["tokenizers"].append(_relative(built.entry, output))
            listing["datasets"].append(_dataset_entry(built, manifest))
            _write_json(output / MANIFEST, listing)
    return Exported(str(output), listing, kept, warnings, round(time.monotonic() - started, 3))


# The documents.


def read_docs(path: Path, skip: int = 0, advance: Callable[[int], None] = lambda size: None) -> Iterator[str]:
    """Yield the documents after the first `skip`; half a surrogate pair, which is not a character, becomes a question mark."""

    def lines(file: BinaryIO) -> Iterator[bytes]:
        left = skip
        for line in file:
            advance(len(line))
            if left and not _is_blank(line):
                left -= 1
                yield b"\n"  # the reader counts lines
            else:
                yield _without_halves(line) if HALF_PAIR.search(line) else line

    try:
        with reading(path), path.open("rb") as file:
            yield from read_lines(cast(BinaryIO, lines(file)), path, "text")
    except DataError as error:
        raise DataError(error.what if TEXT_FIELD in error.settings else str(error)) from None  # an export has no such option


def _is_blank(line: bytes) -> bool:
    return line.isspace() or (line[:1] != b"{" and line.decode(errors="replace").isspace())


def _without_halves(line: bytes) -> bytes:
    try:
        return json.dumps(json.loads(line), ensure_ascii=False).encode(errors="replace") + b"\n"
    except (ValueError, RecursionError):
        return line  # the reader reports what is wrong with it


def _reading(docs: Docs, what: str, progress: Progress, skip: int = 0) -> Iterator[str]:
    return read_docs(docs.path, skip, adding_up(partial(progress, what), docs.path.stat().st_size))


def _find_docs(
    output: Path, hub: Hub, root: str, shards: Path | None, batch: int | None, notify: Notify, progress: Progress
) -> Docs:
    """Return the documents of the given shards, else of the repository, else of GPT-2 shards in the output if a batch is set."""
    if shards is None:
        if (docs := _fetch_docs(output, hub, root, notify, progress)) is not None:
            return docs
        shards = output / "datasets" / f"fineweb{VERSION}_gpt2"
        if batch is None or not shards.is_dir():
            raise DataError(
                f"dataset repository {hub.repo} has no {f'{root}/{DOCS}' if root else DOCS}, the documents to export; check "
                "--repo-id and --remote-root, or decode GPT-2 tokens with --from-gpt2-shards"
            )
        notify(f"{hub.repo} has no documents; using those of {shards}")
    return _docs_from_shards(shards, output, batch or DECODE_BATCH, notify, progress)


def _fetch_docs(output: Path, hub: Hub, root: str, notify: Notify, progress: Progress) -> Docs | None:
    """Return the documents of a repository, fetched if they are not here; None if it has none. Offline, use what is here."""
    path, start = output / DOCS, f"{root}/" if root else ""
    if hub.offline:
        if not path.is_file():
            raise DataError(f"HF_HUB_OFFLINE is set and there is no {path}; unset it to download the documents")
        notify(f"HF_HUB_OFFLINE is set; using {path} as it is")
        docs = _checked(output)
        return _checked(output, hub.repo, root, docs.sha256) if _came_from(output, hub.repo, docs.sha256) else docs
    try:
        listing = hub.listing()
    except DataError as error:
        raise DataError(f"{error}; HF_HUB_OFFLINE=1 uses {path} as it is") if path.is_file() else error from None
    info = listing.files.get(start + DOCS)
    if info is None:
        return None
    if not path.is_file():
        blob = hub.fetch(start + DOCS, listing.commit, info, adding_up(partial(progress, f"downloading {DOCS}"), info.size or 0))
        with writing(path):
            place(blob, path)
    elif not (path.stat().st_size == info.size and _came_from(output, hub.repo, info.sha256)) and info.problem(path):
        raise DataError(
            f"{path} is not that of {hub.repo} and is not replaced; remove it, choose another output, or set HF_HUB_OFFLINE=1 to "
            "use it"
        )
    with writing(output / DOCS_SOURCE):
        if start + DOCS_SOURCE in listing.files:
            place(hub.fetch(start + DOCS_SOURCE, listing.commit, listing.files[start + DOCS_SOURCE]), output / DOCS_SOURCE)
        else:
            (output / DOCS_SOURCE).unlink(missing_ok=True)  # it describes other documents
    return _checked(output, hub.repo, root, info.sha256)


def _came_from(output: Path, repo: str, sha256: str | None) -> bool:
    """Return True if the documents in a folder are known to be a repository's: by a download or an export into it."""
    source = read_source(output)
    if source is not None and source.repo == repo and DOCS in source.files:
        return source.files[DOCS].sha256 == sha256
    try:
        meta = json.loads((output / MANIFEST).read_bytes())["docs_meta"]
        return bool(meta["remote_repo_id"] == repo and meta["docs_sha256"] == sha256)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _sidecar(output: Path) -> dict[str, Any] | None:
    path = output / DOCS_SOURCE
    if not path.exists():
        return None
    with reading(path):
        return parse_manifest(path.read_bytes(), str(path))


def _checked(output: Path, repo: str | None = None, root: str | None = None, sha256: str | None = None) -> Docs:
    """Return the documents in a folder if they are what the file beside them says."""
    path, sidecar = output / DOCS, _sidecar(output)
    sha256 = sha256 or file_sha256(path)
    expected = (sidecar or {}).get("docs_sha256")
    if expected is not None and expected != sha256:
        raise DataError(
            f"{path} has the sha256 {sha256[:12]} and {DOCS_SOURCE} says {str(expected)[:12]}: one is damaged or describes "
            "other documents; remove both and run the same command, or ask their owner"
        )
    for key in ("num_docs", "docs_val"):
        count = (sidecar or {}).get(key)
        if count is not None and (type(count) is not int or count < 0):
            raise DataError(f"{output / DOCS_SOURCE} says {key}={count!r}, which is not a number of documents")
    documents = (sidecar or {}).get("num_docs")
    if documents is None:
        with reading(path), path.open("rb") as file:
            documents = sum(not _is_blank(line) for line in file)
    if not documents:
        raise DataError(f"{path} holds no documents; it needs a JSON object with a field 'text' in every line")
    return Docs(path, documents, sha256, sidecar, repo, root)


def _docs_from_shards(folder: Path, output: Path, batch: int, notify: Notify, progress: Progress) -> Docs:
    """Decode GPT-2 tokens, validation first; documents that were decoded from the same tokens before are used again."""
    path, source = output / DOCS, open_tokens(folder)
    if source.known_tokenizer is not None and source.known_tokenizer.kind != "gpt2":
        raise DataError(f"{folder} holds tokens of a {source.known_tokenizer.kind} tokenizer; only GPT-2's can be decoded here")
    origin = {"path": str(folder.resolve()), "tokens": source.tokens}
    if path.exists():
        if (_sidecar(output) or {}).get("gpt2_shards") != origin:
            raise DataError(
                f"{path} exists and was not made of the tokens in {folder}; leave --from-gpt2-shards out, remove it, or choose "
                "another output"
            )
        return _checked(output)
    notify(f"decoding {source.about} of {folder} into {path}")
    with writing(path), replace_file(path) as file:
        facts = _decode(source, file, batch, notify, progress)
        sidecar = {**facts, "shuffle_seed": None, "snapshot_kind": "docs_cache_from_gpt2_shards", "gpt2_shards": origin}
        write_atomically(output / DOCS_SOURCE, json.dumps(sidecar, indent=2) + "\n")
    return _checked(output, sha256=facts["docs_sha256"])


def _decode(source: Dataset, file: BinaryIO, batch: int, notify: Notify, progress: Progress) -> dict[str, Any]:
    """Write the documents of a source as lines and return what the sidecar says of them."""
    tokenizer, digest = GPT2Tokenizer(), hashlib.sha256()
    pieces = [tokenizer.decode_bytes([token]) for token in range(tokenizer.vocab_size)]
    counts, total = {"val": 0, "train": 0}, sum(source.tokens.values())
    done = size = broken = 0
    for split in [split for split in counts if split in source.tokens]:
        documents = _marked_documents(source, split, tokenizer.bos)
        while group := [[token for part in document for token in part.tolist()] for document in islice(documents, batch)]:
            if (largest := max(map(max, filter(None, group)), default=0)) >= len(pieces):
                raise DataError(
                    f"{source.folder} holds token {largest:,}, which GPT-2 does not have; give shards of GPT-2 tokens"
                )
            contents = [b"".join(pieces[token] for token in tokens) for tokens in group]
            texts = [content.decode(errors="replace") for content in contents]
            broken += sum(text.encode() != content for text, content in zip(texts, contents, strict=True))
            lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts).encode()
            file.write(lines)
            digest.update(lines)
            counts[split], size, done = counts[split] + len(group), size + len(lines), done + sum(map(len, group))
            progress("decoding GPT-2 shards", TOKEN_BYTES * done, TOKEN_BYTES * total)
    if broken:
        notify(f"warning: {broken:,} documents of {source.folder} begin or end inside a character, which became U+FFFD")
    facts = {"num_docs": sum(counts.values()), "docs_val": counts["val"]}
    return {**facts, "docs_sha256": digest.hexdigest(), "docs_bytes": size}


def _marked_documents(source: Dataset, split: str, mark: int | None) -> Iterator[Document]:
    documents = source.documents(split, Marks(mark, mark))
    first = next(documents, [])
    if sum(map(len, first)) == source.tokens[split]:
        raise DataError(f"no document of {source.folder} begins with GPT-2's mark {mark}; give shards of GPT-2 tokens")
    return chain([first], documents)


def _val_documents(docs: Docs, requested: int | None) -> int:
    sidecar = (docs.sidecar or {}).get("docs_val")
    count: int = next(count for count in (requested, sidecar, VAL_DOCUMENTS) if count is not None)
    if count > docs.documents:
        raise ConfigError(
            f"validation needs {count:,} documents and {docs.path} has {docs.documents:,}; give fewer with --num-val-docs"
        )
    return count


# A dataset: shards of both splits, made in a hidden folder that takes the place of the old one. Beside golf's own files lie
# dataset.json and an index of documents, so that every other command of ours reads the same folder.


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
    """Write the folder of one tokenizer's shards; return its manifest, and whether it was written now."""
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
        pass  # it is not there, or of another origin
    if any(target.glob("fineweb_*.bin")):
        notify(f"{target} holds other shards, which are replaced when those of this export are complete")

    def blocks(begin: Point) -> RuledBlocks:
        """Yield the documents after those that were written before; those without text are documents too."""
        if begin.documents:
            notify(f"{target}: continuing after document {begin.documents:,}")
        texts = text_blocks(_reading(docs, f"exporting {name}", progress, begin.documents), documents=batch)
        return ruled(first_documents(val_documents), map(EveryText, texts))

    def report(written: range) -> None:
        if written.stop // REPORT_DOCUMENTS > written.start // REPORT_DOCUMENTS:
            notify(f"{name}: {written.stop:,} of {docs.documents:,} documents")

    source = {"inputs": [str(docs.path)], "validation": f"the first {val_documents} documents", "golf": work}
    engine = partial(local_engine, built.tokenizer, workers or workers_for(built.tokenizer, docs.path.stat().st_size))
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


def _write_tokenizer(built: Built, output: Path, notify: Notify, replace: bool) -> None:
    """Write a tokenizer's files; those of an older dataset are replaced only together with it."""
    for name, content in built.files.items():
        path = output / "tokenizers" / name
        with writing(path):
            path.parent.mkdir(exist_ok=True)
            exists = path.exists()
            if not exists or (replace and path.read_bytes() != content):
                write_atomically(path, content)
                if exists:
                    notify(f"{path} was another tokenizer and is replaced by that of this export")


def _listing(output: Path, docs: Docs, val_documents: int, chunk: int, specs: Sequence[Spec]) -> dict[str, Any]:
    """Return the manifest without datasets."""
    sidecar = docs.sidecar
    meta = {
        "remote_repo_id": docs.repo,
        "remote_root": docs.root,
        "num_docs": docs.documents,
        "docs_sha256": docs.sha256,
        "source_manifest": None if sidecar is None else DOCS_SOURCE,
    }
    return {
        "version": VERSION,
        "num_docs": docs.documents,
        "num_val_docs": val_documents,
        "shuffle_seed": (sidecar or {}).get("shuffle_seed"),
        "shard_size": chunk,
        "append_eos": False,
        "docs_jsonl": DOCS,
        "docs_meta": meta if sidecar is None else {**meta, "source_sidecar": _relative(sidecar, output)},
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
        "tokenizer_name": built.spec.name,
        "tokenizer_kind": built.spec.kind,
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
    """Keep a manifest that lists datasets which this export does not make, under another name."""
    path = output / MANIFEST
    with writing(path):
        content = path.read_bytes() if path.is_file() else b"{}"
        try:
            listed = {entry["name"] for entry in json.loads(content).get("datasets", ())}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            listed = {"?"}
        if listed - {spec.dataset for spec in specs}:
            write_atomically(output / PREVIOUS, content)
            notify(f"{path} lists other datasets and is replaced by that of this export; it is kept as {PREVIOUS}")


def _relative(value: Any, output: Path) -> Any:
    """Return a JSON value whose absolute paths below the output are relative to it."""
    if isinstance(value, dict):
        return {key: _relative(item, output) for key, item in value.items()}
    if isinstance(value, list):
        return [_relative(item, output) for item in value]
    if isinstance(value, str) and value.startswith("/"):
        for root in (output.absolute(), output.resolve()):
            if Path(value).is_relative_to(root):
                return Path(value).relative_to(root).as_posix()
    return value


def _write_json(path: Path, record: Any) -> None:
    with writing(path):
        write_atomically(path, json.dumps(record, indent=2, ensure_ascii=False) + "\n")


# The challenge's script.


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
                gpt2_shards=args.from_gpt2_shards,
                workers=_number(THREADS),
                tiktoken_workers=_number(TIKTOKEN_THREADS),
                batch=_number(BATCH_SIZE),
                decode_batch=_number(DECODE_BATCH_SIZE),
                notify=notify,
                progress=show or (lambda what, done, total: None),
            )
        if args.json:
            print_json(result)
        else:
            _print(result)
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
    about = "decode docs_selected.jsonl from these shards of GPT-2 tokens instead of downloading it; their validation comes first"
    add("--from-gpt2-shards", type=Path, metavar="DIR", help=about)
    add("--json", action="store_true", help="print the result as JSON")
    return parser


def _number(variable: str) -> int | None:
    """Return the number that a variable sets, at least 1; None if it is not set."""
    if not (text := os.environ.get(variable, "").strip()):
        return None
    try:
        return max(1, int(text))
    except ValueError:
        raise ConfigError(f"{variable}={text!r} is not a whole number") from None


def _print(result: Exported) -> None:
    for entry in result.manifest["datasets"]:
        stats, kept = entry["stats"], " (was complete)" if entry["name"] in result.kept else ""
        print(f"{result.folder}/{entry['path']}: {entry['vocab_size']:,} ids, {stats['docs_total']:,} documents{kept}")
        for split, name in (("train", "train"), ("val", "validation")):
            files, tokens, documents = (stats[f"{what}_{split}"] for what in ("files", "tokens", "docs"))
            print(f"  {name}: {documents:,} documents, {tokens:,} tokens, {files:,} {'shard' if files == 1 else 'shards'}")
    print(f"{result.folder}/manifest.json lists them, {result.seconds:.1f} s")
