"""Which version of this package wrote a file."""

from __future__ import annotations

import importlib.metadata

NOT_INSTALLED = "ingot (not installed)"


def made_by() -> str:
    """What data says of its maker."""
    try:
        return f"ingot {importlib.metadata.version('ingot-lm')}"
    except importlib.metadata.PackageNotFoundError:
        return NOT_INSTALLED
