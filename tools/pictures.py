"""Makes the pictures of README and docs/ anew, each by the command that its page shows: `make pictures`.

    python tools/pictures.py [FOLDER]

A picture lies in docs/pictures (or FOLDER), and its page has a command that ends in `-o NAME`, in a line of text or in a block of
shell. RUN in it is a run of the `demo` recipe, which is trained first, for its 90 seconds: no training goes on beside it.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs/pictures"
SHOWN = re.compile(r"!\[[^\]]*\]\((?:docs/)?pictures/([^)\s]+)\)")
COMMAND = re.compile(r"(?:`|^)((?:ingot|python) [^`\n]*)(?:`|$)", re.M)
TRAIN = "ingot train --recipe demo --training.output_dir RUN"  # as `make train` does


@dataclass(frozen=True)
class Picture:
    """A picture on a page, with the command that the page shows for it."""

    name: str
    page: Path
    command: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.command)


def pictures() -> list[Picture]:
    """All that pages show; a page that does not say how one was made ends the program."""
    found = []
    for page in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]:
        text = page.read_text()
        for name in SHOWN.findall(text):
            commands = {match for match in COMMAND.findall(text) if re.search(rf"-o (?:\S*/)?{re.escape(name)}$", match)}
            if len(commands) != 1:
                sys.exit(
                    f"{page.relative_to(ROOT)} shows {name} and {len(commands)} commands that end in -o {name}; one is needed"
                )
            found.append(Picture(name, page, commands.pop()))
    return found


def make(folder: Path) -> None:
    """Draw them into a folder."""
    with tempfile.TemporaryDirectory() as beside:
        drawn = pictures()
        if any("RUN" in picture.words for picture in drawn):
            run(TRAIN, Path(beside))
        for picture in drawn:
            run(picture.command, Path(beside))
            made = Path(beside) / picture.words[-1]
            folder.mkdir(parents=True, exist_ok=True)
            (folder / picture.name).write_bytes(made.read_bytes())
            print(folder / picture.name)


def run(command: str, folder: Path) -> None:
    """Run a command of a page; the program ends where it fails."""
    print(command, file=sys.stderr)
    program, *rest = [str(ROOT / word) if word.startswith("tools/") else word for word in shlex.split(command)]
    found = sys.executable if program == "python" else str(Path(sys.executable).with_name(program))
    if code := subprocess.run([found, *rest], cwd=folder, stdout=sys.stderr).returncode:
        sys.exit(f"{command} ended with exit code {code}")


if __name__ == "__main__":
    make(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else PICTURES)
