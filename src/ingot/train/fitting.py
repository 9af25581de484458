"""Whether a config and its data belong together: what may be run and was probably not meant."""

from __future__ import annotations

from ingot.config.schema import Config
from ingot.data.store.dataset import Dataset

IDLE_ROWS = 1024  # of the embedding; a vocabulary is rounded up to a multiple of 128, or left some room
MANY_PASSES = 300  # over the training text; nanoGPT's smallest preset makes 82
GPT2_IDS = 50257


def fitting_tokenizer(config: Config) -> str:
    """The tokenizer with which text for this config is prepared."""
    return config.data.tokenizer or ("gpt2" if (config.model.vocab_size or 0) >= GPT2_IDS else "byte")


def unfit(config: Config, dataset: Dataset) -> list[str]:
    """A sentence for everything that this model or this number of steps will waste on this data."""
    said, ids, rows = [], dataset.tokenizer.vocab_size, config.model.vocab_size or 0
    if rows - ids > IDLE_ROWS:
        said.append(
            f"warning: model.vocab_size={rows:,} and the data has {ids:,} ids: {rows - ids:,} rows of the embedding can never be "
            f"used; set model.vocab_size=null or prepare the text with --tokenizer {fitting_tokenizer(config)}"
        )
    tokens, steps = dataset.split("train").tokens, config.training.max_steps
    passes = (steps or 0) * config.training.tokens_per_step / max(1, tokens)
    if passes > MANY_PASSES and config.budget.seconds is None:
        said.append(
            f"warning: training.max_steps={steps:,} reads the {tokens:,} training tokens {passes:,.0f} times; lower it, set "
            "budget.seconds or prepare more text"
        )
    return said
