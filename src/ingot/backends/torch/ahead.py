"""What gets ready while the model is built, because a run needs it soon after and it takes seconds."""

from __future__ import annotations

import atexit
import contextlib
import threading
from collections.abc import Callable
from importlib import import_module

import torch

from ingot.backends.torch.attention import load_flash4
from ingot.backends.torch.parallel import compiles
from ingot.config.schema import Config
from ingot.runtime.ranks import Ranks

# Seconds: a program that ends while a thread is inside of the driver or of an operation of torch's is aborted, whatever its exit
# code was.
PATIENCE = 10


def prepare_ahead(config: Config, ranks: Ranks) -> None:
    """Import the compiler and FlashAttention 4 and make the GPU ready while the model is built: nothing depends on them yet."""
    name = config.training.device
    on_cuda = (name == "auto" or name.startswith("cuda")) and torch.cuda.is_available()
    if compiles(config, on_cuda):
        for thread, target in (("triton", hash_triton), ("compiler", _start_compiler)):
            threading.Thread(target=target, args=(), name=thread, daemon=True).start()
    if on_cuda and config.training.precision != "fp32":
        _start("attention", load_flash4)
    if on_cuda:
        _start("device", _make_ready, name if ":" in name else f"cuda:{ranks.local_rank}")


def _start(name: str, target: Callable[..., None], *args: str) -> None:
    """Do it in a thread that the end of the program waits for."""
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    thread.start()
    atexit.register(thread.join, PATIENCE)


def hash_triton() -> None:
    """Let Triton find and keep the hash of itself that the compiler's caches ask for; other threads go on importing meanwhile.

    It is one of 500 MB: 2 s on a processor without instructions for it, for which a graph out of the caches would wait.
    """
    with contextlib.suppress(Exception):  # not installed, or it has another name: whoever compiles finds it out
        import_module("triton.runtime.cache").triton_key()


def _start_compiler() -> None:
    """Import the compiler, but begin with the processes that compile kernels for it: until they are ready, it does so itself."""
    with contextlib.suppress(Exception):
        import_module("torch._inductor.async_compile").maybe_warm_pool()
    import_compiler()


def import_compiler() -> None:
    with contextlib.suppress(Exception):  # said by whoever compiles; the end of the program stops it anywhere
        import_module("torch._inductor.compile_fx")


def _make_ready(device: str) -> None:
    """A first product: the driver makes its context, and the library of products is loaded; then what Triton needs of it.

    That is a C program, which the first run of a machine compiles.
    """
    with contextlib.suppress(RuntimeError):  # said by whoever needs the device
        one = torch.ones(16, 16, device=device)
        one @ one
    with contextlib.suppress(Exception):  # not installed, or no compiler: said by whoever has a kernel
        _ = import_module("triton.runtime.driver").driver.active
