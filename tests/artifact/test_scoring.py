import sys

import pytest

from ingot.artifact.fresh_process import score_in_fresh_process
from ingot.errors import RunError
from ingot.runtime.ranks import without_ranks

LAUNCHED = {
    "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "0", "ROLE_RANK": "1",
    "MASTER_ADDR": "somewhere", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip


def test_a_process_on_its_own_knows_nothing_of_the_ranks():
    assert without_ranks({**LAUNCHED, "PATH": "/bin", "CUDA_VISIBLE_DEVICES": "2", "PYTHONPATH": "here"}) == {
        "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "2",
        "PYTHONPATH": "here",
    }


def test_a_file_that_cannot_be_scored_is_an_error_with_the_reason(tmp_path, monkeypatch):
    """A rank of a group asks; its child neither waits for the others nor hides why it failed."""
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RunError, match=r"scoring it failed: .*missing\.ingot"):
        score_in_fresh_process(tmp_path / "missing.ingot", None, "cpu")


@pytest.mark.parametrize(
    ("program", "match"),
    [
        ("import sys; sys.exit(3)", r"the process that read the file exited with code 3"),
        ("print('no json')", r"`ingot eval` printed no JSON"),
        ("import os; os.kill(os.getpid(), 9)", r"exited with code -9"),
        ("import sys; sys.exit('Traceback: no such thing')", r"exited with code 1: Traceback: no such thing$"),
        ("import sys; print('{\"error\": \"it is cut short\"}'); sys.exit('ingot: error: it is')", r"failed: it is cut short$"),
    ],
)
def test_whatever_the_child_does_is_one_sentence(tmp_path, monkeypatch, program, match):
    child = tmp_path / "child"
    child.write_text(f"#!{sys.executable}\n{program}\n")
    child.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(child))
    with pytest.raises(RunError, match=match):
        score_in_fresh_process(tmp_path / "a")


def test_a_stop_is_heard_while_the_process_says_nothing(tmp_path, monkeypatch):
    child = tmp_path / "child"
    child.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(20)\nprint('{{\"val_bpb\": 1}}')\n")
    child.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(child))
    with pytest.raises(RunError, match="exited with code -9"):
        score_in_fresh_process(tmp_path / "a", stop=lambda: True)


# The process that scores hangs while it imports typer.
SCORE = """
import sys
from pathlib import Path
from ingot.artifact.fresh_process import score_in_fresh_process
sys.path.insert(0, sys.argv[1])
score_in_fresh_process(Path(sys.argv[1]) / "typer.py", None, "cpu")
"""
HANG = """
import os, pathlib, time
here = pathlib.Path(__file__)
here.with_name("pid.part").write_text(str(os.getpid()))
here.with_name("pid.part").rename(here.with_name("pid"))
time.sleep(60)
"""


def test_the_process_ends_when_whoever_waits_for_the_score_is_killed(tmp_path, python, eventually, alive):
    (tmp_path / "typer.py").write_text(HANG)
    waiting = python(SCORE, tmp_path)
    eventually((tmp_path / "pid").exists)
    child = int((tmp_path / "pid").read_text())
    assert alive(child)
    waiting.kill()
    eventually(lambda: not alive(child))
