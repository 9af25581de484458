"""Ingot in Python and in a notebook: what is printed, what tab completion finds, and how a model shows itself."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import yaml
from programs import DEMO

import ingot
from ingot.errors import ConfigError
from ingot.inference.model import LoadedModel

SHORT = {"training.max_steps": 3, "evaluation.every": 0}


def sections(data: Path, output: Path) -> dict[str, dict[str, object]]:
    """The settings of a small run, as Python has them."""
    found: dict[str, dict[str, object]] = {}
    for name, value in {**DEMO, **SHORT, "data.path": str(data), "training.output_dir": str(output)}.items():
        section, key = name.split(".")
        found.setdefault(section, {})[key] = yaml.safe_load(str(value))
    return found


def test_training_from_python_tells_its_progress_on_stderr(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    ingot.train(recipe="demo", **sections(data, tmp_path / "run"))
    out, err = capsys.readouterr()
    assert out == "" and "step 3" in err and "val_bpb" in err


def test_a_run_that_is_complete_is_told_and_not_scored_again(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    first = ingot.train(recipe="demo", **sections(data, tmp_path / "run"))
    capsys.readouterr()
    written = first.artifact_path.stat().st_mtime_ns
    again = ingot.train(recipe="demo", **sections(data, tmp_path / "run"))
    assert again == first and first.artifact_path.stat().st_mtime_ns == written
    assert capsys.readouterr().err.splitlines() == [
        f"{tmp_path / 'run'} is complete: raise training.max_steps or budget.seconds to train longer, or start a new run in "
        "another training.output_dir"
    ]


def test_a_quiet_training_prints_nothing(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    ingot.train(recipe="demo", quiet=True, **sections(data, tmp_path / "run"))
    assert capsys.readouterr() == ("", "")


def test_tab_completion_finds_the_public_names_and_no_rooms():
    assert [name for name in dir(ingot) if not name.startswith("_")] == sorted(ingot.__all__)


def test_generate_names_its_options_wherever_it_is_called():
    wanted = {name: one.default for name, one in inspect.signature(LoadedModel.stream).parameters.items() if name != "self"}
    for call in (ingot.generate, LoadedModel.generate):
        found = inspect.signature(call).parameters
        assert all(one.kind is not one.VAR_KEYWORD for one in found.values())
        assert {name: found[name].default for name in wanted} == wanted


def test_an_option_that_there_is_not_is_a_type_error(reference: Path):
    with pytest.raises(TypeError, match="temprature"):
        ingot.generate(reference, "abc", temprature=0.0)


def test_a_model_shows_itself_in_one_line(reference: Path):
    shown = repr(ingot.load(reference))
    assert re.fullmatch(r"LoadedModel\(.*step-\d+: gpt2, [\d,]+ parameters, step 40, byte tokenizer, on cpu.*\)", shown)


def test_a_dict_may_name_settings_by_their_paths_and_what_is_no_section_is_told(data: Path, tmp_path: Path):
    given = {name: value for name, value in sections(data, tmp_path / "run").items() if name != "training"}
    training = sections(data, tmp_path / "run")["training"]
    dotted = {f"training.{name}": value for name, value in training.items()}
    assert ingot.train({**given, **dotted}, quiet=True).total_steps == 3
    with pytest.raises(ConfigError, match=r"data \(python\) is a section; set one of its settings"):
        ingot.train({**given, "data": "x"}, quiet=True)
    with pytest.raises(ConfigError, match=r"training \(python\) is a section"):
        ingot.train({**given, "training": {"max_steps": 1}}, quiet=True, training=5)
