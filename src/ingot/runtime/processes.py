"""Child Python processes, which import the same packages as this process and nothing from the current folder.

With `python -c` and `python -m`, a user's `random.py` or `json.py` in the current folder would shadow Python's own module.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Path of the train_gpt.py of a golf submission if this package was loaded from it, else None.
ONE_FILE: str | None = getattr(globals().get("__loader__"), "one_file", None)
_PR_SET_PDEATHSIG = 1  # prctl option on Linux: signal to send when the parent dies
_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "


def python_command(code: str, *arguments: str) -> list[str]:
    """Return the command for a new Python process that runs `code`, with `sys` imported and the arguments in sys.argv[1:]."""
    boot = f"{_BOOT}import runpy; runpy.run_path({ONE_FILE!r}); " if ONE_FILE else _BOOT
    return [sys.executable, "-P", "-c", boot + code, json.dumps(import_path()), *arguments]


def end_with_parent() -> None:
    """Start a thread that exits this process when stdin is closed, as happens when the parent process ends for any reason."""

    def watch() -> None:
        with suppress(OSError):
            while os.read(0, 4096):
                pass
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def die_with(parent: int) -> Callable[[], None]:
    """Return a preexec function that kills the child when its parent (pid `parent`) dies; it has an effect only on Linux."""
    if sys.platform != "linux":
        return lambda: None
    import ctypes  # imported here because few programs need it

    prctl = ctypes.CDLL(None).prctl

    def bind() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent:  # the parent died before prctl took effect
            os._exit(1)

    return bind


def cpu_count() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def import_path() -> list[str]:
    """Return sys.path for child processes: that of this process without the current folder and the script's folder."""
    kept, package = _without_users_folders(), Path(__file__).resolve().parents[2]
    # If Ingot was imported from one of the removed folders, append that folder, so that its files shadow no standard module.
    return kept if any(Path(entry).resolve() == package for entry in kept) else [*kept, str(package)]


def _without_users_folders() -> list[str]:
    script = getattr(sys.modules["__main__"], "__file__", None)
    users = [Path.cwd(), *([Path(script).resolve().parent] if script else [])]
    return [entry for entry in sys.path if Path(entry).resolve() not in users]


def shield_compile_workers() -> None:
    """Keep the current folder and the script's folder out of the import path that torch.compile passes to its workers."""
    os.environ.setdefault("TORCH_CUSTOM_PYTHONPATH", os.pathsep.join(_without_users_folders()))


@contextmanager
def safe_path() -> Iterator[None]:
    """Keep child processes started in the block, such as torch's CPU detection, from importing from the current folder."""
    given = "PYTHONSAFEPATH" in os.environ
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    try:
        yield
    finally:
        if not given:
            os.environ.pop("PYTHONSAFEPATH", None)


def process_age(pid: int | str = "self") -> float | None:
    """Return the age of a process in seconds, or None if unknown. The age shows whether a pid was reused."""
    try:
        since_boot = int(_fields(pid)[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of /proc/PID/stat: the start time
        return time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot
    except (OSError, AttributeError, IndexError):
        return None


def is_alive(pid: int, heard_ago: float) -> bool:
    """Return True if the process `pid`, last heard from `heard_ago` seconds ago, is alive and the pid was not reused."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, TypeError, OverflowError):
        return False
    except PermissionError:
        pass  # the process exists, but belongs to another user
    with suppress(OSError, IndexError):
        if _fields(pid)[0] in ("Z", "X"):  # a zombie: ended, but not yet waited for
            return False
    age = process_age(pid)
    return age is None or age >= heard_ago - 1.0  # 1 s of tolerance for the resolution of ages and for clock adjustments


def _fields(pid: int | str) -> list[str]:
    """Return the fields of /proc/PID/stat after the process name, which is the second field and may contain spaces."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
