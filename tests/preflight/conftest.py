"""A small run on a folder of buckets, and what each test breaks of it."""

import pytest
from bucket_files import EOS, write_pair

from ingot.config.loading import load_config
from ingot.data.tokenizers import ByteTokenizer


@pytest.fixture
def document():
    """46 tokens, their end mark included."""
    return [*ByteTokenizer().encode("some words that a model could learn by heart ").tolist(), EOS]


@pytest.fixture
def folder(tmp_path, document):
    """Two buckets of 920 tokens to train on, one file each, and the same for validation."""
    for split in ("train", "val"):
        for bucket in ("web", "books"):
            write_pair(tmp_path / "data" / split / bucket / "0.bin", [document] * 20)
    return tmp_path / "data"


@pytest.fixture
def config(folder, tmp_path):
    """The config of a run of 20 steps of 64 tokens on it, with some settings changed; None takes one out."""

    def call(**changes):
        settings = {
            "model.family": "llama", "model.layers": 2, "model.heads": 2, "model.width": 16,
            "data.path": str(folder), "data.tokenizer": "byte", "data.seq_len": 16, "data.sampling": "pack",
            "training.max_steps": 20, "training.tokens_per_step": 64, "training.device": "cpu",
            "training.output_dir": str(tmp_path / "run"), "artifact.write": False,
        }  # fmt: skip
        settings |= {name.replace("__", "."): value for name, value in changes.items()}
        return load_config(python={k: v for k, v in settings.items() if v is not None}, environment={}).config

    return call
