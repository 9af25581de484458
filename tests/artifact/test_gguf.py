"""GGUF files: what llama.cpp reads in them, and the same log-probabilities there where it is installed."""

import json
import random
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch
from portable_kit import random_model, settings_of

from ingot.artifact.gguf import is_normalised, vocabulary_of, write_gguf
from ingot.backends.torch.state import model_records
from ingot.data.tokenizers import ByteTokenizer, GPT2Tokenizer
from ingot.data.tokenizers.hf_json import from_json
from ingot.data.tokenizers.learn_vocabulary import learn
from ingot.data.tokenizers.plain import CharTokenizer
from ingot.data.tokenizers.sentencepiece import SentencePieceTokenizer
from ingot.errors import CheckpointError, ConfigError
from ingot.runtime.files import writing_output

BYTE = ByteTokenizer().spec()
PROMPT = [1, 70, 105, 112, 112, 115, 36, 123, 115, 118, 112, 104]


def test_without_the_package_it_is_said_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    settings = settings_of("gpt2")
    with pytest.raises(ConfigError, match=r"needs the package gguf; pip install 'ingot-lm\[gguf\]'"):
        write_gguf(tmp_path / "out", model_records(random_model(settings)), settings, BYTE)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def gguf():
    return pytest.importorskip("gguf", reason="the extra gguf is not installed")


def opened(gguf, folder):
    reader = gguf.GGUFReader(folder / "model.gguf")
    return {name: field.contents() for name, field in reader.fields.items()}, {t.name: t for t in reader.tensors}


def test_the_file_says_what_llama_cpp_builds_the_model_by(gguf, tmp_path):
    settings = settings_of("llama", kv_heads=2, rope_scaling="linear", rope_factor=2.0, vocab_size=263)
    size = write_gguf(tmp_path / "out", model_records(random_model(settings)), settings, BYTE, name="mine")
    fields, tensors = opened(gguf, tmp_path / "out")
    assert (fields["general.architecture"], fields["general.name"]) == ("llama", "mine")
    assert (fields["llama.attention.head_count"], fields["llama.attention.head_count_kv"]) == (4, 2)
    assert (fields["llama.context_length"], fields["llama.rope.dimension_count"]) == (48, 16)
    assert (fields["llama.rope.scaling.type"], fields["llama.rope.scaling.factor"]) == ("linear", 2.0)
    assert (len(fields["tokenizer.ggml.tokens"]), fields["tokenizer.ggml.bos_token_id"]) == (263, 1)
    assert (fields["tokenizer.ggml.eos_token_id"], fields["tokenizer.ggml.eot_token_id"]) == (1, 2)  # a text ends at either
    assert fields["tokenizer.ggml.merges"] == ["ÿ ÿ"] and fields["tokenizer.ggml.add_bos_token"] is True
    assert "output.weight" not in tensors
    assert (tmp_path / "out" / "Modelfile").read_text() == ("FROM ./model.gguf\nTEMPLATE {{ .Prompt }}\nPARAMETER num_ctx 48\n")
    assert size == sum(path.stat().st_size for path in (tmp_path / "out").iterdir())


def test_pairs_that_are_turned_together_become_neighbours(gguf, tmp_path):
    settings = settings_of("llama", kv_heads=2, qkv_bias=True)
    model = random_model(settings)
    write_gguf(tmp_path / "out", model_records(model), settings, BYTE)
    _, tensors = opened(gguf, tmp_path / "out")
    for name, heads in (("q", 4), ("k", 2)):
        rows = getattr(model.h[0].attn, f"{name}_proj").weight.detach().numpy().reshape(heads, 16, 64)
        stored = tensors[f"blk.0.attn_{name}.weight"].data.reshape(heads, 16, 64)
        for i in range(8):
            assert np.array_equal(stored[:, 2 * i], rows[:, i]) and np.array_equal(stored[:, 2 * i + 1], rows[:, i + 8])
    assert np.array_equal(tensors["blk.0.attn_v.weight"].data, model.h[0].attn.v_proj.weight.detach().numpy())


