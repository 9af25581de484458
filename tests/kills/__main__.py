"""Kill runs and say whether one ended differently; see the package."""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .cases import SETTINGS, Case, make_case
from .ends import differences, end_of

KILLS = 15


def main(arguments: list[str] | None = None) -> int:
    """Kill runs; 1 where one ended differently or left something."""
    parser = argparse.ArgumentParser("python -m tests.kills", description="Kill runs at any moment and compare how they end.")
    parser.add_argument("--kills", type=int, default=KILLS, metavar="N", help=f"how many kills at least ({KILLS})")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="which cases (1)")
    parser.add_argument("--case", type=int, metavar="N", help="one case, with what its sessions print")
    given = parser.parse_args(arguments)
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}  # before torch is imported, which only children compute with
    home = Path(tempfile.mkdtemp(prefix="ingot-kills-"))
    try:
        return _run(home, given.seed, given.kills, given.case)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _run(home: Path, seed: int, wanted: int, one: int | None) -> int:
    began, counts, unbroken = time.monotonic(), Counter[str](), dict[tuple[str, int, str], dict[str, Any]]()
    number, runs, failed = one or 0, 0, 0
    _in_child(lambda: _write_data(home))
    while (sum(counts.values()) < wanted or runs < len(SETTINGS)) if one is None else not runs:
        case = make_case(seed, number)
        try:
            killed, wrong = _life(case, home, unbroken)
        except KeyboardInterrupt:
            break  # what was found so far is told
        except Exception as error:
            killed, wrong = [], [f"{type(error).__name__}: {error}"]
        counts.update(killed)
        if one is not None:
            print((home / f"case-{number}" / "printed").read_text())
        if wrong:
            failed += 1
            print(
                f"--seed {seed} --case {number} ({case.name}, {case.ranks} ranks, {case.parallel}): {'; '.join(wrong)}",
                flush=True,
            )
        shutil.rmtree(home / f"case-{number}", ignore_errors=True)
        number, runs = number + 1, runs + 1
    told = ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
    print(f"{sum(counts.values())} kills ({told}) in {time.monotonic() - began:.0f} s; {failed} of {runs} runs ended otherwise")
    return 1 if failed else 0


def _life(case: Case, home: Path, unbroken: dict[tuple[str, int, str], dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Kill the sessions of a case and let the last one end; what killed them, and what is not as in a run without kills."""
    from .sessions import session

    key = (case.name, case.ranks, case.parallel)
    if key not in unbroken:
        reference = home / "-".join(map(str, key))
        reference.mkdir()
        session(case, reference)
        unbroken[key] = end_of(reference / "run")
    folder = home / f"case-{case.number}"
    folder.mkdir()
    killed = []
    for moment in case.moments:
        if session(case, folder, moment):
            killed.append(f"{moment.signal.name} on {case.ranks} rank{'s' if case.ranks > 1 else ''}")
    session(case, folder)
    return killed, differences(unbroken[key], end_of(folder / "run"))


def _write_data(home: Path) -> None:
    from ingot.data.prepare.pipeline import write_dataset
    from ingot.data.tokenizers import ByteTokenizer

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from bucket_files import documents_of, write_buckets

    draw = random.Random(0)
    pieces = (("train" if i else "val", "".join(draw.choices("abcde \n", k=600))) for i in range(5))
    write_dataset(pieces, home / "data", ByteTokenizer(), source={})
    write_buckets(home / "buckets", {"web": documents_of("w", 200), "books": documents_of("b", 160)})


def _in_child(work: Callable[[], None]) -> None:
    """Do something in a process of its own: whoever forks later must not have started threads."""
    if not (child := os.fork()):
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0, "the data could not be made"


if __name__ == "__main__":
    sys.exit(main())
