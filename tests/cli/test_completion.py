"""Shell completion, which is typer's: it knows commands, options, recipes and settings."""

from __future__ import annotations

import pytest
from programs import said


@pytest.mark.parametrize(
    ("line", "completions"),
    [
        ("ingot tra", ["train"]),
        ("ingot data v", ["verify"]),
        ("ingot train --nn", ["--nnodes"]),
        ("ingot train --recipe golf/b", ["golf/baseline"]),
        ("ingot train --model.lay", ["--model.layers"]),
        ("ingot config show --budget.s", ["--budget.seconds"]),
        ("ingot eval --model.lay", []),
    ],
)
def test_the_word_at_the_cursor_is_completed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, line: str, completions: list[str]
) -> None:
    monkeypatch.setenv("_INGOT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(line.count(" ")))
    code, out, err = said(capsys)
    assert (code, out.split(), err) == (0, completions, "")
