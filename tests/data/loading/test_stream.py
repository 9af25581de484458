import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numbered import Reading
from shard_files import write_shard

from ingot.config.schema import DataSection
from ingot.data.loading.order import Random, Sequential, Shuffle
from ingot.data.loading.rows import WindowRows, document_numbers, make_rows
from ingot.data.store.dataset import ShardRecord, Split, SplitRecord
from ingot.data.tokenizers import ByteTokenizer
from ingot.errors import DataError
from ingot.runtime.ranks import Ranks
from ingot.runtime.seeds import mix, permuted
from ingot.train.reader import RowReader

KEYS = st.integers(0, 2**64 - 1)


def numbers(*bounds):
    return np.arange(*bounds, dtype=np.uint64)


@pytest.fixture
def split(tmp_path):
    """1,000 tokens, each its own place in the stream, in shards that no window length divides."""
    sizes, first, shards = [337, 400, 263], 0, []
    for number, size in enumerate(sizes):
        file = f"train_{number:06d}.bin"
        sha256 = write_shard(tmp_path / file, np.arange(first, first + size, dtype=np.uint16))
        shards.append(ShardRecord(file=file, tokens=size, documents=0, bytes=size, sha256=sha256))
        first += size
    return Split(
        "train", tmp_path, SplitRecord(documents=0, tokens=first, bytes=first, shards=shards, document_index="train.index")
    )


@settings(deadline=None)
@given(st.integers(1, 3000), KEYS)
def test_permuted_hits_every_place_once(size, key):
    assert sorted(permuted(numbers(size), size, key).tolist()) == list(range(size))


@settings(deadline=None)
@given(st.integers(1, 2**40), KEYS, st.lists(st.integers(0, 2**40), min_size=1, max_size=50, unique=True))
def test_permuted_stays_inside_and_apart_for_any_size(size, key, places):
    places = np.array(sorted({place % size for place in places}), np.uint64)
    images = permuted(places, size, key)
    assert (images < size).all()
    assert len(np.unique(images)) == len(places)


def test_permuted_leaves_its_argument_as_it_was():
    places = numbers(100)
    permuted(places, 100, 7)
    assert np.array_equal(places, numbers(100))


def test_permuted_mixes_well():
    images = permuted(numbers(10_000), 10_000, 7).astype(np.float64)
    assert abs(np.corrcoef(np.arange(10_000), images)[0, 1]) < 0.05
    assert abs(np.corrcoef(images[:-1], images[1:])[0, 1]) < 0.05


def test_mix_depends_on_every_number_and_on_their_order():
    assert len({mix(1, 2), mix(2, 1), mix(1, 3), mix(1), mix(1, 2, 0), mix(0, 1, 2)}) == 6


@settings(deadline=None)
@given(st.integers(2, 2000), st.integers(1, 50), st.integers(0, 2**63))
def test_each_epoch_of_shuffle_reads_every_window_once(tokens, seq_len, seed):
    if tokens <= seq_len:
        return
    order = Shuffle(tokens, seq_len, seed)
    for epoch in range(2):
        starts = order.starts(numbers(epoch * order.windows, (epoch + 1) * order.windows))
        assert sorted(starts.tolist()) == [window * seq_len for window in range(order.windows)]
        assert starts.max() + seq_len + 1 <= tokens


def test_no_window_is_left_out_that_fits():
    assert [Shuffle(tokens, 10, 0).windows for tokens in (11, 20, 21)] == [1, 1, 2]


def test_epochs_and_seeds_have_orders_of_their_own():
    order, other = Shuffle(1001, 10, 1), Shuffle(1001, 10, 2)
    orders = [order.starts(numbers(epoch * 100, epoch * 100 + 100)).tolist() for epoch in range(3)]
    orders.append(other.starts(numbers(100)).tolist())
    orders.append(list(range(0, 1000, 10)))
    assert len({tuple(starts) for starts in orders}) == 5


