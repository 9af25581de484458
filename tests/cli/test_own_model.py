"""A model of one's own, in forty lines: it gets the optimizer, the score, exact resume, the artifact and generation."""

from __future__ import annotations

import json
import shutil

from programs import Ingot, checkpoints, losses, one_line, outcome, progress, state, train_words

import ingot as package

MODEL = """
import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def __init__(self, vocab_size, context, width, heads, hidden=2):
        super().__init__()
        self.context, self.heads = context, heads
        self.embed, self.position = nn.Embedding(vocab_size, width), nn.Embedding(context, width)
        self.norm, self.norm2, self.last = nn.LayerNorm(width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, hidden * width), nn.Linear(hidden * width, width)
        self.head = nn.Linear(width, vocab_size)

    def attend(self, x):
        B, T, C = x.shape
        q, k, v = (part.view(B, T, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(B, T, C))

    def forward(self, tokens, targets=None):
        x = self.embed(tokens) + self.position(torch.arange(tokens.size(1), device=tokens.device))
        x = x + self.attend(self.norm(x))
        x = x + self.down(F.silu(self.up(self.norm2(x))))
        logits = self.head(self.last(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
"""


def test_a_model_of_ones_own_trains_resumes_is_judged_and_writes_from_its_run_folder_alone(ingot: Ingot, data, tmp_path, until):
    assert len(MODEL.strip().splitlines()) <= 40
    file = tmp_path / "mine.py"
    file.write_text(MODEL)
    own = {"model__file": file, "model__width": 32, "model__settings__hidden": 3, "training__max_steps": 12}

    unbroken = tmp_path / "unbroken"
    trained = json.loads(ingot(*train_words(data, unbroken, **own), "--json").stdout)
    assert trained["status"] == "completed" and losses(unbroken)[12] < losses(unbroken)[1] - 1

    run = until(unbroken, 4)
    ingot(*train_words(data, run, **own))
    assert losses(run) == losses(unbroken)
    assert outcome(run) == outcome(unbroken)

    file.unlink()
    shutil.rmtree(unbroken)
    greedy = ["--prompt", "abc", "--tokens", "40", "--greedy", "--json"]
    text = json.loads(ingot("generate", run, *greedy).stdout)["texts"][0]
    assert text.startswith("abc") and len(text) > 3
    assert package.generate(run / "artifact" / "model.safetensors", "abc", tokens=40, temperature=0.0) == text
    judged = json.loads(ingot("eval", checkpoints(run)[12], "--json").stdout)
    assert abs(judged["val_bpb"] - progress(run)["val_bpb"]) < 1e-6
    assert state(run)["status"] == "completed"


def test_an_artifact_never_says_which_code_is_run(ingot: Ingot, data, tmp_path):
    """The Python file of a model lies beside its artifact, unchanged; a path inside the artifact is not followed."""
    run = tmp_path / "run"
    (tmp_path / "mine.py").write_text(MODEL)
    ingot(*train_words(data, run, training__max_steps=2, model__file=tmp_path / "mine.py"))
    moved = tmp_path / "elsewhere" / "deep" / "model.safetensors"
    moved.parent.mkdir(parents=True)
    moved.write_bytes((run / "artifact" / "model.safetensors").read_bytes())
    words = ["generate", moved, "--tokens", "2"]
    assert "put its Python file next to it as model.py" in one_line(ingot(*words, code=4))
    (moved.parent / "model.py").write_text(MODEL + "\nopen('ran', 'w')\n")
    assert "is not the file that" in one_line(ingot(*words, code=4))
    assert not list(tmp_path.rglob("ran"))
    (moved.parent / "model.py").write_text(MODEL)
    assert ingot(*words).stdout == ingot("generate", run, "--tokens", "2").stdout


def test_an_export_brings_the_code_of_the_model_along(ingot: Ingot, data, tmp_path):
    run, place = tmp_path / "run", tmp_path / "elsewhere"
    (tmp_path / "mine.py").write_text(MODEL)
    place.mkdir()
    ingot(*train_words(data, run, training__max_steps=2, model__file=tmp_path / "mine.py"))
    ingot("export", run, "--output", place / "model.ingot", "--codec", "zlib")  # scored by a process that finds only the folder
    assert (place / "model.py").read_text() == MODEL
    (place / "model.py").write_text("another model")
    refused = ingot("export", run, "--output", place / "again.ingot", "--codec", "zlib", code=2)
    assert "but this model's code must be written there" in one_line(refused) and not (place / "again.ingot").exists()


OPTIMIZER = """

class Lion(torch.optim.Optimizer):
    def __init__(self, groups):
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(mean.lerp(p.grad, 0.1).sign(), alpha=0.1 * group["lr"])
                mean.lerp_(p.grad, 0.01)


Model.make_optimizers = lambda self, groups: Lion(groups)
"""


def test_an_optimizer_of_ones_own_trains_by_the_schedule_and_resumes_exactly(ingot: Ingot, data, tmp_path, until):
    file = tmp_path / "mine.py"
    file.write_text(MODEL + OPTIMIZER)
    own = {"model__file": file, "model__width": 32, "training__max_steps": 12, "optimizer__warmup_steps": 3}
    unbroken = tmp_path / "unbroken"
    ingot(*train_words(data, unbroken, **own))
    assert losses(unbroken)[12] < losses(unbroken)[1] - 0.1
    run = until(unbroken, 4)
    ingot(*train_words(data, run, **own))
    assert losses(run) == losses(unbroken) and outcome(run) == outcome(unbroken)
