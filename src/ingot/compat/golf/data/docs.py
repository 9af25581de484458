"""The text of golf's export: docs_selected.jsonl, from the hub or decoded from shards of GPT-2 tokens, and the file beside it.

docs_selected.source_manifest.json says how many documents there are, how many of them are validation, and the sha256 of them all;
the text is used only if that is its sha256. Validation is the first documents, so their order is part of the data.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, cast

from ingot.compat.golf.data.manifest import DOCS, DOCS_SOURCE, read_source
from ingot.compat.golf.data.placing import check_space, disk_of, place
from ingot.data.formats.detect import open_source
from ingot.data.formats.documents import Document, Marks, TokenSource
from ingot.data.formats.foreign import MANIFEST, parse_manifest
from ingot.data.hub import FileInfo, Hub, client_messages
from ingot.data.store.shards import TOKEN_BYTES
from ingot.data.store.staging import writing
from ingot.data.text.records import TEXT_FIELD, read_lines
from ingot.data.tokenizers import GPT2Tokenizer
from ingot.errors import DataError
from ingot.runtime.files import file_sha256, reading, replace_file, write_atomically

DECODE_BATCH = 512  # documents of GPT-2 tokens that become text at once
LARGE_BYTES = 1 << 30  # of which a checksum takes long enough to say so
HALF = re.compile(rb"\\u[dD][89a-fA-F]")  # an escape that is half of a surrogate pair
Notify = Callable[[str], None]
Progress = Callable[[str, int, int], None]  # what is done, how much of it, and of how much


@dataclass(frozen=True)
class Docs:
    """The text, checked; `sidecar` is what lies beside it, `repo` and `root` are None where it is not from a repository."""

    path: Path
    documents: int
    sha256: str
    sidecar: dict[str, Any] | None = None
    repo: str | None = None
    root: str | None = None

    @property
    def val_documents(self) -> int | None:
        """How many documents are validation, where the sidecar says so."""
        return _number(self.sidecar or {}, "docs_val", self.path.with_name(DOCS_SOURCE))


def read_docs(path: Path, skip: int = 0, advance: Callable[[int], None] = lambda size: None) -> Iterator[str]:
    """The documents after the first `skip`; half a surrogate pair, which is not a character, becomes a question mark."""
    try:
        with reading(path), path.open("rb") as file:
            yield from read_lines(cast(BinaryIO, _lines(file, skip, advance)), path, "text")
    except DataError as error:
        raise DataError(error.what if TEXT_FIELD in error.settings else str(error)) from None  # no option of an export


def fetch_docs(output: Path, hub: Hub, root: str, notify: Notify, progress: Progress) -> Docs | None:
    """The text as a repository has it, fetched if it is not here already; offline, as it is here or in the hub's cache.

    None: the repository has none.
    """
    path, start = output / DOCS, f"{root}/" if root else ""
    with client_messages(notify):
        if hub.offline and path.is_file():
            notify(f"HF_HUB_OFFLINE is set; using {path} as it is")
            docs = checked(output)
            return replace(docs, repo=hub.repo, root=root) if _came_from(output, hub.repo, docs.sha256) else docs
        commit, files = _list(hub, start, path)
        remote = start + DOCS
        if remote not in files:
            return None
        _ensure(hub, remote, commit, files[remote], path, notify, progress)
        if (beside := start + DOCS_SOURCE) in files:
            _ensure(hub, beside, commit, files[beside], output / DOCS_SOURCE, notify, progress)
        else:
            with writing(output / DOCS_SOURCE):
                (output / DOCS_SOURCE).unlink(missing_ok=True)  # it would speak of another text
    return checked(output, hub.repo, root, files[remote].sha256)


def docs_from_shards(folder: Path, output: Path, batch: int, notify: Notify, progress: Progress) -> Docs:
    """The text that GPT-2 tokens stand for, validation first; one that was made of the same tokens before is used again."""
    path, source = output / DOCS, open_source(folder)
    if source.tokenizer is not None and source.tokenizer.kind != "gpt2":
        raise DataError(f"{folder} holds tokens of a {source.tokenizer.kind} tokenizer; only GPT-2's can be made text again here")
    origin = {"path": str(folder.resolve()), "tokens": source.tokens}
    if path.exists():
        if (_sidecar(output) or {}).get("gpt2_shards") != origin:
            raise DataError(
                f"{path} is here and was not made of the tokens in {folder}; leave --from-gpt2-shards out, remove it, or choose "
                "another output"
            )
        return checked(output)
    notify(f"decoding {source.about} of {folder} into {path}")
    with writing(path), replace_file(path) as file:
        facts = _decode(source, file, batch, notify, progress)
        sidecar = {**facts, "shuffle_seed": None, "snapshot_kind": "docs_cache_from_gpt2_shards", "gpt2_shards": origin}
        write_atomically(output / DOCS_SOURCE, json.dumps(sidecar, indent=2) + "\n")
    return checked(output, sha256=facts["docs_sha256"])


def checked(output: Path, repo: str | None = None, root: str | None = None, sha256: str | None = None) -> Docs:
    """The text that is in a folder, if it is what the file beside it says."""
    path, beside, sidecar = output / DOCS, output / DOCS_SOURCE, _sidecar(output)
    sha256 = sha256 or file_sha256(path)
    said = (sidecar or {}).get("docs_sha256")
    if said is not None and said != sha256:
        raise DataError(
            f"{path} has the sha256 {sha256[:12]} and {DOCS_SOURCE} says {str(said)[:12]}: one of them is damaged or of another "
            "text; remove both and run the same command, or ask their owner"
        )
    documents = _number(sidecar or {}, "num_docs", beside)
    if documents is None:
        with reading(path), path.open("rb") as file:
            documents = sum(not _is_blank(line) for line in file)
    if not documents:
        raise DataError(f"{path} holds no documents; it needs a JSON object with a field 'text' in every line")
    return Docs(path, documents, sha256, sidecar, repo, root)


def _came_from(output: Path, repo: str, sha256: str) -> bool:
    """Whether the text in a folder is known to be a repository's: by a download into it, or by an export while online."""
    source = read_source(output)
    if source is not None and source.repo == repo and DOCS in source.files:
        return source.files[DOCS].sha256 == sha256
    try:
        meta = json.loads((output / MANIFEST).read_bytes())["docs_meta"]
        return bool(meta["remote_repo_id"] == repo and meta["docs_sha256"] == sha256)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _list(hub: Hub, start: str, path: Path) -> tuple[str | None, dict[str, FileInfo]]:
    """What a repository has; offline, what the client's cache has of it."""
    if hub.offline:
        commit = hub.cached_commit(start + DOCS)
        cached = {start + name: FileInfo() for name in (DOCS, DOCS_SOURCE) if hub.cached(start + name, commit)}
        return commit, {start + DOCS: FileInfo(), **cached}
    try:
        listing = hub.listing()
    except DataError as error:
        if not path.is_file():
            raise
        raise DataError(f"{error}; HF_HUB_OFFLINE=1 takes {path} as it is") from error
    return listing.commit, listing.files


