"""A finished golf run as its log tells it: settings, scores, sizes, and the files of its run folder.

One log may hold several runs, and a run several sessions; a session begins with a head whose first lines are the version and the
variables. Everything is read from the log, because the log is what others will see.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.doors.golf.log import RULE
from ingot.doors.golf.variables import CODE, NAMES, PACKED, read_variables
from ingot.errors import CheckpointError

HEAD = re.compile(r"^ingot .*\n(?=DATA_PATH=)", re.MULTILINE)
LINES = {
    "folder": r"note: run folder (.+?), (.+), \w+, \d+ rows at once",
    "parameters": r"model_params:(\d+)",
    "ranks": r"world_size:(\d+) .*",
    "shards": r"train_loader:dataset:(.*) train_shards:(\d+)",
    "tokens": r"val_loader:.* tokens:(\d+)",
    "validation": r"note: (validation: .*)",
    "stop": r"step:(\d+)/\d+ val_loss:\S+ val_bpb:\S+ train_time:(\d+)ms step_avg:(\S+)ms",
    "code": r"Code size: (\d+) bytes",
    "artifact": r"Serialized model int8\+zlib: (\d+) bytes .*",
    "score": r"final_int8_zlib_roundtrip_exact val_loss:(\S+) val_bpb:(\S+)",
}


@dataclass(frozen=True)
class FinishedRun:
    """What is known of a run that reached its end."""

    path: Path  # the run folder
    log: str
    ended: float  # seconds since the epoch
    maker: str
    values: dict[str, Any]  # of every variable
    artifact: bytes
    code: bytes
    val_loss: float
    val_bpb: float
    steps: int
    train_ms: int
    step_ms: float
    parameters: int
    ranks: int
    data: tuple[str, ...]
    device: str
    torch: str
    python: str

    @property
    def seed(self) -> int:
        """What the runs of a submission differ by."""
        return int(self.values["SEED"])

    @property
    def total_bytes(self) -> int:
        """What the limit is about: the artifact and the code."""
        return len(self.artifact) + len(self.code)


def read_run(path: Path) -> FinishedRun:
    """The finished run of a run folder, logs/RUN_ID, or of a log, logs/RUN_ID.txt, whose last run it is."""
    log, name = _log_of(path)
    sessions = _sessions(log)
    name = name or next(reversed(sessions), None)
    if name not in sessions:
        raise CheckpointError(f"{log} tells of no run of the folder {name}; it tells of {', '.join(sessions) or 'none'}")
    folder = log.parent / name
    texts, said = sessions[name], _said(sessions[name][-1], folder)
    head = {what: re.search(rf"^Running {what} (\S+)", texts[-1], re.MULTILINE) for what in ("PyTorch", "Python")}
    run = FinishedRun(
        path=folder,
        log="".join(texts),
        ended=log.stat().st_mtime,
        maker=texts[-1].partition("\n")[0],
        values=_values(texts[-1]),
        artifact=_read(folder / "artifact" / PACKED),
        code=_read(folder / CODE),
        val_loss=float(said["score"][0]),
        val_bpb=float(said["score"][1]),
        steps=int(said["stop"][0]),
        train_ms=int(said["stop"][1]),
        step_ms=float(said["stop"][2]),
        parameters=int(said["parameters"][0]),
        ranks=int(said["ranks"][0]),
        data=(
            said["shards"][0],
            f"{said['shards'][1]} training shards",
            f"{said['tokens'][0]} tokens scored",
            *said["validation"],
        ),
        device=said["folder"][1],
        torch=head["PyTorch"][1] if head["PyTorch"] else "",
        python=head["Python"][1] if head["Python"] else "",
    )
    for what, content in (("artifact", run.artifact), ("code", run.code)):
        if len(content) != int(said[what][0]):
            raise CheckpointError(
                f"the {what} in {folder} has {len(content):,} bytes and {log} says {int(said[what][0]):,}; it is not the run's"
            )
    if not math.isfinite(run.val_bpb):
        raise CheckpointError(f"{folder} scored {run.val_bpb} bits per byte, which is no score")
    return run


def _log_of(path: Path) -> tuple[Path, str | None]:
    """The log of what was given, and the name of the run folder in it where that was given."""
    if path.is_file():
        return path, None
    if not path.is_dir():
        raise CheckpointError(f"there is no run {path}; give run folders, logs/RUN_ID, or logs, logs/RUN_ID.txt")
    path = path.resolve()
    for name in (path.name, re.sub(r"-\d+$", "", path.name)):  # the second run of a name has a folder of its own and no log
        if (log := path.with_name(f"{name}.txt")).is_file():
            return log, path.name
    raise CheckpointError(f"{path} has no log beside it: {path.name}.txt is missing; give the folder of a run of train_gpt.py")


def _sessions(log: Path) -> dict[str, list[str]]:
    """The sessions of every run that a log tells of, by the name of its folder; those that trained nothing are left out."""
    text = _read(log).decode("utf-8", "replace")
    starts = [found.start() for found in HEAD.finditer(text)]
    if not starts:
        raise CheckpointError(f"{log} is no log of train_gpt.py as this package writes it")
    found: dict[str, list[str]] = {}
    for start, end in zip(starts, [*starts[1:], None], strict=True):
        if folder := re.search(f"^{LINES['folder']}$", text[start:end], re.MULTILINE):
            name = Path(folder[1]).name
            found[name] = [*found.pop(name, []), text[start:end]]  # the run that was last at work is the last
    return found


def _values(session: str) -> dict[str, Any]:
    lines = session.split("\n")[1 : len(NAMES) + 1]
    return read_variables(dict(line.split("=", 1) for line in lines if line.partition("=")[0] in NAMES))


def _said(session: str, folder: Path) -> dict[str, tuple[str, ...]]:
    """What the lines of a session say, the last of each kind."""
    lines = session.rpartition(RULE)[2]
    found = {name: list(re.finditer(f"^{pattern}$", lines, re.MULTILINE)) for name, pattern in LINES.items()}
    if not all(found.values()):
        raise CheckpointError(
            f"{folder} is not finished: its log does not end with a score; the command it was started with goes on, "
            f"with RUN_ID={folder.name}"
        )
    return {name: matches[-1].groups() for name, matches in found.items()}


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; a run that train_gpt.py finished has it") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
