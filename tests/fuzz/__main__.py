"""Run cases of the fuzzer and say what they broke; see the package."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from .confine import confine

if TYPE_CHECKING:
    from .cases import Case
    from .running import Outcome

CURRENT = "current"  # the file that names the case that runs
SHOWN = 2000  # characters of a command, and of what it printed, that are shown with a failure


def main(arguments: list[str] | None = None) -> int:
    """Run cases; 1 where a promise was broken."""
    parser = argparse.ArgumentParser(
        "python -m tests.fuzz", description="Give every program wrong inputs and watch what it does."
    )
    parser.add_argument("--cases", type=int, default=500, metavar="N", help="how many cases (500)")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="the number of the first (0)")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="which cases (1)")
    parser.add_argument("--case", type=int, metavar="N", help="one case, with what it prints")
    parser.add_argument("--program", metavar="NAME", help="only cases of this program, such as ingot or train.py")
    given = parser.parse_args(arguments)
    os.environ["HF_HUB_OFFLINE"] = "1"  # before anything is imported that asks for it
    numbers = range(given.first, given.first + given.cases) if given.case is None else [given.case]
    home = Path(tempfile.mkdtemp(prefix="ingot-fuzz-"))
    try:
        # A process of its own: it can be confined to the folder, and what ends it is told.
        if not (child := os.fork()):
            _run(home, given.seed, numbers, given.program, given.case is not None)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code not in (0, 1):
            print(f"it ended with {code} in the case {(home / CURRENT).read_text() if (home / CURRENT).exists() else 'none'}")
        return int(code != 0)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _run(home: Path, seed: int, numbers: Iterable[int], program: str | None, whole: bool) -> NoReturn:
    code = 2
    try:
        confined = confine(home)  # before anything starts a thread, which would not be
        code = int(run_cases(home, seed, numbers, confined, program, whole).total() > 0)
    except Exception:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_cases(
    home: Path, seed: int, numbers: Iterable[int], confined: bool, program: str | None = None, whole: bool = False
) -> Counter[str]:
    """Run cases in a folder; returns how often each promise was broken. With `whole` all that they print is shown."""
    from .cases import make_case
    from .promises import broken
    from .running import run_case, settle
    from .world import make_world

    began = time.monotonic()
    world = make_world(home / "world", home / "making")
    print(f"made the sound files in {time.monotonic() - began:.1f} s; {home / CURRENT} names the case that runs", flush=True)
    settle()
    counts: dict[str, Counter[int]] = defaultdict(Counter)
    reasons: Counter[str] = Counter()
    for number in numbers:
        (home / CURRENT).write_text(f"--seed {seed} --case {number}\n")
        case = make_case(seed, number, world, home / f"case-{number}", confined)
        if program in (None, case.scenario.program):
            found = run_case(case, home)
            counts[case.scenario.program][found.code] += 1
            wrong = broken(case, found)
            if whole or any(reason not in reasons for reason in wrong):  # of a reason the first case is enough
                _tell(case, found, wrong, seed, whole)
            reasons.update(wrong)
        shutil.rmtree(case.folder, ignore_errors=True)
    _summary(counts, reasons, time.monotonic() - began)
    return reasons


def _tell(case: Case, found: Outcome, wrong: list[str], seed: int, whole: bool) -> None:
    print(f"\ncase {case.number}: {case.scenario.name}, in {case.scenario.at}: {'; '.join(case.changes) or 'as it is'}")
    print(f"  {case.command if whole else case.command[:SHOWN]}")
    print(f"  exit code {found.code} after {found.seconds:.1f} s, {found.peak >> 20:,} MB")
    for reason in wrong:
        print(f"  BROKEN {reason}")
    print(f"  again: python -m tests.fuzz --seed {seed} --case {case.number}")
    print(f"{found.out}{found.err}{found.error}" if whole else (found.error or found.err)[-SHOWN:], flush=True)


def _summary(counts: dict[str, Counter[int]], reasons: Counter[str], seconds: float) -> None:
    total = sum(counts.values(), Counter[int]())
    print("\n" + f"{'program':<18}" + "".join(f"{f'exit {code}':>10}" for code in sorted(total)) + f"{'all':>10}")
    for program, one in [*sorted(counts.items()), ("all", total)]:
        print(f"{program:<18}" + "".join(f"{one[code]:>10,}" for code in sorted(total)) + f"{one.total():>10,}")
    print(f"{total.total():,} cases in {seconds:.0f} s; {reasons.total():,} broken promises of {len(reasons):,} kinds")
    for reason, count in reasons.most_common():
        print(f"{count:>8,}  {reason}")


if __name__ == "__main__":
    sys.exit(main())
