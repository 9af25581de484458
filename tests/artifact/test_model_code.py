"""Exported folders with their code: transformers computes what Ingot computes, without Ingot."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from portable_kit import CONTEXT, random_model, relative_error, settings_of, tokens

from ingot.artifact.huggingface import read_model
from ingot.artifact.model_code import model_code, write_model_with_code
from ingot.backends.sampling import Sampling
from ingot.backends.torch.generate import generate
from ingot.backends.torch.state import model_records
from ingot.data.tokenizers import ByteTokenizer
from ingot.errors import ConfigError

transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = re.search(r"```python\n(.*?)```", (ROOT / "docs/your-own-model.md").read_text(), re.DOTALL)[1]
HEAD = "        self.head = nn.Linear(width, vocab_size, bias=False)\n"
OF_GOLF = """
from ingot.model.golf import Golf


class Model(Golf):
    def __init__(self, vocab_size, context, layers, heads, width):
        super().__init__(vocab_size=vocab_size, context=context, layers=layers, heads=heads, width=width, mlp_multiple=3)
"""
CASES = {
    "gpt2": settings_of("gpt2", bias=False),
    "llama-layernorm": settings_of("llama", norm="layernorm", mlp="plain", kv_heads=2, rope_scaling="ntk", rope_factor=2.0),
    "llama-untied": settings_of("llama", tied=False, activation="gelu"),
    "golf": settings_of("golf", layers=3),
    "golf-untied": settings_of("golf", kv_heads=None, tied=False),
    "golf-bf16": settings_of("golf", embedding_dtype="bf16"),
    "frontier-tables": settings_of("frontier", layers=5, window=7, values="tables"),
    "frontier-projections": settings_of("frontier", layers=5, window=7, pattern="SL", values="projections", tied=False),
    "frontier-none": settings_of("frontier", window=4, values="none", key_offset=False, head_gate=False, softcap=None),
    "example": settings_of("file", file=EXAMPLE, settings={"expansion": 3}),
    "example-tied": settings_of("file", file=EXAMPLE.replace(HEAD, f"{HEAD}        self.head.weight = self.tokens.weight\n")),
    "of-golf": settings_of("file", file=OF_GOLF),
}

GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}

FOR_CODE = "transformers.dynamic_module_utils.HF_MODULES_CACHE"  # the folder in which transformers keeps the code of models


@pytest.fixture(scope="module", autouse=True)
def modules(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FOR_CODE, str(tmp_path_factory.mktemp("modules")))
        yield


def written(folder, settings, stages=()):
    """Write a random model with its code to a folder; return the model."""
    file = None
    if settings["family"] == "file":
        file = folder.parent / f"{folder.name}.py"
        file.write_text(settings["file"])
        settings = {**settings, "file": str(file)}
    model = random_model(settings)
    for numbers in stages:
        model.set(**numbers) if numbers else None
    write_model_with_code(folder, model_records(model), settings, stages, file, ByteTokenizer().spec())
    return model


def opened(folder, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **options).eval()


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / request.param
    model = written(folder, CASES[request.param])
    return model, opened(folder)


def greedy(model, prompts, count, lengths=None):
    steps = generate(model, prompts, Sampling(0.0), keep_half=False, lengths=lengths)
    return torch.stack([next(steps) for _ in range(count)], 1)


@torch.no_grad()
def test_transformers_gives_the_logits_of_ingot_also_after_saving_its_model(pair, tmp_path):
    model, other = pair
    other.save_pretrained(tmp_path / "again")
    again = opened(tmp_path / "again")
    for length in (CONTEXT, 5, 1):
        ids = tokens(2, length)
        assert relative_error(model(ids).float(), other(ids).logits.float()) < 1e-4
        assert torch.equal(other(ids).logits, again(ids).logits)
    half = again.to(torch.bfloat16)
    assert relative_error(model(tokens()).float(), half(tokens()).logits.float()) < 0.1


@torch.no_grad()
def test_generate_writes_the_greedy_tokens_of_ingot_also_beyond_the_context(pair):
    model, other = pair
    for use_cache, prompt, count in ((True, 5, 50), (False, 20, 5)):
        ids = tokens(2, prompt).clamp(min=1)  # 0 is padding
        found = other.generate(ids, max_new_tokens=count, use_cache=use_cache, **GREEDY)
        assert found[:, prompt:].tolist() == greedy(model, ids, count).tolist()


@torch.no_grad()
def test_a_batch_padded_on_the_right_gives_what_each_row_gives_alone(pair):
    _, other = pair
    lengths = 12, 5, 9
    rows = [tokens(1, length)[0] for length in lengths]
    ids = torch.stack([torch.nn.functional.pad(row, (0, 12 - len(row))) for row in rows])
    mask = torch.stack([(torch.arange(12) < length).long() for length in lengths])
    for row, together in zip(rows, other(ids, attention_mask=mask).logits, strict=True):
        assert relative_error(other(row[None]).logits[0].float(), together[: len(row)].float()) < 1e-4


@torch.no_grad()
def test_labels_give_the_mean_loss_of_the_next_tokens(pair):
    model, other = pair
    ids = tokens()
    labels = ids.masked_fill(torch.arange(CONTEXT) < 7, -100)
    expected = model(ids[:, :-1], labels[:, 1:].masked_fill(labels[:, 1:] == -100, -1))
    assert float(other(ids, labels=labels).loss) == pytest.approx(float(expected), rel=1e-3)


@torch.no_grad()
def test_beam_search_gives_the_same_text_with_and_without_the_cache(tmp_path):
    written(tmp_path / "hf", CASES["golf"])
    other, options = opened(tmp_path / "hf"), {"max_new_tokens": 6, "num_beams": 3, **GREEDY}
    first, second = (other.generate(tokens(2, 6).clamp(min=1), use_cache=use_cache, **options) for use_cache in (True, False))
    assert first.tolist() == second.tolist()


@pytest.mark.parametrize("name", ["frontier-tables", "example"])
def test_a_folder_is_opened_where_ingot_cannot_be_imported(tmp_path, name):
    folder = tmp_path / name
    written(folder, CASES[name])
    code = f"""
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "ingot":
            raise ImportError("blocked")

