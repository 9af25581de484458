"""Toy shards, a toy tokenizer, and train_gpt.py, or its twin for Macs, run on them: here in half a second, or by itself."""

from __future__ import annotations

import io
import json
import os
import random
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from toy_tokenizers import sentencepiece_file, toy_sentencepiece

from ingot.compat.golf.main import main
from ingot.compat.golf.variables import MLX_VARIABLES, RANKS, VARIABLES, as_text
from ingot.compat.options import Option

ROOT = Path(__file__).parents[3]
TOY = {
    "VOCAB_SIZE": "274", "ITERATIONS": "4", "VAL_LOSS_EVERY": "0", "TRAIN_BATCH_TOKENS": "512", "TRAIN_SEQ_LEN": "32",
    "VAL_BATCH_SIZE": "16384", "NUM_LAYERS": "2", "MODEL_DIM": "16", "NUM_HEADS": "2", "NUM_KV_HEADS": "1", "WARMUP_STEPS": "0",
    "MAX_WALLCLOCK_SECONDS": "0", "RUN_ID": "toy",
}  # fmt: skip
ROWS = 16  # of a toy step
REFUSED = (
    "huggingface_hub", "ingot", "rich", "safetensors", "tiktoken", "tokenizers", "transformers", "typer", "yaml",
    "zstandard",
)  # fmt: skip
# Python runs this file at its start; the finder of the one file comes before this one, and no other may find what is refused.
BARE = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {REFUSED}:
            raise ModuleNotFoundError(f"{{name}} is not installed", name=name)
sys.meta_path.insert(0, Refuse())
"""
WORDS = ["The", "cat", "cats", "A", "that", "teach", "é"]
EXACT = re.compile(r"^final_int8_zlib_roundtrip_exact val_loss:(\d+\.\d{8}) val_bpb:(\d+\.\d{8})$", re.MULTILINE)


def shard(tokens: Sequence[int]) -> bytes:
    """A shard file of these tokens."""
    head = np.zeros(256, "<i4")
    head[:3] = 20240520, 1, len(tokens)
    return head.tobytes() + np.array(tokens, "<u2").tobytes()


def make_toys(folder: Path) -> None:
    """data/datasets/toy with two shards to train on (6,000 tokens) and one to be judged by (41 rows), and its tokenizer."""
    (folder / "data/datasets/toy").mkdir(parents=True)
    (folder / "data/tokenizers").mkdir()
    (folder / "data/tokenizers/toy.model").write_bytes(sentencepiece_file())
    tokenizer, draw = toy_sentencepiece(), random.Random(0)
    documents = [tokenizer.encode_document(" ".join(draw.choices(WORDS, k=40))) for _ in range(60)]
    ids = [int(token) for document in documents for token in document]
    parts = {"val_000000": ids[:1332], "train_000000": ids[1332:4332], "train_000001": ids[4332:7332]}
    for name, tokens in parts.items():
        (folder / f"data/datasets/toy/fineweb_{name}.bin").write_bytes(shard(tokens))


def manifest(data: Path, tokenizer: str = "toy.model", **stats: Any) -> None:
    """Write the manifest of a data folder, as the challenge's exporter does."""
    sets = [{"name": data.name, "tokenizer_name": "sp_bpe_274", "stats": stats}]
    tokenizers = [{"name": "sp_bpe_274", "model_path": f"tokenizers/{tokenizer}"}]
    (data.parent.parent / "manifest.json").write_text(json.dumps({"datasets": sets, "tokenizers": tokenizers}))


def variables(toys: Path, **given: str) -> dict[str, str]:
    """The variables of a toy run."""
    where = {"DATA_PATH": str(toys / "data/datasets/toy"), "TOKENIZER_PATH": str(toys / "data/tokenizers/toy.model")}
    return TOY | where | given


class Ran:
    """What train_gpt.py printed, and how it ended."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def lines(self) -> list[str]:
        """The challenge's own lines, without our notes."""
        return [line for line in self.out.splitlines() if not line.startswith("note: ")]

    @property
    def exact(self) -> tuple[float, float]:
        """Loss and bits per byte of the file that was read again."""
        (found,) = EXACT.findall(self.out)
        return float(found[0]), float(found[1])

    @property
    def losses(self) -> dict[int, float]:
        """The train losses by step."""
        return {int(step): float(loss) for step, loss in re.findall(r"^step:(\d+)/\d+ train_loss:(\S+) ", self.out, re.M)}

    @property
    def evaluations(self) -> dict[int, tuple[float, float]]:
        """Validation loss and bits per byte by step."""
        found = re.findall(r"^step:(\d+)/\d+ val_loss:(\S+) val_bpb:(\S+) ", self.out, re.M)
        return {int(step): (float(loss), float(bpb)) for step, loss, bpb in found}

    def value(self, key: str) -> str:
        """What stands after `key:` the first time."""
        found = re.search(rf"(?:^| |\(){re.escape(key)}:\s?(\S+?)\)?(?: |$)", self.out, re.M)
        assert found, f"no {key} in:\n{self.out}"
        return found[1]