def test_shuffle_counts_epochs():
    order = Shuffle(1001, 10, 1)
    assert [order.epoch(sample) for sample in (0, 99, 100, 250)] == [0, 0, 1, 2]


def test_random_counts_epochs_by_tokens_read():
    order = Random(1000, 10, 1)
    assert [order.epoch(sample) for sample in (0, 99, 100, 250)] == [0, 0, 1, 2]


@settings(deadline=None)
@given(st.sampled_from([Shuffle, Random]), st.integers(0, 10**9), st.lists(st.integers(1, 60), min_size=1, max_size=8))
def test_a_window_does_not_depend_on_which_samples_are_asked_with_it(kind, first, sizes):
    order = kind(2001, 10, 3)
    ends = np.cumsum(sizes) + first
    parts = [order.starts(numbers(end - size, end)) for end, size in zip(ends.tolist(), sizes, strict=True)]
    assert np.array_equal(np.concatenate(parts), order.starts(numbers(first, first + sum(sizes))))


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", [Shuffle, Random])
def test_ranks_together_read_what_one_rank_would_in_the_same_order(kind, world_size):
    order, rows, steps = kind(2001, 10, 3), 7, 90  # three epochs
    together = []
    for step in range(steps):
        for rank in range(world_size):
            share = Ranks(rank, world_size).share(rows)
            together.append(order.starts(numbers(step * rows + share.start, step * rows + share.stop)))
    assert np.array_equal(np.concatenate(together), order.starts(numbers(steps * rows)))


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 6), min_size=20, max_size=20))
def test_ranks_may_change_between_steps_and_every_window_is_read_once(worlds):
    order, rows = Shuffle(1201, 10, 3), 6  # 120 windows: 20 steps are one epoch
    starts = []
    for step, world_size in enumerate(worlds):
        for rank in range(world_size):
            share = Ranks(rank, world_size).share(rows)
            starts += order.starts(numbers(step * rows + share.start, step * rows + share.stop)).tolist()
    assert sorted(starts) == list(range(0, 1200, 10))


@settings(deadline=None)
@given(st.integers(2, 5000), st.integers(1, 500), st.integers(0, 2**63))
def test_random_stays_inside(tokens, seq_len, seed):
    if tokens <= seq_len:
        return
    starts = Random(tokens, seq_len, seed).starts(numbers(500))
    assert starts.min() >= 0
    assert starts.max() + seq_len + 1 <= tokens


def test_random_draws_every_start_about_equally_often():
    counts = np.bincount(Random(26, 10, 5).starts(numbers(16_000)), minlength=16)
    assert len(counts) == 16
    assert (np.abs(counts - 1000) < 150).all()  # five standard deviations


def test_random_draws_by_its_seed():
    assert not np.array_equal(Random(1000, 10, 1).starts(numbers(50)), Random(1000, 10, 2).starts(numbers(50)))


class Held:
    """A dataset that is one split."""

    tokenizer = ByteTokenizer()

    def __init__(self, split):
        self._split = split

    def split(self, name):
        return self._split


@pytest.mark.parametrize("sampling", ["shuffle", "random", "stream"])
def test_text_shorter_than_a_row_is_refused(split, sampling):
    assert make_rows(DataSection(seq_len=999, sampling=sampling), 1, Held(split)).seq_len == 999
    with pytest.raises(DataError, match=r"1,000 tokens but a row needs data\.seq_len \+ 1 = 1,001"):
        make_rows(DataSection(seq_len=1000, sampling=sampling), 1, Held(split))


class Given:
    """Windows that begin where they are told."""

    def __init__(self, *starts):
        self._starts = np.array(starts)

    def starts(self, samples):
        return self._starts[samples.astype(np.int64)]


def rows_at(split, seq_len, *starts):
    batch = np.empty((len(starts), 2, seq_len), np.int32)
    WindowRows(split, Given(*starts), seq_len).read(range(len(starts)), range(len(starts)), batch)
    return batch


