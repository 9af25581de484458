"""The command line: settings as options, the verbs that only deal with config, and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from ingot.cli import main
from ingot.config.fields import sections
from ingot.config.loading import load_config
from ingot.console.output import split_overrides
from ingot.errors import ConfigError, DataError


class Ran:
    """What a call of the command line gave."""

    def __init__(self, code: Any, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def ingot(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*args: str) -> Ran:
        with pytest.raises(SystemExit) as ended:
            main.run(args)
        return Ran(ended.value.code, *capsys.readouterr())

    return call


def in_a_process(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], {}),
        (["--a.b", "1"], {"a.b": "1"}),
        (["--a.b=1=2"], {"a.b": "1=2"}),
        (["--a.b="], {"a.b": ""}),
        (["--a.b", "-1", "--c.d", "1e-3"], {"a.b": "-1", "c.d": "1e-3"}),
        (["--a.b", "--c.d", "x"], {"a.b": True, "c.d": "x"}),
        (["--a.b"], {"a.b": True}),
        (["--a.b", "1", "--a.b", "2"], {"a.b": "2"}),
    ],
)
def test_words_after_a_verb_become_settings(words: list[str], expected: dict[str, Any]) -> None:
    assert split_overrides(words) == expected


@pytest.mark.parametrize("words", [["stray"], ["--a.b", "1", "stray"], ["-x"]])
def test_a_word_that_is_no_setting_is_an_error_that_names_it(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"unexpected '{words[-1]}'"):
        split_overrides(words)


@given(
    st.dictionaries(st.from_regex(r"[a-z]+\.[a-z]+", fullmatch=True), st.text().filter(lambda text: not text.startswith("--")))
)
def test_settings_written_either_way_are_read_alike(settings: dict[str, str]) -> None:
    apart = [word for path, text in settings.items() for word in (f"--{path}", text)]
    joined = [f"--{path}={text}" for path, text in settings.items()]
    assert split_overrides(apart) == split_overrides(joined) == settings


def test_a_mistyped_setting_ends_with_code_2_and_one_line(ingot: Any) -> None:
    ran = ingot("config", "show", "--recipe", "demo", "--optimizer.learning_rat", "1e-3")
    assert (ran.code, ran.out) == (2, "")
    assert (
        ran.err == "ingot: error: unknown setting optimizer.learning_rat (command line); did you mean optimizer.learning_rate?\n"
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("config", "show", "--recipie", "demo"), "unknown option --recipie; did you mean --recipe?"),
        (("config", "show", "--recipe", "demo", "--learning_rate", "1"), "did you mean --optimizer.learning_rate?"),
        (
            ("config", "show", "--recipe", "demo", "--optimizer.learning_rate", "-1"),
            "optimizer.learning_rate=-1 (command line): must be",
        ),
        (("config", "show", "--recipe"), "--recipe"),
        (("recipes", "show"), "NAME"),
        (("recipes", "--jsn"), "--jsn"),
        (("confg",), "confg"),
    ],
)
def test_usage_mistakes_end_with_code_2_and_one_line(ingot: Any, args: tuple[str, ...], message: str) -> None:
    ran = ingot(*args)
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert ran.err.startswith("ingot: error: ") and message in ran.err


def test_config_show_prints_values_with_their_origins(ingot: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGOT_DATA__SEED", "7")
    file = tmp_path / "c.yaml"
    file.write_text("base: demo\nmodel: {layers: 2}\n")
    ran = ingot(
        "config", "show", "--config", str(file), "--training.seed=3", "--model.file", "m.py", "--model.settings.depth", "4"
    )
    rows = [line.split(maxsplit=2) for line in ran.out.splitlines()]
    assert ran.code == 0 and rows[0] == ["model"]
    assert ["layers", "2", f"file {file}"] in rows
    assert ["seed", "7", "environment INGOT_DATA__SEED"] in rows
    assert ["seed", "3", "command line"] in rows
    assert ["settings.depth", "4", "command line"] in rows
    assert ["beta1", "0.9", "default"] in rows


def test_config_show_changed_leaves_the_defaults_out(ingot: Any) -> None:
    shown = json.loads(ingot("config", "show", "--recipe", "demo", "--changed", "--json", "--model.layers", "3").out)
    assert shown["recipe"] == "demo" and shown["config"]["model"]["layers"] == 3
    assert "default" not in shown["origins"].values() and shown["origins"]["model.layers"] == "command line"
    assert "default" not in ingot("config", "show", "--recipe", "demo", "--changed").out


def test_config_show_as_json_is_the_whole_config(ingot: Any) -> None:
    shown = json.loads(ingot("config", "show", "--recipe", "demo", "--json").out)
    assert shown["config"] == load_config("demo", environment={}).config.model_dump()


def test_config_schema_and_docs_are_printed(ingot: Any, tmp_path: Path) -> None:
    assert "base" in json.loads(ingot("config", "schema").out)["properties"]
    page = ingot("config", "docs").out
    assert page.startswith("# Configuration\n") and "`optimizer.learning_rate`" in page
    assert ingot("config", "docs", "-o", str(tmp_path / "page.md")).code == 0
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == page


def test_recipes_are_listed_and_shown(ingot: Any) -> None:
    listed = json.loads(ingot("recipes", "--json").out)
    assert [line.split()[0] for line in ingot("recipes").out.splitlines()] == [recipe["name"] for recipe in listed]
    shown = ingot("recipes", "show", "demo").out
    assert shown == Path(next(recipe["path"] for recipe in listed if recipe["name"] == "demo")).read_text(encoding="utf-8")
    assert json.loads(ingot("recipes", "show", "demo", "--json").out)["yaml"] == shown
    assert ingot("recipes", "show", "dmo").err.startswith("ingot: error: unknown recipe dmo; did you mean demo?")


def test_init_writes_a_file_that_loads_to_the_recipe_and_overrides(ingot: Any, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    ran = ingot("init", "--recipe", "gpt2", "-o", str(file), "--data.path", "data/mine")
    assert ran.code == 0 and str(file) in ran.out
    expected = load_config("gpt2", overrides={"data.path": "data/mine"}, environment={}).config
    assert load_config(file=file, environment={}).config == expected
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_init_without_a_file_prints_it(ingot: Any, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(ingot("init").out)
    assert load_config(file=tmp_path / "c.yaml", environment={}).config == load_config("demo", environment={}).config
    assert json.loads(ingot("init", "--json").out)["recipe"] == "demo"


def test_init_overwrites_only_when_forced(ingot: Any, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("mine")
    ran = ingot("init", "-o", str(file))
    assert (ran.code, file.read_text()) == (2, "mine") and "--force" in ran.err
    assert ingot("init", "-o", str(file), "--force").code == 0 and file.read_text() != "mine"


def test_init_says_why_a_file_cannot_be_written(ingot: Any, tmp_path: Path) -> None:
    assert "; create it first" in ingot("init", "-o", str(tmp_path / "no" / "c.yaml")).err
    assert "is a folder" in ingot("init", "-o", str(tmp_path), "--force").err
    assert list(tmp_path.iterdir()) == []


def test_help_lists_the_verbs_in_groups_and_the_settings_of_a_verb(ingot: Any) -> None:
    helped = ingot("--help")
    assert helped.code == 0 and "Settings:\n  recipes  List the recipes, or print the YAML of one.\n" in helped.out
    shown = ingot("config", "show", "--help").out
    assert "Settings, given as --section.key value" in shown and "learning_rate" in shown
    assert all(f"\n  {section:<12}" in shown for section in sections()) and shown.endswith("prints its value.\n")
    assert ingot("--version").out.startswith("ingot")


def test_a_bare_command_prints_its_help(ingot: Any) -> None:
    ran = ingot()
    assert ran.err.startswith("Usage: ingot") and "config" in ran.err


@pytest.mark.parametrize(
    ("failure", "code", "message"),
    [
        (DataError("no data\nhere"), 3, "ingot: error: no data here\n"),
        (KeyboardInterrupt(), 130, "ingot: error: interrupted\n"),
        (typer.Exit(5), 5, ""),
        (BrokenPipeError(32, "Broken pipe"), 141, ""),
    ],
)
def test_failures_of_a_verb_become_a_line_and_an_exit_code(failure: BaseException, code: int, message: str) -> None:
    given = f"typer.Exit({failure.exit_code})" if isinstance(failure, typer.Exit) else repr(failure)
    program = f"""
import typer
from ingot.cli import main
from ingot.errors import DataError
def fail() -> None:
    raise {given}
main.app.command("fail")(fail)
main.run(["fail"])
"""
    ran = in_a_process(program)
    assert (ran.returncode, ran.stdout, ran.stderr) == (code, "", message)


def test_a_bug_keeps_its_traceback() -> None:
    program = "from ingot.cli import main\nmain.app.command('bug')(lambda: 1 / 0)\nmain.run(['bug'])"
    assert "Traceback" in in_a_process(program).stderr


def test_help_is_built_without_torch_or_numpy() -> None:
    program = """
import sys
from ingot.cli import main
try:
    main.run(["--help"])
except SystemExit:
    print({"torch", "numpy"} & set(sys.modules))
"""
    assert in_a_process(program).stdout.endswith("set()\n")


def test_a_reader_that_leaves_is_no_error() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "ingot", "config", "schema"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout and process.stderr
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(300) == 141
