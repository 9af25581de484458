"""This machine: its memory size, allocator settings, cache folder and installed package versions."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from ingot.runtime.processes import ONE_FILE

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # values of M_TRIM_THRESHOLD and M_MMAP_THRESHOLD in glibc's malloc.h
LARGEST = 32 << 20  # largest mmap threshold, in bytes, that glibc accepts; larger blocks are always mapped separately


def host_bytes() -> int | None:
    """Return the memory of this machine or container in bytes; None if unknown."""
    found = []
    with suppress(OSError, ValueError, AttributeError):
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with suppress(OSError, ValueError), open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:  # noqa: PTH123
        found.append(int(file.read()))
    return min(found) if found else None


def collected_later() -> ExitStack:
    """Disable garbage collection until the returned stack is closed; importing torch's compiler then takes 13% less time."""
    later = ExitStack()
    if gc.isenabled():
        gc.disable()
        later.callback(gc.enable)
    return later


def keep_freed_memory() -> None:
    """Make this process reuse freed memory instead of returning it to the system. Only glibc supports this.

    Each training step frees and reallocates the same memory. By default glibc returns large blocks to the system, which maps them
    again as zeroed pages. For the demo recipe that is 1,000 to 2,000 page faults per step, 13% of the time on a CPU.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "gnu_get_libc_version"):
        library.mallopt(MMAP_THRESHOLD, LARGEST)
        library.mallopt(TRIM_THRESHOLD, -1)  # never return memory


# The machine's cache folder, for files that any run can recreate: prepared samples and results of kernel tuning.


def cache_root() -> Path:
    """Return the cache folder: INGOT_CACHE, or `ingot` in the user's cache folder."""
    if cache := os.environ.get("INGOT_CACHE"):
        return Path(cache)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 (without a home folder, ~ is kept)
    return Path(base) / "ingot"


OF_KERNELS = ("triton", "flash-attn-4", "quack-kernels", "nvidia-cutlass-dsl")  # packages that GPU kernels use


def installed(packages: Iterable[str]) -> dict[str, str]:
    """Return the installed versions of packages by name, leaving out packages that are not installed."""
    found = {}
    for name in packages:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def has_flash4() -> bool:
    """Return True if FlashAttention 4 is installed."""
    with suppress(Exception):  # the import may fail: FlashAttention may be too old or built for a different torch version
        return find_spec("flash_attn.cute") is not None
    return False


def keep_compiled_kernels() -> None:
    """Make FlashAttention 4 and quack-kernels cache their compiled kernels. Call this before importing either of them."""
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(cache_root() / "flash4"))
    os.environ.setdefault("QUACK_CACHE_DIR", str(cache_root() / "quack"))


NOT_INSTALLED = "ingot (not installed)"


def made_by() -> str:
    """Return the name and version of this program, as recorded in output files."""
    if ONE_FILE:
        return str(getattr(globals().get("__loader__"), "made_by", NOT_INSTALLED))
    try:
        return f"ingot {metadata.version('ingot-lm')}"
    except metadata.PackageNotFoundError:
        return NOT_INSTALLED