sys.meta_path.insert(0, Blocked())
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained({str(folder)!r}, trust_remote_code=True)
tokens = AutoTokenizer.from_pretrained({str(folder)!r}, trust_remote_code=True)("a text", return_tensors="pt")
print(model.generate(**tokens, max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=0).shape)
"""
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder.parent, env=environment)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "torch.Size([1, 10])"


@torch.no_grad()
def test_the_window_is_that_of_the_last_stage(tmp_path):
    model = written(tmp_path / "hf", settings_of("frontier", window=2), [{"window": 4}, {}, {"window": 9}])
    assert opened(tmp_path / "hf").model.window == model.window == 9


@torch.no_grad()
def test_buffers_that_are_not_saved_have_their_values(tmp_path):
    code = EXAMPLE.replace(
        "        self.blocks =",
        "        self.register_buffer('scale', torch.arange(width) / width, False)\n        self.blocks =",
    )
    code = "import torch\n" + code.replace("        for block in", "        x = x * self.scale\n        for block in")
    model = written(tmp_path / "hf", settings_of("file", file=code))
    assert relative_error(model(tokens()), opened(tmp_path / "hf")(tokens()).logits) < 1e-4


@pytest.mark.parametrize("mask", [[[0, 0, 1, 1]], [[1, 0, 1, 1]], [[1, 1, 1, 0]], [[[1, 1, 1, 1]]]])
def test_padding_on_the_left_and_masks_with_holes_are_refused(tmp_path, mask):
    written(tmp_path / "hf", CASES["golf"])
    other, ids = opened(tmp_path / "hf"), tokens(1, 4)
    with pytest.raises(ValueError, match="pad on the right, or generate for one prompt at a time"):
        past = other(ids, attention_mask=torch.tensor(mask), use_cache=True).past_key_values
        other(ids[:, :1], attention_mask=torch.tensor([[*mask[0], 1]]), past_key_values=past)


def test_what_does_not_fit_into_the_context_and_foreign_caches_are_refused(tmp_path):
    written(tmp_path / "hf", CASES["golf"])
    other = opened(tmp_path / "hf")
    with pytest.raises(ValueError, match="49 tokens do not fit into a context of 48 tokens"):
        other(tokens(1, CONTEXT + 1))
    with pytest.raises(ValueError, match="past_key_values must come from an earlier output"):
        other(tokens(1, 3), past_key_values=transformers.DynamicCache())


@pytest.mark.parametrize("family", ["gpt2", "llama", "golf", "frontier"])
def test_the_code_needs_only_torch_and_transformers_and_keeps_its_comments(family):
    code = model_code(family)
    imported = set(re.findall(r"^ *(?:from|import) (\w+)", code, re.MULTILINE))
    assert imported - sys.stdlib_module_names == {"torch", "transformers"}
    assert not re.search(r"ingot\.|pydantic|def head_loss\(hidden|type: ignore", code)
    assert "# (B, T, C)" in code or "# (N, C)" in code
    assert max(map(len, code.splitlines())) <= 130


def test_a_custom_model_that_cannot_be_exported_is_refused(tmp_path):
    file = tmp_path / "mine.py"
    for line, match in (
        ("from ingot.data.hub import Hub", r"imports ingot\.data\.hub cannot be exported"),
        (
            "from ingot.model.golf import norm\ndef rotate(): norm(1)\nfrom ingot.model.layers import Rotation, rotate",
            r"both define rotate",
        ),
        ("from ingot.model.golf import *", r"import only names from ingot\.model"),
        ("import math; SCALE = 1.0", r"mine\.py:1: put this import on a separate line"),
        ("import ingot.model.golf", r"with `import ingot.model.golf` cannot be exported"),
    ):
        file.write_text(line + "\nclass Model:\n    pass\n")
        with pytest.raises(ConfigError, match=match):
            model_code("file", file)


def test_a_custom_file_keeps_its_text(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("from ingot.model.gpt2 import GPT2 as Model\n\nNOTE = 'a  # type: ignore b'\n", encoding="utf-8-sig")
    names = {}
    exec(compile(model_code("file", file), "mine", "exec"), names)
    assert names["NOTE"] == "a  # type: ignore b" and names["Model"] is names["GPT2"]


def test_such_a_folder_is_not_imported(tmp_path):
    written(tmp_path / "hf", CASES["golf"])
    with pytest.raises(ConfigError, match="was written for transformers; give the run or an artifact"):
        read_model(tmp_path / "hf")
    assert json.loads((tmp_path / "hf/config.json").read_text())["auto_map"]["AutoConfig"] == "modeling_ingot.IngotConfig"