def test_rows_are_windows_wherever_shards_end(split):
    batch = rows_at(split, 20, 0, 330, 730, 979)
    expected = np.array([[0], [330], [730], [979]]) + np.arange(20)
    assert np.array_equal(batch[:, 0], expected)
    assert np.array_equal(batch[:, 1], expected + 1)


def test_a_window_that_reaches_the_end_goes_on_at_the_start(split):
    batch = rows_at(split, 20, 990, 980)
    assert batch[0, 0].tolist() == [*range(990, 1000), *range(10)]
    assert batch[0, 1].tolist() == [*range(991, 1000), *range(11)]
    assert batch[1, 1].tolist() == [*range(981, 1000), 0]


def test_windows_have_a_target_for_every_token(split):
    rows = WindowRows(split, Shuffle(1000, 20, 0), 20)
    assert rows.read(range(7, 12), range(1, 3), np.empty((2, 2, 20), np.int32)) == 100


# -- golf's stream -------------------------------------------------------------------------------------------------------------


def test_the_stream_is_read_in_spans_of_one_token_more_than_they_train_on():
    order = Sequential(10_000, 8, rows=8, spans=8)
    assert order.starts(numbers(9)).tolist() == [0, 9, 18, 27, 36, 45, 54, 63, 72]  # the ninth begins the second step


def test_rows_of_a_span_follow_each_other():
    order = Sequential(10_000, 8, rows=6, spans=2)
    assert order.starts(numbers(7)).tolist() == [0, 8, 16, 25, 33, 41, 50]


def test_a_step_of_the_stream_consumes_its_tokens_and_one_for_every_span():
    order = Sequential(10**9, 4096, rows=96, spans=8)
    assert int(order.starts(numbers(96, 97))[0]) == 96 * 4096 + 8 == 393_224


def test_spans_of_unequal_rows_come_one_after_the_other_again_and_again():
    order = Sequential(10_000, 8, rows=6, spans=[2, 1])  # one step is read as 2, 1, 2 and 1 rows
    assert order.starts(numbers(7)).tolist() == [0, 8, 17, 26, 34, 43, 52]
    equal = Sequential(10_000, 8, rows=6, spans=[3])
    assert equal.starts(numbers(99)).tolist() == Sequential(10_000, 8, rows=6, spans=2).starts(numbers(99)).tolist()


def test_the_stream_begins_again_behind_its_end():
    order = Sequential(100, 8, rows=4, spans=1)
    assert order.starts(numbers(12, 16)).tolist() == [99, 7, 15, 23]
    assert [order.epoch(sample) for sample in (0, 12, 13, 24)] == [0, 0, 1, 1]


def test_rows_of_the_stream_wrap_into_its_start(split):
    rows = WindowRows(split, Sequential(1000, 20, rows=5, spans=1), 20)
    batch = np.empty((5, 2, 20), np.int32)
    rows.read(range(45, 50), range(5), batch)  # the tenth step: 9 * 101 = 909
    assert batch[:, 0].ravel().tolist() == [*range(909, 1000), *range(9)]
    assert batch[-1, 1].tolist()[-1] == 9


# -- documents -----------------------------------------------------------------------------------------------------------------


class Documents:
    """A split of which only the documents matter."""

    def __init__(self, *starts):
        self._starts = np.array(starts, np.uint64)
        self.tokens = starts[-1]

    def document_starts(self):
        return self._starts


def test_tokens_are_numbered_by_the_documents_that_began_in_their_window():
    split = Documents(0, 3, 4, 9, 12)
    assert document_numbers(split, 0, 6).tolist() == [1, 1, 1, 2, 3, 3]
    assert document_numbers(split, 2, 5).tolist() == [0, 1, 2, 2, 2]
    assert document_numbers(split, 5, 3).tolist() == [0, 0, 0]


