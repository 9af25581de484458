"""How every program of ours ends: one line, one exit code, and output that goes to whoever reads it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ingot.cli import main
from ingot.console import entry
from ingot.console.entry import BROKEN_PIPE, explained
from ingot.errors import INTERRUPTED, CheckpointError, ConfigError, DataError, PeerLost, RunError, Setting
from ingot.model.registry import load_class


def ended(error: BaseException, **how) -> int:
    with explained("it.py", **how) as outcome:
        raise error
    return outcome.code


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigError("a\n  b"), 2, "it.py: error: a b\n"),
        (DataError("no data"), 3, "it.py: error: no data\n"),
        (CheckpointError("no room"), 4, "it.py: error: no room\n"),
        (RunError("nan"), 1, "it.py: error: nan\n"),
        (KeyboardInterrupt(), INTERRUPTED, "it.py: interrupted\n"),
        (OSError(28, "No space left on device"), 1, "it.py: error: No space left on device\n"),
        (PermissionError(13, "Permission denied", "x"), 1, "it.py: error: x: Permission denied\n"),
        (MemoryError(), 1, "it.py: error: out of memory; lower training.micro_batch or data.seq_len, "),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"), 1, "it.py: error: out of memory; "),
        (RuntimeError("[metal::malloc] Attempting to allocate 9 bytes which is"), 1, "it.py: error: out of memory; "),
        (
            RuntimeError("[METAL] Command buffer execution failed: Insufficient Memory (8)"),
            1,
            "it.py: error: out of memory; ",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_is_one_line_and_the_exit_code_of_its_class(capsys, error, code, said):
    assert ended(error) == code
    told = capsys.readouterr().err
    assert told.startswith(said) and told.count("\n") == 1


def test_what_a_library_starts_imports_nothing_from_the_current_folder(tmp_path, monkeypatch):
    """torch.compile tries by a `python -c` which vectors the processor has, and would compute otherwise where that fails."""
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    (tmp_path / "struct.py").write_text("raise SystemExit('a file of the user was imported')")
    with explained("it.py"):
        subprocess.run([sys.executable, "-c", "from ctypes import cdll"], cwd=tmp_path, check=True)
    assert "PYTHONSAFEPATH" not in os.environ  # of whoever called us from Python


def test_a_bug_of_ours_keeps_its_traceback():
    with pytest.raises(KeyError), explained("it.py"):
        raise KeyError("a bug")


def test_a_front_end_gives_settings_its_own_names_and_advice(capsys):
    error = DataError("{0} is odd", Setting("data.seq_len", 7), advice="double it")
    assert ended(error, name=lambda path: "T", advise=lambda ours: "add 1") == 3
    assert capsys.readouterr().err == "it.py: error: T=7 is odd; add 1\n"


@pytest.mark.parametrize("error", [ConfigError("x"), DataError("x"), CheckpointError("x")])
def test_what_every_rank_finds_wrong_the_first_one_says(capsys, monkeypatch, error):
    monkeypatch.setattr(entry, "PEER_WAIT_SECONDS", 0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = {}
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        assert ended(error) == error.exit_code
        said[rank] = capsys.readouterr().err
    assert said == {"0": "it.py: error: x\n", "1": ""}
    assert ended(error, every_rank=True) == error.exit_code and capsys.readouterr().err == "it.py: error: x\n"


@pytest.mark.parametrize("ranks", [{"RANK": "x", "WORLD_SIZE": "2"}, {"RANK": "1"}])
def test_where_nobody_knows_which_rank_is_first_every_one_speaks(capsys, monkeypatch, ranks):
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    assert ended(ConfigError("x")) == 2 and capsys.readouterr().err == "it.py: error: x\n"


def test_a_rank_that_lost_another_is_silent_and_has_its_code(capsys, monkeypatch):
    monkeypatch.setattr(entry, "PEER_WAIT_SECONDS", 0)
    assert ended(PeerLost(4), every_rank=True) == 4 and capsys.readouterr().err == ""


PROGRAM = """
import sys
from ingot.console.entry import explained
with explained("it.py") as outcome:
    print("\\u2581" * 100_000 if "long" in sys.argv else "hello \\u2581")
