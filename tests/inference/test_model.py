"""A trained model that is opened: the same scores as in training, no more memory than it needs."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from ingot.backends.open import open_backend
from ingot.backends.sampling import GenerationOptions
from ingot.config.schema import FAMILIES, Config
from ingot.data.loading.data_path import open_dataset
from ingot.data.tokenizers import ByteTokenizer
from ingot.errors import CheckpointError, ConfigError, DataError
from ingot.inference.model import Weights, open_model
from ingot.runtime.ranks import Ranks

torch.set_num_threads(1)
CONFIG = Config(
    model={"layers": 2, "heads": 2, "width": 16},
    data={"seq_len": 16, "path": "sample:shakespeare"},
    training={"max_steps": 1, "tokens_per_step": 16, "device": "cpu"},
)


@pytest.fixture
def weights(tmp_path):
    backend = open_backend(CONFIG, ByteTokenizer().vocab_size, Ranks())
    facts = {"config": CONFIG.model_dump(mode="json"), "tokenizer": ByteTokenizer().spec()}
    facts["data_fingerprint"] = open_dataset("sample:shakespeare", "byte").fingerprint
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


def test_a_model_of_another_split_of_the_sample_is_not_scored_on_what_it_has_read_unless_asked(weights):
    older = replace(weights, facts={**weights.facts, "data_fingerprint": "of an older split"})
    model = open_model(older, ByteTokenizer(), "cpu")
    with pytest.raises(DataError, match="another version of sample:shakespeare"):
        model.evaluate(rows=2)
    assert model.evaluate("sample:shakespeare", rows=2).rows == 2


def test_a_model_with_fewer_tensors_than_layers_is_refused_before_it_is_built(weights, monkeypatch):
    large = CONFIG.model_copy(update={"model": CONFIG.model.model_copy(update={"layers": 10**9})})
    monkeypatch.setattr(nn, "ModuleList", None)
    with pytest.raises(CheckpointError, match=r"has fewer tensors than model\.layers=1,000,000,000 needs"):
        open_model(replace(weights, config=large), ByteTokenizer(), "cpu")


@pytest.mark.parametrize("family", ["llama", "golf", "frontier"])
def test_rows_may_be_longer_than_in_training_where_positions_are_turns(tmp_path, family):
    config = CONFIG.model_copy(update={"model": FAMILIES[family](family=family, layers=2, heads=4, width=32)})
    backend = open_backend(config, ByteTokenizer().vocab_size, Ranks())
    tensors = {record.name: record for record in backend.weights()}
    facts = {"config": config.model_dump(mode="json"), "tokenizer": ByteTokenizer().spec()}
    facts["data_fingerprint"] = open_dataset("sample:shakespeare", "byte").fingerprint
    model = open_model(Weights(tmp_path, None, tensors, facts, config), ByteTokenizer(), "cpu")
    wide = config.model_copy(update={"data": config.data.model_copy(update={"seq_len": 48})})
    expected = open_model(Weights(tmp_path, None, tensors, facts, wide), ByteTokenizer(), "cpu").evaluate(rows=4)
    written = model.generate("To be", tokens=20, temperature=0.0)
    assert model.evaluate(rows=4, seq_len=48).nats == pytest.approx(expected.nats, abs=1e-6)
    assert [check for check in model.self_test(seq_len=48) if not check.passed] == []
    assert model.generate("To be", tokens=20, temperature=0.0) == written  # which sees as much as before


def test_rows_are_not_longer_than_there_are_learnt_positions(model):
    with pytest.raises(ConfigError, match="row lengths from 1 to 16 tokens, not 17"):
        model.evaluate(rows=4, seq_len=17)


PROMPTS = ["", "Speak, ", "I", "What say you? "]


@pytest.fixture
def model(weights):
    return open_model(weights, ByteTokenizer(), "cpu")


def test_texts_of_a_batch_are_those_of_single_prompts_with_the_seed_plus_their_number(model):
    options = GenerationOptions(max_new_tokens=12, temperature=1.0, seed=5, stop_at_end=False)
    texts = model.generate_batch(PROMPTS, options)
    assert len(set(texts)) == len(PROMPTS)
    assert texts == [model.generate_batch([p], replace(options, seed=5 + i))[0] for i, p in enumerate(PROMPTS)]
    assert texts == ["".join(model.stream(p, tokens=12, temperature=1.0, seed=5 + i)) for i, p in enumerate(PROMPTS)]


def test_a_stream_of_a_batch_has_the_pieces_of_its_texts(model):
    options = GenerationOptions(max_new_tokens=12, temperature=1.0, seed=5)
    pieces = list(model.stream_batch(PROMPTS, options))
    assert ["".join(piece for row, piece in pieces if row == i) for i in range(4)] == model.generate_batch(PROMPTS, options)


def test_a_text_ends_at_the_end_mark_while_the_others_go_on(model, monkeypatch):
    end = ByteTokenizer().bos
    rows = [[97, 97, 97], [98, end, 98], [99, 99, 99]]
    monkeypatch.setattr(model.backend, "generate", lambda prompts, sampling: iter(rows))
    assert model.generate_batch(["a", "b", "c"], GenerationOptions(max_new_tokens=3)) == [
        ByteTokenizer().decode([97, 98, 99]),
        ByteTokenizer().decode([97]),
        ByteTokenizer().decode([97, 98, 99]),
    ]


def test_nothing_is_computed_after_all_texts_have_ended(model, monkeypatch):
    asked = []

    def rows(prompts, sampling):
        for row in ([97, 97], [2, 2], [97, 97]):
            asked.append(row)
            yield row

    monkeypatch.setattr(ByteTokenizer, "bos", 2)
    monkeypatch.setattr(model.backend, "generate", rows)
    model.generate_batch(["a", "b"], GenerationOptions(max_new_tokens=3))
    assert len(asked) == 2


def test_a_batch_that_the_memory_does_not_hold_is_written_in_parts(model, monkeypatch):
    options = GenerationOptions(max_new_tokens=12, temperature=1.0, seed=5, return_full_text=True)
    expected, plain, sizes = model.generate_batch(PROMPTS, options), model.backend.generate, []

    def at_most_one(prompts, sampling):
        sizes.append(len(prompts))
        if len(prompts) > 1:
            raise MemoryError
        return plain(prompts, sampling)

    monkeypatch.setattr(model.backend, "generate", at_most_one)
    assert model.generate_batch(PROMPTS, options) == expected
    assert sizes == [4, 2, 1, 1, 1, 1]
    assert [text.startswith(prompt) for text, prompt in zip(expected, PROMPTS, strict=True)] == [True] * 4


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "float32"])
def test_a_model_writes_with_weights_of_another_number_format(weights, dtype):
    model = open_model(weights, ByteTokenizer(), "cpu", dtype)
    formats = {str(p.dtype) for p in model.backend.model.parameters()}
    assert formats == {{"bf16": "torch.bfloat16", "fp16": "torch.float16", "float32": "torch.float32"}[dtype]}
    assert len(model.generate_batch(PROMPTS, GenerationOptions(max_new_tokens=4, greedy=True))) == 4


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"temperature": float("nan")}, "temperature must be a number of 0 or more, not nan"),
        ({"temperature": float("inf")}, "temperature must be a number of 0 or more, not inf"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty must be a number above 0, not nan"),
        ({"tokens": 1.5}, "tokens must be a whole number from 0 to 100,000,000, not 1.5"),
        ({"tokens": -1}, "tokens must be a whole number from 0"),
        ({"seed": 2**70}, "seed must be a whole number from 0 to 2"),
        ({"top_k": -1}, "top_k must be a whole number of 0 or more, or null, not -1"),
        ({"top_p": 0}, "top_p must be a number above 0 and at most 1, or null, not 0"),
    ],
)
def test_a_setting_that_cannot_be_used_is_told_at_once(weights, settings, said):
    model = open_model(weights, ByteTokenizer(), "cpu")
    with pytest.raises(ConfigError, match=said):
        model.stream("hi", **settings)


def test_none_is_a_setting_left_out(weights):
    model = open_model(weights, ByteTokenizer(), "cpu")
    assert model.generate("hi", tokens=5, top_k=None, top_p=None) == model.generate("hi", tokens=5)
    assert model.generate("hi", tokens=0) == "hi"
    assert len({model.generate("hi", tokens=12, temperature=2, seed=None) for _ in range(3)}) > 1


def test_a_number_format_that_is_not_known_is_told(weights):
    with pytest.raises(ConfigError, match="unknown dtype int3"):
        open_model(weights, ByteTokenizer(), "cpu", dtype="int3")
