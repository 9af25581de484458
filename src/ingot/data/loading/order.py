"""From `data.sampling` to the rows it names."""

from __future__ import annotations

from ingot.config.schema import DataSection
from ingot.data.loading.packing import PackedRows
from ingot.data.loading.rows import Order, Random, Rows, Shuffle, Stream, Windows
from ingot.data.store.dataset import Dataset
from ingot.errors import DataError


def make_rows(settings: DataSection, rows_per_step: int, dataset: Dataset) -> Rows:
    """The rows a run trains on."""
    split, seq_len, seed = dataset.split("train"), settings.seq_len, settings.seed
    if settings.sampling == "pack":
        return PackedRows(split, seq_len, seed, dataset.tokenizer.bos, settings.document_mask)
    if split.tokens <= seq_len:
        raise DataError(
            f"the text has {split.tokens:,} tokens and a row needs data.seq_len + 1 = {seq_len + 1:,}; "
            "use more text or shorter rows"
        )
    order: Order
    match settings.sampling:
        case "shuffle":
            order = Shuffle(split.tokens, seq_len, seed)
        case "random":
            order = Random(split.tokens, seq_len, seed)
        case "stream":
            order = Stream(split.tokens, seq_len, rows_per_step, settings.spans)
    return Windows(split, order, seq_len, settings.document_mask)
