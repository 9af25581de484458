"""A small run on a folder of buckets, and what each test breaks of it."""

import numpy as np
import pytest

from ingot.config.loading import load_config
from ingot.data.formats.gpt_simple import index_bytes
from ingot.data.tokenizers import ByteTokenizer

TEXT = "some words that a model could learn by heart "


def write_pair(path, documents=20, text=TEXT):
    """A .bin and its .idx of so many equal documents; returns their tokens."""
    tokenizer = ByteTokenizer()
    one = [*tokenizer.encode(text).tolist(), tokenizer.eos]
    path.parent.mkdir(parents=True, exist_ok=True)
    np.array(one * documents, "<u2").tofile(path)
    offsets = [len(one) * number for number in range(documents + 1)]
    path.with_suffix(".idx").write_bytes(index_bytes(offsets, [0] * documents, 2))
    return offsets[-1]


@pytest.fixture
def folder(tmp_path):
    """Two buckets of 920 tokens to train on, one file each, and the same for validation."""
    for split in ("train", "val"):
        for bucket in ("web", "books"):
            assert write_pair(tmp_path / "data" / split / bucket / "0.bin") == 920
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
