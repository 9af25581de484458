"""Weights & Biases, offline: nanoGPT's keys at every evaluation, and one run there for all sessions of ours."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
from small_runs import words

from ingot.errors import ConfigError
from ingot.runs.tracking import check_installed


def test_evaluations_are_sent_and_a_resumed_run_is_the_same_run_there(train, monkeypatch):
    pytest.importorskip("wandb", reason="Weights & Biases is an extra")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    keys = {"wandb_log": True, "wandb_project": "words", "wandb_run_name": "a=b", "lr_decay_iters": 20}
    train(words(max_iters=4, **keys))
    begun = json.loads(Path("out/wandb.json").read_text())["id"]
    train(words(max_iters=8, init_from="resume", **keys))
    assert json.loads(Path("out/wandb.json").read_text())["id"] == begun
    files = list(Path("out/wandb").glob("offline-run-*/*.wandb"))
    assert {path.name for path in files} == {f"run-{begun}.wandb"}
    told = b"".join(path.read_bytes() for path in files)
    assert all(name in told for name in (b"iter", b"train/loss", b"val/loss", b"lr", b"mfu", b"gradient_accumulation_steps"))


def test_the_files_of_weights_and_biases_lie_where_its_own_variable_says(train, monkeypatch, tmp_path):
    pytest.importorskip("wandb", reason="Weights & Biases is an extra")
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(tmp_path / "elsewhere")}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "elsewhere").mkdir()
    train(words(max_iters=0, wandb_log=True))
    assert list((tmp_path / "elsewhere").glob("wandb/offline-run-*")) and not Path("out/wandb").exists()


def test_without_the_package_it_says_how_to_get_it(monkeypatch):
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"wandb_log=True .*pip install 'ingot-lm\[wandb\]'"):
        check_installed("wandb_log=True")
