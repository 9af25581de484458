"""Pictures of matplotlib's, which is an extra: asked for before anything is computed, written whole or not at all."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path
from typing import Any

from ingot.errors import ConfigError
from ingot.runtime.files import write_atomically

SUFFIXES = (".png", ".svg")


def check_picture(file: Path, option: str) -> None:
    """Refuse a picture that could not be drawn later; `option` is how the user named it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"{option} needs matplotlib, which is not installed; install it with: pip install 'ingot-lm[plots]'")
    if file.suffix.lower() not in SUFFIXES or file.is_dir():
        raise ConfigError(f"{option} {file} is not a name for a picture; give one that ends in {' or '.join(SUFFIXES)}")
    if not file.parent.is_dir():
        raise ConfigError(f"{option} {file} cannot be written: there is no folder {file.parent}; make it first")


def save_picture(figure: Any, file: Path, option: str) -> None:
    """Write a figure of matplotlib's; the same figure gives the same bytes."""
    import matplotlib

    image, form = io.BytesIO(), file.suffix.lower()[1:]
    # Text stays text, so that an SVG is small; its ids follow from what is drawn and it has no date.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "ingot"}):
        figure.savefig(image, format=form, dpi=150, metadata={"Date": None} if form == "svg" else None)
    try:
        write_atomically(file.resolve(), image.getvalue())
    except OSError as error:
        raise ConfigError(f"{option} {file} cannot be written: {error.strerror}") from None
