import json
import struct

import numpy as np
import pytest
import torch
from portable_kit import relative_error
from safetensors.torch import load_file, save_file

from ingot.artifact.hf_tokenizer import find_tokenizer, tokenizer_files
from ingot.artifact.huggingface import read_model, write_model
from ingot.backends.torch.state import load_model, model_records
from ingot.data.tokenizers import ByteTokenizer, GPT2Tokenizer
from ingot.data.tokenizers.hf_json import from_json
from ingot.data.tokenizers.learn_vocabulary import learn
from ingot.errors import CheckpointError, ConfigError, DataError
from ingot.model.registry import build
from ingot.runtime.tensors import TensorRecord

transformers = pytest.importorskip("transformers")

SMALL = {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 24, "vocab_size": 300}
REAL = {"n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024, "vocab_size": 50257}
OURS = {
    "family": "gpt2",
    "layers": 2,
    "heads": 4,
    "width": 32,
    "context": 24,
    "vocab_size": 300,
    "dropout": 0.0,
    "bias": True,
    "gelu": "tanh",
}
BYTE = ByteTokenizer().spec()


def theirs(shape, **settings):
    """A GPT-2 of transformers with random weights, biases and gains included."""
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, **settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def loaded(folder):
    records, settings = read_model(folder)
    model = build(settings).eval()
    load_model(model, {r.name: r for r in records}, str(folder))
    return model


def ours(**settings):
    torch.manual_seed(1)
    model = build({**OURS, **settings}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def tokens(shape, rows=2, length=None):
    return torch.randint(shape["vocab_size"], (rows, length or shape["n_positions"]), generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def same_logits(model, other, ids):
    torch.testing.assert_close(model(ids), other(ids).logits, atol=1e-4, rtol=0)


@pytest.fixture
def folder(tmp_path):
    theirs(SMALL).save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


def change(folder, **settings):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **settings}))


@pytest.mark.parametrize("gelu", ["gelu_new", "gelu"])
def test_a_model_of_transformers_gives_the_same_logits_here(tmp_path, gelu):
    model = theirs(SMALL, activation_function=gelu)
    model.save_pretrained(tmp_path)
    same_logits(loaded(tmp_path), model, tokens(SMALL))


