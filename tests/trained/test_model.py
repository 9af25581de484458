"""A trained model that is opened: the same scores as in training, no more memory than it needs."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from ingot.backends.open import open_backend
from ingot.config.schema import Config
from ingot.data.tokenizers import ByteTokenizer
from ingot.errors import CheckpointError
from ingot.runtime.ranks import Ranks
from ingot.trained.model import open_model
from ingot.trained.weights import Weights

torch.set_num_threads(1)
CONFIG = Config(
    model={"layers": 2, "heads": 2, "width": 16},
    data={"seq_len": 16, "path": "sample:shakespeare"},
    training={"max_steps": 1, "tokens_per_step": 16, "device": "cpu"},
)


@pytest.fixture
def weights(tmp_path):
    backend = open_backend(CONFIG, ByteTokenizer().vocab_size, Ranks())
    facts = {"config": CONFIG.model_dump(mode="json"), "tokenizer": ByteTokenizer().spec(), "data_fingerprint": "of some text"}
    return Weights(tmp_path, None, {record.name: record for record in backend.weights()}, facts, CONFIG)


def test_opening_draws_no_weights(weights, monkeypatch):
    drawn = []
    plain = torch.Tensor.normal_
    monkeypatch.setattr(torch.Tensor, "normal_", lambda t, *a, **k: drawn.append(t.device.type) or plain(t, *a, **k))
    model = open_model(weights, ByteTokenizer(), "cpu")
    assert set(drawn) == {"meta"}
    assert not any(p.is_meta for p in model.backend.model.parameters())


def test_an_open_model_does_not_hold_the_file_it_came_from(weights):
    model = open_model(weights, ByteTokenizer(), "cpu")
    assert model.weights.tensors == {} and model.weights.path == weights.path


def test_progress_is_told_row_by_row(weights):
    told = []
    score = open_model(weights, ByteTokenizer(), "cpu").evaluate(rows=130, progress=lambda *now: told.append(now))
    assert told[-3:] == [(64, 130), (128, 130), (130, 130)]
    assert score.tokens == 130 * 16


def test_a_model_with_fewer_tensors_than_layers_is_refused_before_it_is_built(weights, monkeypatch):
    large = CONFIG.model_copy(update={"model": CONFIG.model.model_copy(update={"layers": 10**9})})
    monkeypatch.setattr(nn, "ModuleList", None)
    with pytest.raises(CheckpointError, match=r"has fewer tensors than model\.layers=1,000,000,000 needs"):
        open_model(replace(weights, config=large), ByteTokenizer(), "cpu")
