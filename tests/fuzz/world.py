"""The sound files that cases start from: text, data, runs and models of every format, small and made once for each process.

Everything is made by the programs themselves, so a case that changes nothing must succeed.
"""

from __future__ import annotations

import csv
import gzip
import json
import lzma
import random
import shutil
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path

import golf_toys
import original
import small_runs
import torch
import yaml
from tiny_runs import write_text
from toy_tokenizers import byte_level_config, llama_config

from ingot.cli.main import run
from ingot.compat.gpt_simple.main import main as gpt_simple
from ingot.compat.nanogpt.train import main as nanogpt

from .models import SOUND

# A model of a thousand weights, two steps of it, and nothing that takes a process of its own.
TINY = {
    "model.layers": 1, "model.heads": 2, "model.width": 16, "data.seq_len": 16, "data.path": "data",
    "training.max_steps": 2, "training.tokens_per_step": 64, "training.device": "cpu", "training.threads": 1,
    "training.save_every": 1,
    "evaluation.rows": 4, "evaluation.final_rows": 4, "artifact.score": "false", "artifact.codec": "zlib",
}  # fmt: skip
GOLF = {**golf_toys.TOY, "ITERATIONS": "1", "DATA_PATH": "data/datasets/toy", "TOKENIZER_PATH": "data/tokenizers/toy.model"}
NANOGPT = small_runs.SMALL | {"max_iters": 1, "n_layer": 1, "eval_interval": 1, "eval_iters": 1, "gradient_accumulation_steps": 1}
GPT_SIMPLE = {
    "training": {"max_steps": 2, "save_steps": 1, "eval_steps": 1, "logging_steps": 1, "walltime_reserve_seconds": 1},
    "model": {"n_layer": 1},
    "optimizer": {"warmup_steps": 0},
}


def words(settings: dict[str, object]) -> list[str]:
    """Settings as words of a command line."""
    return [f"--{name}={value}" for name, value in settings.items()]


def make_world(folder: Path, said: Path) -> Path:
    """Fill a folder with everything that scenarios.py names; what is printed meanwhile goes into the file `said`."""
    folder.mkdir(parents=True)
    torch.set_num_threads(1)
    with said.open("w") as file, redirect_stdout(file), redirect_stderr(file), chdir(folder):
        _texts(Path("text"))
        _data()
        _runs()
        _others()
    return folder


def _texts(folder: Path) -> None:
    """The same kind of text in every form that `data prepare` reads."""
    folder.mkdir()
    draw = random.Random(1)
    texts = [" ".join("".join(draw.choices("abcdefgh", k=5)) for _ in range(30)) for _ in range(30)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "a.txt").write_text("\n".join(texts))
    (folder / "a.md").write_text("# a\n" + "\n".join(texts))
    (folder / "a.jsonl").write_text(lines)
    (folder / "a.json").write_text(json.dumps([{"text": text} for text in texts]))
    for name, delimiter in (("a.csv", ","), ("a.tsv", "\t")):
        with (folder / name).open("w", newline="") as file:
            csv.writer(file, delimiter=delimiter).writerows([["id", "text"], *enumerate(texts)])
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (folder / "c.txt.xz").write_bytes(lzma.compress("\n".join(texts).encode()))


def _data() -> None:
    """Prepared folders, and the data of the other programs."""
    write_text(Path("data"), 0)
    _ingot("data", "prepare", "--input", "text/a.jsonl", "--tokenizer", "char", "--output", "chars")
    golf_toys.make_toys(Path("golf"))
    small_runs.make_data(Path("nanogpt"))
    original.make_data(Path("gpts"), files=1, documents=80)
    for split in ("train", "val"):
        for bucket in ("web", "books"):
            Path("lines", split, bucket).mkdir(parents=True)
            shutil.copy("text/a.jsonl", Path("lines", split, bucket, "a.jsonl"))
    Path("tokenizers").mkdir()
    Path("tokenizers/bytes.json").write_text(json.dumps(byte_level_config()))
    Path("tokenizers/llama.json").write_text(json.dumps(llama_config()))
    shutil.copy("golf/data/tokenizers/toy.model", "tokenizers/toy.model")


def _runs() -> None:
    """A finished run of each family and each program."""
    Path("mine.py").write_text(SOUND)
    families = {
        "gpt2": {"model.family": "gpt2", "optimizer.ema_decay": 0.5},
        "llama": {"model.family": "llama"},
        "golf": {"model.family": "golf", "model.kv_heads": 1, "optimizer.name": "muon"},
        "own": {"model.file": "mine.py"},
    }
    for name, settings in families.items():
        _ingot("train", *words(TINY | settings), f"--training.output_dir=runs/{name}")
    shutil.copytree("golf", "golf-run")
    with chdir("golf-run"):
        assert golf_toys.run_here(Path(), **GOLF).code == 0
    shutil.copytree("nanogpt", "nanogpt-run")
    with chdir("nanogpt-run"):
        assert nanogpt([*words(NANOGPT), "--out_dir=out"]) == 0
    original.write_config(Path("gpts/config.yaml"), **GPT_SIMPLE)
    shutil.copytree("gpts", "gpts-run")
    with chdir("gpts-run"):
        assert gpt_simple(["-q", "train", "--config", "config.yaml", "--training.device", "cpu"]) == 0


def _others() -> None:
    """Exports, and small files that commands read."""
    Path("exports").mkdir()
    for codec in ("none", "zlib", "lzma", "rans"):
        name = f"{codec}.{'safetensors' if codec == 'none' else 'ingot'}"
        _ingot("export", "runs/gpt2", "--no-score", "--codec", codec, "-o", f"exports/{name}")
    _ingot("export", "runs/gpt2", "--format", "huggingface", "-o", "exports/huggingface")
    tree: dict[str, dict[str, object]] = {}
    for name, value in (TINY | {"artifact.score": False}).items():
        section, _, key = name.partition(".")
        tree.setdefault(section, {})[key] = value
    Path("config.yaml").write_text(yaml.safe_dump(tree))
    Path("prompts.jsonl").write_text('{"prompt": "ab"}\n{"prompt": ""}\n')
    requests = ({"prompt": "ab"}, {"prompt": "c", "model": {"checkpoint": "runs/gpt2"}, "generation": {"max_new_tokens": 2}})
    Path("requests.jsonl").write_text("".join(json.dumps(request) + "\n" for request in requests))
    Path("preset.py").write_text("max_iters = 1\nbatch_size = 2\n")


def _ingot(*given: str) -> None:
    try:
        run(given)
    except SystemExit as end:
        if end.code:
            raise AssertionError(f"ingot {' '.join(given)} ended with {end.code}") from None