def test_a_row_does_not_cost_a_copy_of_the_whole_index():
    split, asked = Documents(0, 3, 4, 9, 12), []

    class Index(np.ndarray):
        def __array_function__(self, function, types, given, named):
            if function is np.searchsorted:
                asked.append(np.asarray(given[1]).dtype)  # of another type numpy would make all numbers a third
            return super().__array_function__(function, types, given, named)

    split._starts = split._starts.view(Index)
    assert document_numbers(split, 2, 5).tolist() == [0, 1, 2, 2, 2]
    assert asked == [np.uint64]


def test_documents_are_told_apart_across_the_end_of_the_stream():
    assert document_numbers(Documents(0, 3, 4, 9, 12), 10, 7).tolist() == [0, 0, 1, 1, 1, 2, 3]


# -- the reader ----------------------------------------------------------------------------------------------------------------


def host_buffer(shape):
    return np.empty(shape, np.int32)


class Steady(RowReader):
    """A reader that is asked for step after step of the same size."""

    def __init__(self, source, ranks, first, *rest):
        self.due = first
        super().__init__(source, ranks, first, *rest)

    def next(self):
        rank_batch = super().next(self.due)
        self.due = self.due.following()
        return rank_batch


@pytest.fixture
def reader_of():
    """Open readers; they end with the test."""
    opened = []

    def open_reader(split, order, ranks=None, rows=5, sample=0, host_buffer=host_buffer):
        first = Reading(sample, rows, order.seq_len)
        opened.append(
            Steady(WindowRows(split, order, order.seq_len), ranks or Ranks(), first, Reading.following, [first], host_buffer)
        )
        return opened[-1]

    yield open_reader
    for reader in opened:
        reader.close()


@pytest.fixture
def reading():
    """The threads that read ahead and were started in this test."""
    before = set(threading.enumerate())
    return lambda: [thread for thread in threading.enumerate() if thread.name.startswith("read-ahead") and thread not in before]


def expected_rows(order, step, rows=5, sample=0, share=None):
    share = share or range(rows)
    starts = order.starts(numbers(sample + step * rows + share.start, sample + step * rows + share.stop))
    tokens = starts[:, None] + np.arange(order.seq_len)  # every token is its own place
    return np.stack([tokens, tokens + 1], axis=1)


class Watched:
    """An order that counts how often it was asked, and waits at a gate."""

    def __init__(self, order):
        self._order, self.seq_len, self.asked = order, order.seq_len, 0
        self.gate = threading.Event()
        self.gate.set()

    def starts(self, samples):
        self.gate.wait()
        self.asked += 1
        return self._order.starts(samples)

    def epoch(self, sample):
        return self._order.epoch(sample)

    def eventually_asked(self, times):
        deadline = time.monotonic() + 300
        while self.asked < times:
            assert time.monotonic() < deadline, f"asked {self.asked} times, {times} expected"
            time.sleep(0.001)


@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (0, 2), (1, 2), (2, 3)])
def test_the_reader_gives_a_rank_its_rows_step_after_step(split, reader_of, rank, world_size):
    order, ranks = Shuffle(1000, 10, 3), Ranks(rank, world_size)
    reader = reader_of(split, order, ranks, sample=50)
    for step in range(40):  # across two ends of an epoch
        assert np.array_equal(reader.next().batch, expected_rows(order, step, sample=50, share=ranks.share(5)))


def test_rows_lie_in_the_host_buffers(split, reader_of):
    given = []

    def remembered(shape):
        given.append(np.empty(shape, np.int32))
        return given[-1]

    reader = reader_of(split, Shuffle(1000, 10, 3), host_buffer=remembered)
    taken = [reader.next().batch for _ in range(10)]
    assert all(any(np.shares_memory(rows, buffer) for buffer in given) for rows in taken)


