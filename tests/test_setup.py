"""`make` on a fresh machine: which Python it takes, and says so."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# A Python of any version, as far as `make` can tell, that goes no further than to make a venv.
PYTHON = """#!{executable}
import sys
if sys.argv[1] == "-m":
    sys.exit("made")
sys.version_info = ({version}, 0, "final", 0)
exec(sys.argv[2])
"""


def make(folder: Path, version: str) -> subprocess.CompletedProcess[str]:
    for name in ("Makefile", "pyproject.toml", "requirements.lock"):
        shutil.copy(ROOT / name, folder)
    python = folder / "python"
    python.write_text(PYTHON.format(executable=sys.executable, version=version))
    python.chmod(0o755)
    return subprocess.run(["make", "train", f"PYTHON={python}"], cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize("version", ["3, 11", "3, 13", "3, 14", "3, 15"])
def test_make_takes_any_python_from_3_11_on_and_says_which(tmp_path: Path, version: str) -> None:
    ran = make(tmp_path, version)
    assert f"setting up .venv with {sys.executable}, Python {version.replace(', ', '.')}\n" in ran.stdout
    assert "made" in ran.stderr


def test_make_refuses_an_older_python_with_what_to_do(tmp_path: Path) -> None:
    ran = make(tmp_path, "3, 10")
    assert f"ingot needs Python 3.11 or newer and {sys.executable} is 3.10; choose one with: make PYTHON=" in ran.stderr
    assert ran.returncode and "made" not in ran.stderr and not (tmp_path / ".venv").exists()


def test_no_python_is_refused_for_being_new() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"] == ">=3.11"


@pytest.mark.parametrize(
    ("code", "said"), [(0, ""), (1, "mlx does not install here: the tests of the MLX backend are skipped\n")]
)
def test_make_goes_on_where_mlx_does_not_install_and_says_so(tmp_path: Path, code: int, said: str) -> None:
    for name in ("Makefile", "pyproject.toml", "requirements.lock", "requirements-test.lock", "requirements-mlx.lock"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    python = tmp_path / ".venv/bin/python"
    python.write_text(f'#!/bin/sh\necho "$@" > asked\necho trouble >&2\nexit {code}\n')
    python.chmod(0o755)
    (tmp_path / ".venv/.ready").touch()
    (tmp_path / ".venv/.tests").touch()
    ran = subprocess.run(["make", "--no-print-directory", ".venv/.mlx"], cwd=tmp_path, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, said, "")
    assert "--only-binary :all: -r requirements-mlx.lock" in (tmp_path / "asked").read_text()


def test_what_everybody_installs_is_no_more_than_this() -> None:
    """Servers, dashboards, exports and tasks are extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {"torch", "numpy", "pydantic", "typer", "pyyaml", "sentencepiece", "tokenizers", "tiktoken", "huggingface_hub"}
    assert {re.split(r"[<>=]", one)[0] for one in project["dependencies"]} == names
    assert {"serve", "flash", "gguf", "lm-eval", "trackio", "wandb", "tensorboard", "plots", "parquet"} <= project[
        "optional-dependencies"
    ].keys()


def locked(name: str) -> dict[str, str]:
    """Return the version of each package in a lock, where every package has at least one hash."""
    packages = re.findall(
        r"^([a-z0-9.-]+)==([^ ;]+)[^\n]*((?:\n    --hash=sha256:[0-9a-f]{64}(?: \\\\)?)*)", (ROOT / name).read_text(), re.M
    )
    assert packages and all(hashes for _, _, hashes in packages)
    return {package: version for package, version, _ in packages}


def test_training_installs_no_tool_of_the_tests_and_every_locked_package_has_a_hash() -> None:
    train, tests = locked("requirements.lock"), locked("requirements-test.lock")
    assert not {"ray", "wandb", "transformers", "ruff", "mypy", "pytest", "fastapi", "pyarrow", "matplotlib"} & train.keys()
    assert {"pytest", "transformers", "wandb", "ruff", "mypy"} <= tests.keys() and locked("requirements-mlx.lock")
    # `make test` must not replace what `make train` installed.
    assert {package: tests[package] for package in train.keys() & tests.keys()} == train
    assert not {"torch", "triton"} & (train.keys() | tests.keys())  # torch's builds differ in hash: the Makefile pins it


def test_the_makefile_and_the_image_install_the_same_torch() -> None:
    pins = [re.findall(r"torch==[\d.]+", (ROOT / name).read_text()) for name in ("Makefile", "Dockerfile")]
    assert pins[0] == pins[1] and len(pins[0]) == 1


def test_the_extra_all_is_every_extra_but_the_one_for_recent_gpus_and_our_tools() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"[\w-]+", extras["all"][0].split("[")[1])) == extras.keys() - {"all", "dev", "flash"}


def test_a_wheel_trains_and_writes_away_from_the_checkout(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("ingot_lm-*.whl")
    site = tmp_path / "site"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", site, wheel], check=True)
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}

    def ingot(*arguments: str) -> str:
        command = [sys.executable, "-m", "ingot", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True).stdout

    where = subprocess.run(
        [sys.executable, "-c", "import ingot; print(ingot.__file__)"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert Path(where.stdout.strip()).is_relative_to(site)
    ingot("train", "--recipe", "demo", "--budget.seconds", "2", "--artifact.write", "false", "--training.output_dir", "run")
    assert ingot("generate", "run", "--prompt", "HAMLET.", "--tokens", "5", "--temperature", "0").startswith("HAMLET.")


def test_every_hint_to_install_an_extra_names_this_distribution_and_one_of_its_extras():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (project["name"], project["version"]) == ("ingot-lm", importlib.metadata.version("ingot-lm"))
    texts = [*ROOT.glob("src/**/*.py"), *ROOT.glob("tests/**/*.py"), *ROOT.glob("docs/*.md"), *ROOT.glob("*.md")]
    hints = [hint for path in texts for hint in re.findall(r"pip install ('?)([\w-]+)\[([\w-]+)\]", path.read_text())]
    assert len(hints) > 30 and all(quote for quote, *_ in hints)  # a shell may expand brackets that are not quoted
    assert "ingot" not in {name for _, name, _ in hints}
    assert {extra for _, name, extra in hints if name == "ingot-lm"} <= project["optional-dependencies"].keys()


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="there is no git checkout here")
def test_data_that_users_make_is_not_offered_to_git() -> None:
    names = ["data/book/train_000000.bin", "data/book.txt", "data/datasets/x/a.bin", "data/tokenizers/a.model"]
    ran = subprocess.run(["git", "check-ignore", *names], cwd=ROOT, capture_output=True, text=True)
    assert ran.stdout.split() == names


def test_the_wheel_holds_ingot_alone() -> None:
    targets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    assert targets["wheel"] == {"packages": ["src/ingot"]}
