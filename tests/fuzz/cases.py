"""One case: a command that works, with up to three things made different. The seed and the number say all of it.

The first numbers are the commands as they are.
"""

from __future__ import annotations

import os
import random
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

from .commands import Scenario
from .confine import tame
from .damage import damage
from .knobs import Knob
from .scenarios import SCENARIOS
from .values import path_word

KEPT = ("--no-score", "--artifact.score", "--n_", "--b")  # or a process imports torch, or bench.py measures its large model
CHANGES = (1, 1, 1, 2, 3)  # how many things are made different, each of these as likely as another


@dataclass
class Case:
    """What is run, and what was made different."""

    number: int
    scenario: Scenario
    folder: Path
    words: list[str]
    variables: dict[str, str]
    changes: list[str]

    @property
    def at(self) -> Path:
        """The folder that it runs in."""
        return self.folder / self.scenario.at

    @property
    def command(self) -> str:
        """The command as a shell would have it."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        text = " ".join([*variables, self.scenario.program, *map(shlex.quote, self.words)])
        return text.encode("unicode_escape", "surrogatepass").decode()


def make_case(seed: int, number: int, world: Path, folder: Path, confined: bool) -> Case:
    """Draw a case and lay out its files in a folder that does not exist yet; `confined`: nothing can be written elsewhere."""
    draw = random.Random(f"{seed} {number}")
    as_it_is = number < len(SCENARIOS)
    scenario = SCENARIOS[number] if as_it_is else draw.choices(SCENARIOS, [one.weight for one in SCENARIOS])[0]
    for name in scenario.files:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (world / name).is_dir() else shutil.copy
        copy(world / name, target)
    case = Case(number, scenario, folder, list(scenario.words), dict(scenario.variables), [])
    case.at.mkdir(parents=True, exist_ok=True)
    _odd_files(case.at)
    for _ in range(0 if as_it_is else draw.choice(CHANGES)):
        _change(draw, case)
    if not confined and not as_it_is:
        case.words = list(map(tame, case.words))
        case.variables = {name: tame(value) for name, value in case.variables.items()}
    return case


def _odd_files(folder: Path) -> None:
    """What values.PATHS names."""
    (folder / "loop").symlink_to("loop")
    (folder / "dangling").symlink_to("nowhere-at-all")
    os.mkfifo(folder / "pipe")
    (folder / "empty").mkdir()
    (folder / "file.txt").write_text("a file of the user's\n")


def _change(draw: random.Random, case: Case) -> None:
    """Make one thing different."""
    one = case.scenario
    kinds = {_set: one.settings, _flag: one.flags, _variable: one.environment, _word: case.words, _file: one.files}
    ways = [way for way, possible in kinds.items() if possible]
    if ways:
        case.changes.append(draw.choice(ways)(draw, case))


def _set(draw: random.Random, case: Case) -> str:
    knob = draw.choice(case.scenario.settings)
    value = knob.draw(draw)
    as_two = case.scenario.program in ("ingot", "gpt-simple") and draw.random() < 0.2
    case.words += [f"--{knob.name}", value] if as_two else [f"--{knob.name}={value}"]
    return f"set {knob.name}"


def _flag(draw: random.Random, case: Case) -> str:
    knob: Knob = draw.choice(case.scenario.flags)
    case.words += [knob.name] if knob.flag else [knob.name, knob.draw(draw)]
    return f"flag {knob.name}"


def _variable(draw: random.Random, case: Case) -> str:
    knob = draw.choice(case.scenario.environment)
    case.variables[knob.name] = knob.draw(draw)
    return f"variable {knob.name}"


def _word(draw: random.Random, case: Case) -> str:
    """A word is left out, there twice, another path, cut short or misspelt."""
    place = draw.choice([place for place, word in enumerate(case.words) if not word.startswith(KEPT)])
    word = case.words[place]
    match draw.randrange(5):
        case 0:
            del case.words[place]
        case 1:
            case.words.insert(place, word)
        case 2:
            case.words[place] = word[: draw.randrange(len(word) + 1)]
        case 3:
            case.words[place] = word.partition("=")[0] + "=" + path_word(draw) if "=" in word else path_word(draw)
        case _:
            case.words[place] = "".join(draw.sample(word, len(word))) if len(word) < 100 else word
    return f"word {place}"


def _file(draw: random.Random, case: Case) -> str:
    """A file is damaged."""
    top = case.folder / draw.choice(case.scenario.files)
    found = [top] if top.is_file() else sorted(path for path in top.rglob("*") if path.is_file())
    return damage(draw, draw.choice(found)) if found else "nothing"
