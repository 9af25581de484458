"""Which tokenizer belongs to a config, for advice to those who have no data for it yet."""

from __future__ import annotations

from ingot.config.schema import Config

GPT2_IDS = 50257


def fitting_tokenizer(config: Config) -> str:
    """The tokenizer with which text for this config is prepared."""
    return config.data.tokenizer or ("gpt2" if (config.model.vocab_size or 0) >= GPT2_IDS else "byte")
