"""The original gpt-simple in a process of its own, and small data that it and ours can read.

It takes some five seconds to start, so one process runs as many commands as a test has for it.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from ingot.data.formats.gpt_simple import index_bytes

SITE = Path(sys.prefix) / "gpt-simple"  # where `make test` installs it
BUCKETS = ("books", "web")
END = "<|endoftext|>"
LENGTH = 32  # of a row

# The commands come as JSON on stdin: words for its command line, or Python that finds its results in `said`.
DRIVER = """
import contextlib, io, json, sys
from gpt_simple.cli import main
said = []
for command in json.load(sys.stdin):
    if isinstance(command, str):
        exec(command)
        continue
    sys.argv, out, code = ["gpt-simple", *command], io.StringIO(), 0
    with contextlib.redirect_stdout(out):
        try:
            main.main()
        except SystemExit as end:
            code = end.code or 0
    said.append({"code": code, "out": out.getvalue()})
print("SAID" + json.dumps(said))
"""


def run_original(commands: Sequence[Sequence[str] | str], folder: Path) -> list[Any]:
    """Run commands of the original one after the other in a folder; returns what each said and its exit code."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(SITE),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "400",
    }
    ran = subprocess.run(
        [sys.executable, "-c", DRIVER],
        input=json.dumps(list(commands)),
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0 and "SAID" in ran.stdout, ran.stdout + ran.stderr
    return json.loads(ran.stdout.rpartition("SAID")[2])


def write_config(path: Path, **sections: Mapping[str, Any]) -> Path:
    """A YAML of gpt-simple's for a model of 20,000 parameters that learns eight rows per step."""
    config: dict[str, dict[str, Any]] = {
        "model": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_positions": LENGTH},
        "data": {"path": "data", "tokenizer": "tok", "max_length": LENGTH, "overlap_size": 4, "num_workers": 0},
        "optimizer": {"learning_rate": 0.01, "warmup_steps": 2},
        "training": {
            "per_device_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 12, "compile": False,
            "gradient_checkpointing": False, "logging_steps": 1000, "eval_steps": 1000, "save_steps": 4, "output_dir": "out",
        },
    }  # fmt: skip
    for name, section in sections.items():
        config[name] |= section
    path.write_text(yaml.safe_dump(config))
    return path


def make_data(folder: Path, files: int = 2, documents: int = 300) -> None:
    """tok/tokenizer.json with 300 ids, and data/SPLIT/BUCKET with documents that begin with a number of their own."""
    folder.mkdir(parents=True)
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghiklmnoprstuvwy", k=draw.randint(2, 8))) for _ in range(60)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([" ".join(draw.choices(words, k=2000))], trainer)
    (folder / "tok").mkdir()
    tokenizer.save(str(folder / "tok" / "tokenizer.json"))
    number = 0
    for split, bucket in ((split, bucket) for split in ("train", "val") for bucket in BUCKETS):
        place = folder / "data" / split / bucket
        place.mkdir(parents=True)
        for file in range(files if split == "train" else 1):
            tokens, offsets = [], [0]
            for _ in range(documents if split == "train" else 20):
                text = f"{number:05d} " + " ".join(draw.choices(words, k=draw.randint(1, 7)))
                ids = [*tokenizer.encode(text).ids[: LENGTH - 1], tokenizer.token_to_id(END)]
                tokens += ids
                offsets.append(len(tokens))
                number += 1
            np.array(tokens, "<u2").tofile(place / f"part{file}.bin")
            (place / f"part{file}.idx").write_bytes(index_bytes(offsets, [0] * (len(offsets) - 1), 2))
