import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.config.schema import DataSection
from ingot.data.loading.packing import PackedRows, best_fit, rows_filled
from ingot.data.loading.rows import make_rows
from ingot.data.prepare.pipeline import write_dataset
from ingot.data.store.dataset import Dataset
from ingot.data.tokenizers import ByteTokenizer
from ingot.errors import DataError
from ingot.runtime.tensors import IGNORED

BOS = 7


class Documents:
    """A split in memory: documents of these tokens."""

    def __init__(self, documents, eos=None, repeats=None):
        self.eos, self._repeats = eos, repeats
        self.ids = np.concatenate([np.asarray(document, np.uint16) for document in documents])
        self.tokens = len(self.ids)
        self._starts = np.cumsum([0, *map(len, documents)]).astype(np.uint64)

    def document_starts(self):
        return self._starts

    def document_repeats(self):
        return None if self._repeats is None else np.array(self._repeats, np.uint16)

    def read(self, start, stop):
        assert 0 <= start <= stop <= self.tokens
        return self.ids[start:stop]


def read(rows, first, count):
    batch = np.full((count, rows.planes, rows.seq_len), -7, np.int32)
    rows.read(range(first, first + count), range(count), batch)
    return batch


def count_targets(rows, first, count):
    return rows.read(range(first, first + count), range(0), np.empty((0, rows.planes, rows.seq_len), np.int32))


def epoch_length(rows, epoch=0):
    first = 0
    while rows.epoch(first) < epoch:
        first += 1
    last = first
    while rows.epoch(last) == epoch:
        last += 1
    return first, last - first


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), max_size=80), st.integers(50, 60))
def test_best_fit_deals_every_length_once_and_overfills_no_row(lengths, capacity):
    rows = best_fit(lengths, capacity)
    assert len(rows) == rows_filled(np.array(lengths, np.int64), capacity)
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[number] for number in row) <= capacity for row in rows)


def test_best_fit_takes_the_fullest_row_that_has_room():
    assert best_fit([6, 5, 4, 3, 2], 10) == [[0, 2], [1, 3, 4]]
    assert best_fit([8, 7, 2], 10) == [[0, 2], [1]]


def test_labels_where_documents_end_with_a_mark():
    """[a b E c d E pad] predicts b E . d E . . : the start of the next document is not a target, the mark is."""
    rows = PackedRows(Documents([[1, 2, 9], [3, 4, 9]]), 7, seed=0, bos=None, documents=True)
    tokens, targets, documents = read(rows, 0, 1)[0].tolist()
    if tokens[0] == 3:  # which of the two comes first is the seed's affair
        tokens = [{1: 3, 2: 4, 3: 1, 4: 2}.get(t, t) for t in tokens]
        targets = [{2: 4, 4: 2}.get(t, t) for t in targets]
    assert tokens == [1, 2, 9, 3, 4, 9, 0]
    assert targets == [2, 9, IGNORED, 4, 9, IGNORED, IGNORED]
    assert documents == [0, 0, 0, 1, 1, 1, 2]
    assert count_targets(rows, 0, 1) == 4


def test_labels_where_documents_begin_with_a_mark():
    rows = PackedRows(Documents([[BOS, 1, 2]]), 5, seed=0, bos=BOS)
    tokens, targets = read(rows, 0, 1)[0].tolist()
    assert tokens == [BOS, 1, 2, 0, 0]
    assert targets == [1, 2, BOS, IGNORED, IGNORED]  # the next mark says that the document is over


def test_a_document_longer_than_a_row_is_cut_and_no_target_is_lost():
    rows = PackedRows(Documents([[BOS, 1, 2, 3, 4, 5, 6]]), 3, seed=0, bos=BOS)
    batch = read(rows, 0, 3)
    found = {tuple(line[0]): tuple(line[1]) for line in batch.tolist()}
    assert found == {(BOS, 1, 2): (1, 2, 3), (3, 4, 5): (4, 5, 6), (6, 0, 0): (BOS, IGNORED, IGNORED)}


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(4, 24), st.booleans(), st.integers(0, 2**40))
def test_every_token_is_read_once_per_epoch_with_its_own_successor(lengths, seq_len, marked, seed):
    ids = iter(range(10, 10_000))
    documents = [[BOS if marked and i == 0 else next(ids) for i in range(length)] for length in lengths]
    if not marked and max(lengths) == 1:
        return
    rows = PackedRows(Documents(documents), seq_len, seed, BOS if marked else None)
    expected = sorted(
        (token, target)
        for document in documents
        for token, target in zip(document, [*document[1:], BOS if marked else IGNORED], strict=True)
        if marked or len(document) % seq_len != 1 or token != document[-1]
    )
    for epoch in range(2):
        first, count = epoch_length(rows, epoch)
        batch = read(rows, first, count)
        used = batch[:, 0] != 0
        assert sorted(zip(batch[:, 0][used].tolist(), batch[:, 1][used].tolist(), strict=True)) == expected
        assert count_targets(rows, first, count) == np.count_nonzero(batch[:, 1] != IGNORED)


