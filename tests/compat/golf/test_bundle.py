"""The one file: small, the same every time, and complete without the package."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from ingot.compat.golf import bundle as bundling
from ingot.compat.golf.alone.bundle import with_settings
from ingot.compat.golf.alone.loading import load_config as load_alone
from ingot.compat.golf.bundle import BY_SETTINGS, GOLF, LEFT_OUT, OF_FRONTIER, Program, bundle, one_file
from ingot.compat.golf.linker import link
from ingot.compat.golf.translate import translate
from ingot.compat.golf.variables import NAMES, read_variables
from ingot.config.loading import load_config
from ingot.errors import ConfigError

TOY = {
    "toy": "",
    "toy.errors": "class ConfigError(Exception): pass",
    "toy.heavy": "def work(): return 1",
    "toy.main": """
import inspect
import os
import sys
from toy.errors import ConfigError
from toy.heavy import work

def fail(depth):
    if depth:
        return fail(depth - 1)
    raise ValueError("deep")

def main(arguments):
    match arguments[0]:
        case "fail":
            fail(1)
        case "source":
            print(inspect.getsource(fail))
        case "absent":
            try:
                work()
            except ConfigError as error:
                print(error)
        case "setting":
            print(os.environ["COLOUR"], __name__, __file__)
    return 5
""",
}


@pytest.fixture
def toy(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a toy program from one file, beside another package of its name."""
    content = one_file("toy", "toy.main", TOY.get, ("toy.heavy",))
    (tmp_path / "train_gpt.py").write_bytes(with_settings(content, {"COLOUR": 'red "quoted"'}))
    (tmp_path / "toy.py").write_text("raise ImportError('the wrong one')")

    def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "train_gpt.py", *words]
        return subprocess.run(command, cwd=tmp_path, env=os.environ | environment, capture_output=True, text=True)

    return run


def imported(content: bytes, folder: Path) -> ModuleType:
    """The file as a module, which installs nothing that outlives the caller."""
    (folder / "one_file.py").write_bytes(content)
    spec = importlib.util.spec_from_file_location("one_file", folder / "one_file.py")
    assert spec is not None and spec.loader is not None
    module, finders = importlib.util.module_from_spec(spec), list(sys.meta_path)
    spec.loader.exec_module(module)
    sys.meta_path[:] = finders
    return module


