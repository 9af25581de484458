"""A model in gpt-simple's words and in ours: its `model` section as our llama family's, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ingot.doors.gpt_simple.config import ModelConfig
from ingot.doors.gpt_simple.names import SETTINGS

ACTIVATIONS = {"swish": "silu", "gelu": "gelu", "relu": "relu"}
MLPS = {"gated": "gated", "mlp": "plain"}
SAME = {
    theirs.removeprefix("model."): ours.removeprefix("model.") for theirs, ours in SETTINGS.items() if ours.startswith("model.")
}


def model_settings(config: ModelConfig) -> dict[str, Any]:
    """The settings of our llama family, but for vocab_size and context, which the tokenizer and the rows decide too."""
    return {
        "family": "llama",
        **{ours: getattr(config, theirs) for theirs, ours in SAME.items()},
        "activation": ACTIVATIONS[config.activation],
        "mlp": MLPS[config.mlp_type],
        "rope_factor": config.rope_scaling_factor if config.rope_scaling_type is not None else 1.0,
    }


def model_config(settings: Mapping[str, Any], vocab_size: int, document_mask: bool = False) -> ModelConfig:
    """gpt-simple's section of a model of our llama family with so many rows in its embedding."""
    back = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
    return ModelConfig(
        vocab_size=vocab_size,
        n_positions=settings["context"],
        **{theirs: settings[ours] for theirs, ours in SAME.items()},
        activation=back[settings["activation"]],
        mlp_type="gated" if settings["mlp"] == "gated" else "mlp",
        rope_scaling_factor=settings["rope_factor"],
        attention_mode="sdpa_mask" if document_mask else "causal",
    )
