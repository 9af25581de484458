"""Any model of the llama family as a checkpoint of gpt-simple's, whatever trained it: `ingot export --format gpt-simple`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ingot.artifact.gpt_simple import model_keys
from ingot.compat.gpt_simple.checkpoint import write_checkpoint
from ingot.compat.gpt_simple.config import Config
from ingot.compat.gpt_simple.names import SETTINGS
from ingot.config.schema import Config as IngotConfig
from ingot.inference.model import Weights, as_checkpoint


def export_folder(source: Weights, folder: Path) -> int:
    """Write a checkpoint folder with its tokenizer inside and return its bytes."""
    return write_checkpoint(folder, as_checkpoint(source), keys_of(source.config), tokenizer=True)


def keys_of(config: IngotConfig) -> dict[str, dict[str, Any]]:
    """gpt-simple's 59 keys that say what a config says; those it says nothing of have their defaults."""
    keys = Config().to_dict()
    for theirs, ours in SETTINGS.items():
        (section, name), (our_section, setting) = theirs.split("."), ours.split(".")
        value = getattr(getattr(config, our_section), setting, None)
        if value not in (None, "auto"):
            keys[section][name] = value
    t, o, rows = config.training, config.optimizer, config.rows_per_step
    micro_batch = rows if t.micro_batch == "auto" else min(t.micro_batch, rows)
    steps = t.max_steps or 1
    model = config.model.model_dump()
    model["context"] = model["context"] or config.data.seq_len
    keys["model"] = model_keys(model, config.data.document_mask) | {"vocab_size": None}
    keys["data"] |= {"packing": config.data.sampling != "document", "tokenizer": config.data.tokenizer or "gpt2"}
    keys["optimizer"]["decay_steps"] = max(1, (o.decay_steps or steps) - o.warmup_steps)
    keys["training"] |= {
        "max_steps": steps,
        "per_device_batch_size": micro_batch,
        "gradient_checkpointing": bool(t.gradient_checkpointing),
        "gradient_accumulation_steps": -(-rows // micro_batch),
        "keep_last_k": t.keep_last,
        "keep_milestone_every": t.keep_every or None,
    }
    return keys
