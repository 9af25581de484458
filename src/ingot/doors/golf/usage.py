"""What `train_gpt.py --help` prints; the one file of a submission does without it."""

from __future__ import annotations

from collections.abc import Iterable

from ingot.doors.golf.variables import CODE, TABLE, Variable, default_of


def usage(script: str = CODE, table: Iterable[Variable] = TABLE) -> str:
    """What --help of a script prints: every variable with its default and meaning."""
    lines = [f"usage: [VARIABLE=value ...] python {script}"]
    if script == CODE:
        lines.append(f"       [VARIABLE=value ...] torchrun --standalone --nproc_per_node=N {script}")
    lines += ["", "Trains and scores a golf model. It takes no arguments; settings are environment variables:"]
    lines += [f"  {v.name}={default_of(v)}\n      {v.meaning} ({' or '.join(v.choices) or v.kind})" for v in table]
    return "\n".join(lines)
