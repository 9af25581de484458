"""`gpt-simple tokenize`: JSON lines to pairs of .bin and .idx, one for each file of a folder."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from ingot.compat.gpt_simple.log import Log
from ingot.compat.gpt_simple.translate import tokenizer_name
from ingot.console.progress import progress_bar
from ingot.data.formats.tokenize_jsonl import Windows, refuse_failed
from ingot.data.formats.tokenize_jsonl import tokenize as make


def tokenize(options: Namespace, log: Log) -> int:
    """Make the pairs, and say of each file what became of it."""
    probability = options.overlap_probability if options.probabilistic_overlap else 1.0
    length, overlap = options.max_length, min(options.overlap_size, max(0, options.max_length // 2))
    if overlap < options.overlap_size and length > 0:  # as there, where windows begin at least half of one apart
        log.info(
            f"--overlap_size {options.overlap_size} is more than half of --max_length {length}: windows share {overlap} tokens"
        )
    windows = Windows(length, overlap, probability, options.min_text_length)
    source, output = Path(options.input_dir), Path(options.output_dir)
    with progress_bar("tokenizing", unit="files") as progress:
        found = make(source, output, tokenizer_name(options.tokenizer_path), windows, options.num_workers, progress)
    for one in found:
        skipped = one.short + one.bad_lines + one.empty
        log.info(f"{one.file}: {one.documents:,} documents, {one.windows:,} windows, {one.tokens:,} tokens, {skipped:,} skipped")
    refuse_failed(found)
    return 0
