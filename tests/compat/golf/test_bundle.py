"""The one file: small, the same every time, and complete without the package."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ingot.compat.golf import bundle as bundling
from ingot.compat.golf.bundle import BY_SETTINGS, GOLF, LEFT_OUT, LEFT_OUT_OF, bundle
from ingot.compat.golf.variables import VARIABLES


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golf program in a folder that also holds another package called ingot."""
    path = tmp_path_factory.mktemp("alone") / "train_gpt.py"
    path.write_bytes(bundle({"COLOUR": 'red "quoted"\n}', "SHADE": "dark"}))
    path.with_name("ingot.py").write_text("raise ImportError('the wrong one')")
    return path


def run(file: Path, program: str) -> subprocess.CompletedProcess[str]:
    """Run Python that has imported the file and nothing else of ours."""
    command = [sys.executable, "-c", f"import train_gpt\n{program}"]
    return subprocess.run(command, cwd=file.parent, capture_output=True, text=True)


def test_a_traceback_shows_the_lines_of_sources_that_are_in_no_file(file: Path) -> None:
    ended = run(file, "from ingot.runtime.ranks import ranks_from_environment as f; f({'RANK': '0', 'WORLD_SIZE': 'x'})")
    assert (
        ended.returncode == 1 and "train_gpt.py/ingot/runtime/ranks.py" in ended.stderr and "raise ConfigError(" in ended.stderr
    )


def test_sources_can_be_inspected_and_left_out_modules_are_a_users_error_when_used(file: Path) -> None:
    ended = run(
        file,
        """
import inspect
from ingot.errors import ConfigError
from ingot.model.golf import Golf
from ingot.model.gpt2 import GPT2
print(inspect.getsource(Golf)[:10], isinstance(1, GPT2))
try:
    GPT2()
except ConfigError as error:
    print(error)
""",
    )
    assert ended.stdout.splitlines() == [
        "class Golf False",
        "ingot.model.gpt2.GPT2 is not part of this file; install ingot to use it",
    ], ended.stderr


def test_processes_that_it_starts_find_the_package_in_the_file(file: Path) -> None:
    program = """
import subprocess
from ingot.runtime.processes import python_command
from ingot.runtime.machine import made_by
child = "from ingot.runtime.machine import made_by; print(made_by())"
print(made_by(), subprocess.run(python_command(child), capture_output=True, text=True).stdout, sep="\\n")
"""
    lines = run(file, program).stdout.split("\n")
    assert lines[0] == lines[1] and lines[0].endswith(", one file")


def test_settings_and_model_are_carried_whatever_their_characters_and_replaced_by_the_next(file: Path) -> None:
    program = f"""
from ingot.compat.golf.bundle import bundle
from pathlib import Path
print(train_gpt.SETTINGS["COLOUR"])
Path("next.py").write_bytes(bundle({{"SHADE": "light"}}, "model\\n\\U0001f600", {GOLF!r}))
"""
    assert run(file, program).stdout == 'red "quoted"\n}\n'
    assert file.with_name("next.py").read_bytes() == bundle({"SHADE": "light"}, "model\n\U0001f600")


def test_the_trainer_fits_into_what_a_submission_may_spend_on_code() -> None:
    assert len(bundle(dict.fromkeys(VARIABLES, "0123456789"))) <= 164_605  # what the artifact of golf/seq4096 leaves
    assert bundle().isascii()


def test_the_same_sources_give_the_same_bytes_in_another_process() -> None:
    program = "import sys; from ingot.compat.golf.bundle import bundle; sys.stdout.buffer.write(bundle())"
    environment = os.environ | {"PYTHONPATH": str(Path(bundling.__file__).parents[3]), "PYTHONHASHSEED": "12345"}
    assert subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True).stdout == bundle()


def test_what_is_left_out_is_a_module_of_the_package() -> None:
    left_out = (*LEFT_OUT, *LEFT_OUT_OF[GOLF], *LEFT_OUT_OF[BY_SETTINGS])
    assert [name for name in left_out if importlib.util.find_spec(name) is None] == []
