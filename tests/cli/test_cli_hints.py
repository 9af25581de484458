"""Words that people bring from other programs are answered with the ones that are meant here."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import said

from ingot.data.text.text_files import find_files, read_documents


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["sample", "runs/x"], "unknown command 'sample'; did you mean 'ingot generate'?"),
        (["prepare"], "unknown command 'prepare'; did you mean 'ingot data prepare'?"),
        (["watch", "runs/x"], "unknown command 'watch'; did you mean 'ingot status --watch'?"),
        (["trian"], "unknown command 'trian'; did you mean 'ingot train'?"),
        (["zzz"], "unknown command 'zzz'; ingot --help lists all commands"),
        (["data", "prepar"], "unknown command 'prepar' of ingot data; did you mean 'ingot data prepare'?"),
        (["golf", "zzz"], "unknown command 'zzz' of ingot golf; ingot golf --help lists all commands"),
        (["train", "demo"], "demo is not a run folder; did you mean the recipe --recipe demo, or the file --config demo?"),
        (["train", "--lr", "3e-4"], "unknown option --lr; did you mean --optimizer.learning_rate?"),
        (["train", "--max-steps=10"], "unknown option --max-steps; did you mean --training.max_steps?"),
        (["train", "--data", "x"], "unknown option --data; did you mean --data.path?"),
    ],
)
def test_a_word_of_another_program_is_answered_with_ours(capsys: pytest.CaptureFixture[str], words: list[str], answer: str):
    code, out, err = said(capsys, *words)
    assert (code, out, err) == (2, "", f"ingot: error: {answer}\n")


@pytest.mark.parametrize("verb", [["train"], ["eval"], ["data", "prepare"], ["golf", "pack"], []])
def test_help_is_asked_for_in_three_ways(capsys: pytest.CaptureFixture[str], verb: list[str]):
    usual = said(capsys, *verb, "--help")
    assert usual[0] == 0 and "Usage: ingot" in usual[1]
    assert said(capsys, *verb, "-h") == usual == said(capsys, "help", *verb)


@pytest.mark.parametrize("verb", [[], ["data"], ["config"]])
def test_help_cuts_no_description_at_80_columns(capsys, monkeypatch, verb: list[str]):
    monkeypatch.setenv("COLUMNS", "80")
    assert "..." not in said(capsys, *verb, "--help")[1].replace("[ARGS]...", "")


def test_the_usage_of_train_names_the_run_that_it_resumes(capsys: pytest.CaptureFixture[str]):
    assert "ingot train [RUN] [OPTIONS]" in said(capsys, "train", "--help")[1]


def test_a_markdown_file_is_a_document(tmp_path: Path):
    (tmp_path / "page.md").write_text("# Title\n\ntext\n")
    (tmp_path / "README.md").write_text("about the pages")
    files, passed_over = find_files([tmp_path])
    assert [path.name for path in passed_over] == ["README.md"]
    assert list(read_documents(files, "text")) == ["# Title\n\ntext\n"]
