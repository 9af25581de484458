"""The commands of README and docs/, as a reader would copy them: the lines of every block of shell."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
BLOCK = re.compile(r"^```(?:sh|bash)\n(.*?)^```$", re.M | re.S)
SHELL = re.compile(r"^\s*(?:for|cd|done)\b", re.M)  # a block with these is one script

# What is not run here, by a part of the command, and why.
ELSEWHERE = {
    "make train": "a test of a fresh clone: it sets a machine up",
    "make test": "it is this",
    "source .venv": "it changes the reader's own shell",
    "pip install": "needs the network",
    "pipx install": "needs the network",
    "uvx ": "needs the network",
    "docker ": "needs a container engine",
    " hf:": "needs the network; tests/data/text asks a server of its own",
    "openai-community/": "needs the network; tests/compat/nanogpt asks a server of its own",
    "gpt2.ingot": "needs GPT-2's weights, which the network has; tests/train/test_session begins with smaller ones",
    "data download": "needs the network; tests/compat/golf/data asks a server of its own",
    "cached_challenge_fineweb.py": "needs the network; tests/compat/golf/data asks a server of its own",
    "download_hf_docs_and_tokenize.py": "needs the network; tests/compat/golf/data asks a server of its own",
    "RUN_ID=mac": "needs the challenge's shards; tests/compat/golf/mlx has it small",
    "logs/mac": "needs the run before it",
    "fineweb": "needs the challenge's shards",
    "ingot serve": "goes on until Ctrl-C; tests/serve has it",
    "ingot ui": "goes on until Ctrl-C; tests/ui has it",
    "--open": "goes on until Ctrl-C; tests/ui has it",
    "--task-data": "needs the files of the tasks; tests/inference/test_tasks has made-up ones",
    "task_data": "needs the files of the tasks; tests/train/test_task_runs has made-up ones",
    "ollama ": "needs ollama; tests/artifact/test_gguf has llama.cpp where it is installed",
    "nproc_per_node=2": "takes long to start; tests/compat/nanogpt/test_nanogpt_resume has it",
    "nproc_per_node=8": "needs eight GPUs",
    "nproc-per-node 8": "needs eight GPUs",
    "nproc_per_node 4": "needs four GPUs",
    "num_processes 4": "needs four GPUs",
    "--nnodes 2": "needs two machines; tests/cli/test_launch has it on one",
    "--nnodes 1:3": "needs several machines; tests/cli/test_restarts has them as network namespaces",
    "bench.py": "needs a GPU for its 124M parameters; tests/compat/nanogpt has it small",
    "device mps": "needs a Mac",
    "benchmarks/": "a benchmark",
    " stop ": "needs a run that is training; tests/cli/test_status_program and tests/compat/gpt_simple have it",
    "--watch": "goes on until Ctrl-C; tests/cli/test_terminal has it",
}


@dataclass(frozen=True)
class Command:
    """A command of a page; `text` is a whole script where it needs a shell."""

    text: str
    is_script: bool = False

    @property
    def elsewhere(self) -> str | None:
        """Why it is not run here; None where it is."""
        return next((why for part, why in ELSEWHERE.items() if part in self.text), None)

    @property
    def variables(self) -> dict[str, str]:
        """What is set before it."""
        return dict(word.split("=", 1) for word in self._split()[: self._start])

    @property
    def words(self) -> list[str]:
        return self._split()[self._start :]

    def _split(self) -> list[str]:
        return shlex.split(self.text, comments=True)

    @property
    def _start(self) -> int:
        return next(i for i, word in enumerate(self._split()) if not re.match(r"[A-Z_]+=", word))


def commands(page: Path) -> list[Command]:
    """All of a page, from its top to its end."""
    found = []
    for block in BLOCK.findall(page.read_text()):
        if SHELL.search(block):
            found.append(Command(block, is_script=True))
            continue
        lines = block.replace("\\\n", " ").splitlines()
        found += [Command(line.strip()) for line in lines if line.strip() and not line.strip().startswith("#")]
    return found
