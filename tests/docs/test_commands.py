"""Every command of README and docs/ runs: as it stands there, in a terminal, in a folder that is not the repository.

Words after it make it small (reader.py). What needs a GPU, the network or another machine is listed with its reason (pages.py).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked import Forking
from pages import ELSEWHERE, PAGES, Command, commands
from reader import BEFORE, GOLF, make_folder, smaller


@pytest.fixture(scope="module")
def forking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forking]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("INGOT_")}
    cache = tmp_path_factory.mktemp("cache")
    process = Forking({**ours, "INGOT_CACHE": str(cache), "OMP_NUM_THREADS": "1", "TERM": "xterm-256color"})
    yield process
    process.close()


@pytest.fixture(scope="module")
def made(forking: Forking, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a reader, made once."""
    folder = tmp_path_factory.mktemp("reader") / "folder"
    make_folder(folder, lambda *words: succeed(forking, Command(" ".join(words)), folder))
    return folder


def succeed(forking: Forking, command: Command, folder: Path) -> str:
    """Run a command of a page; what the terminal showed."""
    variables = {name: GOLF.get(name, value) for name, value in command.variables.items()}
    golf = GOLF if any("train_gpt" in word for word in command.words) else {}
    code, shown = forking(smaller(command.words), folder, {**variables, **golf})
    fine = (0, 2) if "validate" in command.words else (0,)  # 2: there are warnings, of a machine without a GPU for one
    assert code in fine, f"{command.text}\nended with exit code {code}:\n{shown}"
    assert "Traceback" not in shown, shown
    return shown


FIRST = ("README.md", "getting-started.md", "training.md", "nanogpt.md")  # what a new user reads; the others take minutes
TRIED = [
    pytest.param(page, marks=[] if page.name in FIRST else pytest.mark.long, id=page.name) for page in PAGES if commands(page)
]


@pytest.mark.parametrize("page", TRIED)
def test_every_command_of_a_page_runs(page: Path, forking: Forking, made: Path, tmp_path: Path) -> None:
    folder = tmp_path / "reader"
    shutil.copytree(made, folder)
    before = {**BEFORE.get(page.name, {})}
    for command in commands(page):
        if command.elsewhere is not None or command.is_script:
            continue
        for part in [part for part in before if part in command.text]:
            for text in before.pop(part):
                succeed(forking, Command(text), folder)
        succeed(forking, command, folder)


def test_what_is_not_run_is_in_the_documents() -> None:
    every = "\n".join(command.text for page in PAGES for command in commands(page))
    assert [part for part in ELSEWHERE if part not in every] == []


def test_a_command_that_fails_is_noticed(forking: Forking, made: Path) -> None:
    with pytest.raises(AssertionError, match="exit code 2"):
        succeed(forking, Command("ingot train --recipe dmo"), made)
    with pytest.raises(AssertionError, match="exit code 3"):
        succeed(forking, Command("ingot data verify nowhere"), made)
