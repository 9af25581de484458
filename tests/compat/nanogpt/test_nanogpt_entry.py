"""How nanoGPT programs end when the machine is at fault: one line and an exit code, too."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from programs import Ingot
from small_runs import ROOT

from ingot.compat.nanogpt.keys import key_name
from ingot.console.entry import explained
from ingot.errors import CheckpointError, Setting


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:113] DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."
        ),
    ],
    ids=lambda error: type(error).__name__,
)
def test_too_little_memory_is_one_line_with_what_to_do(capsys, error):
    with explained("train.py", key_name) as outcome:
        raise error
    told = capsys.readouterr().err
    assert outcome.code == 1 and len(told.splitlines()) == 1
    assert told.startswith("train.py: error: out of memory; lower batch_size or block_size")


def test_a_mistake_of_ours_keeps_its_traceback():
    with pytest.raises(RuntimeError, match="shapes do not fit"), explained("train.py", key_name):
        raise RuntimeError("shapes do not fit")


def test_errors_of_the_engine_have_the_names_of_the_keys(capsys):
    with explained("train.py", key_name) as outcome:
        settings = Setting("training.output_dir"), Setting("data.seq_len")
        raise CheckpointError("cannot write out", *settings, advice="choose another {0}, and {1} too")
    assert outcome.code == 4
    assert capsys.readouterr().err == "train.py: error: cannot write out; choose another out_dir, and block_size too\n"


@pytest.mark.parametrize(
    ("stdout", "code", "says"), [("/dev/full", 1, "train.py: error: No space left on device\n"), ("&-", 0, "")]
)
def test_a_log_that_cannot_be_written_is_no_traceback(ingot: Ingot, stdout, code, says):
    command = f"exec {sys.executable} {ROOT / 'train.py'} --help >{stdout}"
    ran = subprocess.run(command, shell=True, env=ingot.environment, capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (code, says)