def run_here(toys: Path, *arguments: str, main: Callable[..., int] = main, **given: str) -> Ran:
    """Run train_gpt.py, or what another `main` is, in this process and in the folder that it works in."""
    environment = {name: value for name, value in os.environ.items() if name not in (*VARIABLES, *MLX_VARIABLES, *RANKS)}
    out, err, threads = io.StringIO(), io.StringIO(), torch.get_num_threads()
    torch.set_num_threads(1)  # toys are too small for two, which only wait for each other where a machine is busy
    try:
        with (
            patch.dict(os.environ, environment | variables(toys, **given), clear=True),
            redirect_stdout(out),
            redirect_stderr(err),
        ):
            code = main(arguments)
    finally:
        torch.set_num_threads(threads)
    return Ran(code, out.getvalue(), err.getvalue())


class Golf:
    """Runs train_gpt.py on the toys, in the folder that is worked in."""

    def __init__(self, toys: Path, script: str = "train_gpt.py", main: Callable[[], int] = main) -> None:
        self.toys, self.script, self.main = toys, script, main

    def __call__(self, code: int = 0, **given: str) -> Ran:
        """Run in this process and insist on the exit code."""
        ran = run_here(self.toys, main=self.main, **given)
        assert ran.code == code, ran.err + ran.out
        return ran

    def refuses(self, code: int, **given: str) -> str:
        """The one line on stderr that a mistake is."""
        ran = self(code, **given)
        (line,) = ran.err.splitlines()
        assert line.startswith(f"{self.script}: error: "), line
        return line.removeprefix(f"{self.script}: error: ")

    def program(self, *before: str, **given: str) -> Ran:
        """Run the script as users do, `before` it for example torchrun."""
        ended = subprocess.run(
            [sys.executable, *before, str(ROOT / self.script)], env=self.environment(**given), capture_output=True, text=True
        )
        return Ran(ended.returncode, ended.stdout, ended.stderr)

    def environment(self, **given: str) -> dict[str, str]:
        """What a process of its own finds in its environment."""
        inherited = {name: value for name, value in os.environ.items() if name not in (*VARIABLES, *MLX_VARIABLES, *RANKS)}
        return inherited | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"} | variables(self.toys, **given)


def bare(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """train_gpt.py of a folder, by a Python that has nothing but what a submission may need."""
    (folder.parent / "bare").mkdir(exist_ok=True)
    (folder.parent / "bare" / "sitecustomize.py").write_text(BARE)
    inherited = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    environment = inherited | environment | {"PYTHONPATH": str(folder.parent / "bare"), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "train_gpt.py"], cwd=folder, env=environment, capture_output=True, text=True)


def forked(folder: Path, **environment: str) -> tuple[int, str]:
    """train_gpt.py of a folder in a fork of this process, without our modules but with torch; its exit code and what it said."""
    told = folder / "forked.out"
    if not (child := os.fork()):
        with told.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.chdir(folder)
        os.environ.update(environment)
        sys.argv, sys.stdout, sys.stderr = ["train_gpt.py"], os.fdopen(1, "w"), os.fdopen(2, "w")
        for name in [name for name in sys.modules if name.partition(".")[0] == "ingot"]:
            del sys.modules[name]
        code = 1
        try:
            runpy.run_path("train_gpt.py", run_name="__main__")
        except SystemExit as ended:
            code = int(ended.code or 0)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), told.read_text()


def markdown(options: Iterable[Option]) -> str:
    """The table of variables in docs/golf.md."""
    rows = ["| variable | value | default | meaning |", "|---|---|---|---|"]
    for one in options:
        default = "" if one.default is None else as_text(one.default).replace(",", ", ")
        rows.append(f"| `{one.name}` | {one.allowed} | {default} | {one.help} |")
    return "\n".join(rows) + "\n"
