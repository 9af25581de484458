"""What gets ready while the model is built, because a run needs it soon after and it takes seconds."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ingot.backends.torch.build import fill_outline
from ingot.backends.torch.compile import compiles, uses_cuda_graphs
from ingot.backends.torch.inference import TorchInference
from ingot.backends.torch.precision import FLASH4, has_flash4, keep_compiled
from ingot.backends.torch.tune import SHORT, has_kernel, load_flash4, use_kernels, worth_trying
from ingot.config.schema import Config
from ingot.runtime.machine import OF_KERNELS, cache_root, installed, made_by
from ingot.runtime.processes import cpu_count, end_with_parent, python_command
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


# Programs beside a run that make kernels of FlashAttention 4 and quack-kernels, where the machine has not made them before.

PROGRAMS = ("attention", "products")
# What kernels of these packages are compiled for; those of another depth or softcap are the same.
OF_MODEL = {
    "family", "heads", "kv_heads", "width", "dropout", "window", "pattern", "mlp", "mlp_multiple", "inner_width", "mlp_bias",
    "bias", "activation", "gelu",
}  # fmt: skip
OF_TRAINING = {"precision", "compile", "kernels", "cuda_graphs"}  # which of them are tried
GPUS = Path("/proc/driver/nvidia/gpus")  # with a folder for each
NVIDIA = ("/dev/nvidiactl", "/dev/dxg")  # there where a driver is, the second in a Linux inside of Windows
ENOUGH_CORES = 4  # below, they would only take the run's own time
BUILDER_PATIENCE = 30.0  # seconds


class Builders:
    """The programs that build for a run; none where it needs nothing of them."""

    def __init__(self, config: Config, vocab_size: int, ranks: Ranks):
        self._programs: list[subprocess.Popen[bytes]] = []
        if _may_help(config, ranks) and not (note := cache_root() / "built" / _digest(config)).exists():
            self._note = note
            with suppress(OSError):  # too many processes, or nowhere to keep anything
                note.parent.mkdir(parents=True, exist_ok=True)
                keep_compiled()
                self._programs += (_start_builder(program, config, vocab_size) for program in PROGRAMS)

    def wait(self) -> None:
        """Let them end: what they make is on the disk then, and the device's time and memory are the run's alone."""
        if self._programs:
            deadline = time.monotonic() + BUILDER_PATIENCE
            with suppress(subprocess.TimeoutExpired, OSError):
                codes = [program.wait(max(0.0, deadline - time.monotonic())) for program in self._programs]
                if min(codes) >= 0:  # not where they were killed; where they failed they would again
                    self._note.touch()
            self.stop()

    def stop(self) -> None:
        for program in self._programs:
            program.kill()
            program.communicate()
        self._programs.clear()


def _may_help(config: Config, ranks: Ranks) -> bool:
    """Whether a run may use such kernels, on a machine that has a core for each program."""
    t = config.training
    seen = os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1") and any(Path(place).exists() for place in NVIDIA)
    on_gpu = seen and (t.device == "auto" or t.device.startswith("cuda"))
    tries = t.precision in ("auto", "bf16") and not t.deterministic and config.model.family != "file"
    alone = ranks.world_size == 1 and not ranks.local_rank
    return on_gpu and tries and alone and cpu_count() >= ENOUGH_CORES and has_flash4()


def _digest(config: Config) -> str:
    """A name for the kernels of a run: the same where another one's are."""
    sections = ((config.model, OF_MODEL), (config.training, OF_TRAINING))
    settings = [section.model_dump(mode="json", include=names) for section, names in sections]
    known = [*settings, config.data.document_mask, _gpus(), made_by(), installed(("torch", *OF_KERNELS))]
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:32]


def _gpus() -> list[str]:
    """The kinds of GPU that the driver tells of."""
    with suppress(OSError, ValueError):
        lines = [line for told in GPUS.glob("*/information") for line in told.read_text().splitlines()]
        return sorted({line.partition(":")[2].strip() for line in lines if line.startswith("Model:")})
    return []


def _start_builder(program: str, config: Config, vocab_size: int) -> subprocess.Popen[bytes]:
    code = "from ingot.backends.torch.startup import main; main(*sys.argv[1:])"
    command = python_command(code, program, config.model_dump_json(), str(vocab_size))
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


# What the programs of `builders` do: a pass of one row there and back, for the kernels of other packages that it compiles.

# Of each program: the attention it computes with, and the kernels of ours that call what it is to build.
BUILDS = {"attention": (FLASH4, ("qkv",)), "products": ("default", ("mlp", "gate"))}
SMALL = 1 / 32  # of the free memory: what weights and gradients of a program may take


def builds(config: Config, vocab_size: int) -> list[str]:
    """What a run of this config may use: attention is always tried, products where one of the kernels that call them is."""
    t = config.training
    recorded = uses_cuda_graphs(config, vocab_size, compiles(config, True), on_cuda=True, ranks=Ranks())
    tried = worth_trying(t.kernels, waits=t.tokens_per_step <= SHORT and not recorded)
    return [build for build, (_, names) in BUILDS.items() if build == "attention" or any(name in tried for name in names)]


def main(build: str, settings: str, vocab_size: str) -> None:
    end_with_parent()
    config = Config.model_validate_json(settings)
    if build in builds(config, int(vocab_size)):
        OneRow.of(config, int(vocab_size)).make(build, config.data.seq_len, config.data.document_mask)


class OneRow(TorchInference):
    """The model of a run, with whatever its memory held for weights."""

    def make(self, build: str, seq_len: int, documents: bool) -> None:
        """A pass of one row there and back, for the kernels that it compiles; none where the run may need the memory."""
        if self._device.type == "cuda" and 8 * self.parameters > SMALL * torch.cuda.mem_get_info(self._device)[0]:
            return
        attention, names = BUILDS[build]
        self.model = fill_outline(self.model, self._device).train()
        use_kernels(self.model, [name for name in names if has_kernel(self.model, name)])
        with self._computing(attention):
            self.model(*self._upload(np.zeros((1, 3 if documents else 2, seq_len), np.int32))).backward()
        self.wait()


# To import this is to import what a run on an NVIDIA GPU needs besides torch: for a process of which runs are forks.


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