def test_a_buffer_stays_intact_until_next_was_called_twice_more(split, reader_of):
    order = Watched(Shuffle(1000, 10, 3))
    reader = reader_of(split, order)
    before = reader.next().batch
    for step in range(1, 30):
        rows = reader.next().batch
        order.eventually_asked(step + 3)  # the thread has filled every buffer it may
        time.sleep(0.001)
        assert np.array_equal(before, expected_rows(order, step - 1))
        assert np.array_equal(rows, expected_rows(order, step))
        before = rows


@pytest.mark.parametrize("taken", [0, 1, 2, 3, 7])
def test_a_reader_may_be_closed_at_any_time(split, reader_of, reading, taken):
    order = Watched(Shuffle(1000, 10, 3))
    reader = reader_of(split, order)
    for _ in range(taken):
        reader.next()
    order.eventually_asked(min(taken, 2) + 2)  # it waits for room or for a buffer
    reader.close()
    assert not reading()


def test_a_reader_may_be_closed_before_it_read_anything(split, reader_of, reading):
    for _ in range(20):
        reader_of(split, Shuffle(1000, 10, 3)).close()
    assert not reading()


def test_a_reader_may_be_closed_while_it_reads(split, reader_of, reading):
    order = Watched(Shuffle(1000, 10, 3))
    order.gate.clear()
    reader = reader_of(split, order)
    threading.Timer(0.1, order.gate.set).start()
    reader.close()
    assert not reading()


def test_a_reader_may_be_closed_twice(split, reader_of):
    reader = reader_of(split, Shuffle(1000, 10, 3))
    reader.close()
    reader.close()


class Broken:
    """Real data up to a place; what lies after cannot be read."""

    def __init__(self, split, end):
        self._split, self._end, self.tokens = split, end, split.tokens

    def read(self, start, stop, out=None):
        if stop > self._end:
            raise DataError("the shard was replaced")
        return self._split.read(start, stop, out)


class Straight:
    """Windows one after the other."""

    seq_len = 10

    def starts(self, samples):
        return samples.astype(np.int64) * self.seq_len

    def epoch(self, sample):
        return 0


def test_a_portion_tells_of_the_whole_step(split, reader_of):
    reader = reader_of(split, Shuffle(1000, 10, 3), Ranks(1, 2), rows=60)
    portions = [reader.next() for _ in range(2)]
    assert [rank_batch.targets for rank_batch in portions] == [600, 600]
    assert [rank_batch.epoch for rank_batch in portions] == [0, 1]  # 99 windows are an epoch


def test_an_error_while_reading_ahead_comes_when_its_rows_are_due(split, reader_of):
    reader = reader_of(Broken(split, end=151), Straight())
    for step in range(3):
        assert np.array_equal(reader.next().batch, expected_rows(Straight(), step))
    with pytest.raises(DataError, match=r"the shard was replaced"):
        reader.next()


def test_an_error_while_reading_ahead_is_told_every_time_and_never_waited_for(split, reader_of):
    reader = reader_of(Broken(split, end=0), Straight())
    told = []

    def ask():
        for _ in range(2):
            try:
                reader.next()
            except DataError as error:
                told.append(str(error))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout=300)
    assert told == ["the shard was replaced"] * 2


def test_a_reader_that_met_an_error_can_be_closed(split, reader_of, reading):
    reader = reader_of(Broken(split, end=0), Straight())
    reader.close()
    assert not reading()


@given(st.integers(6, 300), st.one_of(st.integers(1, 3), st.lists(st.integers(1, 4), min_size=1, max_size=3)), st.integers(1, 3))
def test_the_rows_of_some_epochs_are_those_whose_targets_lie_in_them(tokens, spans, epochs):
    order = Sequential(tokens, 5, 6, spans)
    rows = order.rows_in(epochs)
    places = order._place(np.arange(rows + 1, dtype=np.uint64))
    assert all(place + 6 <= epochs * tokens for place in places[:rows])
    assert places[rows] + 6 > epochs * tokens