def test_a_row_does_not_depend_on_what_was_asked_before():
    documents = Documents([[BOS, *range(10, 10 + n % 13)] for n in range(5000)])  # five blocks
    straight = read(PackedRows(documents, 16, 3, BOS), 0, 2500)
    other = PackedRows(documents, 16, 3, BOS)
    for first in (2000, 0, 1999, 700, 2499):
        assert np.array_equal(read(other, first, 1), straight[first : first + 1])


def test_a_step_of_many_blocks_is_planned_once(monkeypatch):
    documents = Documents([[BOS, 10]] * 40_000)  # 256 rows of 8 documents: two blocks for a step
    planned = []
    monkeypatch.setattr("ingot.data.loading.packing.best_fit", lambda *given: planned.append(1) or best_fit(*given))
    rows = PackedRows(documents, 16, 3, BOS)
    for step in range(9):
        read(rows, step * 512, 512)
        rows.epoch((step + 1) * 512)
    assert len(planned) <= 9 * 4 + 1


def test_rows_are_not_sorted_by_length():
    draw = np.random.default_rng(0)
    documents = Documents([[BOS] * n for n in draw.integers(1, 40, 3000)])
    rows = PackedRows(documents, 64, 3, BOS)
    longest = [max(piece.length for piece in rows._row(sample)) for sample in range(200)]
    assert abs(np.corrcoef(np.arange(200), longest)[0, 1]) < 0.25


def test_most_places_are_filled():
    draw = np.random.default_rng(0)
    documents = Documents([[BOS] * n for n in draw.geometric(1 / 300, 4000)])
    rows = PackedRows(documents, 256, 3, BOS)
    _, count = epoch_length(rows)
    assert documents.tokens / (count * 256) > 0.97


def test_epochs_and_seeds_have_orders_of_their_own():
    documents = Documents([[BOS, 10 + n] for n in range(200)])
    rows, other = PackedRows(documents, 2, 1, BOS), PackedRows(documents, 2, 2, BOS)
    orders = [read(rows, 0, 200), read(rows, 200, 200), read(other, 0, 200)]
    assert len({order[:, 0, 1].tobytes() for order in orders}) == 3


def test_documents_without_anything_to_predict_are_refused():
    with pytest.raises(DataError, match="no document has a token to predict"):
        PackedRows(Documents([[1], [2]]), 4, 0, None).epoch(0)


def shifted_labels(tokens, targets):
    """Targets as gpt-simple writes them: beside the token itself, -100 where it is not predicted; a first never is."""
    return [tokens[0], *[-100 if target == IGNORED else target for target in targets[:-1]]]


def test_labels_of_gpt_simple():
    """[a b E c d E pad] -> [a b E -100 d E -100], documents 0 0 0 1 1 1: both as two windows and as one with a mark inside."""
    for documents in ([[1, 2, 9], [3, 4, 9]], [[1, 2, 9, 3, 4, 9]]):
        rows = PackedRows(Documents(documents, eos=9), 7, seed=1, bos=None, documents=True)
        tokens, targets, numbers = read(rows, 0, 1)[0].tolist()
        assert tokens == [1, 2, 9, 3, 4, 9, 0]
        assert shifted_labels(tokens, targets) == [1, 2, 9, -100, 4, 9, -100]
        assert numbers == [0, 0, 0, 1, 1, 1, 2]
        assert count_targets(rows, 0, 1) == 4


def test_what_a_window_repeats_is_not_predicted_again():
    rows = PackedRows(Documents([[1, 2, 3, 4, 5, 9]], eos=9, repeats=[3]), 8, seed=0, bos=None)
    tokens, targets = read(rows, 0, 1)[0].tolist()
    assert tokens == [1, 2, 3, 4, 5, 9, 0, 0]
    assert targets == [IGNORED, IGNORED, 4, 5, 9, IGNORED, IGNORED, IGNORED]
    assert count_targets(rows, 0, 1) == 3


def test_a_window_of_nothing_but_repetition_and_a_second_mark_is_tolerated():
    rows = PackedRows(Documents([[1, 2, 3, 9], [2, 3, 9]], eos=9, repeats=[0, 2]), 7, seed=0, bos=None)
    assert count_targets(rows, 0, 1) == 3 + 1  # the mark again, and none of what it repeats


