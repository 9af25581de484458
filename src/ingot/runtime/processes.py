"""Child Python processes: they import the same packages as this one, and nothing from the current folder.

`python -c` and `python -m` would import a `random.py` or `json.py` of the user's there instead of Python's own.
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

# The train_gpt.py of a golf submission that carries this package, if this is one.
ONE_FILE: str | None = getattr(globals().get("__loader__"), "one_file", None)
_PR_SET_PDEATHSIG = 1  # Linux's prctl: the signal a process gets when its parent is gone
_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "


def python_command(code: str, *arguments: str) -> list[str]:
    """Return the command for a new Python process that runs `code`, with `sys` imported and the arguments in sys.argv[1:]."""
    boot = f"{_BOOT}import runpy; runpy.run_path({ONE_FILE!r}); " if ONE_FILE else _BOOT
    return [sys.executable, "-P", "-c", boot + code, json.dumps(import_path()), *arguments]


def end_with_parent() -> None:
    """End this process when its parent is gone, however it died: the other end of stdin closes then."""

    def watch() -> None:
        with suppress(OSError):
            while os.read(0, 4096):
                pass
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def die_with(parent: int) -> Callable[[], None]:
    """Return a function that makes a process die with its parent, even after kill -9; only Linux supports that."""
    if sys.platform != "linux":
        return lambda: None
    import ctypes  # here: few programs need it

    prctl = ctypes.CDLL(None).prctl

    def bind() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent:  # the parent died before prctl took effect
            os._exit(1)

    return bind


def cpu_count() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def import_path() -> list[str]:
    """Return sys.path for child processes: ours without the current folder and the folder of the script."""
    kept, package = _without_users_folders(), Path(__file__).resolve().parents[2]
    # Ingot itself may have been found there. It goes last, so that nothing beside it shadows a standard module.
    return kept if any(Path(entry).resolve() == package for entry in kept) else [*kept, str(package)]


def _without_users_folders() -> list[str]:
    script = getattr(sys.modules["__main__"], "__file__", None)
    users = [Path.cwd(), *([Path(script).resolve().parent] if script else [])]
    return [entry for entry in sys.path if Path(entry).resolve() not in users]


def shield_compile_workers() -> None:
    """Give torch.compile's workers the import path of our child processes; torch would pass all of sys.path."""
    os.environ.setdefault("TORCH_CUSTOM_PYTHONPATH", os.pathsep.join(_without_users_folders()))


@contextmanager
def safe_path() -> Iterator[None]:
    """Keep children from importing from their current folder: torch probes vector instructions with a `python -c`."""
    given = "PYTHONSAFEPATH" in os.environ
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    try:
        yield
    finally:
        if not given:
            os.environ.pop("PYTHONSAFEPATH", None)


def process_age(pid: int | str = "self") -> float | None:
    """Return the age of a process in seconds, or None if unknown. It distinguishes processes that reused a pid."""
    try:
        since_boot = int(_fields(pid)[19]) / os.sysconf("SC_CLK_TCK")  # the 22nd field
        return time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot
    except (OSError, AttributeError, IndexError):
        return None


def is_alive(pid: int, heard_ago: float) -> bool:
    """Return True if the process last seen that many seconds ago still runs; a younger one has only reused its pid."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, TypeError, OverflowError):
        return False
    except PermissionError:
        pass  # the process exists, but belongs to another user
    with suppress(OSError, IndexError):
        if _fields(pid)[0] in ("Z", "X"):  # it has ended, and its parent has not waited for it
            return False
    age = process_age(pid)
    return age is None or age >= heard_ago - 1.0  # ages are known to a hundredth, and clocks are set


def _fields(pid: int | str) -> list[str]:
    """Return the fields of /proc/PID/stat from the third on: the second, the name, may contain spaces."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
