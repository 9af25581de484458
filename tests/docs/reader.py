"""The folder of a reader who follows the pages: scripts of a checkout, texts, a trained run, and what pages take for granted."""

from __future__ import annotations

import json
import lzma
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
from pages import ROOT
from pyarrow import parquet

# Words after a command that make it small: what it shows is that it runs, not how well it trains.
TRAIN = [
    "--budget.seconds=null", "--evaluation.rows=4", "--evaluation.final_rows=4", "--evaluation.sample_tokens=8",
    "--artifact.score=false",
]  # fmt: skip
LARGE = [
    "--training.tokens_per_step=256", "--data.seq_len=32", "--model.layers=1", "--model.width=32", "--model.heads=2",
    "--evaluation.stride=32", "--optimizer.warmup_steps=0", "--training.compile=false",
]  # fmt: skip
WIDE = ["--training.tokens_per_step=512", "--artifact.codec=zlib"]  # for a vocabulary of 50,257
NANOGPT = [
    "--compile=False", "--n_layer=1", "--n_head=2", "--n_embd=32", "--block_size=32", "--batch_size=4",
    "--max_iters=2", "--eval_iters=1", "--eval_interval=1",
]  # fmt: skip
WRITE = ["--device=cpu", "--num_samples=1", "--max_new_tokens=8"]
GOLF = {"ITERATIONS": "2", "WARMUP_STEPS": "0", "MLX_MAX_MICROBATCH_TOKENS": "1024", "MODEL_DIM": "32", "NUM_LAYERS": "1"}

# What a page takes for granted, because another page made it or the reader has it; before the command that a part of it names.
BEFORE: dict[str, dict[str, list[str]]] = {
    "README.md": {"gpt-simple": ["cp small.yaml config.yaml"]},
    "artifact.md": {
        "path/to/folder": ["mkdir path/to", "ingot export RUN --format huggingface --output path/to/folder"],
        "data/mine": ["ingot data prepare --input text.txt --tokenizer path/to/folder --output data/mine"],
    },
    "clusters.md": {"runs/first": ["cp RUN runs/first"]},
    "data-audit.md": {
        "data/mine": ["ingot data prepare --input text.txt --tokenizer byte --output data/mine"],
        "data/theirs": ["ingot data prepare --input book.txt --tokenizer byte --output data/theirs"],
    },
    "gpt-simple.md": {"./outputs": ["gpt-simple train --config small.yaml"]},
    "gpt-simple-runs.md": {
        "outputs": [
            "gpt-simple train --config small.yaml", "cp small.yaml config.yaml", "cp llama.yaml mine.yaml",
            "cp outputs/checkpoints/final outputs/checkpoints/checkpoint-1000",
        ],
    },
    "mlx.md": {"train_shakespeare_char": ["python data/shakespeare_char/prepare.py"]},
    "nanogpt.md": {
        "runs/edited": ["cp edited.py model.py"],
        "out-old": ["python train.py config/train_shakespeare_char.py --out_dir=out-old"],
    },
    "run-folder.md": {
        "ingot status": ["cp RUN runs/first", "cp RUN runs/second"],
        "step-00001000": ["cp runs/first/checkpoints/step-00000002 runs/first/checkpoints/step-00001000"],
    },
    "training.md": {"validate": ["ingot data prepare --input text.txt --tokenizer gpt2 --output data/gpt2"]},
}  # fmt: skip
LLAMA_YAML = """
base: demo
data: {tokenizer: byte}
model: {family: llama, layers: 2, heads: 4, width: 64, context: 64, vocab_size: 384, inner_width: 256}
training: {output_dir: runs/mine}
"""
SMALL_YAML = """
model: {n_layer: 2, n_head: 4, n_embd: 64, n_positions: 64}
data: {path: small, tokenizer: byte, max_length: 64, overlap_size: 0}
optimizer: {warmup_steps: 1}
training: {output_dir: outputs, max_steps: 2, per_device_batch_size: 1, gradient_accumulation_steps: 1}
"""

Ran = Callable[..., None]


