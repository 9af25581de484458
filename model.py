"""nanoGPT's model.py, for what imports it: `from model import GPT, GPTConfig`."""

try:
    from ingot.doors.nanogpt.model import GPT, GPTConfig
except ModuleNotFoundError as missing:
    raise ImportError(
        f"{missing.name} is not installed here: run `make train` once and use .venv/bin/python, or pip install -e ."
    ) from None

__all__ = ["GPT", "GPTConfig"]
