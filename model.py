"""nanoGPT's model.py, for what imports it: `from model import GPT, GPTConfig`, and the parts of a GPT."""

try:
    from ingot.compat.nanogpt.gpt import GPT, MLP, Block, CausalSelfAttention, GPTConfig
    from ingot.model.layers import LayerNorm
except ModuleNotFoundError as missing:
    raise ImportError(
        f"{missing.name} is not installed here: run `make train` once and use .venv/bin/python, or pip install -e ."
    ) from None

__all__ = ["GPT", "MLP", "Block", "CausalSelfAttention", "GPTConfig", "LayerNorm"]
