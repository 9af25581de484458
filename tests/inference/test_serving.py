"""Texts for many at once, and the probabilities of tokens that are there."""

import queue
import threading
import weakref

import numpy as np
import pytest
import torch
from small_model import write_small_model

from ingot.backends.sampling import GenerationOptions, Sampling
from ingot.errors import RunError
from ingot.inference import scoring
from ingot.inference.batching import Closed, Completion, Engine
from ingot.inference.prompt_files import Request, answer_all, plan_loads
from ingot.inference.scoring import score_rows


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_small_model(tmp_path_factory.mktemp("model") / "small.ingot")


@pytest.fixture
def engine(model):
    found = Engine(model)
    yield found
    found.close()


def ask(engine, ids, tokens=12, seed=0, **options):
    """A text and the queue of its pieces."""
    found = queue.SimpleQueue()
    temperature = options.pop("temperature", 0.9)
    text = Completion(ids, False, tokens, Sampling(temperature=temperature, seed=seed), found.put, **options)
    engine.submit(text)
    return text, found


def pieces(found):
    told = [found.get(timeout=300)]
    while told[-1].finish is None:
        told.append(found.get(timeout=300))
    return told


def test_scores_are_those_of_each_row_alone_whatever_its_company(model):
    rows = [[1, 70, 80, 90], [1, 5], list(range(4, 60)), [9, 8, 7, 6, 5]]
    firsts = [1, 1, 30, 3]
    found = score_rows(model.backend, rows, firsts, top=2)
    for row, first, scores in zip(rows, firsts, found, strict=True):
        with torch.no_grad():
            alone = model.backend.model(torch.tensor([row[:-1]]))[0].log_softmax(-1)
        expected = [float(alone[place - 1, row[place]]) for place in range(first, len(row))]
        np.testing.assert_allclose(scores.chosen, expected, atol=1e-5)
        assert scores.top_ids[:, 0].tolist() == alone[first - 1 :].argmax(-1).tolist()
        assert (scores.top[:, 0] >= scores.top[:, 1]).all()
        assert scores.total == pytest.approx(sum(expected), abs=1e-4)
        assert scores.is_greedy(scores.top_ids[:, 0]) and not scores.is_greedy(scores.top_ids[:, 1])


def test_texts_that_are_asked_for_at_once_are_what_they_are_alone(engine):
    prompts = [[1, *range(70, 70 + size)] for size in (1, 3, 2, 5, 1, 4, 2, 6)]
    alone = [pieces(ask(engine, ids, seed=seed)[1])[0].ids for seed, ids in enumerate(prompts)]
    together = [ask(engine, ids, seed=seed, temperature=0.9)[1] for seed, ids in enumerate(prompts)]
    other = ask(engine, [1, 70], temperature=0.0)[1]  # another kind, which is written in between
    assert [pieces(found)[0].ids for found in together] == alone
    assert len(pieces(other)[0].ids) == 12
    assert len({tuple(ids) for ids in alone}) > 4


def test_a_stream_says_piece_by_piece_what_is_said_at_once(engine):
    whole = pieces(ask(engine, [1, 70], tokens=30, seed=4)[1])
    parts = pieces(ask(engine, [1, 70], tokens=30, seed=4, stream=True)[1])
    assert len(whole) == 1 < len(parts)
    assert "".join(part.text for part in parts) == whole[0].text
    assert [i for part in parts for i in part.ids] == whole[0].ids


def test_a_stop_ends_a_text_before_it_and_is_never_shown_in_part(engine):
    text = pieces(ask(engine, [1, 70], tokens=40, seed=4)[1])[0].text
    stop = text[10:13]
    cut = text[: text.find(stop)]
    for stream in (False, True):
        told = pieces(ask(engine, [1, 70], tokens=40, seed=4, stop=("never there", stop), stream=stream)[1])
        assert ("".join(part.text for part in told), told[-1].finish) == (cut, "stop")


def test_a_stop_in_the_echoed_prompt_is_none(engine):
    plain, told = (pieces(ask(engine, [1, 70, 71], tokens=4, echo=True, stop=stop)[1]) for stop in ((), ("BC",)))
    assert told[0].text.startswith("BC")
    assert [(part.text, part.finish) for part in told] == [(part.text, part.finish) for part in plain]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_after_an_echoed_prompt_is_one(engine, model, stream):
    prompt = [1, *range(70, 90)]
    text = pieces(ask(engine, prompt, tokens=40, seed=4)[1])[0].text
    told = pieces(ask(engine, prompt, tokens=40, seed=4, echo=True, stop=(text[10:13],), stream=stream)[1])
    cut = text[: text.find(text[10:13])]
    assert ("".join(part.text for part in told), told[-1].finish) == (model.tokenizer.decode(prompt) + cut, "stop")


def test_scores_of_what_is_written_come_in_a_stream_too(engine, model):
    whole = pieces(ask(engine, [1, 70, 71], tokens=20, seed=2, logprobs=2)[1])[0]
    parts = pieces(ask(engine, [1, 70, 71], tokens=20, seed=2, logprobs=2, stream=True)[1])
    [expected] = score_rows(model.backend, [[1, 70, 71, *whole.ids]], [3])
    np.testing.assert_allclose(whole.scores.chosen, expected.chosen, atol=1e-6)
    np.testing.assert_allclose(np.concatenate([part.scores.chosen for part in parts]), expected.chosen, atol=1e-5)


