"""ONNX files: onnxruntime computes the same logits and writes the same tokens as our models."""

import json
import re
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from portable_kit import CONTEXT, ROWS, random_model, relative_error, settings_of, tokens
from small_model import write_small_model
from typer.testing import CliRunner

import ingot
from ingot.backends.sampling import Sampling
from ingot.backends.torch.generate import generate
from ingot.backends.torch.onnx import TOLERANCES, write_onnx
from ingot.cli.main import app
from ingot.errors import ConfigError
from ingot.model.registry import build

MODELS = {
    "gpt2": {"bias": True},
    "llama": {"kv_heads": 2, "rope_scaling": "linear", "rope_factor": 2.0, "qkv_bias": True},
    "golf": {"softcap": 20.0},
    "frontier": {"window": 8, "kv_heads": 2, "values": "tables"},
    "frontier-projections": {"layers": 3, "window": 8, "values": "projections", "tied": True},
}
GREEDY = Sampling(0.0)
CUSTOM = re.search(r"```python\n(.*?)```", (Path(ingot.__file__).parents[2] / "docs/your-own-model.md").read_text(), re.DOTALL)[1]


@pytest.fixture
def onnxruntime():
    pytest.importorskip("onnxscript", reason="the extra onnx is not installed")
    return pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")


class Session:
    """An exported model with the cache that the tokens so far have left."""

    def __init__(self, onnxruntime, file, rows=1):
        self.session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        kinds = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
        self.past = {
            node.name: np.zeros((rows, node.shape[1], 0, node.shape[3]), kinds[node.type])
            for node in self.session.get_inputs()[1:]
        }

    def read(self, new):
        logits, *present = self.session.run(None, {"input_ids": np.asarray(new), **self.past})
        self.past = dict(zip(self.past, present, strict=True))
        return torch.from_numpy(logits)


def logits_in_parts(onnxruntime, file, rows, lengths):
    session = Session(onnxruntime, file, len(rows))
    return torch.cat([session.read(part) for part in rows.split(lengths, dim=1)], dim=1)


def continued(session, prompt, count):
    written, new = [], prompt
    for _ in range(count):
        new = session.read(new)[:, -1:].argmax(-1)
        written.append(int(new))
    return written


def check_same(onnxruntime, file, model, vocab_size=ROWS, tolerance=1e-3):
    for rows in (1, 2):
        row = tokens(rows)
        with torch.no_grad():
            ours = model(row)[..., :vocab_size]
        for lengths in ([CONTEXT], [1] * CONTEXT, [17, 1, CONTEXT - 18]):
            assert relative_error(ours, logits_in_parts(onnxruntime, file, row, lengths)) < tolerance


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name != "frontier")) for name in MODELS])
def test_onnxruntime_computes_and_writes_what_the_model_does(onnxruntime, tmp_path, name):
    family = name.split("-")[0]
    settings = settings_of(family, **{"context": 96, **MODELS[name]})
    model = random_model(settings)
    written = write_onnx(model, ROWS, tmp_path / "model.onnx", "fp32")
    heads = settings.get("kv_heads") or settings["heads"]
    sizes = {"layers": settings["layers"], "kv_heads": heads, "head_size": 64 // settings["heads"], "cache": True}
    assert written == {"context": 96, **sizes}
    check_same(onnxruntime, tmp_path / "model.onnx", model)
    prompt = tokens(1, 20)
    ours = [int(token) for token in islice(generate(model, prompt, GREEDY, ROWS), 50)]
    assert continued(Session(onnxruntime, tmp_path / "model.onnx"), prompt, 50) == ours
    assert b"ingot" not in (tmp_path / "model.onnx").read_bytes()  # such as the paths in stack traces


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("frontier", "int8"), *(pytest.param("gpt2", dtype, marks=pytest.mark.long) for dtype in ("int8", "fp16"))],
)
def test_narrow_weights_stay_close(onnxruntime, tmp_path, family, dtype):
    model = random_model(settings_of(family, vocab_size=ROWS + 4))
    exact = sum(p.numel() for p in model.parameters()) * 4
    write_onnx(model, ROWS, tmp_path / "model.onnx", dtype)
    model.float()
    check_same(onnxruntime, tmp_path / "model.onnx", model, ROWS, tolerance=0.02 if dtype == "fp16" else 0.1)
    assert (tmp_path / "model.onnx").stat().st_size < exact * (0.5 if dtype == "fp16" else 0.25) + 60_000
    assert Session(onnxruntime, tmp_path / "model.onnx").read(tokens(1)).dtype == torch.float32


