import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hub_server import serving
from toy_tokenizers import byte_level_config, llama_config, sentencepiece_file, toy_hf, toy_sentencepiece

import ingot as package
from ingot.data.hub import connect
from ingot.data.tokenizers import open_tokenizer
from ingot.data.tokenizers.plain import byte_file
from ingot.errors import ConfigError, DataError

TOKENIZER_JSON = json.dumps(llama_config()).encode()


def write(path, contents):
    path.write_bytes(contents)
    return str(path)


# Names, files and folders


def test_byte_and_gpt2_are_names():
    assert open_tokenizer("byte").kind == "byte"
    assert open_tokenizer("gpt2").kind == "gpt2"


def test_a_model_file_is_a_sentencepiece_tokenizer(tmp_path):
    name = write(tmp_path / "my.model", sentencepiece_file())
    assert open_tokenizer(name).fingerprint() == toy_sentencepiece().fingerprint()


def test_a_json_file_is_a_hugging_face_tokenizer_whatever_its_name(tmp_path):
    name = write(tmp_path / "mine.json", TOKENIZER_JSON)
    assert open_tokenizer(name).fingerprint() == toy_hf(llama_config()).fingerprint()
    assert open_tokenizer(name, bos="</s>").bos == 2
    assert open_tokenizer(name, bos="").bos is None


def test_golfs_file_of_the_byte_tokenizer_is_the_byte_tokenizer(tmp_path):
    name = write(tmp_path / "fineweb_pure_byte_260.json", byte_file())
    assert open_tokenizer(name).fingerprint() == open_tokenizer("byte").fingerprint()
    with pytest.raises(ConfigError, match=r"pure_byte_260.json already defines how"):
        open_tokenizer(name, bos="<s>")


@pytest.mark.parametrize("change", [{"vocab_size": 257}, {"config": {"byte_offset": 1}}, {"config": {"bos_id": 2}}])
def test_a_byte_tokenizer_with_other_ids_is_refused(tmp_path, change):
    name = write(tmp_path / "other.json", json.dumps({**json.loads(byte_file()), **change}).encode())
    with pytest.raises(DataError, match=r"other\.json: a byte tokenizer must have golf's ids"):
        open_tokenizer(name)


def test_a_tokenizer_json_may_hold_golfs_word(tmp_path):
    config = llama_config()
    config["model"]["vocab"]["pure_byte"] = len(config["model"]["vocab"])
    assert open_tokenizer(write(tmp_path / "tokenizer.json", json.dumps(config).encode())).kind == "huggingface"


def test_a_home_is_found(tmp_path, monkeypatch):
    write(tmp_path / "my.model", sentencepiece_file())
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_tokenizer("~/my.model").kind == "sentencepiece"


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["tokenizer.json"], "huggingface"),
        (["tokenizer.json", "a.model", "b.model"], "huggingface"),
        (["a.model", "config.json", "vocab.json"], "sentencepiece"),
    ],
)
def test_a_folder_is_the_tokenizer_it_holds(tmp_path, names, kind):
    for name in names:
        write(tmp_path / name, sentencepiece_file() if name.endswith(".model") else TOKENIZER_JSON)
    assert open_tokenizer(str(tmp_path)).kind == kind


def test_a_folder_with_several_models_asks_for_one(tmp_path):
    for name in ("b.model", "a.model"):
        write(tmp_path / name, sentencepiece_file())
    with pytest.raises(DataError, match=r"holds several tokenizers: a.model, b.model; name one"):
        open_tokenizer(str(tmp_path))


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(DataError, match=f"no tokenizer in {tmp_path}; expected tokenizer.json, a .model"):
        open_tokenizer(str(tmp_path))


@pytest.mark.parametrize("name", ["gone/my.model", "my.model", "./data", "a/b/c", "gone/tokenizer.json", "/gone"])
def test_a_file_that_is_not_there_is_no_name_of_the_hub(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=f"no tokenizer at {name}: no such file or folder; give byte, char"):
        open_tokenizer(name)


@pytest.mark.parametrize("name", ["bpe", "GPT2", "", "two words"])
def test_a_name_that_means_nothing_is_refused_with_what_can_be_given(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path / "..")
    with pytest.raises(ConfigError, match=f"unknown tokenizer '{name}'; give byte, char, bpe:N, gpt2, a file"):
        open_tokenizer(name)


@pytest.mark.parametrize("name", ["char", "bpe:1024"])
def test_what_is_made_from_a_text_needs_that_text(name):
    with pytest.raises(ConfigError, match=f"trained on text; run: ingot data prepare PATH --tokenizer {name}"):
        open_tokenizer(name)


def test_a_file_of_another_kind_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"my.txt is not a tokenizer file"):
        open_tokenizer(write(tmp_path / "my.txt", b"text"))


def test_a_damaged_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"my.model: this is not a SentencePiece model, or it is damaged"):
        open_tokenizer(write(tmp_path / "my.model", sentencepiece_file()[:-1]))
    with pytest.raises(DataError, match=r"tokenizer.json: this is not a tokenizer.json, or it is damaged"):
        open_tokenizer(write(tmp_path / "tokenizer.json", TOKENIZER_JSON[:-1]))