def test_the_real_shape_gives_the_same_logits_here_and_is_written_as_it_was_read(tmp_path, monkeypatch):
    """In half precision, and filled from one draw of a million numbers: 124 million take a test too long."""
    monkeypatch.setattr(torch.nn.init, "normal_", lambda value, *args, **kwargs: value)
    monkeypatch.setattr(transformers.GPT2LMHeadModel, "_init_weights", lambda self, module: None)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**REAL)).half().eval()
    draw = torch.randn(999_983, generator=torch.Generator().manual_seed(3)).mul(0.02).half()
    for name, parameter in model.named_parameters():
        size, gain = parameter.numel(), "ln_" in name and name.endswith("weight")
        parameter.data.copy_(draw.repeat(-(-size // len(draw)))[:size].view(parameter.shape) + gain)
    model.save_pretrained(tmp_path / "a")
    records, settings = read_model(tmp_path / "a")
    assert sum(np.prod(r.shape) for r in records) == 124_439_808
    with torch.device("meta"):
        here = build(settings).eval()
    load_model(here.to_empty(device="cpu"), {r.name: r for r in records}, "the folder")
    same_logits(here, model.float(), tokens(REAL, 1, 16))
    write_model(tmp_path / "b", records, settings, None)
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    a = {name.removeprefix("transformer."): value for name, value in a.items()}
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gelu", ["tanh", "erf"])
def test_a_model_of_ours_gives_the_same_logits_in_transformers(tmp_path, gelu, bias):
    model = ours(gelu=gelu, bias=bias)
    write_model(tmp_path / "hf", model_records(model), {**OURS, "gelu": gelu, "bias": bias}, BYTE)
    other = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        assert relative_error(model(tokens(SMALL)), other(tokens(SMALL)).logits) < 1e-5


def test_weights_of_an_integer_dtype_are_refused(folder):
    tensors = load_file(folder / "model.safetensors")
    name = "transformer.h.0.attn.c_attn.weight"
    save_file({**tensors, name: tensors[name].to(torch.int8)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"attn\.c_attn\.weight has dtype I8"):
        read_model(folder)


def test_what_is_written_is_read_back_bit_for_bit(tmp_path):
    records = model_records(ours())
    write_model(tmp_path / "hf", records, OURS, BYTE)
    found, settings = read_model(tmp_path / "hf")
    assert settings == OURS
    assert {r.name: (r.shape, bytes(r.data)) for r in found} == {r.name: (r.shape, bytes(r.data)) for r in records}


def test_transformers_ends_a_text_at_the_start_of_the_next_document_and_at_the_end_mark(tmp_path):
    write_model(tmp_path / "hf", model_records(ours()), OURS, BYTE)
    other = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf").eval()
    assert other.generation_config.eos_token_id == [1, 2]
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "hf").eos_token_id in other.generation_config.eos_token_id
    for mark in (1, 2):
        with torch.no_grad():
            other.lm_head.weight[:] = 0.0
            other.transformer.ln_f.bias[:] = 1.0
            other.transformer.ln_f.weight[:] = 0.0
            other.lm_head.weight[mark] = 1.0
        written = other.generate(torch.tensor([[1, 70, 71]]), max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert written.tolist() == [[1, 70, 71, mark]]


def test_a_start_mark_that_is_the_end_mark_too_is_named_as_both(tmp_path):
    contents = json.loads(learn("bpe", ["some text for a small vocabulary"] * 5, 270))
    found = from_json(json.dumps(contents).replace("<|endoftext|>", "<s>").encode())
    assert found.eos is None
    write_model(tmp_path / "hf", model_records(ours()), OURS, found.spec())
    config, marks = (json.loads((tmp_path / "hf" / name).read_text()) for name in ("config.json", "tokenizer_config.json"))
    assert (config["bos_token_id"], config["eos_token_id"]) == (found.bos, found.bos)
    assert (marks["bos_token"], marks["eos_token"]) == ("<s>", "<s>")


def test_more_rows_than_the_tokenizer_has_stay_as_they_are(tmp_path):
    write_model(tmp_path / "hf", model_records(ours()), OURS, BYTE)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["vocab_size"] == 300
    assert find_tokenizer(tmp_path / "hf", 300).kind == "byte"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_files_are_read_as_they_are(tmp_path, dtype):
    model = theirs(SMALL).to(dtype)
    model.save_pretrained(tmp_path)
    records, settings = read_model(tmp_path)
    assert {r.dtype for r in records} == {"F16" if dtype == torch.float16 else "BF16"}
    here = build(settings).eval()
    load_model(here, {r.name: r for r in records}, "the folder")
    same_logits(here, model.float(), tokens(SMALL))


def test_half_precision_models_are_written_as_they_are(tmp_path):
    write_model(tmp_path / "hf", model_records(ours(bias=False).bfloat16()), {**OURS, "bias": False}, BYTE)
    assert {value.dtype for value in load_file(tmp_path / "hf" / "model.safetensors").values()} == {torch.bfloat16}


def test_names_without_a_prefix_and_old_buffers_are_read(folder):
    """The file of the hub's own gpt2 has names without `transformer.` and holds the causal masks."""
    file = folder / "model.safetensors"
    before, _ = read_model(folder)
    tensors = {name.removeprefix("transformer."): value for name, value in load_file(file).items()}
    for i in range(2):
        tensors[f"h.{i}.attn.bias"] = torch.ones(1, 1, 24, 24)
        tensors[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(tensors, file)
    after, _ = read_model(folder)
    assert {r.name: bytes(r.data) for r in after} == {r.name: bytes(r.data) for r in before}


def test_a_head_that_is_the_embedding_is_read(folder):
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "lm_head.weight": tensors["transformer.wte.weight"].clone()}, folder / "model.safetensors")
    assert len(read_model(folder)[0]) == 28


def test_a_model_in_parts_is_read(tmp_path):
    model = theirs(SMALL)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    same_logits(loaded(tmp_path), model, tokens(SMALL))


# What cannot be read says so.


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"model_type": "bert"}, ConfigError, r"model_type is 'bert', but only 'gpt2' and 'llama'"),
        ({"layer_norm_epsilon": 1e-6}, ConfigError, r"layer_norm_epsilon is 1e-06"),
        ({"scale_attn_by_inverse_layer_idx": True}, ConfigError, r"scale_attn_by_inverse_layer_idx is True"),
        ({"scale_attn_weights": False}, ConfigError, r"scale_attn_weights is False"),
        ({"add_cross_attention": True}, ConfigError, r"add_cross_attention is True"),
        ({"activation_function": "relu"}, ConfigError, r"activation_function is 'relu'"),
        ({"activation_function": ["gelu"]}, ConfigError, r"activation_function is \['gelu'\]"),
        ({"n_inner": 100}, ConfigError, r"n_inner is 100, but only 128"),
        ({"n_layer": 0}, CheckpointError, r"n_layer is 0"),
        ({"n_layer": "2"}, CheckpointError, r"n_layer is '2'"),
        ({"n_layer": True}, CheckpointError, r"n_layer is True"),
        ({"n_layer": None}, CheckpointError, r"n_layer is None"),
        ({"n_layer": 10**9}, CheckpointError, r"specifies 1,000,000,000 layers"),
        ({"n_layer": 3}, CheckpointError, r"no tensor h\.2\.ln_1\.weight"),
        ({"n_layer": 1}, CheckpointError, r"a tensor 'h\.1\..*' that gpt2 models do not have"),
        ({"n_embd": 64}, CheckpointError, r"wte\.weight has shape \[300, 32\], but config\.json implies \[300, 64\]"),
        ({"vocab_size": 301}, CheckpointError, r"wte\.weight has shape"),
        ({"n_positions": 10**9}, CheckpointError, r"wpe\.weight has shape"),
    ],
)
def test_a_config_of_another_model_is_refused(folder, settings, error, match):
    change(folder, **settings)
    with pytest.raises(error, match=match):
        read_model(folder)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b"5"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_json_that_is_damaged_is_refused(folder, name, content):
    if name != "config.json":
        (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"is damaged"):
        read_model(folder)


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "a/b", 5, None])
def test_an_index_cannot_name_files_elsewhere(folder, file):
    (folder / "model.safetensors").rename(folder.parent / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"wte.weight": file}}))
    with pytest.raises(CheckpointError, match=r"does not list the weight files"):
        read_model(folder)