@pytest.mark.parametrize(("dtype", "kind"), [("fp32", "F32"), ("fp16", "F16"), ("bf16", "BF16"), ("q8_0", "Q8_0")])
def test_matrices_have_the_number_format_that_is_asked_for_and_the_rest_is_exact(gguf, tmp_path, dtype, kind):
    settings = settings_of("gpt2", bias=False)
    model = random_model(settings)
    write_gguf(tmp_path / "out", model_records(model), settings, BYTE, dtype)
    _, tensors = opened(gguf, tmp_path / "out")
    assert {t.tensor_type.name for name, t in tensors.items() if "attn_qkv.weight" in name} == {kind}
    exact = [t for name, t in tensors.items() if len(t.shape) == 1 or name.startswith("position")]
    assert {t.tensor_type.name for t in exact} == {"F32"}
    assert np.array_equal(tensors["blk.1.ffn_norm.weight"].data, model.transformer.h[1].ln_2.weight.detach().numpy())
    assert not tensors["blk.0.attn_qkv.bias"].data.any()  # of a model without biases, on which llama.cpp insists


def test_rows_that_q8_0_cannot_cut_are_kept_in_fp16(gguf, tmp_path):
    settings = settings_of("llama", inner_width=72)
    write_gguf(tmp_path / "out", model_records(random_model(settings)), settings, BYTE, "q8_0")
    _, tensors = opened(gguf, tmp_path / "out")
    assert tensors["blk.0.ffn_down.weight"].tensor_type.name == "F16"
    assert tensors["blk.0.ffn_up.weight"].tensor_type.name == "Q8_0"


def test_what_cannot_be_written_is_told_and_leaves_nothing(gguf, tmp_path):
    settings = settings_of("gpt2")
    model = random_model(settings)
    records = model_records(model)
    with pytest.raises(ConfigError, match=r"'q4'.* fp32, fp16, bf16, q8_0"):
        write_gguf(tmp_path / "out", records, settings, BYTE, "q4")
    with pytest.raises(ConfigError, match=r"add --tokenizer"):
        write_gguf(tmp_path / "out", records, settings, None)
    with pytest.raises(ConfigError, match=r"does not support a char tokenizer; GGUF supports byte, gpt2"):
        write_gguf(tmp_path / "out", records, settings, CharTokenizer("abc").spec())
    model.transformer.wte.weight.data[0, 0] = 1e6
    with pytest.raises(CheckpointError, match=r"token_embd\.weight contains values outside fp16's range; choose the dtype bf16"):
        write_gguf(tmp_path / "out", model_records(model), settings, BYTE, "fp16")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_told_as_such(gguf, tmp_path, monkeypatch):
    def write(writer):
        with Path("/dev/full").open("wb", buffering=0) as full:
            np.zeros(10**5).tofile(full)

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensors_to_file", write)
    settings = settings_of("llama")
    with (
        pytest.raises(ConfigError, match=r"out cannot be written: \d+ requested and \d+ written"),
        writing_output(tmp_path / "out"),
    ):
        write_gguf(tmp_path / "out", model_records(random_model(settings)), settings, BYTE)
    assert not list(tmp_path.iterdir())


def test_it_is_known_which_tokenizers_rewrite_text_before_they_cut_it():
    text = " ".join(f"word{i} abc{i % 7}" for i in range(500))
    plain = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    told = [is_normalised(SentencePieceTokenizer(learn("sentencepiece", [text], 290, how)).spec()) for how in ({}, plain)]
    assert (told, is_normalised(BYTE)) == ([True, False], False)


@pytest.mark.parametrize("changes", [{"model_type": "unigram"}, {"byte_fallback": False}])
def test_a_sentencepiece_model_that_llama_cpp_reads_otherwise_is_refused(changes):
    text = " ".join(f"word{i} abc{i % 7}" for i in range(500))
    spec = SentencePieceTokenizer(learn("sentencepiece", [text], 290 if "model_type" in changes else 40, changes)).spec()
    with pytest.raises(ConfigError, match=r"only BPE with byte fallback; --format huggingface supports this model"):
        vocabulary_of(spec, 1000)


