"""In place of ingot.compat.golf.bundle: the code of a submission is the file that runs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

NONE: Mapping[str, str] = {}


def bundle(settings: Mapping[str, str] = NONE, model: str | None = None) -> bytes:
    """This `train_gpt.py`, in which these variables are set unless the environment sets them, with a model of one's own."""
    return with_settings(Path(__loader__.path).read_bytes(), settings, model)  # type: ignore[name-defined]


def with_settings(content: bytes, settings: Mapping[str, str], model: str | None = None) -> bytes:
    """A `train_gpt.py` with these settings, and the text of this model, in place of its own."""
    content = re.sub(rb"^MODEL = .*$", lambda found: f"MODEL = {model!a}".encode(), content, count=1, flags=re.MULTILINE)
    block = f"SETTINGS = {json.dumps(settings, indent=4)}\n".encode()
    return re.sub(rb"^SETTINGS = \{.*?\}\n", lambda found: block, content, count=1, flags=re.DOTALL | re.MULTILINE)
