"""Check that watching a run does not slow it down: time blocks of one run with and without a watcher and print a table.

    python benchmarks/watched.py    a small model on the CPU, watched by `ingot status --watch RUN`
    python benchmarks/watched.py --watcher "ingot ui RUN --port 8010" --threads 2 --seconds 20 --pairs 10
    python benchmarks/watched.py --device cuda --recipe gpt2

Blocks alternate (without, with, with, without, ...), so that other load on the machine affects both equally. A block's speed
comes from the steps logged in metrics.jsonl during the block. The watcher has its own terminal; it is started for each block a
few seconds before timing begins, because its startup does not matter to people who watch for hours, and ended by SIGINT. Its CPU
seconds are those that Linux reports. Needs an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import datetime
from pathlib import Path
from typing import Any

SETTLE = 4.0  # untimed seconds before each block, in which the watcher starts
ENDS_WITHIN = 10.0  # seconds after SIGINT before the watcher is killed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--watcher", default="ingot status --watch RUN", help="watching command; RUN stands for the run folder")
    parser.add_argument("--recipe", default="demo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", default="auto", help="CPU threads of the training run")
    parser.add_argument("--seconds", type=float, default=12.0, help="seconds per block")
    parser.add_argument("--pairs", type=int, default=8, help="pairs of blocks, watched and not")
    parser.add_argument("--set", action="append", default=[], metavar="SETTING=VALUE", help="a setting of the run")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as beside:
        folder = Path(beside) / "run"
        with training(given, folder) as trainer:
            blocks = watch_in_turns(given, folder, trainer)
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    show(blocks, records)


@contextmanager
def training(given: argparse.Namespace, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a run without evaluation or saves, which trains until the context exits."""
    settings = {
        "training.output_dir": folder, "training.device": given.device, "training.threads": given.threads,
        "training.max_steps": 100_000_000, "budget.seconds": "null", "evaluation.every": 0, "evaluation.at_start": "false",
        "evaluation.at_end": "false", "artifact.write": "false", "training.save_seconds": 100_000, "tracking.log_every": 1,
    }  # fmt: skip
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    words += [word for text in given.set for word in (f"--{text.partition('=')[0]}", text.partition("=")[2])]
    command = [sys.executable, "-m", "ingot", "train", "--recipe", given.recipe, *words]
    trainer = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while trainer.poll() is None and not (folder / "metrics.jsonl").is_file():
            time.sleep(0.1)
        yield trainer
    finally:
        trainer.send_signal(signal.SIGTERM)
        trainer.wait()


def watch_in_turns(
    given: argparse.Namespace, folder: Path, trainer: subprocess.Popen[bytes]
) -> list[tuple[bool, float, float, float]]:
    """Time the blocks; return for each whether it was watched, its start and end, and the watcher's CPU seconds."""
    blocks = []
    for watched in [kind for pair in range(given.pairs) for kind in ((False, True) if pair % 2 == 0 else (True, False))]:
        with watching(shlex.split(given.watcher.replace("RUN", str(folder)))) if watched else nullcontext() as watcher:
            time.sleep(SETTLE)
            began, before = time.time(), cpu_seconds(watcher)
            time.sleep(given.seconds)
            blocks.append((watched, began, time.time(), cpu_seconds(watcher) - before))
            if watcher is not None and watcher.poll() is not None:
                sys.exit(f"the watcher has ended with exit code {watcher.returncode}: {given.watcher}")
        if trainer.poll() is not None:
            sys.exit(f"the run has ended with exit code {trainer.returncode}; try its settings with `ingot train`")
    return blocks


@contextmanager
def watching(words: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a watcher in its own terminal until the context exits."""
    program = [str(Path(sys.executable).with_name(words[0])), *words[1:]]
    ours, theirs = pty.openpty()
    process = subprocess.Popen(program, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    threading.Thread(target=drain, args=[ours], daemon=True).start()
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(ENDS_WITHIN)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def cpu_seconds(process: subprocess.Popen[bytes] | None) -> float:
    """Return the CPU seconds that a process has used so far, or 0 if the system does not report them."""
    path = Path(f"/proc/{process.pid}/stat") if process is not None else None
    if path is None or not path.exists():
        return 0.0
    user, system = path.read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def drain(terminal: int) -> None:
    """Read the terminal's output; otherwise the watcher would block once the buffer is full."""
    try:
        while os.read(terminal, 1 << 16):
            pass
    except OSError:  # raised when the terminal is closed
        os.close(terminal)


def speed(records: Sequence[Mapping[str, Any]], began: float, ended: float) -> float:
    """Return the steps per second between two times, from the run's metrics."""
    steps = [record for record in records if record["kind"] == "train"]
    times = [(datetime.fromisoformat(record["time"]).timestamp(), record["step"]) for record in steps]
    inside = [(at, step) for at, step in times if began <= at <= ended]
    if len(inside) < 2:
        sys.exit("a block has fewer than two steps; raise --seconds")
    return (inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0])


def show(blocks: Sequence[tuple[bool, float, float, float]], records: Sequence[Mapping[str, Any]]) -> None:
    """Print the table of blocks and the mean ratio."""
    rows = [(watched, speed(records, began, ended), cpu / (ended - began)) for watched, began, ended, cpu in blocks]
    print(f"{'block':>6} {'watched':>8} {'steps/s':>9} {'CPU of the watcher':>19}")
    for number, (watched, rate, cpu) in enumerate(rows, 1):
        print(f"{number:6} {'yes' if watched else 'no':>8} {rate:9.2f} {f'{100 * cpu:.1f}%' if watched else '':>19}")
    pairs = [{row[0]: row[1] for row in rows[i : i + 2]} for i in range(0, len(rows) - 1, 2)]
    ratios = [pair[True] / pair[False] for pair in pairs]
    spread = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else float("nan")
    cpu = statistics.fmean(part for watched, _, part in rows if watched)
    print(
        f"watched / not watched: mean {statistics.fmean(ratios):.4f} +- {spread:.4f}, median {statistics.median(ratios):.4f} of "
        f"{len(ratios)} pairs; it takes {100 * cpu:.1f}% of a core; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    )


if __name__ == "__main__":
    main()
