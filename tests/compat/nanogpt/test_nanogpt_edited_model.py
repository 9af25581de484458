"""An edited model.py beside train.py: people expect it to be trained, so they are told how it is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import ingot
from ingot.compat.nanogpt.train import is_edited, main

ROOT = Path(__file__).parents[3]
EDITED = "from ingot.compat.nanogpt.gpt import GPT as Base\n\n\nclass GPT(Base):\n    pass\n"
# A model of one's own with the constructor and the forward of nanoGPT's, which flattens the targets by `view`.
VIEWING = """
from dataclasses import dataclass
import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size)

    def forward(self, idx, targets=None):
        logits = self.head(torch.tanh(self.embedding(idx)))
        if targets is None:
            return logits[:, -1:], None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


"""


def test_the_model_py_of_the_repository_is_not_taken_for_an_edited_one():
    assert not is_edited(ROOT / "model.py") and not is_edited(ROOT / "nowhere.py")


@pytest.mark.parametrize("text", [EDITED, EDITED.replace("class", "def").replace("(Base)", "()")])
def test_an_edited_model_py_is_named_with_the_way_that_trains_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str
):
    (tmp_path / "model.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "train.py")])
    assert main(["--dataset=nowhere", "--device=cpu"]) != 0
    warning, *_ = capsys.readouterr().err.splitlines()
    assert warning.startswith(f"train.py: warning: {tmp_path / 'model.py'} has custom code, which train.py does not run")
    assert f"ingot train --recipe shakespeare-char --model.file {tmp_path / 'model.py'}" in warning


def test_the_way_of_the_docs_trains_a_model_py_that_flattens_targets_by_view(tmp_path: Path):
    page = (ROOT / "docs/nanogpt.md").read_text()
    [snippet] = [block for block in page.split("```python\n") if block.startswith("class Model(GPT)")]
    file = tmp_path / "model.py"
    file.write_text(VIEWING + snippet.split("```")[0])
    result = ingot.train(
        recipe="shakespeare-char",
        quiet=True,
        model={"file": str(file), "layers": 1, "heads": 1, "width": 8},
        data={"seq_len": 16},
        training={"max_steps": 2, "tokens_per_step": 64, "device": "cpu", "output_dir": str(tmp_path / "run")},
        optimizer={"warmup_steps": 0},
        evaluation={"every": 0, "rows": 2},
    )
    assert result.status == "completed" and result.total_steps == 2
