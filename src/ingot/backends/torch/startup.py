"""Start-up work in parallel with building the model, which halves the time from the start to the first step.

The work has two parts. Threads import torch's compiler and initialise the GPU (`prepare_ahead`). Processes compile the kernels of
FlashAttention 4 and quack-kernels if this machine has not compiled them before (`Builders`). Builders start before torch is
imported, so this module imports torch only inside functions.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from ingot.config.schema import Config
from ingot.runtime.machine import OF_KERNELS, cache_root, has_flash4, installed, keep_compiled_kernels, made_by
from ingot.runtime.processes import cpu_count, end_with_parent, python_command
from ingot.runtime.ranks import Ranks

# Wait for the threads at exit: if one is still inside the driver or torch, the process aborts and its exit code is lost.
EXIT_PATIENCE_SECONDS = 10


def prepare_ahead(config: Config, ranks: Ranks) -> Callable[[], None]:
    """Start threads that import the compiler and FlashAttention 4 and initialise the GPU, if the run needs them.

    Returns a function that waits for the imports; call it before any code that may import the same modules. The compiler and
    Triton have circular imports. If two threads enter such a cycle at different modules, Python avoids a deadlock by giving
    one thread a half-initialised module. Errors are suppressed here; the first real use of a module raises them again.
    """
    import torch

    from ingot.backends.torch.compile import compiles

    name = config.training.device
    on_cuda = (name == "auto" or name.startswith("cuda")) and torch.cuda.is_available()
    compiling = compiles(config.training, config.model.family, on_cuda)
    if compiling or on_cuda:
        with suppress(Exception):
            import_module("triton")  # takes 0.1 s; imported here because several threads need it
            if compiling:
                threading.Thread(target=hash_triton, args=(), name="triton", daemon=True).start()
    if on_cuda:
        _start("device", _wake_device, name if ":" in name else f"cuda:{ranks.local_rank}")
    flash4 = on_cuda and config.training.precision != "fp32"
    return _start("imports", _import_ahead, compiling, flash4).join if compiling or flash4 else lambda: None


def _start(name: str, target: Callable[..., None], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    thread.start()
    atexit.register(thread.join, EXIT_PATIENCE_SECONDS)
    return thread


def hash_triton() -> None:
    """Make Triton compute and cache the hash of its own files, which is part of the compiler's cache keys.

    Hashing 500 MB takes 2 s on a CPU without SHA instructions; in a thread, it does not delay loading a cached graph.
    """
    with suppress(Exception):
        import_module("triton.runtime.cache").triton_key()


def _import_ahead(compiler: bool, flash4: bool) -> None:
    """Import torch's compiler if `compiler`, and FlashAttention 4 with quack-kernels if `flash4` and they are installed."""
    if compiler:  # start the compiler's worker processes first: until they are ready, this process compiles all kernels
        with suppress(Exception):
            import_module("torch._inductor.async_compile").maybe_warm_pool()
        with suppress(Exception):
            import_module("torch._inductor.compile_fx")
    if flash4 and has_flash4():
        keep_compiled_kernels()
        with suppress(Exception):
            import_module("ingot.model.kernels.flash").library()
            import_module("ingot.model.kernels.quack_matmul")


def _wake_device(device: str) -> None:
    """Create the CUDA context, load cuBLAS with a first matmul, and load Triton's driver, a C extension compiled on first use."""
    import torch

    with suppress(RuntimeError):
        ones = torch.ones(16, 16, device=device)
        ones @ ones
    with suppress(Exception):
        _ = import_module("triton.runtime.driver").driver.active


# Processes that compile the kernels of FlashAttention 4 and quack-kernels.

# For each build, the attention kernel and our own kernels; a builder compiles them by running a forward and backward pass.
BUILDS = {"attention": ("flash4", ("qkv",)), "matmuls": ("default", ("mlp", "gate"))}
# Settings that determine which kernels are compiled; all other settings, such as depth and softcap, do not matter.
MODEL_KEYS = {
    "family", "heads", "kv_heads", "width", "dropout", "window", "pattern", "mlp", "mlp_multiple", "inner_width", "mlp_bias",
    "bias", "activation", "gelu",
}  # fmt: skip
TRAINING_KEYS = {"precision", "compile", "kernels", "cuda_graphs"}
GPU_FOLDERS = Path("/proc/driver/nvidia/gpus")  # on Linux, the NVIDIA driver has a folder per GPU here
NVIDIA_DEVICES = ("/dev/nvidiactl", "/dev/dxg")  # one of these exists if an NVIDIA driver is installed; /dev/dxg in WSL
MIN_CORES = 4  # with fewer CPU cores, builders would only slow down the run itself
BUILDER_PATIENCE_SECONDS = 30.0
MAX_MEMORY_SHARE = 1 / 32  # largest share of the free GPU memory that a builder's weights and gradients may take


