"""Keeps the fuzzer in its folder: a case may be told to write to / or /dev/null, and root can.

Linux's Landlock refuses every write, removal and new name outside of the folder, to this process and to all that it starts. Where
a kernel has none, cases are given no path that leads out of their folder.
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
from pathlib import Path

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # system calls, the same on every processor
VERSION, PATH_BENEATH, NO_NEW_PRIVILEGES = 1, 1, 38
WRITE_FILE, TRUNCATE = 1 << 1, 1 << 14
REMOVE_AND_MAKE = sum(1 << bit for bit in range(4, 13))
REFER = 1 << 13  # renaming from one folder to another
OUTSIDE = re.compile(r"(^|[=:])[/~]")  # where a word, or its value, begins with a path that leads away


def confine(folder: Path) -> bool:
    """Let this process write nowhere but below a folder, for good; False where this kernel cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(CREATE_RULESET, None, 0, VERSION)
    if version < 3:  # before that it did not know of truncating
        return False
    handled = WRITE_FILE | TRUNCATE | REMOVE_AND_MAKE | REFER
    attributes = struct.pack("=Q", handled)
    rules = libc.syscall(CREATE_RULESET, attributes, len(attributes), 0)
    for path, allowed in ((folder, handled), (Path("/proc"), WRITE_FILE | TRUNCATE), (Path(os.devnull), WRITE_FILE | TRUNCATE)):
        opened = os.open(path, os.O_PATH)
        if libc.syscall(ADD_RULE, rules, PATH_BENEATH, struct.pack("=Qi", allowed, opened), 0):
            raise OSError(ctypes.get_errno(), f"{path} cannot be allowed")
        os.close(opened)
    if libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.syscall(RESTRICT_SELF, rules, 0):
        raise OSError(ctypes.get_errno(), "this process cannot be confined")
    os.close(rules)
    return True


def tame(word: str) -> str:
    """A word without a path that leads out of the folder it is used in."""
    return OUTSIDE.sub(r"\1out", word.replace("..", "out"))