def test_a_file_beyond_all_measure_is_not_read(tmp_path):
    with (tmp_path / "my.model").open("wb") as file:
        file.truncate((1 << 26) + 1)
    with pytest.raises(DataError, match=r"at most 67,108,864 bytes"):
        open_tokenizer(str(tmp_path / "my.model"))


def test_only_a_tokenizer_json_takes_another_start(tmp_path):
    for name in ("byte", "gpt2", "char", write(tmp_path / "my.model", sentencepiece_file())):
        with pytest.raises(ConfigError, match=r"bos '<s>' applies only to a tokenizer.json; .* already defines how"):
            open_tokenizer(name, bos="<s>")


# The hub: the real client, against a server of our own

CLIENT = """
import sys, time
time.sleep = lambda seconds: None  # the client waits longer and longer between its attempts
from ingot.data.tokenizers import open_tokenizer
from ingot.errors import IngotError
for name in sys.argv[1:]:
    try:
        tokenizer = open_tokenizer(name)
        print(tokenizer.kind, tokenizer.fingerprint())
    except IngotError as error:
        print(type(error).__name__, error)
"""
REPOSITORIES = {
    "org/both": {"tokenizer.json": TOKENIZER_JSON, "tokenizer.model": sentencepiece_file()},
    "org/old": {"tokenizer.model": sentencepiece_file()},
    "org/none": {"config.json": b"{}"},
    "org/damaged": {"tokenizer.json": b"<html>"},
    "short": {"tokenizer.json": json.dumps(byte_level_config()).encode()},
}


@pytest.fixture
def hub():
    with serving() as server:
        for name, files in REPOSITORIES.items():
            server.commit(name, files)
        yield server


@pytest.fixture
def ask(hub, tmp_path):
    """What a process of its own, as the client reads its settings once, says to each name."""

    def call(*names, **variables):
        given = {
            "HF_HOME": str(tmp_path / "hub"),
            "HF_ENDPOINT": hub.endpoint,
            "HF_HUB_OFFLINE": "0",
            "HF_TOKEN": "",
            **variables,
        }
        environment = {**os.environ, "PYTHONPATH": str(Path(package.__file__).parents[1]), **given}
        command = [sys.executable, "-c", CLIENT, *names]
        result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=300)
        return result.stdout.splitlines()

    return call


def test_the_hub_gives_a_tokenizer_and_a_cache_that_works_without_it(ask):
    names = ("org/both", "org/old", "hf:short")
    kinds = ("huggingface", "sentencepiece", "huggingface")
    fetched = ask(*names)
    assert [line.split()[0] for line in fetched] == list(kinds)
    assert fetched[0].split()[1] == toy_hf(llama_config()).fingerprint()
    assert ask(*names, HF_HUB_OFFLINE="1") == fetched


def test_what_the_hub_cannot_give_is_one_line_that_says_what_to_do(ask, hub):
    said = ask("org/gone", "org/none", "org/damaged", "hf:not a name")
    assert [line.split()[0] for line in said] == ["DataError"] * 4
    absent = "tokenizer org/gone, which is not a local file or folder: no access to model repository org/gone at"
    assert f"{absent} {hub.endpoint}" in said[0]
    assert "no tokenizer in org/none; expected tokenizer.json, a .model" in said[1]
    assert "org/damaged: this is not a tokenizer.json, or it is damaged" in said[2]
    assert "cannot fetch the tokenizer hf:not a name" in said[3]
    hub.gated, hub.token = True, "secret"
    (said,) = ask("org/both")
    assert "org/both at" in said and "(HTTP 403); check the name; for a private or gated repository, log in" in said


def test_a_hub_that_does_not_answer_is_one_line_that_says_what_to_do(ask, hub):
    refused = ask("org/both", HF_ENDPOINT="http://127.0.0.1:9")
    assert refused[0].startswith("DataError cannot fetch the tokenizer org/both, which is not a local file or folder: gave up on")
    assert "at http://127.0.0.1:9: " in refused[0] and "or give the path of its tokenizer.json" in refused[0]
    assert "HF_HUB_OFFLINE is set and" in ask("org/both", HF_HUB_OFFLINE="1")[0]
    hub.fail("revision/main", status=500, times=99)
    assert "gave up on" in ask("org/both")[0]


def test_a_name_is_looked_for_in_the_cache_where_the_hub_does_not_answer(ask):
    fetched = ask("org/both")
    assert ask("org/both", HF_ENDPOINT="http://127.0.0.1:9") == fetched


def test_an_address_that_takes_no_connection_is_known_without_asking_the_client():
    with socket.create_server(("127.0.0.1", 0)) as server:
        connect(f"http://127.0.0.1:{server.getsockname()[1]}")
    with pytest.raises(ConnectionError, match="refused"):
        connect("http://127.0.0.1:9")


def test_a_folder_of_that_name_is_taken_before_the_hub(ask, tmp_path):
    (tmp_path / "org/both").mkdir(parents=True)
    shutil.copy(write(tmp_path / "my.model", sentencepiece_file()), tmp_path / "org/both")
    assert ask("org/both")[0].split()[0] == "sentencepiece"
    assert ask("hf:org/both")[0].split()[0] == "huggingface"
