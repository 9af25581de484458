"""Buckets of a validation split: each has its score, and all of them make that of the split."""

import numpy as np
import pytest
from bucket_files import EOS, documents_of, write_pair

from ingot.config.loading import load_config
from ingot.data.loading.data_path import open_dataset
from ingot.data.loading.packing import PackedRows
from ingot.eval.evaluator import evaluator_of
from ingot.runtime.ranks import Ranks
from ingot.runtime.tensors import IGNORED

VAL = {"books": documents_of("b", 11), "web": documents_of("w", 23)}
TARGETS = {name: sum(len(document) - 1 for document in documents) for name, documents in VAL.items()}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scored") / "data"
    for name, documents in VAL.items():
        write_pair(folder / "val" / name / "0.bin", documents)
        write_pair(folder / "train" / name / "0.bin", documents)
    return open_dataset(str(folder), "byte")


def evaluator(dataset, sampling="pack", **given):
    values = {"data.seq_len": 16, "data.sampling": sampling, "training.max_steps": 1, "evaluation.micro_batch": 3, **given}
    return evaluator_of(load_config(python=values, environment={}).config, dataset, "val")


def byte_nats(batch):
    """A loss that says which bucket a target is from: a nat for a token after a b, two for one after a w, else none."""
    tokens, targets = batch[:, 0], batch[:, 1]
    counted = targets != IGNORED
    return float(np.sum(counted & (tokens == 4 + ord("b"))) + 2 * np.sum(counted & (tokens == 4 + ord("w"))))


@pytest.mark.parametrize("sampling", ["pack", "document"])
def test_every_target_is_scored_once_in_its_bucket(dataset, sampling):
    one = evaluator(dataset, sampling)
    score = one.score(one.rows(), byte_nats)
    assert {name: part.tokens for name, part in score.buckets.items()} == TARGETS
    assert {name: part.nats for name, part in score.buckets.items()} == {"books": 11.0, "web": 46.0}
    assert (score.tokens, score.nats) == (sum(TARGETS.values()), 57.0)
    assert score.bytes == sum(len(document) - 2 for documents in VAL.values() for document in documents)  # marks are no text
    assert score.rows == score.rows_of == one.count(None)


def test_windows_are_scored_by_bucket_too(dataset):
    one = evaluator(dataset, "shuffle")
    score = one.score(one.rows(), byte_nats)
    sizes = {name: dataset.buckets("val")[name].tokens - 1 for name in VAL}
    assert {name: part.tokens for name, part in score.buckets.items()} == sizes


@pytest.mark.parametrize("world_size", [2, 3, 7])
@pytest.mark.parametrize("limit", [None, 5])
def test_ranks_add_up_to_the_score_of_one_and_call_equally_often(dataset, world_size, limit):
    one = evaluator(dataset)
    rows, calls, sums = one.rows(limit), [], []
    dealt = [rows[share.start : share.stop] for share in Ranks(0, world_size).shares(len(rows))]
    most = max(one.calls(some) for some in dealt)
    for some in dealt:
        called = []
        sums.append(one.score(some, lambda batch, called=called: called.append(1) or byte_nats(batch), at_least=most).sums)
        calls.append(len(called))
    assert len(set(calls)) == 1
    assert one.total(np.sum(sums, axis=0).tolist()) == one.score(rows, byte_nats)


def test_a_batch_never_mixes_buckets(dataset):
    one = evaluator(dataset)
    for name, batch in one.named_batches(one.rows()):
        firsts = {chr(token - 4) for token in batch[:, 0, 0]}
        assert firsts == {name[0]}


def test_the_score_does_not_depend_on_the_seed_of_the_data(dataset):
    batches = [list(evaluator(dataset, **{"data.seed": seed}).batches(np.arange(4))) for seed in (1, 2)]
    assert all(np.array_equal(a, b) for a, b in zip(*batches, strict=True))


def test_repeated_tokens_are_not_scored_again(tmp_path):
    for split in ("train", "val"):
        write_pair(tmp_path / split / "web" / "0.bin", [[10, 11, 12, 13], [12, 13, 14, EOS]], repeats=[0, 2])
    one = evaluator(open_dataset(str(tmp_path), "byte"))
    assert one.score(one.rows(), byte_nats).tokens == 3 + 2


@pytest.mark.parametrize(("seq_len", "stride"), [(16, None), (5, None), (5, 1), (7, 3), (2, None)])
def test_windows_score_a_repeated_token_where_it_stood_first(tmp_path, seq_len, stride):
    text = [*range(10, 40), EOS]
    cut = [text[:9], text[5:16], text[14:25], text[18:]]  # of which each repeats 4, 2 and 7 tokens of the one before
    for split in ("train", "val"):
        write_pair(tmp_path / split / "web" / "0.bin", [*cut, text], repeats=[0, 4, 2, 7, 0])
    given = {"data.seq_len": seq_len, "evaluation.stride": stride, "training.tokens_per_step": seq_len}
    one = evaluator(open_dataset(str(tmp_path), "byte"), "shuffle", **given)
    found = [target for batch in one.batches(one.rows()) for target in batch[:, 1][batch[:, 1] != IGNORED].tolist()]
    assert sorted(found) == sorted([*text[1:], *text])  # the very first token is nobody's target


def test_rows_are_counted_once_for_all_evaluations(dataset, monkeypatch):
    one, asked = evaluator(dataset), []
    plain = PackedRows.available
    monkeypatch.setattr(PackedRows, "available", lambda *given: asked.append(given) or plain(*given))
    scores = [one.score(one.rows(), byte_nats) for _ in range(3)]
    assert len(asked) == len(VAL) and scores[0] == scores[2]
