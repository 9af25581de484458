"""Rows drawn from buckets: which documents a run reads, whatever its ranks, its phases and the places where it stopped."""

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pytest
from bucket_files import documents_of, write_buckets

from ingot.config.schema import DataSection
from ingot.data.loading.data_path import open_dataset
from ingot.data.loading.order import DataExhausted
from ingot.data.loading.rows import MixedRows, make_rows
from ingot.runtime.ranks import Ranks
from ingot.runtime.tensors import IGNORED
from ingot.train.reader import RowReader, read_rank_batch

SEQ_LEN, ROWS = 16, 6
BUCKETS = {"web": documents_of("w", 90), "books": documents_of("b", 40), "code": documents_of("c", 60)}
MIX = {"web": 2.0, "books": 1.0, "code": 1.0}


@dataclass(frozen=True)
class Reading:
    """A step, and the one after it."""

    sample: int = 0
    samples: int = ROWS
    seq_len: int = SEQ_LEN
    phase: int = 0
    places: dict = field(default_factory=dict)

    def following(self, read):
        return replace(self, sample=read.next_sample, places=read.places)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return open_dataset(str(write_buckets(tmp_path_factory.mktemp("mixed") / "data", BUCKETS)), "byte")


def rows_of(dataset, sampling="pack", **given):
    return make_rows(DataSection(seq_len=SEQ_LEN, sampling=sampling, **given), ROWS, dataset)


def step(source, plan, ranks=1):
    """The rows of a step on some ranks, and what it says of itself, which is the same on each."""
    found = [
        read_rank_batch(source, plan, Ranks(rank, ranks), np.empty((plan.samples, source.planes, SEQ_LEN), np.int32))
        for rank in range(ranks)
    ]
    assert len({(one.targets, one.epoch, str(one.places)) for one in found}) == 1
    return np.concatenate([one.batch for one in found]), found[0]


def run(source, steps, ranks=(1,), phases=()):
    """The rows of a run that moves on to other ranks at every step; `phases`: the steps at which the next one begins."""
    plan, batches = Reading(), []
    for number in range(steps):
        plan = replace(plan, phase=sum(number >= begin for begin in phases))
        batch, read = step(source, plan, ranks[number % len(ranks)])
        assert read.targets == np.count_nonzero(batch[:, 1] != IGNORED)
        batches.append(batch)
        plan = plan.following(read)
    return np.concatenate(batches), plan


def whole(source):
    """All rows up to the end of the data, and the reason of the end."""
    plan, batches = Reading(), []
    while True:
        try:
            batch, read = step(source, plan)
        except DataExhausted as end:
            return np.concatenate(batches), end.reason
        batches.append(batch)
        plan = plan.following(read)


def documents(rows):
    """How often each document stands in some rows, by its name."""
    tokens = [token for row in rows[:, 0] for token in row.tolist() if token > 2]
    text = bytes(token - 4 for token in tokens).decode()
    return Counter(text[i : i + 5] for i in range(len(text)) if text[i] in "wbc")


NAMES = Counter(f"{bucket[0]}{number:04d}" for bucket, some in BUCKETS.items() for number in range(len(some)))


@pytest.mark.parametrize("sampling", ["pack", "document"])
@pytest.mark.parametrize("mix", [{}, MIX])
def test_every_document_is_read_once_per_epoch(dataset, sampling, mix):
    rows, reason = whole(rows_of(dataset, sampling, mix=mix, epochs=1, exhausted="renormalise"))
    assert documents(rows) == NAMES
    assert reason == "data"
    twice, _ = whole(rows_of(dataset, sampling, mix=mix, epochs=2, exhausted="renormalise"))
    assert documents(twice) == NAMES + NAMES


