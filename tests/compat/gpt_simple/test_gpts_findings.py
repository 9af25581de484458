"""`gpt-simple validate` finds what the original finds, by the same codes, on the same folders; and more."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_program import Cli
from original import Original, write_config

PHASE = {"duration_tokens": 1_000_000, "mix": {"web": 1.0}}
# What the original finds besides, by reading the same thing twice, or by a mistake.
TWICE = {"curriculum.shortfall.nosuch", "resume.resolve_failed"}
MILDER = {"data.shards.fewer_than_world"}  # an error there; here rows are shared, so a file per rank is not needed


def damaged(folder: Path) -> None:
    index = folder / "data/train/web/part0.idx"
    index.write_bytes(b"GPTX" + index.read_bytes()[4:])


def broken_state(folder: Path) -> None:
    (folder / "out/checkpoints/checkpoint-3").mkdir(parents=True)
    (folder / "out/checkpoints/checkpoint-3/trainer_state.json").write_text("{")


# The folder is spoiled first; then the keys that differ, and words of the command line.
CASES: dict[str, tuple[Callable[[Path], None] | None, dict[str, Any], list[str]]] = {
    "nothing": (None, {}, []),
    "path-empty": (None, {"data": {"path": ""}}, []),
    "path-missing": (None, {"data": {"path": "nowhere"}}, []),
    "train-missing": (lambda f: shutil.rmtree(f / "data/train"), {}, []),
    "val-missing": (lambda f: shutil.rmtree(f / "data/val"), {}, []),
    "bucket-missing": (lambda f: shutil.rmtree(f / "data/val/web"), {}, []),
    "no-shards": (lambda f: [path.unlink() for path in (f / "data/train/web").iterdir()] and None, {}, []),
    "index-damaged": (damaged, {}, []),
    "unknown-bucket": (
        None,
        {"data": {"curriculum": [{"duration_tokens": 3072, "mix": {"nosuch": 1, "web": 1, "books": 1}}]}},
        [],
    ),
    "shortfall": (None, {"data": {"curriculum": [PHASE]}}, []),
    "shortfall-allowed": (None, {"data": {"curriculum": [PHASE]}}, ["--allow-bucket-exhaustion", "--allow-budget-mismatch"]),
    "ranks": (None, {}, ["--world-size", "9"]),
    "clamped": (None, {"data": {"num_workers": 9}}, []),
    "resume-missing": (None, {"training": {"resume": "nowhere"}}, []),
    "resume-empty": (lambda f: (f / "old").mkdir(), {"training": {"resume": "old"}}, []),
    "resume-damaged": (broken_state, {}, []),
}
LOOK = """
from gpt_simple.config import Config
from gpt_simple.validate import run_offline_validation
config = Config.from_file("config.yaml")
config.data.allow_bucket_exhaustion = config.data.allow_budget_mismatch = {allowed}
import os
os.chdir("{name}")
said.append([[one.severity.value if hasattr(one.severity, "value") else str(one.severity), one.code]
             for one in run_offline_validation(config, world_size={ranks}).findings])
os.chdir("..")
"""


def test_every_finding_of_the_original_is_found_with_its_severity(
    original: Original, gpts: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = (gpts / "tok").resolve().parent
    looks, words = [], {}
    for name, (spoil, keys, flags) in CASES.items():
        folder = gpts / name
        folder.mkdir()
        shutil.copytree(data / "tok", folder / "tok")
        shutil.copytree(data / "data", folder / "data")
        write_config(folder / "config.yaml", **keys)
        if spoil is not None:
            spoil(folder)
        ranks = flags[1] if "--world-size" in flags else 1
        look = LOOK.format(name=name, allowed="--allow-budget-mismatch" in flags, ranks=ranks)
        looks.append(look.replace('"config.yaml"', f'"{name}/config.yaml"'))
        words[name] = flags
    theirs = dict(zip(CASES, original(looks, gpts), strict=True))
    cli = Cli(capfd)
    missing = {}
    for name, flags in words.items():
        monkeypatch.chdir(gpts / name)
        said = cli("validate", "--config", "config.yaml", "--json", *flags, code=None)
        found = {(one["severity"], one["code"]) for one in json.loads(said.out)["findings"]}
        codes = {code for _, code in found}
        expected = {(severity, code) for severity, code in theirs[name] if code not in TWICE}
        expected -= {one for one in expected if one[1] in MILDER and (one[1] in codes or name == "no-shards")}
        if not expected <= found:
            missing[name] = (sorted(expected - found), sorted(found))
    assert not missing, missing
    assert any(theirs.values())
