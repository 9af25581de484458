"""Llama in Hugging Face's layout: the same logits in transformers, and read back bit for bit."""

import json

import pytest
import torch
from portable_kit import crossed, random_model, relative_error, settings_of, tokens
from safetensors.torch import load_file, save_file

from ingot.artifact.huggingface import read_model, write_model
from ingot.backends.torch.state import load_model, model_records
from ingot.data.tokenizers import ByteTokenizer
from ingot.errors import CheckpointError, ConfigError
from ingot.model.registry import build

transformers = pytest.importorskip("transformers")
BYTE = ByteTokenizer().spec()


def check_logits(folder, settings):
    """What we wrote gives our logits in transformers, and in ourselves after it was read back."""
    model = random_model(settings)
    write_model(folder, model_records(model), settings, BYTE)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    records, read = read_model(folder)
    back = build(read).eval()
    load_model(back, {record.name: record for record in records}, str(folder))
    with torch.no_grad():
        ours = model(tokens())
        assert relative_error(ours, theirs(tokens()).logits) < 1e-5
        assert relative_error(ours, back(tokens())) < 1e-6


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_heads": 2, "qkv_bias": True},
        {"tied": False, "attention_out_bias": True, "mlp_bias": True, "activation": "gelu"},
        {"rope_scaling": "linear", "rope_factor": 2.0, "rope_base": 5000.0, "activation": "relu"},
        {"rope_scaling": "ntk", "rope_factor": 4.0, "norm_epsilon": 1e-3, "inner_width": 96, "bias": True},
    ],
)
def test_a_llama_of_ours_gives_the_same_logits_in_transformers_and_after_it_is_read_back(tmp_path, options):
    check_logits(tmp_path / "hf", settings_of("llama", **options))


@pytest.mark.long
def test_all_portable_options_crossed_give_the_same_logits_in_transformers(tmp_path):
    for number, settings in enumerate(crossed()):
        check_logits(tmp_path / str(number), settings)


@pytest.fixture
def folder(tmp_path):
    """A Llama that transformers wrote."""
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 260}
    config = transformers.LlamaConfig(**shape, num_key_value_heads=2, max_position_embeddings=48, attention_bias=True)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs"


def test_a_llama_of_transformers_gives_the_same_logits_here(folder):
    theirs = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
    records, settings = read_model(folder)
    assert (settings["kv_heads"], settings["tied"], settings["norm_epsilon"]) == (2, False, 1e-6)
    ours = build(settings).eval()
    load_model(ours, {record.name: record for record in records}, "the folder")
    with torch.no_grad():
        assert relative_error(ours(tokens()), theirs(tokens()).logits) < 1e-5


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"model_type": "mistral"}, ConfigError, r"model_type is 'mistral', but only 'gpt2' and 'llama' can be read"),
        ({"hidden_act": "gelu"}, ConfigError, r"hidden_act is 'gelu'; only silu"),
        ({"head_dim": 32}, ConfigError, r"head_dim is 32, but only 16 is supported"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
            ConfigError,
            r"rope_type is 'yarn'; only default and linear",
        ),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, CheckpointError, r"factor is 0, but must be"),
        ({"rope_parameters": [1]}, CheckpointError, r"rope_scaling is \[1\]"),
        ({"pretraining_tp": 2}, ConfigError, r"pretraining_tp is 2"),
        ({"rms_norm_eps": "small"}, CheckpointError, r"rms_norm_eps is 'small'"),
        ({"num_hidden_layers": 3}, CheckpointError, r"has no tensor layers\.2\."),
        ({"num_hidden_layers": 1}, CheckpointError, r"a tensor 'layers\.1\..*' that llama models do not have"),
        (
            {"intermediate_size": 100},
            CheckpointError,
            r"gate_proj\.weight has shape \[96, 64\], but config\.json implies \[100, 64\]",
        ),
        ({"tie_word_embeddings": True}, CheckpointError, r"has a separate output head, although config\.json ties"),
    ],
)
def test_a_config_of_another_llama_is_refused(folder, changes, error, match):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(error, match=match):
        read_model(folder)


def test_a_tied_head_that_the_file_holds_too_is_read(tmp_path):
    settings = settings_of("llama")
    write_model(tmp_path / "hf", model_records(random_model(settings)), settings, None)
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file)
    assert "lm_head.weight" not in {record.name for record in read_model(tmp_path / "hf")[0]}


def test_a_file_in_the_words_of_transformers_4_is_read(folder):
    config = json.loads((folder / "config.json").read_text())
    config.pop("rope_parameters", None)
    (folder / "config.json").write_text(
        json.dumps({**config, "rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 2}})
    )
    settings = read_model(folder)[1]
    assert (settings["rope_base"], settings["rope_scaling"], settings["rope_factor"]) == (5000.0, "linear", 2.0)


@pytest.mark.parametrize(("family", "options"), [("gpt2", {}), ("llama", {"kv_heads": 2})])
def test_mlx_lm_gives_the_same_logits(tmp_path, family, options):
    pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
    import mlx.core as mx
    from mlx_lm.utils import load_model as load_mlx

    settings = settings_of(family, **options)
    model = random_model(settings)
    write_model(tmp_path / "hf", model_records(model), settings, BYTE)
    theirs, _ = load_mlx(tmp_path / "hf")
    found = torch.tensor(theirs(mx.array(tokens().numpy())).tolist())
    with torch.no_grad():
        assert relative_error(model(tokens()), found) < 1e-4
