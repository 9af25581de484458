"""`ingot plan`: predict the memory, speed, hours and cost of a run before it is started."""

from __future__ import annotations

from typing import Annotated

import typer
from typer import Option

from ingot.cli.arguments import AsJson, ConfigFile, RecipeName, given_settings, resolve_config
from ingot.console.entry import warn
from ingot.console.output import print_columns, print_json
from ingot.console.progress import duration

PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "workspace")


def plan(
    ctx: typer.Context,
    config: ConfigFile = None,
    recipe: RecipeName = None,
    gpus: Annotated[int, Option("--gpus", metavar="N", help="Number of GPUs.")] = 1,
    gpu: Annotated[str, Option("--gpu", metavar="NAME", help="Kind of GPU: h200, h100, b200, a100, l40s or 4090.")] = "h200",
    price: Annotated[float | None, Option("--price", metavar="DOLLARS", help="Price of a GPU per hour.")] = None,
    tokens: Annotated[int | None, Option("--tokens", metavar="N", help="Number of tokens to train on.")] = None,
    as_json: AsJson = False,
) -> int:
    """Predict memory per GPU, tokens/s, hours and cost of a run from a simulated step. Exit code 1: too little memory."""
    from ingot.preflight.plan import GIB, make_plan

    resolved = resolve_config(recipe, config, given_settings(ctx), max(1, gpus), warn)
    p = make_plan(resolved.config, gpus, gpu.lower(), price, tokens)
    if as_json:
        print_json(p)
        return 0 if p["fits"] else 1
    compute, optimizer, sending, exposed = (
        f"{1000 * p[f'{what}_seconds']:,.1f} ms" for what in ("compute", "optimizer", "communication", "exposed")
    )
    hidden = f"{exposed} of it not hidden behind compute" if p["exposed_seconds"] else "hidden behind compute"
    rows = [
        (f"Model on {p['gpus']} x {p['gpu']}",),
        ("  parameters", f"{p['parameters']:,}"),
        ("  FLOPs per token", f"{p['flops_per_token'] / 1e9:,.3f} G"),
        ("  parallel", p["parallel"]),
        ("  micro-batch", f"{p['micro_batch']:,} rows, {p['micro_batches']:,} per step"),
        ("  checkpointing", f"one of {p['checkpointed']} blocks" if p["checkpointed"] else "none"),
        ("Memory per GPU",),
        *((f"  {part}", f"{p['memory'].get(part, 0) / GIB:9.2f} GiB") for part in PARTS),
        ("  peak", f"{p['memory_bytes'] / GIB:9.2f} GiB of {p['usable_bytes'] / GIB:.1f} usable"),
        ("Step",),
        ("  compute", compute),
        ("  optimizer", optimizer),
        ("  communication", f"{p['communication_bytes'] / 1e9:,.3f} GB, {sending}, {hidden}" if p["gpus"] > 1 else "none"),
        ("  speed", f"{p['tokens_per_second']:,.0f} tokens/s, MFU {100 * p['mfu']:.0f}%"),
        ("Run",),
        ("  tokens", f"{p['tokens']:,}, {p['tokens'] / p['optimal_tokens']:.2f} x compute-optimal ({p['optimal_tokens']:,})"),
        ("  time", duration(3600 * p["hours"])),
        *([("  cost", f"${p['cost']:,.2f}")] if p["cost"] is not None else []),
    ]
    print_columns(rows)
    print(f"\n{p['advice']}")
    return 0 if p["fits"] else 1
