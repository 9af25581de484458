"""Values that programs stumble over. Nothing here knows what a value is for; knobs.py does."""

from __future__ import annotations

import math
import random
from typing import Any

# Around the sizes of integers, and beyond all of them.
HUGE = (2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**20, 10**30)
NUMBERS = (
    "0", "1", "2", "-1", "3.5", "nan", "inf", "-inf", "1e300", "-1e300", "1e-320", "1e999", "-0.0", "0.1", "1_000", "0x10", "1.0",
    "00", "9" * 5000, *map(str, HUGE), *(f"-{number}" for number in HUGE),
)  # fmt: skip
WORDS = (
    "", " ", "null", "true", "no", "auto", "é", "\u202e", "a\nb", "a\tb", "\x1b[31m", "\x07", "\udcff", "x" * 300, "{", "[1, 2",
    "{a: 1}", "[]", "{}", "'", '"', "%s%n", "{0}", "$HOME", "*", "-", "--", "--x", "!!python/object:os.system",
    "&a [*a]", "<<", "\ufeff",
)  # fmt: skip
# Names of files and folders that are not what they seem; the last ones are made by cases.py in every folder.
PATHS = (
    "", ".", "..", "/", "/dev/null", "/dev/zero", "/proc/self/fd", "~nosuchuser/x", "~", "x" * 256, "x/" * 3000, "nowhere",
    "a\nb", "\x1b[31mred", "caf\u00e9", "\udcff", "-rf", "hf:nobody/nothing", "nobody/nothing", "https://nowhere.invalid/x",
    "file.txt/below", "loop", "pipe", "dangling", "empty", "file.txt",
)  # fmt: skip
SCALARS = (None, True, False, 0, 1, -1, 1.5, math.nan, math.inf, 1e300, "", "x", "\x00", "\udcff", "x" * 300)
DEPTH = 100_000  # of JSON that no reader without a limit survives


def number_word(draw: random.Random) -> str:
    """A number as somebody may type it."""
    return draw.choice(NUMBERS)


def any_word(draw: random.Random) -> str:
    """A text that may stand where something else is expected."""
    return draw.choice((number_word(draw), draw.choice(WORDS), draw.choice(PATHS)))


def path_word(draw: random.Random) -> str:
    """The name of something that is there, or is not."""
    return draw.choice(PATHS)


def json_value(draw: random.Random) -> Any:
    """A value of JSON of any type; never the deep one, which is text and not a value."""
    return draw.choice((*SCALARS, draw.choice(HUGE), -draw.choice(HUGE), [], {}, [[]], {"a": {}}, [None], ["x"] * 3, {"": 0}))


def tweaked(draw: random.Random, value: Any, other: Any = json_value) -> Any:
    """A value of dicts and lists with one of its parts replaced, left out, doubled or put under another key."""
    parts = value if isinstance(value, dict | list) else None
    if not parts or draw.random() < 0.15:
        return other(draw)
    if isinstance(value, list):
        found = list(value)
        place = draw.randrange(len(found))
        match draw.randrange(4):
            case 0:
                del found[place]
            case 1:
                found.insert(place, found[place])
            case _:
                found[place] = tweaked(draw, found[place], other)
        return found
    copy = dict(value)
    key = draw.choice(sorted(copy, key=repr))
    match draw.randrange(6):
        case 0:
            del copy[key]
        case 1:
            copy[draw.choice(("", "x", "__class__"))] = copy.pop(key)
        case _:
            copy[key] = tweaked(draw, copy[key], other)
    return copy
