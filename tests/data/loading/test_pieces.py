"""Stages with rows of different lengths: short rows are pieces of long ones, and the reader follows a change of plans."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numbered import Numbered, Reading

from ingot.data.loading.order import Shuffle
from ingot.data.loading.packing import PackedRows
from ingot.data.loading.rows import WindowRows
from ingot.runtime.ranks import Ranks
from ingot.runtime.tensors import IGNORED
from ingot.train.reader import RowReader, read_rank_batch

LONG = 12


def batch_of(source, samples, share, seq_len):
    buffer = np.full((len(share) * source.seq_len // seq_len, source.planes, seq_len), -9, np.int32)
    plan = Reading(samples.start, len(samples), seq_len)
    read = read_rank_batch(source, plan, SimpleNamespace(share=lambda rows: share), buffer)
    return read.batch, read.targets


@pytest.mark.parametrize("seq_len", [1, 3, 4, 12])
def test_a_long_row_becomes_pieces_one_after_the_other(seq_len):
    source = WindowRows(Numbered(500), Shuffle(500, LONG, 7), LONG)
    whole, targets = batch_of(source, range(5, 11), range(1, 4), LONG)
    pieces, same = batch_of(source, range(5, 11), range(1, 4), seq_len)
    assert targets == same == 6 * LONG
    for plane in range(2):
        assert np.array_equal(pieces[:, plane].reshape(3, LONG), whole[:, plane])


def test_pieces_keep_documents_apart_and_their_last_targets():
    source = WindowRows(Numbered(500, 0, 3, 40, 41, 100), Shuffle(500, LONG, 7), LONG, planes=3)
    whole, _ = batch_of(source, range(41), range(41), LONG)
    pieces, _ = batch_of(source, range(41), range(41), 4)
    assert np.array_equal(pieces[:, 2].reshape(41, LONG), whole[:, 2])
    assert np.array_equal(pieces[:, 1], pieces[:, 0] + 1)


def test_packed_documents_are_cut_with_what_is_padding():
    split = Numbered(90, 0, 5, 12, 40, 77)
    whole, targets = batch_of(PackedRows(split, LONG, 3, bos=None, documents=True), range(4), range(4), LONG)
    pieces, same = batch_of(PackedRows(split, LONG, 3, bos=None, documents=True), range(4), range(4), 6)
    assert targets == same == np.count_nonzero(whole[:, 1] != IGNORED) == np.count_nonzero(pieces[:, 1] != IGNORED)
    for plane in range(3):
        assert np.array_equal(pieces[:, plane].reshape(4, LONG), whole[:, plane])


STAGES = st.lists(st.tuples(st.integers(1, 5), st.sampled_from([1, 2, 3, 4, 6, 12]), st.integers(1, 4)), min_size=1, max_size=4)


@given(stages=STAGES, ranks=st.integers(1, 3), tokens=st.integers(200, 400))
def test_every_token_is_read_once_per_epoch_whatever_the_stages_and_ranks(stages, ranks, tokens):
    """Stages of (samples, row length, steps) in turns until an epoch is over."""
    order = Shuffle(tokens, LONG, 1)
    source, sample, seen = WindowRows(Numbered(tokens), order, LONG), 0, Counter()
    while sample < order.windows:
        for samples, seq_len, steps in stages:
            for _ in range(steps):
                plan = Reading(sample, min(samples, max(0, order.windows - sample)), seq_len)
                for rank in range(ranks):
                    buffer = np.empty((6, 2, LONG), np.int32)
                    seen.update(read_rank_batch(source, plan, Ranks(rank, ranks), buffer).batch[:, 0].ravel().tolist())
                sample += plan.samples
    assert seen == dict.fromkeys(range(order.windows * LONG), 1)


def test_ranks_share_the_rows_of_one_in_their_order():
    source, plan = WindowRows(Numbered(500), Shuffle(500, LONG, 7), LONG), Reading(3, 7, 4)
    alone = read_rank_batch(source, plan, Ranks(), np.empty((7, 2, LONG), np.int32))
    shared = [read_rank_batch(source, plan, Ranks(rank, 3), np.empty((3, 2, LONG), np.int32)) for rank in range(3)]
    assert np.array_equal(np.concatenate([rank_batch.batch for rank_batch in shared]), alone.batch)
    assert {rank_batch.targets for rank_batch in shared} == {alone.targets} == {7 * LONG}


class Counting(WindowRows):
    """Rows that note which samples were read."""

    def read(self, samples, share, batch):
        read.append(samples.start)
        return super().read(samples, share, batch)


read: list[int] = []


@pytest.fixture
def reader_of():
    opened = []

    def open_reader(shapes, following=Reading.following):
        read.clear()
        source = Counting(Numbered(2000), Shuffle(2000, LONG, 7), LONG)
        opened.append(RowReader(source, Ranks(), shapes[0], following, shapes, lambda shape: np.empty(shape, np.int32)))
        return source, opened[-1]

    yield open_reader
    for reader in opened:
        reader.close()


def expected(source, plan):
    return read_rank_batch(source, plan, Ranks(), np.empty((20, 2, LONG), np.int32)).batch


@pytest.mark.parametrize("at", [0, 1, 3])
def test_the_reader_drops_what_it_read_ahead_when_the_plan_is_another(reader_of, at):
    first, second = Reading(0, 2, 4), Reading(2 * at, 5, 12)
    source, reader = reader_of([first, second])
    plan = first
    for _ in range(at):
        assert np.array_equal(reader.next(plan).batch, expected(source, plan))
        plan = plan.following()
    plan = second
    for _ in range(4):
        found = reader.next(plan).batch
        assert found.shape == (5, 2, 12)
        assert np.array_equal(found, expected(source, plan))
        plan = plan.following()


def test_the_reader_goes_back_when_asked(reader_of):
    source, reader = reader_of([Reading(0, 2, 12)])
    for sample in (0, 2, 0, 2, 100, 102):
        plan = Reading(sample, 2, 12)
        assert np.array_equal(reader.next(plan).batch, expected(source, plan))


def test_a_change_that_can_be_foreseen_drops_nothing(reader_of):
    shapes = [Reading(0, 2, 4), Reading(0, 5, 12)]
    plans = [replace(shapes[0], sample=2 * i) for i in range(3)] + [replace(shapes[1], sample=6 + 5 * i) for i in range(4)]
    _, reader = reader_of(shapes, lambda plan, read: plans[plans.index(plan) + 1])
    for plan in plans[:4]:
        reader.next(plan)
    assert read[:4] == [0, 2, 4, 6]