def test_a_part_that_is_missing_is_named(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"wte.weight": "model-1.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"model-1\.safetensors does not exist"):
        read_model(folder)


def test_a_folder_with_a_pickle_only_is_refused(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"model\.safetensors does not exist; only safetensors files are read, not pickles"):
        read_model(folder)


def test_a_folder_that_is_missing_or_empty_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"nowhere does not exist; give a folder with"):
        read_model(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        read_model(tmp_path)


def test_a_file_cut_short_is_refused(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read: its entry"):
        read_model(folder)


def test_a_head_of_its_own_is_refused(folder):
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "lm_head.weight": torch.zeros(300, 32)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has a separate output head"):
        read_model(folder)


# Writing.


def test_a_model_of_another_family_has_no_place(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.family=golf is not supported by Hugging Face's layout"):
        write_model(tmp_path / "hf", [], {**OURS, "family": "golf"}, None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("change", ["more", "less"])
def test_tensors_that_are_not_those_of_gpt2_are_refused(tmp_path, change):
    records = model_records(ours())
    extra = TensorRecord("transformer.extra", "F32", (1,), memoryview(struct.pack("<f", 1.0)))
    wrong = {"more": [*records, extra], "less": [r for r in records if "mlp.c_fc.weight" not in r.name]}[change]
    with pytest.raises(CheckpointError, match=r"the tensor transformer\.extra does not belong|no tensor .*c_fc\.weight"):
        write_model(tmp_path / "hf", wrong, OURS, None)
    assert not list(tmp_path.iterdir())


def test_a_model_is_not_written_beside_the_tokenizer_of_another(tmp_path):
    write_model(tmp_path / "hf", model_records(ours()), OURS, BYTE)
    before = {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()}
    with pytest.raises(ConfigError, match=r"tokenizer\.json belongs to another model's tokenizer; remove the file"):
        write_model(tmp_path / "hf", model_records(ours()), OURS, None)
    assert {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()} == before


def test_a_failed_write_leaves_the_folder_before_and_nothing_else(tmp_path, monkeypatch):
    write_model(tmp_path / "hf", model_records(ours()), OURS, None)
    before = (tmp_path / "hf" / "model.safetensors").read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match=r"No space left"):
        write_model(tmp_path / "hf", model_records(ours(gelu="erf")), OURS, None)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    assert (tmp_path / "hf" / "model.safetensors").read_bytes() == before


# Tokenizers.


@pytest.fixture(scope="module")
def gpt2_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt2")
    for name, content in tokenizer_files({"kind": "gpt2"}, 1024)[0].items():
        (folder / name).write_bytes(content)
    return folder


def test_transformers_reads_the_tokenizer_that_is_written(gpt2_folder):
    text = "Hello world, größe 😀  3.14\n\n"
    found = transformers.GPT2Tokenizer.from_pretrained(gpt2_folder)
    assert found.encode(text) == GPT2Tokenizer().encode(text).tolist()
    assert found.bos_token_id == 50256


def test_gpt2_is_known_by_its_vocabulary_in_either_form(gpt2_folder, tmp_path):
    assert find_tokenizer(gpt2_folder, 50257).spec() == {"kind": "gpt2"}
    transformers.GPT2Tokenizer.from_pretrained(gpt2_folder).save_pretrained(tmp_path)
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).unlink(missing_ok=True)
    assert (tmp_path / "tokenizer.json").is_file()
    assert find_tokenizer(tmp_path, 50257).spec() == {"kind": "gpt2"}


def test_another_tokenizer_is_kept_as_it_is(tmp_path):
    from tokenizers import ByteLevelBPETokenizer

    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(["some text for a small vocabulary"] * 5, vocab_size=270, special_tokens=["<|endoftext|>"])
    trained.save(str(tmp_path / "tokenizer.json"))
    found = find_tokenizer(tmp_path, 300)
    assert found.kind == "huggingface"
    files, tokenizer = tokenizer_files(found.spec(), 24)
    assert files["tokenizer.json"] == (tmp_path / "tokenizer.json").read_bytes()
    assert json.loads(files["tokenizer_config.json"])["bos_token"] == "<|endoftext|>"
    assert tokenizer.bos == found.bos


def test_a_tokenizer_that_transformers_does_not_have_goes_along(tmp_path):
    files, tokenizer = tokenizer_files(BYTE, 24)
    assert tokenizer.bos == 1
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    assert find_tokenizer(tmp_path, 260).spec() == BYTE


@pytest.mark.parametrize("rows", [50257, 50304])
def test_a_folder_without_a_tokenizer_has_gpt2_s_if_its_ids_fit_and_that_is_said(tmp_path, rows, caplog):
    assert find_tokenizer(tmp_path, rows).kind == "gpt2"
    assert "has no tokenizer; using GPT-2's because the vocabulary sizes match" in caplog.text


@pytest.mark.parametrize("rows", [300, 50305, 65536])
def test_a_folder_without_a_tokenizer_and_with_other_ids_needs_one_named(tmp_path, rows):
    with pytest.raises(DataError, match=rf"has no tokenizer, and its {rows:,} ids are not GPT-2's; give one with --tokenizer"):
        find_tokenizer(tmp_path, rows)
    assert find_tokenizer(tmp_path, rows, "byte").kind == "byte"


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"the gpt2 tokenizer has 50,257 ids, but the model has only 300"):
        find_tokenizer(tmp_path, 300, "gpt2")


@pytest.mark.parametrize("content", [b"", b"[]", b"5", b'{"kind": "word"}', b"[" * 100_000])
def test_a_damaged_tokenizer_of_ours_is_refused(tmp_path, content):
    (tmp_path / "ingot-tokenizer.json").write_bytes(content)
    with pytest.raises((CheckpointError, DataError), match=r"damaged|unknown tokenizer kind"):
        find_tokenizer(tmp_path, 300)