def smaller(words: list[str]) -> list[str]:
    """The words of a command with those that make it small."""
    match words:
        case ["ingot", "train", "--recipe", "auto", *_]:
            return [*words, "--budget.seconds=1", *TRAIN[1:]]
        case ["ingot", "train", *rest]:
            steps = [] if "--training.stages" in rest else ["--training.max_steps=2"]  # stages say how many
            large = LARGE if "--recipe" in rest and "demo" not in rest else []
            return [*words, *TRAIN, *steps, *large, *(WIDE if "gpt2" in rest and "demo" in rest else [])]
        case ["ingot", "sweep", *_]:
            return [*words, *TRAIN, "--training.max_steps=2"]
        case ["ingot", "export", *_]:
            return [*words, "--no-score"]
        case ["ingot", "eval", *_] if "--self-test" not in words:
            return [*words, "--rows", "4"]
        case ["ingot", "generate", *_] if "--tokens" not in words:
            return [*words, "--tokens", "8"]
        case ["python", "train.py", *rest]:
            named = any(word.startswith("--device=") for word in rest)
            return [*words, *NANOGPT, *([] if named else ["--device=cpu"])]
        case ["python", "sample.py", *_]:
            return [*words, *WRITE]
    return words


def make_folder(folder: Path, run: Ran) -> None:
    """What every page finds: README and docs/ are read from a checkout, with one's own texts in it."""
    folder.mkdir(parents=True)
    for name in ("train.py", "sample.py", "bench.py", "model.py", "train_gpt.py", "train_gpt_mlx.py"):
        shutil.copy(ROOT / name, folder)
    for name in ("config", "data"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.bin", "*.pkl", "datasets"))
    text = prose(100_000)
    corpus = [f"corpus/{split}/{bucket}/a.txt" for split in ("train", "val") for bucket in ("web", "books")]
    for name in ("book.txt", "text.txt", "data/shakespeare_char/input.txt", *corpus):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    articles = [text[i : i + 1500] for i in range(0, len(text), 1500)]
    lines = "".join(json.dumps({"text": article}) + "\n" for article in articles)
    for name in ("articles.jsonl", "big.jsonl", "raw/train/web/a.jsonl", "raw/val/web/a.jsonl", "text/train/web/a.jsonl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(lines)
    parquet.write_table(pa.table({"content": articles}), folder / "articles.parquet")
    (folder / "src/ingot/data/samples").mkdir(parents=True)
    (folder / "src/ingot/data/samples/shakespeare.jsonl.xz").write_bytes(lzma.compress(lines.encode()))
    (folder / "mine.py").write_text(python_block("your-own-model.md", "class Model"))
    (folder / "edited.py").write_text(
        "from ingot.compat.nanogpt.gpt import GPT, GPTConfig\n\n\n" + python_block("nanogpt.md", "class Model")
    )
    (folder / "beginning.txt").write_text("ROMEO.")
    (folder / "run.yaml").write_text("base: demo\n")
    (folder / "mine.yaml").write_text("base: demo\ntraining:\n  output_dir: runs/four-layers\n")
    (folder / "small.yaml").write_text(SMALL_YAML)
    (folder / "llama.yaml").write_text(LLAMA_YAML)
    (folder / "beginning.txt").write_text("ROMEO.\n")
    (folder / "prompts.jsonl").write_text('{"prompt": "ROMEO."}\n')
    (folder / "requests.jsonl").write_text('{"prompt": "ROMEO.", "model": {"output_dir": "RUN"}}\n')
    run("ingot", "train", "--recipe", "demo", "--model.family", "gpt2", "--training.output_dir", "RUN")  # exports to every format
    for split in ("train", "val"):
        words = ("--input_dir", f"raw/{split}/web", "--output_dir", f"small/{split}/web", "--tokenizer_path", "byte")
        run("gpt-simple", "tokenize", *words, "--max_length", "64", "--overlap_size", "0")


def python_block(page: str, part: str) -> str:
    """The block of Python on a page that holds a part."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.M | re.S)
    return str(next(block for block in blocks if part in block))


def prose(size: int) -> str:
    """The first bytes of the text that comes with the package."""
    with lzma.open(ROOT / "src/ingot/data/samples/shakespeare.jsonl.xz", "rt") as lines:
        return str(json.loads(next(lines))["text"])[:size]
