"""`ingot serve` as clients know it: OpenAI's completions over HTTP from a server on this machine."""

import json
import os
import re
import signal
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from serve_client import Client
from small_model import write_small_model
from typer.testing import CliRunner
from web import Site

from ingot.cli import use
from ingot.cli.main import app
from ingot.errors import ConfigError


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "small.ingot"
    return path, write_small_model(path)


@pytest.fixture(scope="module")
def client(file):
    pytest.importorskip("uvicorn", reason="the extra serve is not installed")
    pytest.importorskip("fastapi", reason="the extra serve is not installed")
    found = Client(file[1])
    yield found
    found.close()


def test_models_are_listed(client):
    status, told = client.ask(path="/v1/models")
    assert (status, [model["id"] for model in told["data"]]) == (200, ["small"])
    assert client.ask(path="/v1/models/small")[1]["object"] == "model"
    assert client.ask(path="/v1/models/other")[0] == 404


def test_a_completion_is_the_text_that_the_model_writes_with_that_seed(client, file):
    model = file[1]
    status, told = client.ask({"model": "small", "prompt": "abc", "max_tokens": 20, "temperature": 0.8, "seed": 7})
    expected = model.generate("abc", tokens=20, temperature=0.8, seed=7, stop_at_end=True)
    assert (status, told["object"], "abc" + told["choices"][0]["text"]) == (200, "text_completion", expected)
    assert told["usage"]["prompt_tokens"] == 4  # with the start of a document
    assert (
        client.ask({"prompt": [1, 101, 102, 103], "max_tokens": 20, "temperature": 0.8, "seed": 7})[1]["choices"]
        == told["choices"]
    )


def test_several_prompts_and_several_texts_come_in_order(client):
    status, told = client.ask({"prompt": ["a", "b"], "n": 2, "max_tokens": 5, "seed": 1})
    assert (status, [choice["index"] for choice in told["choices"]]) == (200, [0, 1, 2, 3])
    again = client.ask({"prompt": "b", "max_tokens": 5, "seed": 3})[1]["choices"][0]["text"]
    assert told["choices"][2]["text"] == again
    assert told["usage"]["prompt_tokens"] == 4


def test_a_stream_adds_up_to_the_whole(client):
    body = {"prompt": "abc", "max_tokens": 30, "seed": 5}
    whole = client.ask(body)[1]["choices"][0]
    parts = client.stream(**body, stream_options={"include_usage": True})
    assert "".join(part["choices"][0]["text"] for part in parts[:-1]) == whole["text"]
    assert parts[-2]["choices"][0]["finish_reason"] == whole["finish_reason"] == "length"
    assert parts[-1]["usage"]["completion_tokens"] == 30 and parts[-1]["choices"] == []


def test_a_prompt_is_scored_token_by_token(client):
    told = client.ask({"prompt": [1, 70, 71, 72], "max_tokens": 0, "echo": True, "logprobs": 2})[1]["choices"][0]
    scores = told["logprobs"]
    assert (told["text"], scores["tokens"]) == ("BCD", ["<|token 1|>", "B", "C", "D"])
    assert scores["token_logprobs"][0] is None and all(value < 0 for value in scores["token_logprobs"][1:])
    assert scores["text_offset"] == [0, 0, 1, 2]
    assert all(
        len(top) == 2 and max(top.values()) >= value
        for top, value in zip(scores["top_logprobs"][1:], scores["token_logprobs"][1:], strict=True)
    )
    longer = client.ask({"prompt": [1, 70, 71, 72], "max_tokens": 1, "echo": True, "logprobs": 2})[1]["choices"][0]["logprobs"]
    assert longer["token_logprobs"][1:4] == pytest.approx(scores["token_logprobs"][1:], abs=1e-5) and len(longer["tokens"]) == 5