def test_a_traceback_shows_the_lines_of_sources_that_are_in_no_file(toy: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    ended = toy("fail")
    assert ended.returncode == 1 and "raise ValueError('deep')" in ended.stderr and "return fail(depth - 1)" in ended.stderr


def test_sources_can_be_asked_for_and_the_exit_code_is_that_of_main(toy: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    ended = toy("source")
    assert ended.stdout.startswith("def fail(depth):\n") and ended.returncode == 5


def test_what_was_left_out_can_be_imported_and_its_use_is_a_users_error(
    toy: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    assert toy("absent").stdout.startswith("toy.heavy.work is not part of this file")


def test_settings_hold_unless_the_environment_sets_them(toy: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    assert toy("setting").stdout.startswith('red "quoted" toy.main ')
    assert toy("setting", COLOUR="blue").stdout.startswith("blue ")


def test_settings_take_the_place_of_those_before() -> None:
    once = with_settings(bundle(), {"A": "1", "B": "}\n"})
    assert with_settings(once, {"C": "3"}) == with_settings(bundle(), {"C": "3"}) == bundle({"C": "3"})
    assert with_settings(once, {}) == bundle()


@pytest.mark.parametrize("program", [GOLF, BY_SETTINGS])
def test_what_compiles_a_model_on_a_gpu_is_in_the_file(program: Program) -> None:
    sources = link("ingot", program.entry, program.read, program.left_out)
    assert "return torch.compile(model" in sources["ingot.backends.torch.compile"]


def test_the_trainer_fits_into_what_a_submission_may_spend_on_code() -> None:
    assert len(bundle(dict.fromkeys(NAMES, "0123456789"))) <= 80_000
    assert bundle().isascii()


def test_the_same_sources_give_the_same_bytes_in_another_process() -> None:
    program = "import sys; from ingot.compat.golf.bundle import bundle; sys.stdout.buffer.write(bundle())"
    environment = os.environ | {"PYTHONPATH": str(Path(bundling.__file__).parents[3]), "PYTHONHASHSEED": "12345"}
    assert subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True).stdout == bundle()


@pytest.mark.parametrize("program", [GOLF, BY_SETTINGS], ids=["golf", "by settings"])
def test_the_trainer_needs_torch_numpy_sentencepiece_pydantic_and_nothing_else(tmp_path: Path, program: Program) -> None:
    sources = imported(bundle(program=program), tmp_path).SOURCES
    nodes = [node for source in sources.values() for node in ast.walk(ast.parse(source))]
    modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    modules += [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
    found = {module.partition(".")[0] for module in modules} - sys.stdlib_module_names - {"ingot"}
    assert found == {"torch", "numpy", "sentencepiece", "pydantic"}


@pytest.mark.parametrize("program", [GOLF, BY_SETTINGS], ids=["golf", "by settings"])
def test_every_name_that_a_part_of_the_file_imports_from_another_is_there(tmp_path: Path, program: Program) -> None:
    sources = {name: ast.parse(text) for name, text in imported(bundle(program=program), tmp_path).SOURCES.items()}
    missing = [
        f"{name}: {node.module}.{alias.name}"
        for name, tree in sources.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in sources
        for alias in node.names
        if f"{node.module}.{alias.name}" not in sources and alias.name not in names_at_the_top(sources[node.module])
    ]
    assert missing == []


def names_at_the_top(tree: ast.Module) -> set[str]:
    found: set[str] = set()
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            found.add(statement.name)
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in statement.names}
        else:
            found |= {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return found


def test_everything_named_as_left_out_is_a_module_of_the_package() -> None:
    assert [name for name in LEFT_OUT if importlib.util.find_spec(name) is None] == []
    assert set(OF_FRONTIER) <= set(LEFT_OUT)


def test_settings_are_understood_as_in_the_package() -> None:
    resolved = translate(read_variables({"NUM_LAYERS": "3", "TIE_EMBEDDINGS": "0", "MAX_WALLCLOCK_SECONDS": "0"}))
    values = {
        f"{section}.{name}": value for section, tree in resolved.config.model_dump().items() for name, value in tree.items()
    }
    alone = load_alone(python=values, environment={})
    assert alone.config == resolved.config and set(alone.origins.values()) == {"python"}
    assert vars(alone).keys() == vars(resolved).keys()  # the run asks for any of them


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("training.max_steps", -1, "training.max_steps=-1: must be greater than or equal to 0"),
        ("model.layers", "many", "model.layers=many: must be a valid integer"),
        ("training.tokens_per_step", 1000, "training.tokens_per_step=1,000 is not a multiple of data.seq_len=1,024"),
    ],
)
def test_mistakes_are_told_as_in_the_package(path: str, value: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_alone(python={"model.family": "golf", "training.max_steps": 1, "data.seq_len": 1024, path: value}, environment={})


@pytest.mark.parametrize("recipe", ["golf/baseline", "golf/seq4096"])
def test_the_config_that_one_file_writes_is_one_that_ingot_reads(recipe: str, tmp_path: Path) -> None:
    from ingot.compat.golf.alone.render import dump_yaml

    wanted = load_config(recipe=recipe, overrides={"optimizer.epsilon": 1e-10, "data.path": "a: #b"}, environment={})
    text = dump_yaml(wanted.config, wanted.origins)
    (tmp_path / "config.yaml").write_text(text)
    assert '  path: "a: #b"  # command line\n' in text
    assert load_config(file=tmp_path / "config.yaml", environment={}).config == wanted.config
