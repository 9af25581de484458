"""What `ingot status` shows of runs, by what their folders say; takes no lock, waits for nobody, and loads next to nothing."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingot.console.output import columns, print_json
from ingot.console.progress import ERASE, START_OF_LINE, UP, duration, is_terminal
from ingot.runs.view import RUNS, run_record, runs_below

if TYPE_CHECKING:
    from ingot.runs.view import Run

WATCH_SECONDS = 1.0
COLOUR_OR_CELL = re.compile(r"\x1b\[[\d;]*m|.")


def understood(words: Sequence[str]) -> tuple[list[Path], bool, bool] | None:
    """The folders among the words after `status`, whether to watch them, and whether as JSON; None where typer has to answer."""
    options = [word for word in words if word.startswith("-")]
    if not set(options) <= {"--watch", "--json"}:
        return None
    return [Path(word) for word in words if word not in options], "--watch" in options, "--json" in options


def show(runs: Sequence[Path], watch: bool, as_json: bool) -> None:
    """Print how runs are doing, those below runs/ where none are named."""
    from ingot.runs.view import Run

    found = [Run.open(path) for path in runs] if runs else runs_below(RUNS)
    if watch:
        _watch(found, as_json)
        return
    records = [run_record(run) for run in found]
    if as_json:
        print_json(records)
    else:
        print("\n".join(_lines(records)))


def status_lines(runs: Sequence[Run]) -> list[str]:
    """How runs are doing, for a reader."""
    return _lines([run_record(run) for run in runs])


def _lines(records: Sequence[dict[str, Any]]) -> list[str]:
    """One run as a list of facts, several as a table."""
    told = [_told(record) for record in records]
    if len(told) == 1:
        return columns([(name, value) for name, value in told[0].items() if value])
    named = [name for name in told[0] if name not in ("process", "error")]
    return columns([named, *([one[name] or "-" for name in named] for one in told)])


def _told(record: dict[str, Any]) -> dict[str, str]:
    def number(name: str, form: str) -> str:
        return format(record[name], form) if record[name] is not None else ""

    why = f" ({record['stop_reason']})" if record["stop_reason"] else ""
    left = [number("steps_left", ",") + " steps" if record["steps_left"] is not None else ""]
    left.append(f"{duration(record['budget_seconds_left'])} of training" if record["budget_seconds_left"] is not None else "")
    return {
        "run": record["run"],
        "status": f"{record['status']}{why}",
        "step": number("step", ","),
        "left": " or ".join(part for part in left if part),
        "loss": number("loss", ".4f"),
        "val_bpb": number("val_bpb", ".4f"),
        "tokens/s": number("tokens_per_second", ",.0f"),
        "checkpoint": record["checkpoint"] or "",
        "last heard": f"{duration(record['last_heard_seconds'])} ago" if record["last_heard_seconds"] is not None else "",
        "process": f"{record['pid']} on {record['host']}" if record["pid"] is not None else "",
        "error": record["error"] or "",
    }


def _watch(runs: Sequence[Run], as_json: bool) -> None:
    """Show them until none is running or Ctrl-C; on a terminal in one place, elsewhere what has changed."""
    drawn, before = 0, None
    in_place = is_terminal(sys.stdout) and not as_json
    try:
        while True:
            records = [run_record(run) for run in runs]
            facts = [{name: value for name, value in one.items() if name != "last_heard_seconds"} for one in records]
            if in_place:
                drawn = draw(_lines(records), drawn)
            elif facts != before:
                print_json(records) if as_json else print("\n".join(_lines(records)))
                sys.stdout.flush()
            before = facts
            if not any(one["status"] == "running" for one in records):
                return
            time.sleep(WATCH_SECONDS)
    except KeyboardInterrupt:
        return  # the way to end it; what was shown last stays


def draw(lines: Sequence[str], drawn: int) -> int:
    """Put lines over those drawn before, as many and as wide as the terminal has room for."""
    width, height = os.get_terminal_size(sys.stdout.fileno())  # 0 where nobody has told the terminal its size
    shown = [_cut(line, max(1, (width or 80) - 1)) for line in lines[: max(1, (height or 24) - 1)]]
    over = UP * drawn + "".join(f"{START_OF_LINE}{ERASE}{line}\n" for line in shown)
    spare = max(0, drawn - len(shown))
    sys.stdout.write(over + f"{START_OF_LINE}{ERASE}\n" * spare + UP * spare)
    sys.stdout.flush()
    return len(shown)


def _cut(line: str, width: int) -> str:
    """The cells of a line that there is room for; colours take none and all stay, so that each is closed."""
    kept, cells = [], 0
    for part in COLOUR_OR_CELL.findall(line):
        is_cell = len(part) == 1
        cells += is_cell
        if cells <= width or not is_cell:
            kept.append(part)
    return "".join(kept)
