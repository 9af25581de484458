"""OpenAI's own package talks to `ingot serve`: models, texts, streams and log-probabilities, where it is installed."""

import pytest
from serve_client import Client
from small_model import write_small_model

openai = pytest.importorskip("openai", reason="the package openai is not installed")
pytest.importorskip("fastapi", reason="the extra serve is not installed")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_small_model(tmp_path_factory.mktemp("model") / "small.ingot")


@pytest.fixture(scope="module")
def client(model):
    server = Client(model, token="secret")
    yield openai.OpenAI(base_url=f"{server.address}/v1", api_key="secret", max_retries=0)
    server.close()


def test_it_lists_the_models(client):
    assert [one.id for one in client.models.list()] == ["small"]
    assert client.models.retrieve("small").object == "model"


def test_it_gets_the_text_that_the_model_writes(client, model):
    told = client.completions.create(model="small", prompt="abc", max_tokens=20, temperature=0.8, seed=7)
    assert "abc" + told.choices[0].text == model.generate("abc", tokens=20, temperature=0.8, seed=7, stop_at_end=True)
    assert (told.usage.prompt_tokens, told.object) == (4, "text_completion")


def test_its_stream_adds_up_to_the_whole(client):
    asked = {"model": "small", "prompt": "abc", "max_tokens": 20, "seed": 7}
    parts = [part.choices[0].text for part in client.completions.create(**asked, stream=True)]
    assert len(parts) > 2 and "".join(parts) == client.completions.create(**asked).choices[0].text


def test_it_gets_log_probabilities_of_a_prompt_and_of_what_is_written(client, model):
    told = client.completions.create(model="small", prompt=[1, 70, 71], max_tokens=2, echo=True, logprobs=3, temperature=0)
    scores = told.choices[0].logprobs
    [expected] = model.backend.score_rows([[1, 70, 71]], [1], 1)
    assert scores.token_logprobs[1:3] == pytest.approx(expected.chosen.tolist(), abs=1e-5)
    assert len(scores.tokens) == 5 and all(len(top) == 3 for top in scores.top_logprobs[1:])


def test_a_bad_request_is_its_own_error_with_our_sentence(client):
    with pytest.raises(openai.BadRequestError, match=r"300"):
        client.completions.create(model="small", prompt=[1, 300], max_tokens=1)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="another", prompt="a", max_tokens=1)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
