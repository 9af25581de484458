"""To import this is to import what a run on an NVIDIA GPU needs besides torch: for a process of which runs are forks.

None of it may touch the driver, which a fork could then not use; so what the GPU is gets asked of `nvidia-smi`, a process apart.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ingot.backends.torch.ahead import hash_triton, import_compiler
from ingot.backends.torch.attention import load_flash4


def preload() -> None:
    if (capability := compute_capability()) is not None:
        hash_triton()
        with _answering(capability):
            import_compiler()
            load_flash4()


def compute_capability() -> str | None:
    """That of the first GPU, such as "90", an H200's; None: there is no GPU, or nobody to ask."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return lines[0].replace(".", "") if lines else None


def fork_can_use_gpu() -> bool:
    """Whether this process, a fork of one in which this was imported, can use the GPU; also where there is none to use."""
    if torch.version.cuda is None or compute_capability() is None:
        return True
    return not torch.cuda._is_in_bad_fork() and torch.cuda.is_available()


@contextmanager
def _answering(capability: str) -> Iterator[None]:
    """Let packages that ask for the GPU as they are imported find the answer without the driver.

    quack-kernels wants its capability; torch's own compiler and apache-tvm-ffi whether there is one, which torch can learn as
    `nvidia-smi` did.
    """
    answers = {"QUACK_ARCH": capability, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    before = {name: os.environ.get(name) for name in answers}
    os.environ.update(answers)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


preload()