sys.exit(outcome.code)
"""


def shell(command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    python = f"{sys.executable} -c '{PROGRAM}'"
    return subprocess.run(
        ["bash", "-c", command.format(python=python)], env={**os.environ, **variables}, capture_output=True, text=True
    )


def test_a_reader_that_leaves_is_no_error():
    ran = shell("{python} long | head -c 1 > /dev/null; exit ${{PIPESTATUS[0]}}")
    assert (ran.returncode, ran.stderr) == (BROKEN_PIPE, "")


@pytest.mark.parametrize(
    ("where", "code", "said"), [(">/dev/full", 1, "it.py: error: No space left"), (">&-", 0, ""), ("2>&-", 0, "")]
)
def test_an_output_that_cannot_be_written_is_one_line(where, code, said):
    ran = shell(f"{{python}} {where}")
    assert (ran.returncode, ran.stderr[: len(said)], ran.stderr.count("\n")) == (code, said, bool(said))


def test_a_terminal_that_cannot_show_a_character_is_no_reason_to_fail():
    ran = shell("{python}", PYTHONIOENCODING="ascii")
    assert (ran.returncode, ran.stdout) == (0, "hello \\u2581\n")


@pytest.mark.parametrize(
    ("words", "code"), [(["--no-such"], 2), (["config", "show", "--training.seed", "x"], 2), (["data", "verify", "nowhere"], 3)]
)
def test_a_program_that_asks_for_json_gets_its_error_as_json_too(capsys, words, code):
    with pytest.raises(SystemExit) as ended:
        main.run([*words, "--json"])
    told = capsys.readouterr()
    assert ended.value.code == code and told.err.startswith("ingot: error: ") and told.err.count("\n") == 1
    assert json.loads(told.out) == {"error": told.err.removeprefix("ingot: error: ").rstrip("\n"), "exit_code": code}


def test_the_start_of_a_program_lies_before_its_imports() -> None:
    program = "import time; first_line = time.time()\n"
    program += "from ingot.console.entry import process_start; print(process_start(), first_line)"
    launched = time.time()
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    began, first_line = map(float, said.split())
    assert launched - 1 < began < first_line  # the system counts in hundredths of a second


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda: Path("a\0b").stat(), 2),
        (lambda: Path("\ud800").stat(), 2),
        (lambda: "\ud800".encode(), 2),
        (lambda: Path("x" * 300).stat(), 1),
        (lambda: Path("/".join(["x" * 200] * 30)).stat(), 1),
    ],
    ids=["NUL", "half a character", "text", "long", "longer"],
)
def test_a_name_that_no_file_can_have_is_one_line_that_can_be_read(capsys, call, code):
    with explained("it.py") as outcome:
        call()
    told = capsys.readouterr().err
    assert outcome.code == code and told.startswith("it.py: error: ") and told.count("\n") == 1 and len(told) < 1100


def test_other_values_that_are_wrong_are_mistakes_of_ours(capsys):
    with pytest.raises(ValueError, match="ours"):
        ended(ValueError("ours"))


def test_warnings_show_control_characters_and_do_not_send_them(capsys):
    with explained("it.py"):
        entry.warn("no a\x1b[31mb")
        handler = logging.lastResort
        assert handler is not None
        handler.handle(logging.makeLogRecord({"msg": "passed over %s", "args": ("c\x1b[0m",), "levelno": logging.WARNING}))
    assert capsys.readouterr().err == "no a\\x1b[31mb\npassed over c\\x1b[0m\n"


OWN_MODEL = """
import sys
from torch import nn

def helper(x):
    return x.nowhere

class Model(nn.Module):
    def forward(self, x):
        if x == "exit":
            sys.exit(0)
        if x == "raise":
            raise KeyError("a message of the user's")
        return helper(x)
"""


@pytest.fixture
def own_model(tmp_path):
    (tmp_path / "mine.py").write_text(OWN_MODEL)
    return load_class(str(tmp_path / "mine.py"))()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("attribute", "mine.py:14 in forward: return helper(x) > mine.py:6 in helper: return x.nowhere > AttributeError: 'str' "),
        ("raise", """mine.py:13 in forward: raise KeyError("a message of the user's") > KeyError: "a message of the user's"\n"""),
        ("exit", "mine.py:11 in forward: sys.exit(0) > SystemExit: it ends the program with 0\n"),
    ],
)
def test_an_error_in_a_model_of_ones_own_shows_its_lines_and_not_ours(capsys, own_model, given, said):
    with explained("it.py") as outcome:
        own_model(given)
    told = capsys.readouterr().err
    assert told.startswith(f"it.py: error: your model fails: {said}") and told.count("\n") == 1 and outcome.code == 1


def test_an_error_that_a_model_of_ones_own_causes_elsewhere_is_still_its_own(capsys, own_model):
    with explained("it.py") as outcome:
        try:
            own_model("raise")
        except KeyError as error:
            raise RuntimeError("compiling failed") from error
    assert "mine.py:13" in capsys.readouterr().err and outcome.code == 1


def test_a_program_that_ends_itself_ends_as_it_says():
    with pytest.raises(SystemExit) as ended, explained("it.py"):
        sys.exit(7)
    assert ended.value.code == 7