def test_of_a_text_without_echo_of_which_nothing_is_written_no_token_is_told(client):
    told = client.ask({"prompt": "abcd", "max_tokens": 0, "logprobs": 1})[1]["choices"][0]
    assert (told["text"], told["finish_reason"]) == ("", "length")
    assert told["logprobs"] == {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def test_parts_of_characters_have_names_of_their_own(client):
    told = client.ask({"prompt": "ä", "max_tokens": 0, "echo": True, "logprobs": 0})[1]["choices"][0]
    assert (told["text"], told["logprobs"]["tokens"][1:]) == ("ä", ["bytes:\\xc3", "bytes:\\xa4"])
    assert told["logprobs"]["top_logprobs"] is None


def test_every_token_says_where_in_the_text_it_begins(client):
    told = client.ask({"prompt": "日ä👩y", "max_tokens": 0, "echo": True, "logprobs": 0})[1]["choices"][0]
    assert told["logprobs"]["text_offset"] == [0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 3]
    broken = client.ask({"prompt": [1, 4 + 0xE6, 70, 71], "max_tokens": 0, "echo": True, "logprobs": 0})[1]["choices"][0]
    assert (broken["text"], broken["logprobs"]["text_offset"]) == ("\ufffdBC", [0, 0, 1, 2])


@pytest.mark.parametrize("stop", [None, ["e", "bc", "\ufffdxyz"]])
@pytest.mark.parametrize("seed", range(3))
def test_a_stream_says_the_same_places_as_the_whole(client, seed, stop):
    body = {"prompt": "日本x👩y", "max_tokens": 45, "logprobs": 0, "temperature": 2, "seed": seed, "stop": stop}
    body["echo"] = bool(seed)
    whole = client.ask(body)[1]["choices"][0]
    parts = [part["choices"][0]["logprobs"] for part in client.stream(**body)]
    assert [place for part in parts for place in part["text_offset"]] == whole["logprobs"]["text_offset"]
    for token, place in zip(whole["logprobs"]["tokens"], whole["logprobs"]["text_offset"], strict=True):
        assert token.startswith(("bytes:", "<|")) or whole["text"].startswith(token, place) or place >= len(whole["text"])


def test_eight_requests_at_once_give_what_they_give_alone(client):
    bodies = [{"prompt": "abcdefgh"[: 1 + i % 5], "max_tokens": 20, "seed": i, "temperature": 0.9} for i in range(8)]
    alone = [client.ask(body)[1]["choices"] for body in bodies]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda body: client.ask(body)[1]["choices"], bodies))
    assert together == alone


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"{", 400, None),
        ([1], 400, None),
        ({"prompt": "a", "max_tokens": 63, "logprobs": 1}, 400, "logprobs"),
        ({"prompt": "a" * 100, "max_tokens": 0}, 400, "prompt"),
        ({"prompt": [5, 260]}, 400, "prompt"),
        ({"prompt": [-1]}, 400, "prompt"),
        ({"prompt": {"a": 1}}, 400, "prompt"),
        ({"prompt": ["a", [1]]}, 400, "prompt"),
        ({"prompt": "a", "max_tokens": "7"}, 400, "max_tokens"),
        ({"prompt": "a", "max_tokens": -1}, 400, "max_tokens"),
        ({"prompt": "a", "best": 1}, 400, "best"),
        ({"prompt": "a", "best_of": 4}, 400, "best_of"),
        ({"prompt": "a", "suffix": "b"}, 400, "suffix"),
        ({"prompt": "a", "presence_penalty": 1}, 400, "presence_penalty"),
        ({"prompt": "a", "logit_bias": {"5": 1}}, 400, "logit_bias"),
        ({"prompt": "a", "temperature": -1}, 400, "temperature"),
        ({"prompt": "a", "top_p": 0}, 400, "top_p"),
        ({"prompt": "a", "n": 0}, 400, "n"),
        ({"prompt": "a", "logprobs": 21}, 400, "logprobs"),
        ({"prompt": "a", "logprobs": -1}, 400, "logprobs"),
        ({"prompt": "a", "logprobs": True}, 400, "logprobs"),
        ({"prompt": "a", "stream": 1}, 400, "stream"),
        ({"prompt": "a", "stop": [""]}, 400, "stop"),
        ({"prompt": "a", "seed": 0.5}, 400, "seed"),
        ({"prompt": "a" * 10**6}, 400, "prompt"),
        ({"prompt": "a", "\ud800": 1}, 400, "\\ud800"),
        ({"prompt": "\ud800"}, 400, "prompt"),
        ({"model": "gpt-4", "prompt": "a"}, 404, "model"),
    ],
)
def test_a_bad_request_gets_openai_s_error_with_the_field(client, body, status, param):
    code, told = client.ask(body)
    assert (code, told["error"]["type"], told["error"]["param"]) == (status, "invalid_request_error", param)
    assert (param or "JSON") in told["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": "a" * 257}, "stop"),
        ({"stop": ["a", "b" * 257]}, "stop"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": ["a"] * 65, "n": 2}, "prompt"),
    ],
)
def test_a_request_that_would_starve_others_is_refused(client, body, param):
    code, told = client.ask({"prompt": "a", "max_tokens": 1, **body})
    assert (code, told["error"]["param"]) == (400, param)
    allowed = {"stop": ["a" * 256] * 4, "prompt": ["a"] * 64, "n": 2}
    assert client.ask({"max_tokens": 1, **allowed})[0] == 200


