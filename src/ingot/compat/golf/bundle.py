"""One file that trains and scores: `train_gpt.py` with the sources of a golf run inside, for machines without Ingot.

Code counts as part of a submission, so the file holds only what the entry reaches, compressed after a loader that can be read.
What is not reached in a golf run is named in LEFT_OUT; an import of it is harmless there and its use is an error. There are two
such programs: the challenge's script (GOLF), and one for runs that `ingot train` made with the frontier family (BY_SETTINGS),
with that family, its optimizer options and its artifact in place of the challenge's.
"""

from __future__ import annotations

import bz2
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import ingot
from ingot.compat.golf.alone.bundle import NONE, with_settings
from ingot.compat.golf.linker import Read, link
from ingot.runtime.machine import made_by

WIDTH = 132  # of the lines of packed text
# Of packed text: 94 of them, so that eleven hold nine bytes, where base 85 needs eleven and a quarter.
LETTERS = [chr(code) for code in range(32, 127) if code != ord('"')]

# What a golf run passes by: preparing and packing text, other kinds of tokenizers and files, samples, averages of weights.
LEFT_OUT = (
    "ingot.artifact.container",
    "ingot.artifact.fresh_process",
    "ingot.artifact.rans",
    "ingot.backends.mlx",
    "ingot.backends.torch.state",
    "ingot.backends.torch.inference",
    "ingot.backends.torch.tune",
    "ingot.backends.torch.rounding",
    "ingot.config.checks",
    "ingot.config.checks",
    "ingot.data.formats.foreign",
    "ingot.data.formats.nanogpt_folder",
    "ingot.data.loading.rows",
    "ingot.data.loading.rows",
    "ingot.data.loading.packing",
    "ingot.data.loading.redraw",
    "ingot.data.prepare",
    "ingot.data.store.dataset",
    "ingot.data.store.dataset",
    "ingot.data.text",
    "ingot.data.tokenizers.plain",
    "ingot.eval.evaluator",
    "ingot.generate",
    "ingot.model.loss",
    "ingot.model.kernels",
    "ingot.optim.muon",
    "ingot.optim.muon",
    "ingot.runs.folder",
    "ingot.runs.checkpoints",
    "ingot.runs.reporter",
    "ingot.runs.tracking",
    "ingot.train.end",
    "ingot.train.evaluation",
    "ingot.train.resume",
    "ingot.train.evaluation",
    "ingot.trained",
)

# Modules of which a golf run asks next to nothing.
NOTHING = (
    "ingot.backends.torch.startup",
    "ingot.backends.torch.startup",
    "ingot.backends.torch.tune",
    "ingot.backends.torch.compile",
    "ingot.backends.torch.tune",
    "ingot.backends.torch.custom_model",
    "ingot.backends.torch.tune",
    "ingot.compat.golf.look_alikes",
    "ingot.console.entry",
    "ingot.model.layers",
    "ingot.runs.folder",
    "ingot.runs.checkpoints",
    "ingot.runtime.processes",
    "ingot.runtime.machine",
    "ingot.runtime.signals",
    "ingot.runtime.machine",
    "ingot.train.evaluation",
    "ingot.train.resume",
    "ingot.train.stop",
)
# Modules that the file has in a smaller form.
INSTEAD = {
    **dict.fromkeys(NOTHING, "ingot.compat.golf.alone.nothing"),
    "ingot": "ingot.compat.golf.alone",
    "ingot.backends.torch.tune": "ingot.compat.golf.alone.attention",
    "ingot.backends.torch.compile": "ingot.compat.golf.alone.regions",
    "ingot.backends.torch.tune": "ingot.compat.golf.alone.threads",
    "ingot.config.schema": "ingot.compat.golf.alone.registry",
    "ingot.config.loading": "ingot.compat.golf.alone.loading",
    "ingot.config.render": "ingot.compat.golf.alone.render",
    "ingot.data.loading.data_path": "ingot.compat.golf.alone.dataset",
    "ingot.data.tokenizers.open": "ingot.compat.golf.alone.tokenizers",
    "ingot.compat.golf.bundle": "ingot.compat.golf.alone.bundle",
    "ingot.model.registry": "ingot.compat.golf.alone.registry",
    "ingot.runs.lock": "ingot.compat.golf.alone.lock",
}

# What runs of the frontier family ask for besides: documents redrawn, stages, NorMuon, averages, weights as codes of few bits.
OF_FRONTIER = (
    "ingot.artifact.container",
    "ingot.artifact.fresh_process",
    "ingot.artifact.rans",
    "ingot.backends.torch.state",
    "ingot.backends.torch.rounding",
    "ingot.config.checks",
    "ingot.data.loading.redraw",
    "ingot.data.store.dataset",
    "ingot.optim.muon",
    "ingot.optim.muon",
    "ingot.train.end",
)


@dataclass(frozen=True, eq=False)
class Program:
    """What is made one file: where it begins, what it passes by, what it has in a smaller form, and how it is used."""

    entry: str
    left_out: tuple[str, ...] = ()
    instead: Mapping[str, str] = field(default_factory=dict)
    usage: str = ""

    @cache  # noqa: B019 (there are two programs)
    def read(self, name: str) -> str | None:
        """The source of a module of ours as this program has it."""
        path = Path(ingot.__file__).parent.joinpath(*self.instead.get(name, name).split(".")[1:])
        files = [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]
        return files[0].read_text(encoding="utf-8") if files else None


