"""docs/gpt-simple.md says of every key and every command what the code does with it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from ingot.compat.gpt_simple.config import all_keys
from ingot.compat.gpt_simple.main import COMMANDS, make_parser
from ingot.config.text import format_value

PAGE = (Path(__file__).parents[3] / "docs/gpt-simple.md").read_text()


def test_the_table_has_every_key_with_its_default_and_what_it_becomes() -> None:
    rows = re.findall(r"^\| `(\w+\.\w+)` \| (.*?) \| (.*?) \|", PAGE, re.M)
    expected = [
        (path, format_value(key.default), f"`{key.sets}`" if key.sets else "not a setting") for path, key in all_keys().items()
    ]
    assert rows == expected


def test_the_commands_of_the_page_parse_and_all_are_there() -> None:
    lines = [line for line in PAGE.splitlines() if line.startswith("gpt-simple ")]
    for line in lines:
        options, rest = make_parser().parse_known_args(shlex.split(line)[1:])
        assert not rest or options.command in ("train", "validate"), line
    assert {shlex.split(line)[1] for line in lines} == set(COMMANDS)