def test_what_is_not_there_is_an_error_of_the_same_kind(client):
    assert client.ask({"messages": []}, "/v1/chat/completions")[1]["error"]["message"].startswith("this is a base model")
    assert client.ask(path="/v1/nothing")[0] == 404
    assert client.ask(path="/v1/completions")[0] == 405
    for origin in ("http://evil.example", "http://localhost.evil.example", f"{client.address}.evil.example", "null"):
        assert client.ask({"prompt": "a"}, origin=origin)[0] == 403
    assert client.ask(b"x" * (1 << 24) + b"x")[0] == 413


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example"])
def test_a_name_of_others_that_leads_to_this_machine_does_not_let_their_pages_ask(client, host):
    told = client.ask({"prompt": "a"}, origin=f"http://{host}", host=host)
    assert told[0] == 421 and f"the host '{host}' is not this machine" in told[1]["error"]["message"]
    assert client.ask(path="/v1/models", host=f"{host}:8765")[0] == 421  # browsers name no origin of the same page
    assert client.ask({"prompt": "a"}, origin=client.address)[0] == 200


def test_fields_whose_values_ask_for_nothing_are_taken(client):
    nothing = {"logprobs": None, "suffix": "", "presence_penalty": 0, "logit_bias": {}, "best_of": 1, "user": "me"}
    assert client.ask({"prompt": "a", "max_tokens": 1, **nothing})[1]["choices"][0]["logprobs"] is None


def test_a_completion_goes_beyond_the_context_as_that_of_ingot_generate(client, file):
    status, told = client.ask({"prompt": "abc", "max_tokens": 100, "seed": 7})
    expected = file[1].generate("abc", tokens=100, temperature=1.0, seed=7, stop_at_end=True)
    assert (status, "abc" + told["choices"][0]["text"]) == (200, expected)


def test_clients_that_left_while_they_waited_are_not_written_for(file, monkeypatch):
    from ingot.backends.sampling import Sampling
    from ingot.inference.batching import Completion, Engine

    asked, generate = [], file[1].backend.generate
    monkeypatch.setattr(file[1].backend, "generate", lambda rows, how: asked.append(len(rows)) or generate(rows, how))
    engine, chunks = Engine(file[1]), []
    left = Completion([1], True, 5, Sampling(seed=1), chunks.append)
    left.gone.set()
    stays = Completion([1], True, 5, Sampling(seed=1), lambda chunk: answered.set())
    answered = threading.Event()
    engine.submit(left)
    engine.submit(stays)
    assert answered.wait(300) and chunks == []
    engine.close()
    assert asked == [1]


def test_a_shutdown_does_not_wait_for_a_request_that_is_being_read(file, monkeypatch, eventually):
    pytest.importorskip("fastapi", reason="the extra serve is not installed")
    reading, over, ended = threading.Event(), threading.Event(), []

    def read(*args):
        reading.set()
        ended.append(over.wait(300))

    monkeypatch.setattr("ingot.serve.app.read_request", read)
    client = Client(file[1])
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.ask, {"prompt": "a"})
        assert reading.wait(300)
        client.close()  # returns while the request is still being read
        assert not ended
        over.set()
        answer.exception()


@pytest.mark.parametrize("host", ["localhost", "localhost:8765", "127.0.0.2:80", "[::1]", "[::1]:8765"])
def test_every_name_of_this_machine_may_be_asked(client, host):
    assert client.ask(path="/v1/models", host=host)[0] == 200


@pytest.mark.parametrize("stream", [True, False])
def test_what_a_client_that_left_had_asked_for_is_stopped(file, eventually, stream, monkeypatch):
    pytest.importorskip("fastapi", reason="the extra serve is not installed")
    monkeypatch.setattr(type(file[1]), "context", 10**7)  # a text that would not end, by chance neither
    monkeypatch.setattr(type(file[1]), "ends", set())
    client = Client(file[1])
    try:
        body = json.dumps({"prompt": "a", "max_tokens": 10**6, "stream": stream}).encode()
        with socket.create_connection(("127.0.0.1", client.socket.getsockname()[1])) as there:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
            there.sendall(head.encode() + body)
            eventually(lambda: client.app.state.engine.busy)
        eventually(lambda: not client.app.state.engine.busy)
    finally:
        client.close()


