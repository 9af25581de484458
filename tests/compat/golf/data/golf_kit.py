"""What the tests of golf's export share: an output folder with documents in it, and a hub with a repository of them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import ingot
from ingot.compat.golf import export_shards as golf_data
from ingot.compat.golf.export_shards import Export, load_specs
from ingot.data.hub import Hub
from ingot.data.store.shards import open_shard

ROOT = Path(ingot.__file__).parents[2]
REPO = "owner/golf"
BYTE = {"name": "b", "kind": "byte"}
THREE = ["é1", "", "two words here"]
SENTENCE = "the cat sat on the mat and saw 12 more cats come to the house where a dog was at rest"
TEXTS = [" ".join(SENTENCE.split()[i % 7 :: 1 + i % 3]) + "." for i in range(60)]
VARIABLES = (
    "MATCHED_FINEWEB_REPO_ID", "MATCHED_FINEWEB_REMOTE_ROOT_PREFIX", golf_data.THREADS,
    "HF_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE",
)  # fmt: skip


def forget_user(monkeypatch, tmp_path):
    """Neither the settings nor the token of whoever runs the tests count."""
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no token"))
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def lines(texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def sidecar(docs, **more):
    return json.dumps({"docs_sha256": hashlib.sha256(docs).hexdigest(), "num_docs": docs.count(b"\n"), **more}).encode()


class Folder:
    """An output folder with documents in it, offline."""

    def __init__(self, path, texts=THREE):
        self.path = path
        self.lines = []
        self.docs(texts)

    def docs(self, texts):
        self.path.mkdir(exist_ok=True)
        (self / "docs_selected.jsonl").write_bytes(lines(texts))

    def __truediv__(self, name):
        return self.path / name

    def specs(self, *records, **options):
        file = self.path.parent / "specs.json"
        file.write_text(json.dumps(records))
        return load_specs(file, **options)

    def __call__(self, *records, hub=None, **request):
        options = {key: request.pop(key) for key in ("reuse", "train_documents") if key in request}
        if hub is None:
            hub = Hub(REPO)
            hub.offline = True
        request = {"val_documents": 1, "chunk_tokens": 500, "notify": self.lines.append, **request}
        return SimpleNamespace(**Export(self.path, self.specs(*(records or [BYTE]), **options), hub, "datasets", **request).run())

    def split(self, dataset, split):
        return [open_shard(path).tolist() for path in sorted((self / f"datasets/{dataset}").glob(f"fineweb_{split}_*.bin"))]

    def stream(self, dataset, split):
        return [token for shard in self.split(dataset, split) for token in shard]

    def content(self, dataset="fineweb10B_byte260"):
        return {path.name: path.read_bytes() for path in (self / f"datasets/{dataset}").iterdir()}

    def manifest(self):
        return json.loads((self / "manifest.json").read_text())

    def said(self, words):
        return any(words in line for line in self.lines)


def byte_ids(text):
    return [1, *(byte + 4 for byte in text.encode())]


class Repository:
    """A hub with documents, and an output to export into."""

    def __init__(self, server, base):
        self.server, self.base, self.out = server, base, Folder.__new__(Folder)
        self.out.path, self.out.lines = base / "out", []
        self.base.mkdir(exist_ok=True)

    def commit(self, docs=None, beside=None, prefix="datasets/"):
        files = {"docs_selected.jsonl": docs, "docs_selected.source_manifest.json": beside}
        return self.server.commit(
            REPO, {"readme": b"x"} | {prefix + name: content for name, content in files.items() if content is not None}
        )

    def hub(self):
        return Hub(REPO, endpoint=self.server.endpoint, cache=self.base / "cache")

    def __call__(self, *records, **request):
        return self.out(*records, hub=self.hub(), **request)
