"""The documents say what the program does: commands parse, settings and links exist, the code in them works.

No command trains. A command is a line that starts with `ingot`, or has `-m ingot` in it, as in every code block; code in the
running text is checked for verbs, options and settings only, because it is often a part of a command.
"""

from __future__ import annotations

import ast
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import typer

import ingot
from ingot.cli import main
from ingot.cli.arguments import given_settings
from ingot.compat.gpt_simple.config import all_keys
from ingot.config.fields import sections, setting_at
from ingot.config.loading import list_recipes, load_config
from ingot.config.schema import FAMILIES
from ingot.console.entry import BROKEN_PIPE
from ingot.errors import INTERRUPTED, CheckpointError, ConfigError, DataError, IngotError, RunError
from ingot.model.registry import build
from ingot.runs.folder import MODEL_COPY, RunFolder
from ingot.train.resume import FIXED

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")])
COMMAND = re.compile(r"(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?ingot\s|torchrun .*-m ingot\s")
FILES = ("py", "safetensors", "gguf", "ingot", "onnx")  # `model.py` is a file and no setting


def fences(page: Path) -> list[tuple[str, str]]:
    """The language and text of every code block between fences."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text(), re.M | re.S)


def prose_code(page: Path) -> list[str]:
    """The code inside running text, with line breaks as spaces."""
    text = re.sub(r"^```\w*\n.*?^```$", "", page.read_text(), flags=re.M | re.S)
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", text)]


def commands(page: Path) -> list[str]:
    """Every `ingot` command that stands on a line of its own."""
    lines = page.read_text().replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if COMMAND.match(line.strip())]


def words_of(command: str) -> tuple[dict[str, str], list[str]]:
    """The variables before a command and the words after `ingot`."""
    words = shlex.split(command, comments=True)
    start = next(i for i, word in enumerate(words) if word.rpartition("/")[2] == "ingot")
    return dict(word.split("=", 1) for word in words[:start] if re.match(r"[A-Z_]+=", word)), words[start + 1 :]


@cache
def ingot_command() -> Any:
    """`ingot` with all its verbs, which takes 0.1 s to make."""
    command = typer.main.get_command(main.app)
    for name in main.COMMANDS:
        command.get_command(None, name)  # loads it
    return command


def verb_of(words: list[str]) -> tuple[Any, list[str]]:
    """The verb that words call, and the words after it."""
    command = ingot_command()
    while words and words[0] in getattr(command, "commands", ()):
        command, words = command.commands[words[0]], words[1:]
    return command, words


def check(command: str, folder: Path) -> None:
    """Parse a command as the program would, resolve its settings, and run it if it only writes a config file."""
    variables, words = words_of(command)
    verb, rest = verb_of(words)
    if rest and rest[-1] in ("--help", "--version"):
        return
    if hasattr(verb, "commands") and (verb.no_args_is_help or (rest[:1] and not rest[0].startswith("-"))):
        raise ConfigError(f"no such verb: {words}")
    context = verb.make_context(verb.name, rest, ignore_unknown_options=getattr(verb, "ignore_unknown_options", False))
    if verb.name in ("train", "show", "init") and "recipe" in context.params:
        file = context.params.get("config")
        names_run = verb.name == "train" and bool(context.args) and not context.args[0].startswith("-")
        settings = given_settings(context, skip=int(names_run))
        recipe = "demo" if names_run else context.params["recipe"]  # a run has settings of its own
        load_config(recipe, folder / file if file else None, settings, environment=variables)
    if verb.name == "init":
        verb.invoke(context)


@pytest.fixture
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_named_blocks(page: Path, folder: Path) -> None:
    """Code blocks that begin with `# NAME.yaml` become that file."""
    for _, block in fences(page):
        if name := re.match(r"# (\S+\.yaml)\n", block):
            (folder / name[1]).write_text(block)


def test_there_are_documents_to_check() -> None:
    names = {str(page.relative_to(ROOT)) for page in PAGES}
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/getting-started.md", "docs/run-folder.md"} <= names
    assert sum(len(commands(page)) for page in PAGES) > 20


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_in_a_document_parses(page: Path, outputs: Path) -> None:
    write_named_blocks(page, outputs)
    for command in commands(page):
        try:
            check(command, outputs)
        except (IngotError, main.UsageError) as error:
            pytest.fail(f"{page.name}: {command}\n{error}")


@pytest.mark.parametrize(
    "command",
    ["ingot trian", "ingot recipes shw", "ingot train --recipe dmo", "ingot train --model.wdth 3", "ingot stop"],
)
def test_a_wrong_command_would_be_noticed(command: str, outputs: Path) -> None:
    with pytest.raises((IngotError, main.UsageError)):
        check(command, outputs)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_verbs_and_options_named_in_the_text_exist(page: Path) -> None:
    top = ingot_command()
    for code in prose_code(page):
        if COMMAND.match(code + " "):
            verb, rest = verb_of(words_of(code)[1])
            known = {name for option in verb.params for name in (*option.opts, *option.secondary_opts)} | {"--help"}
            no_verb = verb is top and rest and not rest[0].startswith("-") and rest[0] != "help"
            assert not no_verb, f"{page.name}: there is no verb in `{code}`"
            for word in (word.partition("=")[0] for word in rest if word.startswith("-") and word != "--"):
                assert word in known or is_setting(word.removeprefix("--"), page), f"{page.name}: there is no {word} in `{code}`"
        elif re.match(r"--[a-z]", code):
            name = code.split()[0].partition("=")[0].removeprefix("--")
            assert "." not in name or is_setting(name, page), f"{page.name}: there is no setting {name}"


def is_setting(path: str, page: Path) -> bool:
    if page.name == "gpt-simple.md" and path in all_keys():
        return True
    return any(setting_at(tuple(path.split(".")), family) for family in FAMILIES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_named_in_the_text_exist(page: Path) -> None:
    for code in prose_code(page):
        named = re.match(rf"({'|'.join(sections())})\.(\w+)", code)
        if named and named[2] not in FILES:
            assert is_setting(named[0], page), f"{page.name}: there is no setting {named[0]}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_named_in_a_document_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    lines = [line.strip() for _, block in fences(page) for line in block.splitlines()]
    named = {match[1] for code in [*lines, *prose_code(page)] if (match := re.match(r"make ([a-z]+)", code))}
    assert named <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_documents_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!\w+:)([^)]+)\)", page.read_text()):
        name, _, heading = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), f"{page.name} links to {target}"
        lines = re.findall(r"^#+ (.+)", file.read_text(errors="replace"), re.M)
        headings = {re.sub(r"[^\w -]", "", line).lower().replace(" ", "-") for line in lines}
        assert not heading or heading in headings, f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_yaml_in_a_document_is_a_config(page: Path, outputs: Path) -> None:
    for number, (_, block) in enumerate(block for block in fences(page) if block[0] == "yaml"):
        file = outputs / f"{number}.yaml"
        file.write_text(block)
        load_config(file=file, environment={})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_in_a_document_uses_names_that_exist(page: Path) -> None:
    for _, block in (block for block in fences(page) if block[0] == "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ingot":
                assert node.attr in ingot.__all__, f"{page.name}: there is no ingot.{node.attr}"
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "result":
                assert node.attr in ingot.TrainingResult.__dataclass_fields__, f"{page.name}: there is no result.{node.attr}"


@pytest.fixture
def own_model(tmp_path: Path) -> Any:
    """The model of docs/your-own-model.md, as `--model.file` builds it."""
    source = next(block for language, block in fences(ROOT / "docs/your-own-model.md") if language == "python")
    file = tmp_path / "mine.py"
    file.write_text(source)
    shape = {"layers": 2, "heads": 2, "width": 16, "context": 8, "vocab_size": 11, "dropout": 0.0}
    torch.manual_seed(0)
    return build({"family": "file", "file": str(file), "settings": {"expansion": 3}, **shape})


def test_the_model_of_ones_own_in_the_documents_has_at_most_forty_lines() -> None:
    source = next(block for language, block in fences(ROOT / "docs/your-own-model.md") if language == "python")
    assert len(source.splitlines()) <= 40


def test_the_model_of_ones_own_in_the_documents_gives_logits_that_do_not_look_ahead(own_model: Any) -> None:
    tokens = torch.randint(11, (2, 8))
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 11
    logits = own_model(tokens)
    assert logits.shape == (2, 8, 11)
    torch.testing.assert_close(own_model(changed)[:, :5], logits[:, :5])


def test_the_model_of_ones_own_in_the_documents_gives_the_loss_of_the_targets_that_count(own_model: Any) -> None:
    tokens = torch.randint(11, (2, 8))
    targets = torch.randint(11, (2, 8))
    targets[:, :3] = -1
    picked = own_model(tokens).log_softmax(-1)[:, 3:].gather(-1, targets[:, 3:, None])
    loss = own_model(tokens, targets)
    torch.testing.assert_close(loss, -picked.mean())
    loss.backward()
    assert all(parameter.grad is not None for parameter in own_model.parameters())


def test_the_readme_names_every_command_and_every_recipe() -> None:
    text = (ROOT / "README.md").read_text()
    table = text.partition("## Commands")[2].partition("\n## ")[0]
    assert [command for command in main.COMMANDS if not re.search(rf"`(ingot )?{command}\b", table)] == []
    assert all(f"`{recipe.name}`" in text for recipe in list_recipes())


def test_the_page_of_the_run_folder_names_every_file_and_every_exit_code() -> None:
    text = (ROOT / "docs/run-folder.md").read_text()
    folder = RunFolder(Path("run"))
    paths = (
        folder.config_path,
        folder.environment_path,
        folder.log_path,
        folder.metrics.path,
        folder.result_path,
        folder.stop_path,
    )
    folders = (folder.samples, folder.checkpoints, folder.artifact)
    names = [*(path.name for path in paths), *(f"{path.name}/" for path in folders), "state.json", "stop", ".lock", MODEL_COPY]
    assert [name for name in names if f"| `{name}` |" not in text] == []
    errors = (IngotError, RunError, ConfigError, DataError, CheckpointError)
    codes = {0, INTERRUPTED, BROKEN_PIPE, *(error.exit_code for error in errors)}
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.M)} == codes


def test_the_page_of_the_run_folder_names_every_setting_that_a_resume_cannot_change() -> None:
    text = (ROOT / "docs/run-folder.md").read_text()
    paths = [f"{section}.{name}" for section, names in FIXED.items() for name in names or ("*",)]
    assert [path for path in paths if f"`{path}`" not in text] == []


def test_the_readme_opens_with_a_small_picture_of_the_run_that_it_shows() -> None:
    opening, _, _ = (ROOT / "README.md").read_text().partition("\n## ")
    [shown] = re.findall(r"!\[.+\]\((.+\.svg)\)", opening)
    picture = (ROOT / shown).read_text()
    assert len(picture) < 50_000 and ElementTree.fromstring(picture).tag.endswith("svg")
    assert any("--sample" in command and ".svg" in command for command in re.findall(r"`ingot plot (.+?)`", opening))
    text = next(block for language, block in fences(ROOT / "README.md") if language == "text").split("\n...\n")[0].splitlines()
    assert any(line and line in picture for line in text)
