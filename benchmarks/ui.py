"""Measure how long `ingot ui` takes to show many long runs, with and without its cache, and to follow lines added to a run.

    python benchmarks/ui.py                              50 runs of 100,000 lines as runs write them (1.7 GB)
    python benchmarks/ui.py --short                      the same with only the numbers that are plotted (430 MB)
    python benchmarks/ui.py --runs 3 --lines 2000        a toy
    python benchmarks/ui.py --train 60                   a run of 60 seconds, alternately watched and not for 60 steps

Needs playwright and a Chromium (--chromium), which opens the page; times are measured until its charts are drawn.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

ARMS = 10  # number of arms that the runs belong to, with several seeds each


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--train", type=float, metavar="SECONDS")
    parser.add_argument("--chromium", default=shutil.which("chromium") or shutil.which("google-chrome"))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["INGOT_CACHE"] = str(Path(folder) / "cache")
        if given.train:
            trained(Path(folder), given.train, given.chromium)
        else:
            many(Path(folder) / "runs", given)


def many(runs: Path, given: argparse.Namespace) -> None:
    size = make_runs(runs, given.runs, given.lines, given.short)
    print(f"{given.runs} runs of {given.lines:,} lines, {size / 1e6:,.0f} MB")
    print(f"{'seconds':24} {'first chart':>12} {'all':>8} {'of the server':>14}   (after the page was asked for; of a processor)")
    for words in ("without the cache", "with the cache", "and once more"):
        with serving(runs) as (address, server), browsing(given.chromium) as page:
            first, everything = opened(page, address, given.runs)
            print(f"{words:24} {first:12.2f} {everything:8.2f} {cpu_seconds(server.pid):14.2f}", flush=True)
            if words == "and once more":
                further(page, server, runs / "run-00", given)


def opened(page: Any, address: str, runs: int) -> tuple[float, float]:
    """Open the page; return the seconds until a chart is drawn and until it shows all runs."""
    began = time.monotonic()
    page.goto(address)
    page.locator("#chart-loss canvas").wait_for(timeout=120_000)
    first = time.monotonic() - began
    page.locator(f"body[data-drawn='{runs}']").wait_for(timeout=600_000)
    return first, time.monotonic() - began


def further(page: Any, server: subprocess.Popen[str], run: Path, given: argparse.Namespace) -> None:
    """Print the cost of 1,000 more lines of one run: streamed bytes, and CPU time of the server and the page."""
    session = page.context.new_cdp_session(page)
    received = [0]
    session.on("Network.dataReceived", lambda told: received.__setitem__(0, received[0] + told["dataLength"]))
    session.send("Network.enable")
    session.send("Performance.enable")
    page.wait_for_timeout(3000)
    idle = cost(page, session, server, received, lambda: None)
    text = "".join(lines(given.lines, 1000, given.short, 7))
    with (run / "metrics.jsonl").open("a") as file:
        added = cost(page, session, server, received, lambda: print(text, end="", file=file, flush=True))
    found = [more - less for more, less in zip(added, idle, strict=True)]
    print(f"1,000 further lines: {found[0]:,.0f} bytes, server {1e3 * found[1]:.0f} ms, page {1e3 * found[2]:.0f} ms")
    print(f"3 seconds in which nothing happens: server {1e3 * idle[1]:.0f} ms, page {1e3 * idle[2]:.0f} ms")


def cost(page: Any, session: Any, server: subprocess.Popen[str], received: list[int], act: Any) -> tuple[float, float, float]:
    def now() -> tuple[float, float, float]:
        told = {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}
        return received[0], cpu_seconds(server.pid), told["TaskDuration"]

    before = now()
    act()
    page.wait_for_timeout(3000)
    return tuple(after - less for after, less in zip(now(), before, strict=True))  # type: ignore[return-value]


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds that a process has used, from /proc."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def trained(folder: Path, seconds: float, chromium: str | None) -> None:
    """Train one run and print its step time with the page open and closed, alternately."""
    run, steps = folder / "runs" / "watched", 60
    words = ["train", "--recipe", "demo", f"--budget.seconds={seconds}", f"--training.output_dir={run}", "--tracking.log_every=1"]
    program = subprocess.Popen([sys.executable, "-m", "ingot", *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    rates: dict[bool, list[float]] = {True: [], False: []}
    with serving(folder / "runs") as (address, server), browsing(chromium) as page:
        used, began, at, watched = 0.0, time.monotonic(), 0, True
        while program.poll() is None:
            page.goto(address if watched else "about:blank")
            before = cpu_seconds(server.pid)
            found = stretch(run / "metrics.jsonl", at, steps, program)
            used += cpu_seconds(server.pid) - before if watched else 0.0
            at += steps
            if found is not None and at > steps:  # the first stretch includes startup
                rates[watched].append(found)
            watched = not watched
    watch_seconds = max(1e-9, (time.monotonic() - began) / 2)
    medians = {one: statistics.median(found) for one, found in rates.items()}
    for one, name in ((False, "alone"), (True, "watched")):
        print(f"{name:8} {medians[one] * 1e3:8.3f} ms per step, median of {len(rates[one])} stretches of {steps} steps")
    slower = 100 * (medians[True] / medians[False] - 1)
    print(f"watched is {slower:+.2f}% slower; the server used {100 * used / watch_seconds:.2f}% of a core")


def stretch(file: Path, at: int, steps: int, program: subprocess.Popen[bytes]) -> float | None:
    """Return the seconds per step from line `at` on, as a median over single steps because the load varies."""
    while program.poll() is None:
        records = [json.loads(line) for line in file.read_text().splitlines() if '"train"' in line] if file.exists() else []
        if len(records) >= at + steps:
            part = [record["elapsed_seconds"] for record in records[at : at + steps]]
            return statistics.median(after - before for before, after in pairwise(part))
        time.sleep(0.2)
    return None


@contextmanager
def serving(runs: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run `ingot ui` in a separate process; yield its address and the process."""
    runs.mkdir(parents=True, exist_ok=True)
    server = subprocess.Popen([sys.executable, "-m", "ingot", "ui", str(runs), "--port", "0"], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    address = next(word for word in server.stdout.readline().split() if word.startswith("http")).rstrip(";")
    try:
        yield address, server
    finally:
        server.terminate()
        server.wait()


@contextmanager
def browsing(chromium: str | None) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser.new_page(viewport={"width": 1400, "height": 1000})
        browser.close()


def make_runs(folder: Path, runs: int, count: int, short: bool) -> int:
    """Write run folders that look finished and return their total bytes."""
    from ingot.config.loading import load_config
    from ingot.config.render import dump_yaml

    folder.mkdir(parents=True)
    written = [folder / f"run-{number:02}" for number in range(runs)]
    for number, run in enumerate(written):
        run.mkdir()
        settings = {"training": {"seed": number // ARMS}, "optimizer": {"learning_rate": 0.01 + number % ARMS / 1e3}}
        resolved = load_config(recipe="demo", environment={}, python=settings)
        (run / "config.yaml").write_text(dump_yaml(resolved.config, resolved.origins))
        state = {"status": "completed", "host": "h", "pid": 1, "boot_id": "b", "started_at": "2026-01-01T00:00:00+00:00"}
        state |= {
            "updated_at": "2026-01-01T00:00:00+00:00",
            "step": count,
            "max_steps": count,
            "loss": 3.0,
            "tokens": count * 4096,
        }
        (run / "state.json").write_text(json.dumps(state))
        if number < ARMS:
            (run / "metrics.jsonl").write_text("".join(lines(0, count, short, number)))
        else:
            shutil.copy(written[number % ARMS] / "metrics.jsonl", run / "metrics.jsonl")
    return sum(path.stat().st_size for path in folder.glob("*/metrics.jsonl"))


def lines(begin: int, count: int, short: bool, seed: int) -> Iterator[str]:
    """Yield lines of metrics.jsonl."""
    draw = random.Random(seed)
    for step in range(begin + 1, begin + count + 1):
        loss = round(3 + seed / 50 + 4 * math.exp(-step / 8000) + draw.gauss(0, 0.03), 6)
        record = {"kind": "train", "step": step, "loss": loss, "tokens": step * 4096, "elapsed_seconds": round(step * 0.13, 3)}
        if not short:
            record = {"kind": "train", "time": "2026-11-16T16:00:00.000+00:00", "session": 1, **record, "max_steps": 100_000}
            record |= {"grad_norm": draw.random(), "learning_rate": 0.001, "tokens_per_second": 31234.123 + draw.random()}
            record |= {"budget_seconds": None, "epoch": 0, "mfu": None, "spent": step / 1e5, "targets": 4096, "phase": 0}
        yield json.dumps(record, separators=(", ", ": ") if not short else (",", ":")) + "\n"


if __name__ == "__main__":
    main()
