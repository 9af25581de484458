"""Programs beside a run that make kernels of FlashAttention 4 and quack-kernels, where the machine has not made them before.

Both packages compile a kernel in Python when it is first used, seconds for each, and keep it on the disk. Two programs use them
on one row while the run imports torch, builds its model and tries kernels of ours, and the run finds theirs on the disk. Nothing
depends on them: what they have not made is compiled where it is used. They begin before torch is imported, so this does not.
"""

from __future__ import annotations

import hashlib
import json
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
# What kernels of these packages are compiled for; those of another depth, row length or softcap are the same.
OF_MODEL = {
    "family", "heads", "kv_heads", "width", "dropout", "window", "pattern", "mlp", "mlp_multiple", "inner_width", "mlp_bias",
    "bias", "activation", "gelu",
}  # fmt: skip
OF_TRAINING = {"tokens_per_step", "precision", "compile", "kernels", "cuda_graphs"}  # which of them are tried
NVIDIA = ("/dev/nvidiactl", "/dev/dxg")  # there where a driver is, the second in a Linux inside of Windows
ENOUGH_CORES = 4  # below, they would only take the run's own time
PATIENCE = 30.0  # seconds


class Builders:
    """The programs that build for a run; none where it needs nothing of them."""

    def __init__(self, config: Config, vocab_size: int, ranks: Ranks):
        self._programs: list[subprocess.Popen[bytes]] = []
        if _may_help(config, ranks) and not (note := cache_root() / "built" / _digest(config)).exists():
            self._note = note
            keep_compiled()
            with suppress(OSError):  # too many processes
                self._programs += (_start(program, config, vocab_size) for program in PROGRAMS)

    def wait(self) -> None:
        """Let them end: what they make is on the disk then, and the device's time and memory are the run's alone."""
        if self._programs:
            deadline = time.monotonic() + PATIENCE
            with suppress(subprocess.TimeoutExpired, OSError):
                for program in self._programs:
                    program.wait(max(0.0, deadline - time.monotonic()))
                self._note.parent.mkdir(parents=True, exist_ok=True)
                self._note.touch()  # also where they failed: they would again
            self.stop()

    def stop(self) -> None:
        for program in self._programs:
            program.kill()
            program.communicate()
        self._programs.clear()


def _may_help(config: Config, ranks: Ranks) -> bool:
    """Whether a run may use such kernels, on a machine that has a core for each program."""
    t = config.training
    on_gpu = (t.device == "auto" or t.device.startswith("cuda")) and any(Path(place).exists() for place in NVIDIA)
    tries = t.precision in ("auto", "bf16") and not t.deterministic and config.model.family != "file"
    return on_gpu and tries and ranks.world_size == 1 and cpu_count() >= ENOUGH_CORES and has_flash4()


def _digest(config: Config) -> str:
    """A name for the kernels of a run: the same where another one's are."""
    sections = ((config.model, OF_MODEL), (config.training, OF_TRAINING))
    settings = [section.model_dump(mode="json", include=names) for section, names in sections]
    known = [*settings, config.data.document_mask, made_by(), installed(("torch", *OF_KERNELS))]
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:32]


def _start(program: str, config: Config, vocab_size: int) -> subprocess.Popen[bytes]:
    code = "from ingot.backends.torch.building import main; main(*sys.argv[1:])"
    command = python_command(code, program, config.model_dump_json(), str(vocab_size))
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
