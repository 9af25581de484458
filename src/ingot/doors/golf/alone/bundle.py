"""In place of ingot.doors.golf.bundle: the code of a submission is the file that runs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

NONE: Mapping[str, str] = {}


def bundle(settings: Mapping[str, str] = NONE) -> bytes:
    """This `train_gpt.py`, in which these variables are set unless the environment sets them."""
    return with_settings(Path(__loader__.path).read_bytes(), settings)  # type: ignore[name-defined]


def with_settings(content: bytes, settings: Mapping[str, str]) -> bytes:
    """A `train_gpt.py` with these settings in place of its own."""
    block = f"SETTINGS = {json.dumps(settings, indent=4)}\n".encode()
    return re.sub(rb"^SETTINGS = \{.*?\}\n", lambda found: block, content, count=1, flags=re.DOTALL | re.MULTILINE)
