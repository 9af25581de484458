"""What must hold of every case, whatever it was given."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import PurePath

from .cases import Case
from .running import TEMPORARY, Outcome

CODES = (0, 1, 2, 3, 4)  # of docs/run-folder.md; the others there follow a signal or a reader that has left
MEMORY = 2 << 30  # bytes
READABLE = 1200  # characters of an error: twelve lines of a terminal, for all mistakes in a config together
LEFTOVER = re.compile(r"\..+\.[0-9a-f]{8}\.(tmp|old)|\..+\.partial-[0-9a-f]+(-old)?|step-\d+\.partial")
WARNING = re.compile(r"^.*\.py:\d+: \w*Warning: .*$", re.MULTILINE)
OWN = re.compile(r"(mine|model)\.py:\d+: UserWarning: careful")  # a model of one's own may warn
RAISED = re.compile(r"^\w[\w.]*(?:: .*)?$", re.MULTILINE)  # the first line of what was raised
OVER = re.compile(r"^error: \d+ bytes are \d+ more than ARTIFACT_LIMIT_BYTES=", re.MULTILINE)
MISTAKE = 2  # a setting or an option is wrong: nothing has begun


def broken(case: Case, found: Outcome) -> list[str]:
    """The promises that a case has broken, each in one line that is the same for the same reason."""
    return [
        *_ends(case, found),
        *([] if found.error else _says(case, found)),
        *(f"left over: {what}" for what in _leaves(case, found)),
        *(f"a file of the user's: {what}" for what in _changes(case, found)),
    ]


def _ends(case: Case, found: Outcome) -> list[str]:
    """By itself, by an exit code that is documented, within its memory, and with no traceback."""
    said = []
    if found.error.startswith("hung"):
        said.append(f"hang: {_place(found.error)}")
    elif found.error:
        said.append(f"traceback: {RAISED.findall(found.error)[-1][:120]} ({_place(found.error)})")
    elif found.code not in CODES:
        said.append(f"exit code {found.code}")
    elif not case.changes and found.code != case.scenario.code:
        said.append(f"exit code {found.code} of a command that works: {case.scenario.name}")
    if found.peak > MEMORY:
        said.append("memory: above 2 GB")
    return said


def _place(trace: str) -> str:
    """The last line of ours in a traceback."""
    frames = re.findall(r'File "[^"]*?/ingot/([^"]+)", line (\d+), in (\S+)', trace)
    return ":".join(frames[-1]) if frames else "not in ingot"


def _says(case: Case, found: Outcome) -> list[str]:
    """An error is the last line, the only one of its kind, and can be read."""
    said = []
    for stream in (found.out, found.err):
        if "Traceback (most recent call last)" in stream or "panicked at" in stream:
            said.append(f"traceback printed: {_place(stream)}")
    for line in WARNING.findall(found.err):
        if not OWN.search(line):
            said.append(f"warning of Python's: {line.rpartition('/')[2][:120]}")
    lines = found.err.splitlines()
    errors = [line for line in lines if line.startswith(f"{case.scenario.program}: error: ")]
    if found.code == 0 and errors:
        said.append("exit code 0 with an error")
    if found.code and found.code not in case.scenario.told and not _is_told(found):
        if not errors:
            said.append(f"exit code {found.code} without an error")
        elif len(errors) > 1:
            said.append("two errors")
        elif lines[-1] != errors[0]:
            said.append(f"a line after the error: {lines[-1][:80]}")
    for line in errors:
        if len(line) > READABLE:
            said.append(f"an error too long to read: {line[:60]}")
        if not line.isprintable():
            said.append("an error with control characters")
    return said


def _is_told(found: Outcome) -> bool:
    """Whether it has shown its help, called with too little to do anything; or, as docs/golf.md has it, the error in its log."""
    return (found.code == MISTAKE and found.err.startswith("Usage:")) or (found.code == 1 and bool(OVER.search(found.out)))


def _leaves(case: Case, found: Outcome) -> list[str]:
    """Nothing in the folder for temporary files, nothing half-written, no process; after a mistake nothing at all."""
    new = [name for name in found.after if name not in found.before]
    said = list(found.left)
    said += [f"temporary file {PurePath(name).suffix}" for name in new if PurePath(name).parts[0] == TEMPORARY]
    said += ["half-written file" for name in new if any(LEFTOVER.fullmatch(part) for part in PurePath(name).parts)]
    if found.code == MISTAKE and not said and not _may_write(case, new):
        said += [f"after a mistake: {sorted(new)[0]}"]
    return sorted(set(said))


def _outputs(case: Case) -> set[str]:
    """The files that --output and -o name."""
    pairs = [(word, after) for word, after in pairwise(case.words) if word in ("--output", "-o")]
    pairs += [(word, after) for word, _, after in (word.partition("=") for word in case.words) if word == "--output"]
    return {str(PurePath(case.scenario.at, after)) for _, after in pairs}


def _may_write(case: Case, names: list[str]) -> bool:
    return all(name.startswith(tuple(f"{folder}/" for folder in case.scenario.writes) or ("\0",)) for name in names)


def _changes(case: Case, found: Outcome) -> list[str]:
    """What was there before is as it was, but for what the command is about and a file that it was told to write."""
    said = []
    meant = {*case.scenario.writes, *_outputs(case)}
    for name, was in found.before.items():
        if not _may_write(case, [name]) and name not in meant and found.after.get(name) != was:
            said.append(f"{name} is {'changed' if name in found.after else 'gone'}")
    return sorted(said)[:3]
