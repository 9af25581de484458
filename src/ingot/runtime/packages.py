"""Versions of other packages, where these are installed."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from importlib import metadata

OF_KERNELS = ("triton", "flash-attn-4", "quack-kernels", "nvidia-cutlass-dsl")  # what a GPU's are written in or come from


def installed(packages: Iterable[str]) -> dict[str, str]:
    """The versions of those packages that are there."""
    found = {}
    for name in packages:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
