"""Files that lie in the user's folder under the names of modules are never run by a process of ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ingot
from ingot.runtime.processes import import_path, python_command

SOURCE = str(Path(ingot.__file__).parents[1])
ENVIRONMENT = {**os.environ, "PYTHONPATH": SOURCE}
STRAY = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\nraise SystemExit('a file of the user was imported')\n"


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("random", "json", "numpy", "torch", "pickle", "encodings", "sitecustomize_of_nobody"):
        (tmp_path / f"{name}.py").write_text(STRAY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", SOURCE)
    return tmp_path


def test_a_child_imports_nothing_from_the_current_folder(planted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["", str(planted), ".", *sys.path])  # as `python -m`, a notebook or a script there has it
    command = python_command("import random, json, numpy, pickle; print(sys.argv)", "one", "two words")
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "['-c', 'one', 'two words']\n" and not (planted / "ran").exists()
    with pytest.raises(subprocess.CalledProcessError):
        subprocess.run(python_command("import sitecustomize_of_nobody"), check=True, capture_output=True)
    assert not (planted / "ran").exists()


def test_a_child_imports_nothing_from_the_folder_of_the_script(planted: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    script = planted / "script.py"
    script.write_text(
        "import sys\nsys.path.pop(0)\nfrom ingot.runtime.processes import import_path\n"
        f"sys.path.insert(0, {str(planted)!r})\nimport json as j\nprint(import_path())\n"
    )
    (planted / "json.py").unlink()
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    done = subprocess.run([sys.executable, script], cwd=elsewhere, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert str(planted) not in done.stdout and SOURCE in done.stdout


def test_a_child_finds_what_the_user_added_to_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "helper_of_mine.py").write_text("")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "mine")])
    subprocess.run(python_command("import helper_of_mine, ingot"), check=True)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "mine"))
    monkeypatch.setattr(sys, "path", sys.path[:-1])
    assert str(tmp_path / "mine") not in import_path()


def test_a_child_finds_ingot_where_the_current_folder_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(SOURCE)
    monkeypatch.setattr(sys, "path", ["", *(entry for entry in sys.path if Path(entry) != Path(SOURCE))])
    assert import_path()[-1] == SOURCE and import_path().count(SOURCE) == 1
    subprocess.run([sys.executable, "-S", *python_command("import ingot.errors")[1:]], check=True)


def test_workers_of_torch_compile_import_nothing_from_the_current_folder(planted: Path) -> None:
    program = (
        "import sys; sys.path.remove(''); import torch._inductor.utils as u, json; sys.path.insert(0, '');"
        "from ingot.runtime.processes import shield_compile_workers; shield_compile_workers();"
        "print(json.dumps(u.python_subprocess_env()['PYTHONPATH'].split(':')))"
    )
    done = subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert SOURCE in found and "" not in found and str(planted) not in found
