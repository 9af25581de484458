"""The original gpt-simple in a process of its own, and small data that it and ours can read.

It takes some five seconds to start, so one process runs as many commands as a test has for it.
"""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from sentencepiece import SentencePieceTrainer
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, trainers

from ingot.compat.gpt_simple.files import write_tokenizer
from ingot.data.formats.gpt_simple_folder import index_bytes
from ingot.data.tokenizers import GPT2Tokenizer, SentencePieceTokenizer, Tokenizer

SITE = Path(sys.prefix) / "gpt-simple"  # where `make test` installs it
BUCKETS = ("books", "web")
END = "<|endoftext|>"
LENGTH = 32  # of a row
Original = Callable[..., list[Any]]  # `run_original`, as the fixture of that name gives it

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

# What the original computes with the weights of its last checkpoint, for ids and for a text; models of other shapes with what
# they compute; and the rows that it makes of two files.
LOOK = """
import dataclasses, json, os, torch
from itertools import islice
from pathlib import Path
from gpt_simple import ModelConfig, SimpleLLM, load_for_inference, generate
from gpt_simple.data import PreTokenizedDataset
ids = torch.arange(24).reshape(2, 12) * 7
model, tokenizer, config = load_for_inference("out", device="cpu")
with torch.no_grad():
    said.append(model(ids)[0].tolist())
said.append(generate(model, tokenizer, ["00001 ab", "00002"], max_new_tokens=12, do_sample=False))
shapes = [
    dict(norm="layernorm", mlp_type="mlp", activation="gelu", use_bias=True, tie_word_embeddings=False, n_kv_head=1,
         rope_scaling_type="linear", rope_scaling_factor=2.0),
    dict(qkv_bias=True, activation="relu", intermediate_size=40, rope_scaling_type="ntk", rope_scaling_factor=4.0,
         rope_base=500.0, norm_eps=1e-3, attention_mode="sdpa_mask"),
]
logits = []
for number, shape in enumerate(shapes):
    torch.manual_seed(number)
    config = ModelConfig(vocab_size=384, n_embd=32, n_layer=2, n_head=4, n_positions=16, **shape)
    model = SimpleLLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        logits.append(model(ids)[0].tolist())
    folder = Path(f"shape-{number}/model")
    folder.mkdir(parents=True)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
said.append(logits)
files = sorted(Path("data/train/web").glob("*.bin"))
rows = PreTokenizedDataset(files, 32, 42, pad_token_id=300, eod_token_id=0)
said.append([item["input_ids"].tolist() for item in rows])
from gpt_simple.tokenizer import SimpleLLMTokenizer
said.append([SimpleLLMTokenizer(name).encode("the quick fox over 12") for name in ("sentencepiece", "gpt2-files")])
"""
# The parameters of everything that is called, and the fields of the results, of both packages in the same words.
SIGNATURES = """
import inspect
def told(value):
    try:
        return [[one.name, str(one.kind), repr(one.default)] for one in inspect.signature(value).parameters.values()]
    except (TypeError, ValueError):
        return []
calls = ["train", "generate", "load_for_inference", "validate_checkpoint", "TrainingResult", "CurriculumPhase", "ModelConfig",
         "DataConfig", "OptimizerConfig", "TrainingConfig", "SimpleLLM"]
said.append({"names": sorted(module.__all__), "calls": {name: told(getattr(module, name)) for name in calls},
             "methods": {name: told(getattr(module.SimpleLLM, name)) for name in ("forward", "generate", "get_num_params")},
             "errors": [getattr(module, f"{name}Error").exit_code for name in ("GptSimple", "Config", "Data", "Checkpoint")]})
"""
NAMES = f"import gpt_simple as module\nsaid.append(module.Config().to_dict()){SIGNATURES}"
# Two phases: after some six of twelve steps the second begins, and the original its files anew.
PHASES = [
    {"duration_tokens": 1500, "mix": {"books": 0.8, "web": 0.2}},
    {"duration_tokens": 1600, "mix": {"books": 0.3, "web": 0.7}},
]


@dataclass(frozen=True)
class TheirRun:
    """A run of the original in `folder`/out, and what it computes."""

    folder: Path
    logits: list[Any]
    texts: list[str]
    shapes: list[Any]  # the logits of the models in shape-0, shape-1
    rows: list[list[int]]  # of the bucket web, from its first file to its last
    tokens: list[list[int]]  # of a text, by the tokenizers that ours wrote for it: SentencePiece's, GPT-2's
    settings: dict[str, Any]  # the keys of a config with their defaults
    signatures: dict[str, Any]  # what SIGNATURES says of its package


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
        timeout=300,
    )
    assert ran.returncode == 0 and "SAID" in ran.stdout, ran.stdout + ran.stderr
    return json.loads(ran.stdout.rpartition("SAID")[2])


def write_tokenizers(folder: Path) -> list[Tokenizer]:
    """Tokenizers of ours as files for the original, below a folder."""
    model = io.BytesIO()
    texts = iter([f"the quick brown fox {number} jumps over the lazy dog" for number in range(300)])
    SentencePieceTrainer.train(sentence_iterator=texts, model_writer=model, vocab_size=120, model_type="bpe", minloglevel=2)
    tokenizers = [SentencePieceTokenizer(model.getvalue()), GPT2Tokenizer()]
    for name, tokenizer in zip(("sentencepiece", "gpt2-files"), tokenizers, strict=True):
        write_tokenizer(folder / name, tokenizer.spec(), LENGTH)
    return tokenizers


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
    tokenizer = Library(models.BPE())
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
