"""What gets ready while the model is built, because a run needs it soon after and it takes seconds."""

from __future__ import annotations

import atexit
import contextlib
import threading
from importlib import import_module

import torch

from ingot.backends.torch.attention import load_flash4
from ingot.backends.torch.parallel import compiles
from ingot.config.schema import Config
from ingot.runtime.ranks import Ranks

PATIENCE = 10  # seconds: a program that ends while a thread is inside of the driver is aborted, whatever its exit code was


def prepare_ahead(config: Config, ranks: Ranks) -> None:
    """Import the compiler and FlashAttention 4 and make the GPU ready while the model is built: nothing depends on them yet."""
    name = config.training.device
    on_cuda = (name == "auto" or name.startswith("cuda")) and torch.cuda.is_available()
    if compiles(config, on_cuda):
        threading.Thread(target=import_module, args=["torch._inductor.compile_fx"], name="compiler", daemon=True).start()
    if on_cuda and config.training.precision != "fp32":
        threading.Thread(target=load_flash4, args=[], name="attention", daemon=True).start()
    if on_cuda:
        asked = name if ":" in name else f"cuda:{ranks.local_rank}"
        thread = threading.Thread(target=_make_ready, args=[asked], name="device", daemon=True)
        thread.start()
        atexit.register(thread.join, PATIENCE)


def _make_ready(device: str) -> None:
    """A first product: the driver makes its context, and the library of products is loaded."""
    with contextlib.suppress(RuntimeError):  # said by whoever needs the device
        one = torch.ones(16, 16, device=device)
        one @ one