def test_the_last_rows_of_the_data_are_read_in_a_step_that_is_not_full(dataset):
    source = rows_of(dataset, epochs=1)
    rows, _ = whole(source)
    filled = (rows[:, 1] != IGNORED).any(axis=1)
    assert not filled.all() and not (rows[~filled, 0]).any()
    assert filled.tolist() == sorted(filled.tolist(), reverse=True)
    last = Reading(sample=len(rows) - ROWS)
    assert step(source, last)[1].next_sample == np.count_nonzero(filled)  # where a second epoch goes on


@pytest.mark.parametrize("mix", [{}, MIX])
@pytest.mark.parametrize("ranks", [(2,), (3,), (1, 2, 3, 1)])
def test_the_rows_are_those_of_an_unbroken_run_on_any_ranks(dataset, mix, ranks):
    given = {"mix": mix, "epochs": 3, "exhausted": "renormalise"}
    expected, end = run(rows_of(dataset, **given), 20)
    found, same = run(rows_of(dataset, **given), 20, ranks)
    assert np.array_equal(found, expected)
    assert same == end


def test_a_run_that_stops_goes_on_with_the_next_row(dataset):
    expected, _ = run(rows_of(dataset, mix=MIX), 24)
    plan, found = Reading(), []
    for number in range(24):
        source = rows_of(dataset, mix=MIX)  # another session, which knows the position and nothing else
        batch, read = step(source, plan, 1 + number % 3)
        found.append(batch)
        plan = plan.following(read)
    assert np.array_equal(np.concatenate(found), expected)


def test_weights_are_kept(dataset):
    rows, end = run(rows_of(dataset, mix=MIX), 500)
    share = {name: place / len(rows) for name, place in end.places.items()}
    assert share == pytest.approx({"books": 0.25, "code": 0.25, "web": 0.5}, abs=0.03)


def test_neighbouring_rows_have_buckets_of_their_own(dataset):
    rows, _ = run(rows_of(dataset, mix=MIX), 100)
    firsts = [chr(row[0] - 4) for row in rows[:, 0]]
    assert sum(a == b for a, b in pairwise(firsts)) / len(firsts) == pytest.approx(0.375, abs=0.06)


def test_two_phases_read_documents_of_their_own(dataset):
    phases = [{"tokens": 1, "mix": {"web": 1, "books": 1}}, {"tokens": 1, "mix": {"web": 1, "code": 3}}]
    rows, _ = run(rows_of(dataset, phases=phases, epochs=1), 9, phases=(4,))
    first, second = documents(rows[: 4 * ROWS]), documents(rows[4 * ROWS :])
    assert first.keys() & second.keys() == set()
    assert max((first + second).values()) == 1
    assert {name[0] for name in first} == {"w", "b"} and {name[0] for name in second} == {"w", "c"}


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_drained_bucket_halts_before_the_step_that_lacks_it(dataset, ranks):
    source, plan = rows_of(dataset, mix={"web": 1, "books": 3}, epochs=1), Reading()
    with pytest.raises(DataExhausted) as end:
        while True:
            _, read = step(source, plan, ranks)
            plan = plan.following(read)
    assert end.value.reason == "bucket_exhausted:books"
    again = rows_of(dataset, mix={"web": 1, "books": 3}, epochs=1, exhausted="renormalise")
    batch, read = step(again, plan, ranks)  # goes on from there
    assert read.places["books"] - plan.places["books"] < np.count_nonzero(batch[:, 1].max(axis=1) != IGNORED)
    assert step(rows_of(dataset, mix={"web": 1, "books": 3}, epochs=2), plan)[1].epoch == 0


def test_the_others_share_the_weight_of_a_drained_bucket(dataset):
    rows, reason = whole(rows_of(dataset, mix={"web": 1, "books": 30}, epochs=1, exhausted="renormalise"))
    assert reason == "data"
    assert documents(rows) == Counter({name: 1 for name in NAMES if name[0] != "c"})


