"""`gpt-simple init`: a config file with every key, its meaning and its default, or a preset's size."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from textwrap import fill

from ingot.compat.gpt_simple.config import SECTIONS, all_keys
from ingot.compat.gpt_simple.log import Log
from ingot.config.text import format_value
from ingot.console.output import write_file

PRESETS = {
    "small": {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 2048},  # 123.6M parameters with GPT-2's vocabulary
    "medium": {"n_embd": 1024, "n_layer": 24, "n_head": 16, "n_positions": 2048},  # 359.8M
    "large": {"n_embd": 2048, "n_layer": 24, "n_head": 32, "n_positions": 2048},  # 1,336M
}
HEADING = """\
# A run of `gpt-simple train --config FILE`, with every key, what it means, what it may be, and its default.
# A line that begins with `# ` before a key leaves it at its default. The same command goes on with a run that was stopped;
# `gpt-simple validate --config FILE` checks everything before.
"""
WIDTH = 100
EXAMPLES = {"data.path": "./data/tokenized"}
UNSET = ("training.compile",)  # whose default depends on the machine


def init(options: Namespace, log: Log) -> int:
    """Print the file, or write it."""
    text = template(options.preset)
    if options.output is None:
        print(text, end="")
    else:
        write_file(Path(options.output), text, force=True)
        log.info(f"Config written to {options.output}")
    return 0


def template(preset: str | None = None) -> str:
    """The file, with the size of a preset."""
    sizes = {f"model.{name}": value for name, value in PRESETS[preset or "small"].items()}
    lines = [HEADING]
    for section, kind in SECTIONS.items():
        lines += [f"# {kind.__doc__}", f"{section}:"]
        for key in (key for path, key in all_keys().items() if path.startswith(f"{section}.")):
            about = f"{key.rule.meaning} ({key.allowed})"
            lines.append(fill(about, WIDTH, initial_indent="  # ", subsequent_indent="  # ", break_on_hyphens=False))
            value = EXAMPLES.get(key.path, sizes.get(key.path, key.default))
            unset = "# " if value is None or key.path in UNSET else ""
            lines.append(f"  {unset}{key.path.partition('.')[2]}: {format_value(value)}")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"