def test_a_client_that_leaves_in_the_middle_of_its_request_is_nothing_to_tell(file, eventually, capsys):
    pytest.importorskip("fastapi", reason="the extra serve is not installed")
    client = Client(file[1])
    try:
        with socket.create_connection(("127.0.0.1", client.socket.getsockname()[1])) as there:
            there.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{"pro')
            eventually(lambda: client.server.server_state.tasks)
        eventually(lambda: not client.server.server_state.tasks)
        assert client.ask({"prompt": "a", "max_tokens": 1})[0] == 200
    finally:
        client.close()
    assert capsys.readouterr().err == ""


def test_ctrl_c_ends_the_server_and_tells_all_who_wait(ingot, tmp_path, eventually):
    pytest.importorskip("fastapi", reason="the extra serve is not installed")
    write_small_model(tmp_path / "small.ingot", context=4096)
    server = ingot.start("serve", tmp_path / "small.ingot", "--port", 0, "--device", "cpu")
    eventually(lambda: "Ctrl-C" in server.stdout)
    site = Site(re.search(r"http://[\d.:]+", server.stdout)[0])
    body = {"prompt": ["a", "b", "c", "d"], "n": 2, "max_tokens": 4000, "temperature": 2}
    with ThreadPoolExecutor(1) as pool:
        whole = pool.submit(site.ask, "/v1/completions", body)
        with site.open("/v1/completions", {**body, "n": 32, "stream": True}) as stream:
            stream.readline()  # of those of its texts for which there is room beside the other's
            server.signal(signal.SIGINT)
            last = [line for line in stream if line.strip()][-1]
        status, told = whole.result()
    assert (server.end(), server.stderr) == (0, "ended\n")
    assert status == 409 and "the model was closed" in told["error"]["message"]
    assert json.loads(last.removeprefix(b"data: ")) == told


def test_with_a_token_only_who_knows_it_is_answered(file):
    pytest.importorskip("fastapi", reason="the extra serve is not installed")
    client = Client(file[1], token="secret")
    try:
        assert client.ask(path="/v1/models")[0] == 401
        assert client.ask({"prompt": "a"}, authorization="Bearer wrong")[1]["error"]["code"] == "invalid_api_key"
        assert client.ask(path="/v1/models", authorization="Bearer secret")[0] == 200
    finally:
        client.close()


def test_a_token_may_have_any_letters(file):
    pytest.importorskip("fastapi", reason="the extra serve is not installed")
    client = Client(file[1], token="schlüssel-鍵")
    try:
        sent = "Bearer schlüssel-鍵".encode().decode("latin-1")  # as a header carries it
        assert client.ask(path="/v1/models", authorization=sent)[0] == 200
        assert client.ask(path="/v1/models", authorization="Bearer schl\xfcssel-")[0] == 401
    finally:
        client.close()


def call(*words):
    return CliRunner().invoke(app, ["serve", *map(str, words)]).exception


def test_without_the_packages_it_is_said_what_to_install(file, monkeypatch):
    for name in ("uvicorn", "ingot.serve.app"):
        monkeypatch.setitem(sys.modules, name, None)
    error = call(file[0])
    assert isinstance(error, ConfigError) and "pip install 'ingot-lm[serve]'" in str(error)


def test_an_address_that_others_reach_needs_a_token_and_one_that_is_taken_is_told(file, monkeypatch):
    pytest.importorskip("fastapi", reason="the extra serve is not installed")
    monkeypatch.delenv("INGOT_SERVE_TOKEN", raising=False)
    assert "can be reached from other machines; give a --token" in str(call(file[0], "--host", "0.0.0.0"))
    from ingot.serve.app import listen

    with listen("127.0.0.1", 0) as taken:  # by another of these, whose model is still being loaded
        port = taken.getsockname()[1]
        assert f"cannot listen on 127.0.0.1:{port}: " in str(call(file[0], "--port", port))


def test_a_name_that_is_not_utf_8_becomes_one_that_can_be_sent(tmp_path):
    odd = os.fsdecode(b"a\xff")
    assert use._served_name(tmp_path / odd, None) == use._served_name(tmp_path, odd) == "a\\udcff"
    assert use._served_name(tmp_path / "run" / "checkpoints" / "step-1", None) == "run"