@pytest.mark.parametrize("rows", [4, 64])
def test_after_the_end_of_a_bucket_the_others_keep_their_proportion(rows):
    class Endless:
        def available(self, samples, epochs):
            return len(samples)

    class Drained:
        def available(self, samples, epochs):
            return 0

    sources = {"drained": Drained(), "one": Endless(), "other": Endless()}
    source = MixedRows(sources, ({"drained": 2.0, "one": 1.0, "other": 1.0},), seed=1, epochs=1)
    drawn = np.concatenate([source._draw(range(first, first + rows)) for first in range(0, 8000, rows)])
    assert np.bincount(drawn, minlength=3)[0] == 0
    assert abs(np.mean(drawn == 1) - 0.5) < 0.02


def test_a_bucket_that_is_left_out_for_a_while_goes_on_where_it_stood(dataset):
    plan, batches = Reading(), []
    for mix in ({"web": 1, "books": 1}, {"web": 1}, {"web": 1, "books": 1}):
        for _ in range(2):
            batch, read = step(rows_of(dataset, mix=mix, epochs=1), plan)
            batches.append(batch)
            plan = plan.following(read)
    assert max(documents(np.concatenate(batches)).values()) == 1


def test_a_bucket_without_weight_is_not_read(dataset):
    rows, _ = run(rows_of(dataset, mix={"web": 1, "books": 0}), 40)
    assert {name[0] for name in documents(rows)} == {"w"}


def test_without_epochs_buckets_begin_again(dataset):
    rows, _end = run(rows_of(dataset, mix=MIX), 60)
    counts = documents(rows)
    assert counts.keys() == NAMES.keys() and max(counts.values()) > 2
    for name in BUCKETS:
        of_bucket = [counts[key] for key in counts if key[0] == name[0]]
        assert max(of_bucket) - min(of_bucket) <= 1  # each pass reads every document


@pytest.mark.parametrize("sampling", ["shuffle", "random"])
def test_windows_are_mixed_too(dataset, sampling):
    rows, end = run(rows_of(dataset, sampling, mix=MIX), 50, (1, 2))
    assert sum(end.places.values()) == len(rows) == 300
    assert (rows[:, 1] != IGNORED).all()


def test_a_bucket_keeps_its_order_when_another_is_added(dataset):
    alone, _ = run(rows_of(dataset, mix={"web": 1}), 3)
    beside, _ = run(rows_of(dataset, mix={"web": 1, "code": 1}), 9)
    web = [row.tobytes() for row in beside if chr(row[0, 0] - 4) == "w"]
    assert web[:10] == [row.tobytes() for row in alone[:10]]


def open_reader(source, first):
    return RowReader(source, Ranks(), first, Reading.following, [first], lambda shape: np.empty(shape, np.int32))


def test_the_reader_says_that_data_is_exhausted_when_its_rows_are_due_and_no_earlier(dataset):
    source, plan, steps = rows_of(dataset, mix={"books": 1}, epochs=1), Reading(), 0
    reader = open_reader(source, plan)
    try:
        with pytest.raises(DataExhausted):
            while True:
                plan, steps = plan.following(reader.next(plan)), steps + 1
        with pytest.raises(DataExhausted):  # as often as it is asked
            reader.next(plan)
    finally:
        reader.close()
    with pytest.raises(DataExhausted):
        run(rows_of(dataset, mix={"books": 1}, epochs=1), steps + 1)
    run(rows_of(dataset, mix={"books": 1}, epochs=1), steps)


def test_a_phase_that_begins_in_time_is_read_although_the_guess_found_nothing(dataset):
    phases = [{"tokens": 1, "mix": {"books": 1}}, {"tokens": 1, "mix": {"web": 1}}]
    source = rows_of(dataset, phases=phases, epochs=1)
    full = int(rows_of(dataset, mix={"books": 1}, epochs=1).sources["books"].available(range(1000), 1)) // ROWS
    _, plan = run(source, full)
    with pytest.raises(DataExhausted):
        step(source, plan)
    reader = open_reader(source, Reading())
    try:
        plan = Reading()
        for _ in range(full):
            plan = plan.following(reader.next(plan))
        reader.next(replace(plan, phase=1))
    finally:
        reader.close()
