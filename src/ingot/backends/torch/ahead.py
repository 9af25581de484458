"""What gets ready while the model is built, because a run needs it soon after and it takes seconds."""

from __future__ import annotations

import atexit
import contextlib
import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from ingot.backends.torch.attention import load_flash4
from ingot.backends.torch.parallel import compiles
from ingot.config.schema import Config
from ingot.runtime.ranks import Ranks

# Seconds: a program that ends while a thread is inside of the driver or of an operation of torch's is aborted, whatever its exit
# code was.
PATIENCE = 10


def prepare_ahead(config: Config, ranks: Ranks) -> Callable[[], None]:
    """Import the compiler and FlashAttention 4 and make the GPU ready while the model is built: nothing depends on them yet.

    Returns what waits for the imports, to be called before anything that could begin one of them too. Only one thread may import:
    modules of the compiler import each other in a circle, and so do Triton's, so of two threads that enter it at two places each
    has the module that the other waits for, and Python gives one of them a module that is half made.
    """
    name = config.training.device
    on_cuda = (name == "auto" or name.startswith("cuda")) and torch.cuda.is_available()
    compiling = compiles(config, on_cuda)
    imports = [_start_compiler] if compiling else []
    if on_cuda and config.training.precision != "fp32":
        imports.append(load_flash4)
    has_triton = (compiling or on_cuda) and _import_triton()  # a tenth of a second, and threads need it
    if compiling and has_triton:
        threading.Thread(target=hash_triton, args=(), name="triton", daemon=True).start()
    if on_cuda:
        _start("device", _make_ready, name if ":" in name else f"cuda:{ranks.local_rank}")
    return _start("imports", _one_by_one, *imports).join if imports else lambda: None


def _start(name: str, target: Callable[..., None], *args: Any) -> threading.Thread:
    """Do it in a thread that the end of the program waits for."""
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    thread.start()
    atexit.register(thread.join, PATIENCE)
    return thread


def _one_by_one(*parts: Callable[[], None]) -> None:
    for part in parts:
        part()


def _import_triton() -> bool:
    """Whether it is there; where it is not, whoever has a kernel finds it out."""
    try:
        import_module("triton")
    except Exception:
        return False
    return True


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
