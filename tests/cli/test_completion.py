"""Shell completion knows verbs, options and settings, installs itself without harm, and needs no torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from programs import said

Capsys = pytest.CaptureFixture[str]


@pytest.fixture
def completed(capsys: Capsys, monkeypatch: pytest.MonkeyPatch):
    def words(*given: str) -> list[str]:
        monkeypatch.setenv("_INGOT_COMPLETE", "1")
        code, out, err = said(capsys, *given)
        assert (code, err) == (0, "")
        return out.splitlines()

    return words


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["tra"], ["train"]),
        (["data", "v"], ["verify"]),
        (["help", "val"], ["validate"]),
        (["train", "--model.lay"], ["--model.layers"]),
        (["config", "show", "--budget.s"], ["--budget.seconds"]),
        (["train", "--recipe", "demo", "--training.max_s"], ["--training.max_steps"]),
        (["train", "--nn"], ["--nnodes"]),
        (["train", "--recipe", "golf/b"], ["golf/baseline"]),
        (["train", "--model.family", "ll"], ["llama"]),
        (["train", "--model.family=ll"], ["--model.family=llama"]),
        (["train", "--model.family", "=", "ll"], ["llama"]),  # as bash cuts it
        (["train", "--model.bias", ""], ["true", "false"]),
        (["export", "runs/x", "--format", "nano"], ["nanogpt"]),
        (["eval", "runs/"], []),  # files are the shell's
        (["eval", "--model.lay"], []),
        (["eval", "--tell"], []),  # hidden
        (["nonsense", "x"], []),
    ],
)
def test_the_word_at_the_cursor_is_completed(completed, words: list[str], found: list[str]):
    assert completed(*words) == found


def test_an_empty_word_is_every_verb(completed):
    assert {"train", "runs", "plot", "data", "golf"} <= set(completed(""))


def test_bash_completes_a_setting_by_the_installed_lines_and_torch_is_not_loaded(tmp_path: Path):
    environment = {**os.environ, "HOME": str(tmp_path), "SHELL": "/bin/bash", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    environment.pop("XDG_CONFIG_HOME", None)
    program = "import sys; sys.modules['torch'] = None; sys.argv[0] = 'ingot'; from ingot.cli.main import run; run()"
    (tmp_path / "ingot").write_text(f'#!/bin/sh\nexec {sys.executable} -c "{program}" "$@"\n')
    (tmp_path / "ingot").chmod(0o755)
    (tmp_path / ".bashrc").write_text("alias mine=ls")
    for _ in range(2):
        subprocess.run(["ingot", "--install-completion"], env=environment, check=True, stdout=subprocess.DEVNULL)
    assert (tmp_path / ".bashrc").read_text() == f"alias mine=ls\nsource '{tmp_path}/.config/ingot/completion.bash'\n"
    line = "COMP_WORDS=(ingot train --model.lay); COMP_CWORD=2; _ingot_complete ingot; echo ${COMPREPLY[@]}"
    shell = subprocess.run(["bash", "-c", f". ~/.bashrc; {line}"], env=environment, capture_output=True, text=True)
    assert (shell.stdout, shell.stderr) == ("--model.layers\n", "")


@pytest.mark.parametrize(
    ("shell", "words"), [("bash", "complete -o default"), ("zsh", "compdef"), ("fish", "complete --command")]
)
def test_every_shell_has_its_lines(capsys: Capsys, monkeypatch: pytest.MonkeyPatch, shell: str, words: str):
    monkeypatch.setenv("SHELL", f"/usr/bin/{shell}")
    code, out, err = said(capsys, "--show-completion")
    assert (code, err) == (0, "") and words in out and "_INGOT_COMPLETE" in out


def test_fish_finds_its_file_without_another(capsys: Capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("SHELL", "fish")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    assert said(capsys, "--install-completion")[0] == 0
    assert [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()] == [
        Path(".config/fish/completions/ingot.fish")
    ]


@pytest.mark.parametrize("option", ["--show-completion", "--install-completion"])
def test_another_shell_is_told_in_one_line(capsys: Capsys, monkeypatch: pytest.MonkeyPatch, option: str):
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    code, out, err = said(capsys, option)
    assert (code, out) == (2, "") and err.count("\n") == 1 and "SHELL is tcsh and completion is for bash, zsh, fish" in err