GOLF = Program(
    "ingot.compat.golf.main",
    LEFT_OUT,
    INSTEAD,
    "Settings are environment variables (DATA_PATH, TOKENIZER_PATH, RUN_ID, SEED, ...); EVAL_ONLY_PATH=final_model.int8.ptz\n"
    "scores that file and trains nothing.",
)
BY_SETTINGS = Program(
    "ingot.compat.golf.by_settings",
    tuple(name for name in LEFT_OUT if name not in OF_FRONTIER),
    {
        **INSTEAD,
        "ingot.artifact.fresh_process": "ingot.compat.golf.alone.fresh_process",
        "ingot.config.schema": "ingot.compat.golf.alone.frontier_registry",
        "ingot.model.registry": "ingot.compat.golf.alone.frontier_registry",
    },
    "Settings are environment variables: DATA_PATH, TOKENIZER_PATH, RUN_ID, SEED, MAX_WALLCLOCK_SECONDS, and any setting by its\n"
    "name (env model.layers=9). EVAL_ONLY_PATH=model.ingot scores that file and trains nothing.",
)

LOADER = '''\
"""Trains and scores a golf model: python train_gpt.py, or torchrun --standalone --nproc_per_node=N train_gpt.py.

{usage} Needs torch, numpy, sentencepiece and pydantic.
The sources ({package} {version}) are PACKED below; to read one:
python -c "import train_gpt; print(train_gpt.SOURCES['{entry}'])"
"""
import bz2, importlib.abc, importlib.util, os, sys, traceback

# What this run sets, unless the environment does.
SETTINGS = {{}}
# Its own model, if it has one, which is put beside this file.
MODEL = None

PACKED = r"""
{packed}
"""
# Eleven letters of it are nine bytes: digits of base 94, the lowest first.
letters = [code - 32 - (code > 34) for code in map(ord, PACKED) if code >= 32]
values = [sum(digit * 94**place for place, digit in enumerate(letters[i : i + 11])) for i in range(0, len(letters), 11)]
packed = b"".join(value.to_bytes(9, "little") for value in values)
SOURCES = dict(part.split("\\n", 1) for part in bz2.decompress(packed).decode().split("\\0"))
# A module that is not among them can be imported and not be used.
ABSENT = """
class Absent:
    def __init__(self, name):
        self.name = name
    def __call__(self, *args, **kwargs):
        from {package}.errors import ConfigError
        raise ConfigError(f"{{self.name}} is not part of this file, which only trains and scores; use the package {package}")
    def __getattr__(self, name):
        return __getattr__(f"{{self.name}}.{{name}}")
def __getattr__(name):
    if "__" in name:
        raise AttributeError(name)
    return Absent(f"{{__name__}}.{{name}}")
"""


class Sources(importlib.abc.MetaPathFinder, importlib.abc.ExecutionLoader):
    path, version = os.path.abspath(__file__), "{version}"

    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_loader(name, self) if name.split(".")[0] == "{package}" else None

    def is_package(self, name):
        return name not in SOURCES or any(other.startswith(name + ".") for other in SOURCES)

    def get_filename(self, name):
        return os.path.join(self.path, *name.split(".")) + ".py"

    def get_source(self, name):
        return SOURCES.get(name, ABSENT)


sys.meta_path.insert(0, Sources())
sys.excepthook = traceback.print_exception  # knows where lines are that no file has

if __name__ == "__main__":
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    from {entry} import main

    sys.exit(main(sys.argv[1:], *filter(None, [MODEL])))
'''


def bundle(settings: Mapping[str, str] = NONE, model: str | None = None, program: Program = GOLF) -> bytes:
    """`train_gpt.py`, in which these variables are set unless the environment sets them; the same bytes for the same sources.

    `model` is the text of a model of one's own, which it carries.
    """
    return with_settings(_unset(program), settings, model)


@cache
def _unset(program: Program) -> bytes:
    version = made_by().removeprefix("ingot ")
    return one_file("ingot", program.entry, program.read, program.left_out, version, program.usage)


def one_file(package: str, entry: str, read: Read, left_out: tuple[str, ...] = (), version: str = "", usage: str = "") -> bytes:
    """A program of a package as one file that needs the package no more."""
    sources = link(package, entry, read, left_out)
    keys: list[Callable[[str], Any]] = [str, sources.__getitem__, lambda name: len(sources[name])]
    orders = [sorted(sources, key=key, reverse=last) for key in keys for last in (False, True)]
    texts = ["\0".join(f"{name}\n{sources[name]}" for name in order) for order in orders]
    # 3% smaller than lzma on a few hundred kilobytes of Python, and 200 bytes more or less by the order of these.
    small = min((bz2.compress(text.encode()) for text in texts), key=len)
    values = [int.from_bytes(small[start : start + 9].ljust(9, b"\0"), "little") for start in range(0, len(small), 9)]
    letters = "".join(LETTERS[value // 94**place % 94] for value in values for place in range(11))
    packed = "\n".join(letters[start : start + WIDTH] for start in range(0, len(letters), WIDTH))
    return LOADER.format(package=package, entry=entry, version=version, usage=usage, packed=packed).encode()