def _ensure(hub: Hub, remote: str, commit: str | None, facts: FileInfo, target: Path, notify: Notify, progress: Progress) -> None:
    """Make one file of a repository be here and whole."""
    if target.is_file():
        if target.stat().st_size > LARGE_BYTES:
            notify(f"checking {target}")
        if (problem := facts.problem(target)) is None:
            return
        _refuse_other(target, hub, problem)
        notify(f"{target} is not the file of {hub.repo} ({problem}); fetching it again")
    size, done = facts.size or 0, 0
    needs = [] if hub.cached(remote, commit) else [(hub.cache, size)]
    check_space([*needs, *([(target.parent, size)] if disk_of(hub.cache) != disk_of(target.parent) else [])])

    def count(arrived: int) -> None:
        nonlocal done
        done += arrived
        progress(f"downloading {target.name}", done, max(size, done))

    blob = hub.fetch(remote, commit, facts, count)
    with writing(target):
        place(blob, target)


def _refuse_other(target: Path, hub: Hub, problem: str) -> None:
    """Text that is whole by the file beside it is somebody's: other than the remains of a download, it is never replaced."""
    said = (_sidecar(target.parent) or {}).get("docs_sha256") if target.name == DOCS else None
    if said is not None and said == file_sha256(target):
        raise DataError(
            f"{target} is not the text of {hub.repo} ({problem}), and by {DOCS_SOURCE} it is another one, which is whole; choose "
            "another output, set HF_HUB_OFFLINE=1 to use it, or remove it"
        )


