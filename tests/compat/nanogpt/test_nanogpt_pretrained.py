"""GPT-2's weights: from the hub, from its cache and from a folder, with transformers' own logits; and back again."""

import sys
from pathlib import Path

import pytest
import torch

from ingot.artifact.huggingface import write_model
from ingot.backends.torch.state import model_records
from ingot.compat.nanogpt.checkpoint import SIZES
from ingot.compat.nanogpt.gpt import GPT, GPTConfig
from ingot.errors import CheckpointError, ConfigError, DataError

transformers = pytest.importorskip("transformers")
constants = pytest.importorskip("huggingface_hub.constants")
sys.path.append(str(Path(__file__).parents[2] / "data"))
from hub_server import serving  # noqa: E402

torch.set_num_threads(1)

SMALL = {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 24, "vocab_size": 300}


def theirs(seed=0, **settings):
    """A GPT-2 of transformers with random weights, biases and gains included."""
    torch.manual_seed(seed)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SMALL, **settings)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model


def files(model, folder):
    model.save_pretrained(folder)
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name in ("config.json", "model.safetensors")}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with serving() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield server


@torch.no_grad()
def same_logits(model, other):
    ids = torch.randint(SMALL["vocab_size"], (2, 24), generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(model.eval()(ids, ids)[0], other(ids).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", SIZES)
def test_a_size_comes_from_the_hub_with_transformers_logits(hub, tmp_path, capsys, name):
    model = theirs(len(name))
    hub.commit(f"openai-community/{name}", files(model, tmp_path / "hf") | {"pytorch_model.bin": b"not asked for"})
    same_logits(GPT.from_pretrained(name), model)
    assert not hub.asked("GET", "pytorch_model.bin")
    assert capsys.readouterr().out.startswith(f"loading weights from pretrained gpt: {name}\nnumber of parameters: ")


def test_what_was_fetched_is_not_asked_for_again(hub, tmp_path):
    hub.commit("openai-community/gpt2", files(theirs(), tmp_path / "hf"))
    GPT.from_pretrained("gpt2")
    hub.requests.clear()
    GPT.from_pretrained("gpt2")
    assert hub.requests == []


def test_a_cache_that_knows_it_by_its_old_name_is_used(hub, tmp_path):
    from huggingface_hub import snapshot_download

    model = theirs()
    hub.commit("gpt2", files(model, tmp_path / "hf"))
    snapshot_download("gpt2")
    same_logits(GPT.from_pretrained("gpt2"), model)
    assert not hub.asked("GET", "openai-community/gpt2/revision/main")


def test_half_a_model_in_the_cache_is_completed(hub, tmp_path):
    from huggingface_hub import hf_hub_download

    model = theirs()
    hub.commit("openai-community/gpt2", files(model, tmp_path / "hf"))
    hf_hub_download("openai-community/gpt2", "config.json")
    same_logits(GPT.from_pretrained("gpt2"), model)


def test_a_hub_that_does_not_have_it_or_does_not_answer_is_one_sentence(hub, monkeypatch):
    with pytest.raises(DataError, match=r"no access to model repository openai-community/gpt2 at http://127"):
        GPT.from_pretrained("gpt2")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        DataError,
        match=r".*: HF_HUB_OFFLINE is set and the model of .* is not in the hub's cache",
    ):
        GPT.from_pretrained("gpt2-xl")


def test_a_folder_does_as_well(tmp_path, capsys):
    model = theirs()
    model.save_pretrained(tmp_path / "mine")
    loaded = GPT.from_pretrained(str(tmp_path / "mine"), {"dropout": 0.25})
    same_logits(loaded, model)
    assert loaded.config == GPTConfig(24, 300, 2, 4, 32, 0.25, True)


def test_the_tanh_form_of_the_gelu_is_kept_and_the_erf_form_too(tmp_path):
    for name in ("gelu_new", "gelu"):
        model = theirs(activation_function=name)
        model.save_pretrained(tmp_path / name)
        same_logits(GPT.from_pretrained(str(tmp_path / name)), model)


def test_back_in_a_folder_transformers_has_the_same_logits(tmp_path):
    theirs().save_pretrained(tmp_path / "a")
    model = GPT.from_pretrained(str(tmp_path / "a"))
    settings = {"family": "gpt2", "layers": 2, "heads": 4, "width": 32, "dropout": 0.0, "bias": True, "gelu": "tanh"}
    write_model(tmp_path / "b", model_records(model), settings, None)
    same_logits(model, transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "b").eval())


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("gpt3", ConfigError, r"unknown weights 'gpt3'; give gpt2, gpt2-medium, gpt2-large, gpt2-xl, or a folder"),
        ("./nowhere", ConfigError, r"unknown weights './nowhere'; give gpt2, .*, or a folder with config.json"),
        ("{tmp}", ConfigError, r"unknown weights '/.*'; give gpt2, .*, or a folder with config.json"),
        ("{tmp}/broken", CheckpointError, r"config.json is damaged"),
    ],
)
def test_what_is_no_gpt2_is_refused(tmp_path, name, error, said):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/config.json").write_text("{")
    with pytest.raises(error, match=said):
        GPT.from_pretrained(name.format(tmp=tmp_path))


def test_only_dropout_can_be_overridden():
    with pytest.raises(ConfigError, match="from_pretrained can override only dropout, not block_size"):
        GPT.from_pretrained("gpt2", {"block_size": 8})
