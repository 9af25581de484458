import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.data.tokenizers import ByteTokenizer, CharTokenizer
from ingot.errors import DataError
from ingot.eval.bits import chosen_rows, row_batches, score


class Tokens:
    """A split in memory."""

    def __init__(self, ids):
        self.ids = np.asarray(ids, np.uint16)
        self.tokens = len(self.ids)

    def read(self, start, stop, out):
        assert 0 <= start <= stop <= self.tokens
        out[: stop - start] = self.ids[start:stop]
        return out


@st.composite
def tilings(draw):
    """A split whose tokens are their own places, a row length, a stride that fits it and a batch size."""
    tokens, seq_len = draw(st.integers(2, 300)), draw(st.integers(1, 64))
    return Tokens(np.arange(tokens)), seq_len, draw(st.integers(1, seq_len)), draw(st.integers(1, 9))


def every_target(split, seq_len, stride, size, limit=None):
    """(place of the target, its inputs up to there) for each target that is scored, in order."""
    for inputs, targets in row_batches(split, seq_len, stride, chosen_rows(split, stride, limit), size):
        assert inputs.shape == targets.shape
        assert inputs.shape[1] == seq_len
        for row, target in zip(inputs, targets, strict=True):
            for place in np.flatnonzero(target != -1):
                yield int(target[place]), row[: place + 1]


@settings(deadline=None)
@given(tilings())
def test_every_target_is_scored_once_for_any_stride(tiling):
    split, seq_len, stride, size = tiling
    assert [target for target, _ in every_target(split, seq_len, stride, size)] == list(range(1, split.tokens))


@settings(deadline=None)
@given(tilings())
def test_a_target_is_predicted_from_the_tokens_right_before_it(tiling):
    split, seq_len, stride, size = tiling
    for target, context in every_target(split, seq_len, stride, size):
        assert context.tolist() == list(range(target - len(context), target))


@settings(deadline=None)
@given(tilings())
def test_a_stride_gives_every_target_at_least_the_rest_of_the_row_as_context(tiling):
    split, seq_len, stride, size = tiling
    for target, context in every_target(split, seq_len, stride, size):
        assert len(context) >= min(target, seq_len - stride)


@settings(deadline=None)
@given(tilings(), st.integers(1, 400))
def test_a_limit_chooses_that_many_different_rows_over_the_whole_split(tiling, limit):
    split, _, stride, _ = tiling
    rows = chosen_rows(split, stride, limit)
    available = math.ceil((split.tokens - 1) / stride)
    assert len(np.unique(rows)) == len(rows) == min(limit, available)
    assert rows.min() == 0
    assert rows.max() < available
    assert np.diff(rows).max(initial=1) <= math.ceil(available / len(rows))


def test_without_a_limit_all_rows_are_read():
    assert chosen_rows(Tokens(np.arange(101)), 10, None).tolist() == list(range(10))


@pytest.mark.parametrize("ids", [[], [1]])
def test_a_split_without_targets_is_refused(ids):
    with pytest.raises(DataError, match=r"the validation split is empty; prepare the data with a larger --val-fraction"):
        chosen_rows(Tokens(ids), 10, None)


def uniform(vocab_size):
    def evaluate(inputs, targets):
        assert inputs.min() >= 0
        assert inputs.max() < vocab_size
        return float(np.count_nonzero(targets != -1)) * math.log(vocab_size)

    return evaluate


def score_of(tokenizer, documents, seq_len=16, stride=16, limit=None, size=3):
    split = Tokens(np.concatenate([tokenizer.encode_document(text) for text in documents]))
    rows = chosen_rows(split, stride, limit)
    return split, score(split, tokenizer.token_bytes(), seq_len, stride, rows, size, uniform(tokenizer.vocab_size))


TEXTS = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=60), min_size=2, max_size=4).filter(
    lambda texts: len("".join(texts)) > 1
)


@settings(deadline=None, max_examples=50)
@given(TEXTS, st.integers(1, 16))
def test_bytes_of_the_byte_tokenizer_are_those_of_the_text(texts, stride):
    _, found = score_of(ByteTokenizer(), texts, stride=stride)
    size = len("".join(texts).encode())
    assert found.bytes == size  # all of it: the first target stands behind the start of the first document
    assert found.tokens == size + len(texts) - 1  # the start of each other document is predicted too


@settings(deadline=None, max_examples=50)
@given(TEXTS, st.integers(1, 16))
def test_bytes_of_the_char_tokenizer_are_those_of_the_text_behind_its_first_character(texts, stride):
    text = "".join(texts)
    _, found = score_of(CharTokenizer(text), texts, stride=stride)
    assert found.bytes == len(text[1:].encode())
    assert found.tokens == len(text) - 1


@pytest.mark.parametrize("stride", [1, 5, 16])
def test_a_uniform_predictor_needs_ln_v_per_token(stride):
    _, found = score_of(ByteTokenizer(), ["all the world's a stage", "and all the men"], stride=stride)
    assert found.loss == pytest.approx(math.log(260))


def test_a_uniform_predictor_pays_for_characters_by_their_bytes():
    _, found = score_of(CharTokenizer("aä€😀"), ["aä€😀aä€😀"])
    assert found.bytes == 2 + 3 + 4 + 1 + 2 + 3 + 4
    assert found.bits_per_byte == pytest.approx(7 * math.log2(4) / 19)


def test_the_start_of_a_document_costs_bits_and_stands_for_no_bytes():
    _, one = score_of(ByteTokenizer(), ["abcdef"])
    _, two = score_of(ByteTokenizer(), ["abc", "def"])
    assert one.bytes == two.bytes == 6
    assert two.nats - one.nats == pytest.approx(math.log(260))
    assert two.bits_per_byte == pytest.approx(7 * math.log2(260) / 6)


def test_a_limit_scores_those_rows_alone():
    split, found = score_of(ByteTokenizer(), ["x" * 160], limit=4)
    assert split.tokens == 161
    assert (found.tokens, found.bytes) == (64, 64)
    assert found.loss == pytest.approx(math.log(260))


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 5), st.integers(1, 16))
def test_ranks_score_together_what_one_would(world_size, stride):
    split = Tokens(ByteTokenizer().encode_document("the quality of mercy is not strained; it droppeth as the gentle rain"))
    rows = chosen_rows(split, stride, None)

    def of(part):
        return score(split, ByteTokenizer().token_bytes(), 16, stride, part, 4, uniform(260))

    parts = [of(part) for part in np.array_split(rows, world_size)]
    whole = of(rows)
    assert sum(part.nats for part in parts) == pytest.approx(whole.nats)
    assert (sum(part.tokens for part in parts), sum(part.bytes for part in parts)) == (whole.tokens, whole.bytes)