class Builders:
    """Processes (builders) that compile the kernels of a run, started only if this machine has not compiled them before."""

    def __init__(self, config: Config, vocab_size: int, ranks: Ranks):
        self._processes: list[subprocess.Popen[bytes]] = []
        t = config.training
        # Start builders only if the run may use the kernels that they compile and the machine has enough cores.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1") and any(Path(path).exists() for path in NVIDIA_DEVICES)
        on_gpu = visible and (t.device == "auto" or t.device.startswith("cuda"))
        tries = t.precision in ("auto", "bf16") and not t.deterministic and config.model.family != "file"
        alone = ranks.world_size == 1 and not ranks.local_rank
        if not (on_gpu and tries and alone and cpu_count() >= MIN_CORES and has_flash4()):
            return
        # The cache key covers everything that determines the kernels: settings, versions, and the driver's list of GPUs.
        settings = [config.model.model_dump(mode="json", include=MODEL_KEYS), t.model_dump(mode="json", include=TRAINING_KEYS)]
        lines = [line for file in GPU_FOLDERS.glob("*/information") for line in file.read_text().splitlines()]
        gpus = sorted({line.partition(":")[2].strip() for line in lines if line.startswith("Model:")})
        facts = [*settings, config.data.document_mask, gpus, made_by(), installed(("torch", *OF_KERNELS))]
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
        self._note = cache_root() / "built" / digest
        if self._note.exists():
            return
        code = "from ingot.backends.torch.startup import main; main(*sys.argv[1:])"
        with suppress(OSError):  # raised if there are too many processes or the disk is full
            self._note.parent.mkdir(parents=True, exist_ok=True)
            keep_compiled_kernels()
            for build in BUILDS:
                command = python_command(code, build, config.model_dump_json(), str(vocab_size))
                process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                self._processes.append(process)

    def wait(self) -> None:
        """Wait at most BUILDER_PATIENCE_SECONDS for the builders, then kill those still running, so that the device is free."""
        if self._processes:
            deadline = time.monotonic() + BUILDER_PATIENCE_SECONDS
            with suppress(subprocess.TimeoutExpired, OSError):
                codes = [process.wait(max(0.0, deadline - time.monotonic())) for process in self._processes]
                if min(codes) >= 0:  # do not retry builders that failed; one killed by a signal may succeed next time
                    self._note.touch()
            self.stop()

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()
        self._processes.clear()


def main(build: str, settings: str, vocab_size: str) -> None:
    """Run a builder: if the run needs the kernels of `build`, compile them by running a forward and backward pass on one row."""
    end_with_parent()
    config = Config.model_validate_json(settings)
    if build in needed_builds(config, int(vocab_size)):
        from ingot.backends.torch.inference import TorchInference

        attention, kernels = BUILDS[build]
        model = TorchInference.of(config, int(vocab_size))
        model.run_row(attention, kernels, config.data.seq_len, config.data.document_mask, MAX_MEMORY_SHARE)


def needed_builds(config: Config, vocab_size: int) -> list[str]:
    """Return the builds that a run may need: `attention`, and `matmuls` if the run tries a kernel based on quack-kernels."""
    from ingot.backends.torch.compile import compiles, uses_cuda_graphs
    from ingot.backends.torch.tune import SHORT_STEP_TOKENS, kernels_to_try

    t = config.training
    recorded = uses_cuda_graphs(config, vocab_size, compiles(t, config.model.family, True), on_cuda=True, ranks=Ranks())
    tried = kernels_to_try(t.kernels, launch_bound=t.tokens_per_step <= SHORT_STEP_TOKENS and not recorded)
    return [build for build, (_, names) in BUILDS.items() if build == "attention" or any(name in tried for name in names)]
