"""A prepared folder of ours as a source of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ingot.data.formats.base import Document, Marks, Stream, TokenSource
from ingot.data.store.dataset import Dataset
from ingot.data.store.shards import open_shard
from ingot.errors import DataError


class PreparedSource(TokenSource):
    """A folder with dataset.json."""

    format = "ingot"

    def __init__(self, path: Path, sure: bool) -> None:
        self.path = path
        self._dataset = Dataset.open(path)
        self.tokenizer = self._dataset.tokenizer
        splits = self._dataset.manifest.splits
        self.tokens = {name: record.tokens for name, record in splits.items() if record.tokens}
        documents = sum(record.documents for record in splits.values())
        self.about = f"a prepared folder, {self.tokenizer.kind} tokenizer, {documents:,} documents"

    def documents(self, split: str, marks: Marks) -> Iterator[Document]:
        data = self._dataset.split(split)
        folder, bos = self._dataset.folder, self._dataset.tokenizer.bos
        shards = self._dataset.manifest.splits[split].shards
        stream = Stream([folder / shard.file for shard in shards], [shard.tokens for shard in shards], open_shard)
        starts = data.document_starts()
        for number in range(data.documents):
            start, stop = int(starts[number]), int(starts[number + 1])
            if bos is not None and (start >= stop or stream.token(start) != bos):
                raise DataError(
                    f"{folder} is damaged: document {number} of {split} starts without its mark; prepare the data again"
                )
            yield stream.slice(start + (bos is not None), stop)