def _decode(source: TokenSource, file: BinaryIO, batch: int, notify: Notify, progress: Progress) -> dict[str, Any]:
    """Writes the documents of a source as lines; returns what the sidecar says of them."""
    tokenizer, digest = GPT2Tokenizer(), hashlib.sha256()
    pieces = [tokenizer.decode_bytes([token]) for token in range(tokenizer.vocab_size)]
    documents, total = {"val": 0, "train": 0}, sum(source.tokens.values())
    done = size = broken = 0
    for split in [split for split in documents if split in source.tokens]:
        found = _marked_documents(source, split, tokenizer.bos)
        while group := [[token for part in document for token in part.tolist()] for document in islice(found, batch)]:
            contents = [_bytes(tokens, pieces, source.path) for tokens in group]
            texts = [content.decode(errors="replace") for content in contents]
            broken += sum(text.encode() != content for text, content in zip(texts, contents, strict=True))
            lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts).encode()
            file.write(lines)
            digest.update(lines)
            documents[split], size, done = documents[split] + len(group), size + len(lines), done + sum(map(len, group))
            progress("decoding GPT-2 shards", TOKEN_BYTES * done, TOKEN_BYTES * total)
    if broken:
        notify(f"warning: {broken:,} documents of {source.path} end or begin inside a character, which became U+FFFD")
    counts = {"num_docs": sum(documents.values()), "docs_val": documents["val"]}
    return {**counts, "docs_sha256": digest.hexdigest(), "docs_bytes": size}


def _bytes(tokens: list[int], pieces: list[bytes], where: Path) -> bytes:
    try:
        return b"".join(map(pieces.__getitem__, tokens))
    except IndexError:
        raise DataError(f"{where} holds token {max(tokens):,}, which GPT-2 does not have; give shards of GPT-2 tokens") from None


def _marked_documents(source: TokenSource, split: str, mark: int | None) -> Iterator[Document]:
    documents = source.documents(split, Marks(mark, mark))
    first = next(documents, [])
    if sum(map(len, first)) == source.tokens[split]:
        raise DataError(f"no document of {source.path} begins with GPT-2's mark {mark}; give shards of GPT-2 tokens")
    return chain([first], documents)


def _lines(file: BinaryIO, skip: int, advance: Callable[[int], None]) -> Iterator[bytes]:
    """Lines for the reader; those that are skipped are blank ones, so that it counts them."""
    for line in file:
        advance(len(line))
        if skip and not _is_blank(line):
            skip -= 1
            yield b"\n"
        else:
            yield _without_halves(line) if HALF.search(line) else line


def _is_blank(line: bytes) -> bool:
    return line.isspace() or (line[:1] != b"{" and line.decode(errors="replace").isspace())


def _without_halves(line: bytes) -> bytes:
    try:
        return json.dumps(json.loads(line), ensure_ascii=False).encode(errors="replace") + b"\n"
    except (ValueError, RecursionError):
        return line  # the reader says what is wrong with it


def _sidecar(output: Path) -> dict[str, Any] | None:
    path = output / DOCS_SOURCE
    if not path.exists():
        return None
    with reading(path):
        return parse_manifest(path.read_bytes(), str(path))


def _number(sidecar: dict[str, Any], key: str, where: Path) -> int | None:
    number = sidecar.get(key)
    if number is not None and (type(number) is not int or number < 0):
        raise DataError(f"{where} says {key}={number!r}, which is not a number of documents")
    return number
