"""The pictures of README and docs/ are what the commands on their pages draw; `make pictures` draws them all anew."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ingot.cli.main import app

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tools"))
import pictures as tool  # noqa: E402


def test_every_picture_is_on_a_page_with_its_command_and_every_file_is_one_of_them():
    shown = {picture.name for picture in tool.pictures()}
    assert shown == {path.name for path in tool.PICTURES.iterdir()} and shown


def test_the_run_that_they_draw_is_the_one_of_make_train():
    recipe = re.search(r"^train: .*\n\t@\$\(BIN\)/(.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert recipe is not None and f"{recipe[1]} --training.output_dir RUN" == tool.TRAIN
    assert "\t$(BIN)/python tools/pictures.py" in (ROOT / "Makefile").read_text()


def test_the_commands_draw_them(reference, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    shutil.copytree(reference, tmp_path / "RUN")
    (tmp_path / "RUN" / "samples").mkdir(exist_ok=True)
    (tmp_path / "RUN" / "samples" / "step-00000001.txt").write_text("ROMEO.")
    monkeypatch.chdir(tmp_path)
    for picture in [one for one in tool.pictures() if one.words[:2] == ["ingot", "plot"]]:
        result = CliRunner().invoke(app, picture.words[1:])
        assert result.exit_code == 0, result.exception
        assert (tmp_path / picture.words[-1]).stat().st_size > 1000


def test_a_page_without_the_command_of_its_picture_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    (tmp_path / "README.md").write_text("![a](docs/pictures/a.png)\n\ndrawn by `ingot plot RUN -o b.png`\n")
    with pytest.raises(SystemExit, match=r"README.md shows a.png and 0 commands"):
        tool.pictures()
    (tmp_path / "README.md").write_text("![a](docs/pictures/a.png)\n\n```sh\ningot plot RUN --x tokens -o docs/a.png\n```\n")
    [found] = tool.pictures()
    assert found.words == ["ingot", "plot", "RUN", "--x", "tokens", "-o", "docs/a.png"]
