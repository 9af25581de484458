"""Documents redrawn each epoch: every token once per epoch, on any ranks, after any resume, whatever the stages."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numbered import Numbered, Reading
from shard_files import write_shard

from ingot.config.schema import DataSection
from ingot.data.formats.nanogpt_folder import META, meta_bytes
from ingot.data.loading.data_path import open_dataset
from ingot.data.loading.order import DataExhausted
from ingot.data.loading.packing import PackedRows, RedrawnRows
from ingot.data.loading.rows import LimitedRows, make_rows
from ingot.data.tokenizers import ByteTokenizer, CharTokenizer
from ingot.errors import DataError
from ingot.runtime.ranks import Ranks
from ingot.runtime.tensors import IGNORED
from ingot.train.reader import read_rank_batch

LONG = 12
STARTS = (0, 3, 40, 41, 100, 130, 131, 132, 133, 190, 230)
TOKENS = 257  # 22 rows, of which the last has 5 tokens


def rows_of(starts=STARTS, tokens=TOKENS, seq_len=LONG, seed=7, **more):
    return RedrawnRows(Numbered(tokens, *starts), seq_len, seed, **more)


def read(rows, first, count):
    batch = np.full((count, rows.planes, rows.seq_len), -9, np.int32)
    rows.read(range(first, first + count), range(count), batch)
    return batch


def read_on(rows, sample, samples, world_size, seq_len=LONG):
    """A step as some ranks read it, put together: inputs, targets and how many of those there are."""
    plan = Reading(sample, samples, seq_len)
    parts = [
        read_rank_batch(rows, plan, Ranks(rank, world_size), np.empty((samples, 2, LONG), np.int32)) for rank in range(world_size)
    ]
    [targets] = {part.targets for part in parts}
    together = np.concatenate([part.batch for part in parts])
    assert targets == np.count_nonzero(together[:, 1] != IGNORED)
    return together


def inputs(batch):
    return batch[:, 0][batch[:, 1] != IGNORED].tolist()


DOCUMENTS = st.lists(st.integers(1, 60), min_size=1, max_size=30).filter(lambda lengths: sum(lengths) > LONG)
STEPS = st.lists(st.tuples(st.integers(1, 5), st.sampled_from([1, 3, 4, 12])), min_size=1, max_size=4)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@settings(deadline=None, max_examples=30)
@given(lengths=DOCUMENTS, steps=STEPS, seed=st.integers(0, 2**63))
def test_every_token_is_read_once_in_each_of_two_epochs_on_any_ranks(world_size, lengths, steps, seed):
    """Steps of (rows, row length) in turns, until an epoch is over."""
    tokens, starts = sum(lengths), np.cumsum([0, *lengths[:-1]]).tolist()
    rows = rows_of(starts, tokens, seed=seed)
    count = -(-tokens // LONG)
    for epoch in range(2):
        sample, seen = epoch * count, Counter()
        while sample < (epoch + 1) * count:
            for samples, seq_len in steps:
                if samples := min(samples, (epoch + 1) * count - sample):
                    seen.update(inputs(read_on(rows, sample, samples, world_size, seq_len)))
                    sample += samples
        assert seen == dict.fromkeys(range(tokens), 1)
        assert rows.epoch(sample - 1) == epoch and rows.epoch(sample) == epoch + 1


@pytest.mark.parametrize("sample", [0, 1, 17, 22, 30, 44])
def test_a_run_goes_on_anywhere_with_other_ranks_and_reads_what_it_would_have(sample):
    unbroken = read_on(rows_of(), sample, 20, 1)
    for world_size in (2, 3):
        resumed = rows_of()  # knows nothing of what was read before
        parts = [read_on(resumed, sample, 7, world_size), read_on(resumed, sample + 7, 13, 1)]
        assert np.array_equal(np.concatenate(parts), unbroken)


def test_the_ranks_may_change_within_an_epoch_and_nothing_is_lost_or_repeated():
    rows, sample, seen = rows_of(), 0, Counter()
    for world_size, samples in [(1, 5), (3, 6), (2, 3), (1, 8), (3, 15), (2, 7)]:
        seen.update(inputs(read_on(rows, sample, samples, world_size)))
        sample += samples
    assert sample == 44
    assert seen == dict.fromkeys(range(TOKENS), 2)


def test_a_token_has_its_successor_as_target_and_the_last_of_a_document_the_first_of_another():
    batch = read(rows_of(), 0, 44)
    counted = batch[:, 1] != IGNORED
    ends = {stop - 1 for stop in (*STARTS[1:], TOKENS)}
    for token, target in zip(batch[:, 0][counted].tolist(), batch[:, 1][counted].tolist(), strict=True):
        assert target in STARTS if token in ends else target == token + 1


def test_documents_stay_whole_where_no_row_cuts_them():
    for line in read(rows_of(), 0, 22):
        tokens = line[0][line[1] != IGNORED]
        breaks = tokens[1:][np.diff(tokens) != 1]
        assert set(breaks.tolist()) <= set(STARTS)


def test_every_epoch_and_seed_has_its_own_order_of_documents():
    found = [read(rows_of(seed=seed), first, 22)[:, :2] for seed, first in [(7, 0), (7, 22), (8, 0)]]
    pairs = [set(zip(batch[:, 0].ravel().tolist(), batch[:, 1].ravel().tolist(), strict=True)) for batch in found]
    ends = [{pair for pair in some if pair[1] in STARTS} for some in pairs]  # which document comes after which
    assert ends[0] != ends[1] != ends[2] != ends[0]


def test_one_long_document_is_cut_elsewhere_in_every_epoch():
    rows = rows_of(starts=(0,), tokens=1000)
    cuts = [set((read(rows, epoch * 84, 84)[:, 0, 0] % LONG).tolist()) for epoch in range(3)]
    assert len({min(some) for some in cuts}) == 3
    assert all(len(some) <= 2 for some in cuts)  # one grid, and where the ring is closed


def test_rows_that_follow_each_other_in_the_join_are_not_read_after_each_other():
    rows = rows_of(starts=(0,), tokens=12_000)
    steps = []
    for epoch in range(2):
        first = read(rows, epoch * 1000, 1000)[:, 0, 0]
        assert abs(np.corrcoef(np.arange(1000), first)[0, 1]) < 0.1
        steps.append(np.diff(first) % 12_000)  # the same wherever the first row begins
        assert np.count_nonzero(steps[-1] == LONG) < 5
    assert not np.array_equal(*steps)


def test_a_mask_tells_the_documents_of_a_row_apart():
    batch = read(rows_of(documents=True), 0, 22)
    document = np.searchsorted(STARTS, batch[:, 0], side="right")
    used = batch[:, 1] != IGNORED
    for tokens, numbers, counted in zip(document, batch[:, 2], used, strict=True):
        assert np.array_equal(np.diff(tokens[counted]) != 0, np.diff(numbers[counted]) != 0)
        assert not set(numbers[counted]) & set(numbers[~counted])
    assert np.array_equal(batch[:, :2], read(rows_of(), 0, 22))


def test_what_a_document_repeats_of_the_one_before_is_left_out():
    rows = RedrawnRows(Numbered(60, 0, 20, 40, 45, repeats=[0, 5, 5, 2]), LONG, 3)
    assert rows.tokens == 48
    assert sorted(inputs(read(rows, 0, 4))) == [*range(20), *range(25, 40), *range(47, 60)]


def test_the_epochs_of_a_run_end_with_the_last_row():
    rows = LimitedRows(rows_of(), 2)
    batch = np.empty((10, 2, LONG), np.int32)
    assert rows.after(range(40, 50))[0] == 44
    assert rows.read(range(40, 50), range(10), batch) == len(inputs(batch)) <= 4 * LONG
    with pytest.raises(DataExhausted):
        rows.read(range(44, 54), range(10), batch)


def golf_shards(folder, ids, tokenizer):
    """Tokens as golf lays them: shards of any length, and nothing beside them."""
    folder.mkdir()
    third = len(ids) // 3
    for number, part in enumerate((ids[:third], ids[third:])):
        write_shard(folder / f"toy_train_{number:06d}.bin", np.array(part, np.uint16))
    write_shard(folder / "toy_val_000000.bin", np.array(ids, np.uint16))
    return open_dataset(str(folder), tokenizer, trust_tokens=True)


def test_documents_of_shards_without_an_index_are_found_by_their_mark(tmp_path):
    bos = ByteTokenizer().bos
    texts = [bytes(range(97, 97 + length)) for length in (3, 9, 1, 25, 14)]
    dataset = golf_shards(tmp_path / "shards", [id for text in texts for id in (bos, *text)], "byte")
    assert dataset.split("train").document_starts().tolist() == [0, 4, 14, 16, 42, 57]
    rows = make_rows(DataSection(seq_len=8, sampling="redraw"), 1, dataset)
    assert Counter(inputs(read(rows, 0, 8))) == Counter([bos] * 5 + list(b"".join(texts)))
    assert isinstance(make_rows(DataSection(seq_len=8, sampling="pack"), 1, dataset), PackedRows)


def test_tokens_in_front_of_the_first_mark_are_a_document_too(tmp_path):
    bos = ByteTokenizer().bos
    assert golf_shards(tmp_path / "a", [*b"abc", bos, *b"defg"], "byte").split("train").document_starts().tolist() == [0, 3, 8]


def test_tokens_without_an_index_and_without_a_mark_are_refused(tmp_path):
    (tmp_path / "chars").mkdir()
    np.arange(40, dtype=np.uint16).tofile(tmp_path / "chars/train.bin")
    (tmp_path / "chars" / META).write_bytes(meta_bytes(CharTokenizer([chr(48 + i) for i in range(40)])))  # which have no mark
    for dataset in (open_dataset(str(tmp_path / "chars")), golf_shards(tmp_path / "none", list(b"abcdefgh" * 5), "byte")):
        with pytest.raises(DataError, match=r"does not record where documents begin; .*ingot data convert .* --mark ID"):
            make_rows(DataSection(seq_len=8, sampling="redraw"), 1, dataset)


def test_text_shorter_than_a_row_is_refused(tmp_path):
    dataset = golf_shards(tmp_path / "shards", [*b"abcdefgh" * 2, ByteTokenizer().bos, *b"abcdefg"], "byte")
    assert make_rows(DataSection(seq_len=23, sampling="redraw"), 1, dataset).seq_len == 23
    with pytest.raises(DataError, match=r"24 tokens but a row needs data\.seq_len \+ 1 = 25"):
        make_rows(DataSection(seq_len=24, sampling="redraw"), 1, dataset)
