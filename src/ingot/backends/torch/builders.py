"""Programs beside a run that make kernels of FlashAttention 4 and quack-kernels, where the machine has not made them before.

Both packages compile a kernel in Python when it is first used, seconds for each, and keep it on the disk. Two programs use them
on one row while the run imports torch, builds its model and tries kernels of ours, and the run finds theirs on the disk. Nothing
depends on them: what they have not made is compiled where it is used. They begin before torch is imported, so this does not.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from ingot.backends.torch.flash4 import has_flash4, keep_compiled
from ingot.config.schema import Config
from ingot.runtime.cache import cache_root
from ingot.runtime.children import cpu_count, python_command
from ingot.runtime.packages import OF_KERNELS, installed
from ingot.runtime.ranks import Ranks
from ingot.runtime.version import made_by

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
PATIENCE = 30.0  # seconds


class Builders:
    """The programs that build for a run; none where it needs nothing of them."""

    def __init__(self, config: Config, vocab_size: int, ranks: Ranks):
        self._programs: list[subprocess.Popen[bytes]] = []
        if _may_help(config, ranks) and not (note := cache_root() / "built" / _digest(config)).exists():
            self._note = note
            with suppress(OSError):  # too many processes, or nowhere to keep anything
                note.parent.mkdir(parents=True, exist_ok=True)
                keep_compiled()
                self._programs += (_start(program, config, vocab_size) for program in PROGRAMS)

    def wait(self) -> None:
        """Let them end: what they make is on the disk then, and the device's time and memory are the run's alone."""
        if self._programs:
            deadline = time.monotonic() + PATIENCE
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


def _start(program: str, config: Config, vocab_size: int) -> subprocess.Popen[bytes]:
    code = "from ingot.backends.torch.building import main; main(*sys.argv[1:])"
    command = python_command(code, program, config.model_dump_json(), str(vocab_size))
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
