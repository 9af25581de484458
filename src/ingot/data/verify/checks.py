"""The checks of one split that need its tokens: checksums, ids, start marks, bytes, and whether the tokenizer fits.

Each adds findings to a list and goes on. What a wrong tokenizer gives away: ids outside its vocabulary, no start marks, other
bytes than the text had, and text that it would not have cut into these tokens.
"""

from __future__ import annotations

import numpy as np

from ingot.data.store.dataset import MANIFEST
from ingot.data.store.findings import Finding
from ingot.data.tokenizers import Tokenizer
from ingot.data.tokenizers.matching import HEAD, round_trips
from ingot.data.verify.counts import CHUNK_TOKENS, Counts
from ingot.data.verify.folder import AuditSplit, Starts
from ingot.data.verify.overlap import ComparedSplit
from ingot.runtime.files import file_sha256

BYTE_GAP = 0.005  # of the text that tokens may not stand for, where nobody counted it when they were made
FOLDED_GAP = 0.05  # and where somebody did: SentencePiece folds white space, 1% of Shakespeare's, and that is how it is
SAMPLED = 64  # documents whose text is encoded again
FOLDS = (
    "the tokenizer made them and changes this text so much; bits per byte by the text stay right: for those by pieces take a "
    "tokenizer that changes nothing (--kind bpe), or raise --byte-gap"
)
OTHER = "give the tokenizer that made the tokens, or prepare the text again"


def check_sha256(split: AuditSplit, findings: list[Finding]) -> bool:
    """Are shards what was written?"""
    before = len(findings)
    for shard in split.record.shards if split.record else ():
        path = split.folder / shard.file
        if path in split.paths and (found := file_sha256(path)) != shard.sha256:
            problem = f"is not what was written: its sha256 is {found[:16]}... and not {shard.sha256[:16]}..."
            findings.append(Finding("shard-sha256", str(path), problem))
    return len(findings) == before


def check_range(split: AuditSplit, tokenizer: Tokenizer, counts: Counts, findings: list[Finding]) -> bool:
    """Are all ids in the vocabulary?"""
    outside = int(counts.ids[tokenizer.vocab_size :].sum())
    if outside:
        vocabulary = f"the {tokenizer.kind} vocabulary of {tokenizer.vocab_size:,} ids"
        problem = f"tokens outside {vocabulary} begin here: {outside:,} in {split.name}, the largest {counts.largest:,}"
        file, place = split.place(_first_outside(split, tokenizer.vocab_size))
        findings.append(Finding("token-range", file, problem, OTHER, place))
    return not outside


def check_marks(split: AuditSplit, tokenizer: Tokenizer, counts: Counts, index: Starts | None, findings: list[Finding]) -> bool:
    """Does every document start with the mark, and nothing else?"""
    marks, bos, before = counts.marks, tokenizer.bos, len(findings)
    if bos is None or not split.tokens or split.starts is not None:  # gpt-simple's windows have a mark at their end, if any
        return True
    if index is None and (not len(marks) or marks[0] != 0):
        problem = f"{split.name} does not begin with the start mark (id {bos}), which occurs {len(marks):,} times in it"
        file, place = split.place(0)
        findings.append(Finding("document-marks", file, problem, OTHER, place))
    starts = marks if index is None else index[:-1]
    without, inside = np.setdiff1d(starts, marks), np.setdiff1d(marks, starts)
    if len(without) or len(inside):
        counted = f"{len(without):,} starts have no mark and {len(inside):,} marks are not start"
        problem = f"a document of {split.name} does not start at its mark (id {bos}) from here on: {counted}"
        file, place = split.place(int(min([*without[:1], *inside[:1]])))
        findings.append(Finding("document-marks", file, problem, OTHER, place))
    told = split.record.documents if split.record else split.listed
    if told is not None and told != len(marks):
        problem = f"{told:,} documents are said to be in {split.name} and there are {len(marks):,} start marks (id {bos})"
        findings.append(Finding("document-marks", str(split.folder), problem, OTHER))
    return len(findings) == before


def check_bytes(split: AuditSplit, tokenizer: Tokenizer, counts: Counts, asked: float | None, findings: list[Finding]) -> None:
    """Do the tokens stand for the bytes that were recorded, and are these about those of the text, up to the gap asked for?"""
    record = split.record
    if record is None:
        return
    found, file, place = counts.piece_bytes, str(split.folder / MANIFEST), f"splits.{split.name}"
    if record.piece_bytes is not None and found != record.piece_bytes:
        problem = f"the tokens stand for {found:,} bytes and when they were written it was {record.piece_bytes:,}"
        findings.append(Finding("byte-count", file, problem, OTHER, place))
    gap = asked if asked is not None else FOLDED_GAP if found == record.piece_bytes else BYTE_GAP
    apart = abs(found - record.bytes) / max(record.bytes, 1)
    if apart > gap or (tokenizer.lossless and found != record.bytes):
        limit = "this tokenizer loses none" if tokenizer.lossless else f"the limit is {gap:.2%}"
        problem = f"the tokens stand for {found:,} bytes and the text has {record.bytes:,}, {apart:.2%} apart ({limit})"
        advice = OTHER if tokenizer.lossless or found != record.piece_bytes else FOLDS
        findings.append(Finding("byte-count", file, f"{problem}, and bits per byte by pieces are as wrong", advice, place))


def check_round_trip(side: ComparedSplit, findings: list[Finding]) -> bool:
    """Does the tokenizer, given the text of some documents, make these tokens again? Another one hardly ever does."""
    split, starts, tokenizer = side.split, side.starts, side.tokenizer
    numbers = np.unique(np.linspace(0, len(starts) - 2, SAMPLED).astype(np.int64)) if len(starts) > 1 else np.empty(0, np.int64)
    begins, ends = starts[numbers].tolist(), starts[numbers + 1].tolist()
    found = round_trips(tokenizer, (split.read(a, min(b, a + 2 * HEAD)) for a, b in zip(begins, ends, strict=True)))
    if not found.fit:
        file, place = split.place(begins[found.wrong[0]])
        problem = f"the tokenizer makes other tokens of the text here, and of {len(found.wrong)} of {found.tried} documents tried"
        findings.append(Finding("tokenizer-mismatch", file, problem, OTHER, place))
        return False
    return True


def _first_outside(split: AuditSplit, vocab_size: int) -> int:
    for begin in range(0, split.tokens, CHUNK_TOKENS):
        wrong = np.flatnonzero(split.read(begin, min(begin + CHUNK_TOKENS, split.tokens)) >= vocab_size)
        if len(wrong):
            return begin + int(wrong[0])
    raise AssertionError("counted and not found")
