"""`ingot export --format huggingface`: the folder of any family, its model card, and the upload."""

import json
import sys
from pathlib import Path

import pytest
from small_model import write_small_model
from typer.testing import CliRunner

from ingot.cli.main import app
from ingot.errors import ConfigError, DataError

sys.path.append(str(Path(__file__).parents[1] / "data"))
from hub_server import serving

CODE = {"config.json", "model.safetensors", "modeling_ingot.py", "README.md", "tokenizer.json", "tokenizer_config.json"}
SIZES = {"layers": 1, "heads": 2, "kv_heads": 1, "width": 32}


@pytest.fixture
def call():
    return lambda *words: CliRunner().invoke(app, ["export", *(str(word) for word in words), "--format", "huggingface"])


@pytest.fixture
def golf(tmp_path):
    write_small_model(tmp_path / "golf.ingot", family="golf", **SIZES)
    return tmp_path / "golf.ingot"


@pytest.fixture
def hub(monkeypatch):
    with serving() as server:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.endpoint)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "secret")
        server.token = "secret"
        yield server


def test_a_family_that_transformers_does_not_know_is_exported_with_its_code(call, golf, tmp_path):
    told = call(golf, "-o", tmp_path / "out", "--json")
    assert told.exit_code == 0, told.exception
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == CODE | {"ingot-tokenizer.json"}
    assert json.loads(told.stdout)["bytes"] == sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    result = CliRunner().invoke(app, ["import", str(tmp_path / "out"), "-o", str(tmp_path / "back")])
    assert "this folder was written for transformers" in str(result.exception)


@pytest.mark.parametrize(("family", "code"), [("golf", True), ("llama", False)])
def test_the_model_card_says_what_the_model_is_and_how_to_load_it(call, tmp_path, family, code):
    write_small_model(tmp_path / "model.ingot", family=family, **SIZES)
    assert call(tmp_path / "model.ingot", "-o", tmp_path / "out").exit_code == 0
    card = (tmp_path / "out/README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- ingot\n")
    assert f'from_pretrained("out"{", trust_remote_code=True" if code else ""})' in card
    assert "model:\n  layers: 1" in card and "ingot export model.ingot --format huggingface" in card
    assert str(tmp_path) not in card


def test_a_card_that_a_user_wrote_is_kept_and_one_of_ours_is_replaced(call, golf, tmp_path):
    card = tmp_path / "out/README.md"
    card.parent.mkdir()
    card.write_text("of the user")
    assert call(golf, "-o", tmp_path / "out", "--force").exit_code == 0
    assert card.read_text() == "of the user"
    card.unlink()
    assert call(golf, "-o", tmp_path / "out", "--force").exit_code == 0
    written = card.read_text()
    card.write_text(written + "more")
    assert call(golf, "-o", tmp_path / "out", "--force").exit_code == 0
    assert card.read_text() == written


def test_push_uploads_the_folder_and_needs_no_output(call, golf, hub, tmp_path):
    told = call(golf, "--push", "me/golf", "--json")
    assert told.exit_code == 0, told.exception
    assert json.loads(told.stdout)["pushed"] == f"{hub.endpoint}/me/golf"
    files = hub.commits["me/golf"][hub.heads["me/golf"]]
    assert files.keys() == CODE | {"ingot-tokenizer.json"}
    assert b'from_pretrained("me/golf", trust_remote_code=True)' in files["README.md"]
    (tmp_path / "out").mkdir()
    (tmp_path / "out/notes").write_text("of the user")
    assert call(golf, "--push", "me/golf", "-o", tmp_path / "out", "--force").exit_code == 0
    assert "notes" not in hub.commits["me/golf"][hub.heads["me/golf"]]


def test_push_uploads_neither_a_folder_above_the_limit_nor_the_code_of_another_model(call, golf, hub, tmp_path):
    assert call(golf, "--push", "me/large", "-o", tmp_path / "out", "--limit", 5).exit_code == 1
    assert "me/large" not in hub.commits
    write_small_model(tmp_path / "native.ingot", family="llama", **SIZES)
    assert call(tmp_path / "native.ingot", "--push", "me/native", "-o", tmp_path / "out", "--force").exit_code == 0
    assert "modeling_ingot.py" not in hub.commits["me/native"][hub.heads["me/native"]]


def test_push_without_a_token_a_whole_name_or_access_is_refused(call, golf, hub, monkeypatch, tmp_path):
    for words, match in ((["--push", "golf"], "expected ORG/NAME"), (["--push", "a/b", "--format", "gguf"], None)):
        result = CliRunner().invoke(app, ["export", str(golf), "--format", "huggingface", *words])
        assert isinstance(result.exception, ConfigError)
        assert (match or "--push needs --format huggingface") in str(result.exception)
    hub.token = "another"
    result = call(golf, "--push", "me/golf")
    assert isinstance(result.exception, DataError) and "no access to model repository me/golf" in str(result.exception)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    result = call(golf, "--push", "me/golf", "-o", tmp_path / "out")
    assert isinstance(result.exception, ConfigError) and "set HF_TOKEN or log in" in str(result.exception)
    assert not (tmp_path / "out").exists()