def test_a_window_longer_than_a_row_is_cut_and_its_mark_is_not_lost():
    """gpt-simple cuts a window of seq_len + 1 tokens off, and with it the mark."""
    rows = PackedRows(Documents([[1, 2, 3, 4, 9]], eos=9), 4, seed=0, bos=None)
    assert read(rows, 0, 1)[0].tolist() == [[1, 2, 3, 4], [2, 3, 4, 9]]
    assert rows.available(range(5), 1) == 1  # the mark alone predicts nothing


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(2, 60), min_size=1, max_size=20),
    st.integers(4, 16),
    st.integers(0, 8),
    st.booleans(),
    st.booleans(),
)
def test_with_an_overlap_every_token_is_still_predicted_once(lengths, seq_len, overlap, marked, alone):
    ids = iter(range(10, 10_000))
    documents = [[BOS if marked and i == 0 else next(ids) for i in range(length)] for length in lengths]
    overlap = min(overlap, seq_len // 2)
    rows = PackedRows(Documents(documents), seq_len, 1, BOS if marked else None, overlap=overlap, alone=alone)
    count = rows.available(range(10_000), 1)
    batch = read(rows, 0, count)
    counted = batch[:, 1] != IGNORED
    found = sorted(zip(batch[:, 0][counted].tolist(), batch[:, 1][counted].tolist(), strict=True))
    after = [BOS] if marked else []
    assert found == sorted((a, b) for d in documents for a, b in zip(d, [*d[1:], *after], strict=False))
    assert count_targets(rows, 0, count) == len(found)


def test_pieces_of_a_long_document_begin_with_what_came_before():
    rows = PackedRows(Documents([[10, 11, 12, 13, 14, 15, 16]]), 4, seed=0, bos=None, overlap=2)
    found = {tuple(line[0]): tuple(line[1]) for line in read(rows, 0, rows.available(range(99), 1)).tolist()}
    assert found == {
        (10, 11, 12, 13): (11, 12, 13, 14),
        (12, 13, 14, 15): (IGNORED, IGNORED, 15, 16),
    }  # and (14, 15, 16, pad) would have nothing left to predict


def test_one_document_in_a_row():
    documents = [[1, 2, 9], [3, 4, 5, 9], [6, 9]]
    rows = PackedRows(Documents(documents, eos=9), 5, seed=0, bos=None, alone=True)
    assert rows.available(range(99), 1) == 3
    assert sorted(line[0][line[0] != 0].tolist() for line in read(rows, 0, 3)) == sorted(documents)


def test_documents_without_a_target_are_no_rows_and_only_reading_them_is_refused():
    rows = PackedRows(Documents([[10], [11], [12]]), 16, 3, None)
    assert [rows.available(range(2**62), epochs) for epochs in (1, 1, 3)] == [0, 0, 0]
    with pytest.raises(DataError, match="no document has a token to predict"):
        rows.epoch(0)


def test_the_end_of_an_epoch_is_known_without_planning_further(monkeypatch):
    documents = Documents([[BOS, 10]] * 5000)
    counted = []
    monkeypatch.setattr("ingot.data.loading.packing.rows_filled", lambda *given: counted.append(1) or rows_filled(*given))
    rows = PackedRows(documents, 2, 3, BOS)
    assert rows.available(range(10), 1) == 10 and len(counted) == 1
    assert rows.available(range(4990, 5010), 1) == 10 and len(counted) == 5
    assert rows.available(range(4990, 5010), 2) == 20 and len(counted) == 6
    assert rows.available(range(6000, 6010), 1) == 0
    assert rows.available(range(3), 1) == 3  # going back counts nothing anew
    assert len(counted) == 6


@pytest.mark.parametrize(
    "given", [{"sampling": "pack"}, {"sampling": "document"}, {"sampling": "redraw"}, {"document_mask": True}]
)
def test_a_damaged_document_index_is_refused_before_a_row_is_read(tmp_path, given):
    write_dataset([("train", "abc" * 9)] * 9, tmp_path / "set", ByteTokenizer(), source=None)
    index = tmp_path / "set/train.index"
    index.write_bytes(index.read_bytes()[:15] + b"\x40" + index.read_bytes()[16:])  # the second begins at token 2**62
    with pytest.raises(DataError, match=r"train.index does not increase: document 1 begins at 4,6"):
        make_rows(DataSection(seq_len=8, **given), 1, Dataset.open(tmp_path / "set"))