def test_a_tokenizer_json_that_splits_words_by_another_rule_is_refused():
    contents = json.loads(learn("bpe", ["some text for a small vocabulary"] * 5, 270))
    contents["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    with pytest.raises(ConfigError, match=r"GGUF does not support the kind of tokenizer in"):
        vocabulary_of(from_json(json.dumps(contents).encode()).spec(), 300)


# With llama.cpp itself, where the package xllamacpp is installed.


@pytest.fixture
def llama_cpp(gguf):
    """Opens a file in llama.cpp, with a float32 cache and without flash attention; `ask` sends a request."""
    x = pytest.importorskip("xllamacpp", reason="xllamacpp, which is llama.cpp, is not installed")

    class Opened:
        def __init__(self, folder):
            p = x.CommonParams()
            p.model.path, p.n_ctx, p.n_gpu_layers, p.warmup, p.n_parallel, p.verbosity = (
                str(folder / "model.gguf"),
                64,
                0,
                False,
                1,
                -1,
            )
            p.cache_type_k = p.cache_type_v = x.ggml_type.GGML_TYPE_F32
            p.flash_attn_type = x.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
            p.cpuparams.n_threads = p.cpuparams_batch.n_threads = 1
            self.server = x.Server(p)

        def ask(self, path, **body):
            words = {"Content-Type": "application/json"}
            request = urllib.request.Request(self.server.listening_address + path, json.dumps(body).encode(), words)
            with urllib.request.urlopen(request) as answer:
                return json.load(answer)

    return Opened


@pytest.mark.parametrize(
    ("family", "options", "dtype", "limit"),
    [
        ("llama", {}, "fp32", 1e-4),
        ("llama", {"kv_heads": 2, "bias": True, "tied": False}, "fp32", 1e-4),
        ("llama", {"rope_scaling": "linear", "rope_factor": 2.0}, "fp32", 1e-4),
        ("llama", {"rope_scaling": "ntk", "rope_factor": 2.0}, "fp16", 2e-2),
        ("gpt2", {"bias": False}, "fp32", 5e-3),  # its GELU is a table of float16
        ("gpt2", {}, "fp16", 2e-2),
    ],
)
def test_llama_cpp_gives_our_log_probabilities_and_the_same_greedy_tokens(llama_cpp, tmp_path, family, options, dtype, limit):
    settings = settings_of(family, context=64, **options)
    model = random_model(settings)
    write_gguf(tmp_path / "out", model_records(model), settings, BYTE, dtype)
    here, scores = list(PROMPT), []
    with torch.no_grad():
        for _ in range(50):
            scores.append(model(torch.tensor([here]))[0, -1].log_softmax(-1))
            here.append(int(scores[-1].argmax()))
    there = llama_cpp(tmp_path / "out")
    written = there.ask("/completion", prompt=PROMPT, n_predict=50, temperature=0, return_tokens=True)["tokens"]
    assert PROMPT + written == here
    compared = 0
    for done in range(0, 50, 7):
        found = there.ask("/completion", prompt=here[: len(PROMPT) + done], n_predict=1, temperature=0, n_probs=260)
        for token in (found.get("completion_probabilities") or [{"top_logprobs": []}])[0]["top_logprobs"]:
            assert abs(token["logprob"] - float(scores[done][token["id"]])) < limit
            compared += 1
    assert compared >= 7 * 100  # none where a byte is only a part of a character


@pytest.mark.parametrize("kind", ["byte", "gpt2", "bpe", "sentencepiece"])
def test_llama_cpp_cuts_text_as_we_do(llama_cpp, tmp_path, kind):
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghiklmnoprstuvwyäöü", k=draw.randint(1, 8))) for _ in range(300)]
    text = "".join(draw.choice(words) + draw.choice([" ", " ", ", ", ".\n", " 17 "]) for _ in range(3000))
    plain = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    ours = {
        "byte": ByteTokenizer,
        "gpt2": GPT2Tokenizer,
        "bpe": lambda: from_json(learn("bpe", [text], 600), "<|endoftext|>"),
        "sentencepiece": lambda: SentencePieceTokenizer(learn("sentencepiece", [text], 600, plain)),
    }[kind]()
    settings = settings_of("llama", layers=1, width=32, heads=2, vocab_size=ours.vocab_size + 3)
    write_gguf(tmp_path / "out", model_records(random_model(settings)), settings, ours.spec())
    there = llama_cpp(tmp_path / "out")
    for one in [*(text[at : at + 100] for at in range(0, 5000, 100)), "größe 😀  3.14\n\n", "I'll we've 123456", "<s>", "  b  "]:
        found = there.ask("/tokenize", content=one, add_special=False, parse_special=False)["tokens"]
        assert found == ours.encode(one).tolist(), one
