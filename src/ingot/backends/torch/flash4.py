"""FlashAttention 4, and quack-kernels, which comes with it: whether they are installed, and where they keep what they compile."""

from __future__ import annotations

import os
from contextlib import suppress
from importlib.util import find_spec

from ingot.runtime.cache import cache_root


def has_flash4() -> bool:
    with suppress(Exception):  # an older FlashAttention of that name may be there, and be for another torch
        return find_spec("flash_attn.cute") is not None
    return False


def keep_compiled() -> None:
    """Before they are imported: they compile kernels when these are first used, seconds for each; later runs find them."""
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(cache_root() / "flash4"))
    os.environ.setdefault("QUACK_CACHE_DIR", str(cache_root() / "quack"))
