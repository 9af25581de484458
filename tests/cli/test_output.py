"""What verbs print."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from ingot.console.output import print_json


@dataclass
class Scores:
    val_bpb: float
    path: Path


def test_printed_json_is_json_whatever_the_numbers_are(capsys):
    print_json({"é": [Scores(math.nan, Path("runs/x"))], "most": math.inf})
    printed = capsys.readouterr().out
    assert json.loads(printed, parse_constant=lambda word: 1 / 0) == {"é": [{"val_bpb": None, "path": "runs/x"}], "most": None}
    assert "é" in printed
