"""Where kernels run: on a GPU, or on a CPU by Triton's interpreter, which has to be asked for before torch is imported:

TRITON_INTERPRET=1 python -m pytest tests/model/kernels

That of Triton 3.6 needs NumPy below 2.4 where a loop's bounds are known to the kernel alone (mlp).
"""

import os
from importlib.util import find_spec

import pytest
import torch


@pytest.fixture
def device():
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    if torch.cuda.is_available():
        return torch.device("cuda")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("no GPU, and TRITON_INTERPRET is not set")
    return torch.device("cpu")


@pytest.fixture(autouse=True)
def _compile_from_scratch():
    """Forget compiled graphs after each test: many shapes in one process exceed the limit of recompilations."""
    yield
    if torch.cuda.is_available():
        torch._dynamo.reset()
