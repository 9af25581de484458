import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.data.tokenizers import ByteTokenizer, CharTokenizer
from ingot.errors import DataError
from ingot.eval.evaluator import Evaluator


class Tokens:
    """A split in memory."""

    def __init__(self, ids):
        self.ids = np.asarray(ids, np.uint16)
        self.tokens = len(self.ids)
        self.bytes, self.piece_bytes = 0, None

    def read(self, start, stop):
        assert 0 <= start <= stop <= self.tokens
        return self.ids[start:stop]


@st.composite
def tilings(draw):
    """A split whose tokens are their own places, a row length, a stride that fits it and a batch size."""
    tokens, seq_len = draw(st.integers(2, 300)), draw(st.integers(1, 64))
    return Tokens(np.arange(tokens)), seq_len, draw(st.integers(1, seq_len)), draw(st.integers(1, 9))


def every_target(split, seq_len, stride, size, limit=None):
    """(place of the target, its inputs up to there) for each target that is scored, in order."""
    evaluator = Evaluator(split, ByteTokenizer(), seq_len, stride, size)
    for batch in evaluator.batches(evaluator.rows(limit)):
        assert batch.shape[1:] == (2, seq_len)
        for row, target in zip(batch[:, 0], batch[:, 1], strict=True):
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


def windows_of_the_challenge(targets, length, stride):
    """(place of the target, first token of its window) by the rule of golf's records: windows begin at multiples of the stride.

    The first scores all of its targets, every other one its last `stride`.
    """
    for start in range(0, targets, stride):
        if start == 0 or start + length - stride < targets:
            first = 0 if start == 0 else start + length - stride
            yield from ((target + 1, start) for target in range(first, min(start + length, targets)))


@settings(deadline=None)
@given(st.integers(2, 300), st.integers(1, 16), st.integers(1, 5))
def test_every_target_sees_what_the_rule_of_the_challenge_lets_it_see(tokens, stride, strides):
    seq_len = stride * strides
    found = [(target, int(context[0])) for target, context in every_target(Tokens(np.arange(tokens)), seq_len, stride, 4)]
    assert found == list(windows_of_the_challenge(tokens - 1, seq_len, stride))


@pytest.mark.parametrize(("stride", "told"), [(4, 4), (16, None)])
def test_a_sliding_score_is_named_as_one(stride, told):
    assert score_of(ByteTokenizer(), ["some text", "and more of it"], stride=stride)[1].stride == told


@settings(deadline=None)
@given(tilings(), st.integers(1, 400))
def test_a_limit_chooses_that_many_different_rows_over_the_whole_split(tiling, limit):
    split, seq_len, stride, size = tiling
    rows = Evaluator(split, ByteTokenizer(), seq_len, stride, size).rows(limit)
    available = math.ceil((split.tokens - 1) / stride)
    assert len(np.unique(rows)) == len(rows) == min(limit, available)
    assert rows.min() == 0
    assert rows.max() < available
    assert np.diff(rows).max(initial=1) <= math.ceil(available / len(rows))


def test_without_a_limit_all_rows_are_read():
    assert Evaluator(Tokens(np.arange(101)), ByteTokenizer(), 10, 10, 4).rows().tolist() == list(range(10))


@pytest.mark.parametrize("ids", [[], [1]])
def test_a_split_without_targets_is_refused(ids):
    with pytest.raises(DataError, match=r"is empty; .*--val-fraction"):
        Evaluator(Tokens(ids), ByteTokenizer(), 10, 10, 4).rows()


def uniform(vocab_size):
    def evaluate(batch):
        assert batch[:, 0].min() >= 0
        assert batch[:, 0].max() < vocab_size
        return float(np.count_nonzero(batch[:, 1] != -1)) * math.log(vocab_size)

    return evaluate


def score_of(tokenizer, documents, seq_len=16, stride=16, limit=None, size=3):
    split = Tokens(np.concatenate([tokenizer.encode_document(text) for text in documents]))
    evaluator = Evaluator(split, tokenizer, seq_len, stride, size)
    return split, evaluator.score(evaluator.rows(limit), uniform(tokenizer.vocab_size))


TEXTS = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=60), min_size=2, max_size=4).filter(
    lambda texts: len("".join(texts)) > 1
)


@settings(deadline=None, max_examples=50)
@given(TEXTS, st.integers(1, 16))
def test_bytes_of_the_byte_tokenizer_are_those_of_the_text(texts, stride):
    _, found = score_of(ByteTokenizer(), texts, stride=stride)
    size = len("".join(texts).encode())
    assert found.bytes == size  # all of it: the first target stands after the start of the first document
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
    evaluator = Evaluator(split, ByteTokenizer(), 16, stride, 4)
    parts = [evaluator.score(part, uniform(260)) for part in np.array_split(evaluator.rows(), world_size)]
    whole = evaluator.score(evaluator.rows(), uniform(260))
    assert sum(part.nats for part in parts) == pytest.approx(whole.nats)
    assert (sum(part.tokens for part in parts), sum(part.bytes for part in parts)) == (whole.tokens, whole.bytes)


class Folding(ByteTokenizer):
    """Stands for half of what it was given, and less after a newline: a count that needs the token before."""

    def target_bytes(self, previous, targets):
        return np.where(np.asarray(previous) == self.encode("\n")[0], 0, self.token_bytes()[targets])


def folding_score(rule, limit=None):
    text = "one\ntwo\nthree\nfour\n" * 20
    split = Tokens(Folding().encode_document(text))
    split.bytes = 3 * len(text)
    split.piece_bytes = int(Folding().target_bytes(split.ids[:-1], split.ids[1:]).sum())
    evaluator = Evaluator(split, Folding(), 16, 16, 4, rule=rule)
    return split, evaluator.score(evaluator.rows(limit), uniform(260))


def test_bytes_of_the_whole_text_are_those_that_preparation_recorded():
    split, found = folding_score("text")
    assert found.bytes == split.bytes
    assert found.bits_per_byte == pytest.approx(found.nats / math.log(2) / split.bytes, rel=1e-15)
    assert found.other == {"val_bpb_pieces": pytest.approx(found.nats / math.log(2) / split.piece_bytes)}


def test_bytes_of_pieces_depend_on_the_token_before():
    split, found = folding_score("pieces")
    assert found.bytes == split.piece_bytes < split.tokens - 1
    assert found.other == {"val_bpb_text": pytest.approx(found.nats / math.log(2) / split.bytes)}


def test_the_text_of_a_part_is_estimated_by_the_ratio_over_the_whole():
    split, found = folding_score("text", limit=5)
    assert found.text_bytes == pytest.approx(found.piece_bytes * split.bytes / split.piece_bytes)


def test_a_tokenizer_that_loses_nothing_has_one_count():
    _, found = score_of(ByteTokenizer(), ["all the world's a stage"])
    assert found.other == {} and found.bytes == found.piece_bytes


@settings(deadline=None)
@given(st.integers(2, 300), st.integers(1, 64))
def test_whole_rows_leave_out_what_does_not_fill_one(tokens, seq_len):
    evaluator = Evaluator(Tokens(np.zeros(tokens)), ByteTokenizer(), seq_len, seq_len, 4, whole_rows=True)
    whole = (tokens - 1) // seq_len
    if whole:
        assert evaluator.score(evaluator.rows(), uniform(2)).tokens == whole * seq_len
    else:
        with pytest.raises(DataError, match="does not fill a row"):
            evaluator.rows()
