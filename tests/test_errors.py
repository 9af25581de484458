"""Errors carry what they are about, so that a front end can print it in its users' words."""

from __future__ import annotations

import pickle

import pytest

from ingot.config.loading import load_config
from ingot.errors import LONGEST, CannotContinue, Change, CheckpointError, ConfigError, DataError, Setting


def theirs(path: str) -> str:
    return path.rpartition(".")[2].upper()


def test_a_sentence_names_settings_as_we_do_unless_a_door_has_names_of_its_own():
    error = ConfigError(
        "{0} does not fit {1}", Setting("model.heads", 5), Setting("model.width"), advice="lower {0} or raise {1}"
    )
    assert str(error) == "model.heads=5 does not fit model.width; lower model.heads=5 or raise model.width"
    assert error.render(theirs) == "HEADS=5 does not fit WIDTH; lower HEADS=5 or raise WIDTH"


def test_a_door_may_have_better_advice():
    error = DataError("no room", Setting("training.output_dir"), advice="choose another {0}")
    assert error.render(theirs, {"choose another {0}": "empty {0}"}.__getitem__) == "no room; empty OUTPUT_DIR"


@pytest.mark.parametrize("name", ["{0}", "{1}", "{", "{name}", "{0.__class__}", "50%"])
def test_a_file_with_braces_in_its_name_is_named_as_it_is(name: str):
    assert str(DataError(f"cannot read {name}")) == f"cannot read {name}"
    assert str(DataError(f"cannot read {name}", Setting("a.b"), advice="set {0}")).endswith("; set a.b")


def test_an_error_that_crosses_processes_keeps_its_fields():
    error = pickle.loads(pickle.dumps(ConfigError("{0} is odd", Setting("model.heads", 5), advice="double {0}")))
    assert (str(error), error.render(theirs)) == ("model.heads=5 is odd; double model.heads=5", "HEADS=5 is odd; double HEADS=5")


def test_a_run_that_cannot_be_continued_says_what_changed():
    changes = [Change("model.layers", 3, 4), Change("data.path", "a", "b", "other data ({1}, {2})")]
    error = CannotContinue("step-1", changes)
    assert isinstance(error, CheckpointError) and error.changes == changes
    said = "step-1 cannot be continued: model.layers was 3 and is 4; other data (a, b); undo the changes or choose another "
    assert str(error) == f"{said}training.output_dir"
    assert error.render(theirs) == f"{said}OUTPUT_DIR".replace("model.layers", "LAYERS")


def test_of_stages_that_have_changed_only_what_was_set_is_shown():
    stage = {"share": None, "steps": 2, "rates": {"matrix": 0.5}, "model": {}}
    said = "training.stages was [] and is [{steps: 2, rates: {matrix: 0.5}}]"
    assert Change("training.stages", [], [stage]).render() == said


def test_mistakes_in_settings_are_fields_whoever_found_them():
    """A range, a wrong type, and two checks of values against each other, which know no errors."""
    wrong = {"training.seed": -1, "model.layers": "x"}
    with pytest.raises(ConfigError) as found:
        load_config(python=wrong, environment={})
    assert {(setting.path, setting.value) for setting in found.value.settings} == {("training.seed", "-1"), ("model.layers", "x")}
    assert "training.seed=-1 (python): must be at least 0" in str(found.value) and "SEED=-1: must" in found.value.render(theirs)
    sound = {"data.path": "x", "training.max_steps": 1}
    for together, said in (
        ({"data.seq_len": 7, "training.tokens_per_step": 15}, "TOKENS_PER_STEP=15 is not a multiple of SEQ_LEN=7"),
        ({"model.heads": 5, "model.width": 64}, "HEADS=5 does not divide WIDTH=64"),
    ):
        with pytest.raises(ConfigError) as found:
            load_config(python=sound | together, environment={})
        assert {setting.path for setting in found.value.settings} >= set(together)
        assert said in found.value.render(theirs) and "." not in found.value.render(theirs).split(";")[0]


def test_a_message_is_cut_to_what_can_be_read_and_keeps_its_beginning_and_its_advice():
    said = str(DataError(f"cannot read {'x' * 1_200_000}", advice="give another file"))
    assert len(said) < LONGEST + 50 and said.startswith("cannot read xxx") and said.endswith("xxx; give another file")
    assert "[1,199,031 characters left out]" in said
    whole = f"no {'x' * (LONGEST - 3)}"
    assert str(DataError(whole)) == whole


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("a\x1b[31mb", "a\\x1b[31mb"),
        ("a\u202eb", "a\\u202eb"),
        ("\udcff", "\\udcff"),
        ("a\0b", "a\\x00b"),
        ("é中", "é中"),
        ("a\nb", "a b"),
    ],
)
def test_control_characters_of_a_name_are_shown_and_not_sent(name: str, told: str):
    assert str(DataError(f"no {name} here")) == f"no {told} here"
    assert str(ConfigError("{0} is odd", Setting("data.path", name))) == f"data.path={told} is odd"