def test_a_prompt_is_scored_without_writing(engine, model):
    told = [ask(engine, [1, *range(70, 70 + size)], tokens=0, logprobs=0, echo=True)[1] for size in (2, 5)]
    for found, size in zip(told, (2, 5), strict=True):
        [piece] = pieces(found)
        assert (piece.ids, piece.finish, len(piece.scores.chosen)) == ([1, *range(70, 70 + size)], "length", size)
        assert piece.text == model.tokenizer.decode(piece.ids)


@pytest.mark.parametrize("tokens", [0, 1])  # lm-eval asks for one token, of which it reads none
def test_prompts_that_wait_are_scored_in_one_pass_and_their_scores_are_those_of_each_alone(engine, model, monkeypatch, tokens):
    rows = [[1, *range(70, 70 + size)] for size in (3, 1, 7, 2, 0)]
    asked = {"tokens": tokens, "logprobs": 1, "echo": True, "temperature": 0.0}
    alone = [pieces(ask(engine, ids, **asked)[1])[0] for ids in rows]
    passes, method = [], model.backend.score_rows
    monkeypatch.setattr(model.backend, "score_rows", lambda rows, *more: passes.append(len(rows)) or method(rows, *more))
    busy, go_on = threading.Event(), threading.Event()
    engine.submit(Completion([1], False, 1, Sampling(), lambda piece: busy.set() or go_on.wait(300)))
    assert busy.wait(300)
    together = [ask(engine, ids, **asked)[1] for ids in rows]
    go_on.set()
    for found, expected, ids in zip(map(pieces, together), alone, rows, strict=True):
        assert [(piece.text, piece.ids, piece.finish) for piece in found] == [(expected.text, expected.ids, expected.finish)]
        if len(ids) + tokens > 1:
            np.testing.assert_allclose(found[0].scores.chosen, expected.scores.chosen, atol=1e-5)
            assert (found[0].scores.top_ids[:, 0] == expected.scores.top_ids[:, 0]).all()
    assert passes == [4 + tokens]


def test_a_text_goes_on_between_the_passes_over_many_prompts(engine, monkeypatch):
    monkeypatch.setattr(scoring, "BATCH_TOKENS", 8)  # a prompt at a time
    told = queue.SimpleQueue()
    busy, go_on = threading.Event(), threading.Event()

    def put(piece):
        told.put("written")
        busy.set()
        go_on.wait(300)

    engine.submit(Completion([1, 70], False, 40, Sampling(temperature=0.9, seed=4), put, stream=True))
    assert busy.wait(300)
    for _ in range(6):
        engine.submit(
            Completion([1, 70, 71, 72, 73], False, 0, Sampling(), lambda piece: told.put("scored"), logprobs=0, echo=True)
        )
    go_on.set()
    order = []
    while order.count("scored") < 6:
        order.append(told.get(timeout=300))
    assert "written" in order[order.index("scored") :]


def test_a_text_whose_reader_has_left_is_stopped(engine, eventually):
    first = threading.Event()
    text = Completion([1, 70], False, 10**7, Sampling(temperature=0.9), lambda piece: first.set(), stream=True)
    engine.submit(text)
    assert first.wait(300) and engine.busy
    text.gone.set()
    eventually(lambda: not engine.busy)


def test_what_goes_wrong_is_told_and_the_next_text_is_written(engine, model):
    told = pieces(ask(engine, [1, 10**6])[1])  # a token that the model does not have
    assert isinstance(told[-1].error, RunError)
    assert pieces(ask(engine, [1, 70])[1])[-1].error is None


def test_texts_that_are_not_done_when_the_engine_is_closed_fail_and_so_do_later_ones(model):
    engine = Engine(model)
    kinds = [{"temperature": 0.1 * number} for number in range(1, 8)]  # four batches at once; the others wait
    asked = [ask(engine, [1, 70], tokens=10**6, stream=True, **kind)[1] for kind in kinds]
    asked[0].get(timeout=300)
    engine.close()
    asked.append(ask(engine, [1, 70])[1])
    for found in asked:
        last = pieces(found)[-1]
        assert isinstance(last.error, Closed) and found.empty()


def test_models_of_a_file_of_requests_are_open_one_at_a_time(tmp_path):
    class Model:
        def generate_batch(self, prompts, options, seeds):
            return [f"{prompt}!" for prompt in prompts]

    opened = weakref.WeakSet()

    def open_path(path, tokenizer, dtype):
        assert not opened
        opened.add(found := Model())
        return found

    names = ["one", "two", "one", "three"]
    asked = [Request(name, {"prompt": name}, name, "fp32", None, GenerationOptions()) for name in names]
    answers = answer_all(asked, plan_loads(asked, lambda name: tmp_path / name), open_path, lambda line: None)
    assert [one["completion"] for one in answers] == ["one!", "two!", "one!", "three!"]
