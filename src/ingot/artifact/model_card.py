"""The README.md of an exported model: scores, data, settings, the commands that made it, and how to load it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from ingot.artifact.huggingface import CARD_MARK
from ingot.runtime.machine import made_by


def model_card(
    name: str,
    settings: Mapping[str, Any],
    facts: Mapping[str, Any],
    scores: Mapping[str, Any],
    data: str | None,
    commands: Sequence[Sequence[str]],
    has_code: bool,
) -> str:
    """Return the text of a model card. `settings` is the `model` section; unknown facts and scores are left out."""
    family = settings["family"] if settings["family"] != "file" else "custom"
    tags = ["ingot", family] + ["custom_code"] * has_code
    head = yaml.safe_dump({"library_name": "transformers", "pipeline_tag": "text-generation", "tags": tags}, sort_keys=False)
    fingerprint = facts.get("data_fingerprint")
    rows = {
        "optimizer steps": facts.get("step"),
        **scores,
        "data": f"{data} (fingerprint {str(fingerprint)[:16]})" if data is not None else None,
        "tokenizer": facts["tokenizer"]["kind"] if facts.get("tokenizer") else None,
    }
    shown = {key: f"{value:,.4f}" if isinstance(value, float) else value for key, value in rows.items() if value is not None}
    table = [f"| {key} | {value} |" for key, value in shown.items()]
    arguments = ", trust_remote_code=True" if has_code else ""
    code = ["The code of the model is in `modeling_ingot.py`; it needs torch and transformers, but not Ingot.", ""]
    load = [
        "from transformers import AutoModelForCausalLM, AutoTokenizer", "",
        f'tokenizer = AutoTokenizer.from_pretrained("{name}"{arguments})',
        f'model = AutoModelForCausalLM.from_pretrained("{name}"{arguments})',
        'tokens = tokenizer("Once upon a time", return_tensors="pt")',
        "print(tokenizer.decode(model.generate(**tokens, max_new_tokens=50)[0]))",
    ]  # fmt: skip
    section = yaml.safe_dump({"model": dict(settings)}, sort_keys=False).rstrip()
    return "\n".join([
        "---", head.rstrip(), "---", CARD_MARK, "", f"# {name}", "", f"A {family} model trained with {made_by()}.", "",
        "| | |", "|---|---|", *table, "", "## Use", "", *code * has_code, "```python", *load, "```", "",
        "## Settings", "", "```yaml", section, "```", "", "## Commands", "", "```sh", *map(shlex.join, commands), "```", "",
    ])  # fmt: skip