def custom(tmp_path, code):
    (tmp_path / "mine.py").write_text(code)
    shape = {"layers": 2, "heads": 4, "width": 64, "context": CONTEXT, "vocab_size": ROWS}
    return build({"family": "file", "file": str(tmp_path / "mine.py"), "settings": {}, **shape}).eval()


def test_a_custom_model_is_exported_without_a_cache(onnxruntime, tmp_path):
    model = custom(tmp_path, CUSTOM)
    assert not write_onnx(model, ROWS, tmp_path / "model.onnx", "fp32")["cache"]
    for length in (1, 30, CONTEXT):
        row = tokens(2, length)
        assert relative_error(model(row).detach(), Session(onnxruntime, tmp_path / "model.onnx").read(row)) < 1e-3


def test_a_model_that_cannot_be_traced_is_refused_in_a_sentence(onnxruntime, tmp_path, capfd):
    code = CUSTOM.replace("        for block in", "        if x.sum() > 0:\n            x = -x\n        for block in")
    with pytest.raises(ConfigError, match=r"\Atorch's exporter cannot convert this model to ONNX: Could not guard[^\n]*\Z"):
        write_onnx(custom(tmp_path, code), ROWS, tmp_path / "model.onnx", "fp32")
    assert not (tmp_path / "model.onnx").exists() and capfd.readouterr() == ("", "")


def test_a_file_that_computes_something_else_is_refused(onnxruntime, tmp_path):
    code = CUSTOM.replace("        logits = ", "        x = x if torch.compiler.is_compiling() else x + 1\n        logits = ")
    with pytest.raises(ConfigError, match="the exported fp32 model is wrong: a logit differs by"):
        write_onnx(custom(tmp_path, "import torch\n" + code), ROWS, tmp_path / "model.onnx", "fp32")


def test_the_folder_has_what_a_program_needs_and_a_failed_export_leaves_nothing(onnxruntime, tmp_path, monkeypatch):
    def call(form, folder):
        return CliRunner().invoke(app, ["export", str(tmp_path / "a.ingot"), "--format", form, "-o", str(tmp_path / folder)])

    model = write_small_model(tmp_path / "a.ingot")
    with monkeypatch.context() as patch:
        patch.setitem(TOLERANCES, "fp32", -1.0)
        assert "the exported fp32 model is wrong" in str(call("onnx", "out").exception)
    assert [path.name for path in tmp_path.iterdir()] == ["a.ingot"]
    assert call("onnx", "out").exit_code == call("huggingface", "hf").exit_code == 0
    assert json.loads((tmp_path / "out/config.json").read_text()) == {
        "format": "ingot-onnx", "family": "llama", "vocab_size": 260, "dtype": "fp32", "context": 64, "layers": 1, "kv_heads": 2,
        "head_size": 16, "cache": True, "bos_token_id": 1, "eos_token_ids": [1, 2],
        "tokenizer_files": ["ingot-tokenizer.json", "tokenizer.json", "tokenizer_config.json"],
    }  # fmt: skip
    files = {path.name: path.read_bytes() for path in (tmp_path / "hf").glob("*token*")}
    assert files and files == {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*token*")}
    prompt = [1, *(ord(letter) + 4 for letter in "abc")]
    written = continued(Session(onnxruntime, tmp_path / "out/model.onnx"), [prompt], 40)
    ours = model.generate("abc", tokens=40, temperature=0.0)
    assert ("abc" + model.tokenizer.decode(written)).startswith(ours.rstrip("\ufffd"))
    assert "out exists; --force replaces it" in str(call("onnx", "out").exception)


def test_what_is_missing_or_unknown_is_told(tmp_path, monkeypatch):
    model = random_model(settings_of("gpt2"))
    with pytest.raises(ConfigError, match=r"'bf16'; choose one of fp32, fp16, int8"):
        write_onnx(model, ROWS, tmp_path / "model.onnx", "bf16")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ConfigError, match=r"needs the package onnx; pip install 'ingot-lm\[onnx\]'"):
        write_onnx(model, ROWS, tmp_path / "model.onnx", "fp32")
    assert not list(tmp_path.iterdir())
