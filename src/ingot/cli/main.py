"""The `ingot` command: its verbs, and how it ends.

`ingot status` is answered without typer, which loads pydantic to read the words of any verb: half of the time that it takes to
look at a run, and scripts look often.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from ingot.console.entry import explained, stop_exit_code
from ingot.console.output import json_printed, print_json
from ingot.runtime.signals import listening_early

VERBS = {
    "Train and use a model": ("train", "sweep", "validate", "eval", "generate", "batch-generate", "serve", "export", "import"),
    "Look at runs": ("status", "stop", "watch", "ui", "runs", "plot", "report", "compare"),
    "Prepare text": ("data", "tokenize"),
    "Compete": ("golf",),
    "Settings": ("recipes", "config", "init"),
}
WITH_DEVICE = ("eval", "generate", "batch-generate", "serve", "export", "ui")  # whose --device is training.device to others
MODULES = {"import": "imports", "batch-generate": "batch_generate"}  # verbs whose names are not names of Python's


def run(args: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    given = list(sys.argv[1:] if args is None else args)
    code, trains = stop_exit_code(given), given[:1] == ["train"]
    name = _option_name if given[:1] and given[0] in WITH_DEVICE else str
    ends = explained("ingot", name, interrupted="error: interrupted", every_rank=True, stopped=code)
    json_printed.set(False)
    with ends as outcome, listening_early(trains):
        outcome.code = _call(given)
    told = "--json" not in given or json_printed.get()  # one document: where there is a result, it is that
    if outcome.error is not None and not told and os.environ.get("RANK", "0") == "0":
        with suppress(OSError):
            print_json({"error": outcome.error.render(name), "exit_code": outcome.code})
    sys.exit(outcome.code)


def _option_name(setting: str) -> str:
    return "--device" if setting == "training.device" else setting


def _call(args: list[str]) -> int:
    if "_INGOT_COMPLETE" in os.environ:
        from ingot.cli.completion import print_completions

        print_completions(args)
        return 0
    if args[:1] == ["help"]:
        args = [*args[1:], "--help"]
    if args[:1] == ["status"]:
        from ingot.cli.showing import show, understood

        if (asked := understood(args[1:])) is not None:
            show(*asked)
            return 0
    from ingot.cli.app import call

    return call(args)
