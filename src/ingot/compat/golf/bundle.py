"""Build a single `train_gpt.py` that trains and scores models, with Ingot embedded, for machines where Ingot is not installed.

The code counts towards the size limit of a submission, so the file is a readable loader with compressed sources: the modules that
a golf run can reach through imports from its entry point, without docstrings, comments, return types and setting descriptions.
LEFT_OUT lists modules that no golf run uses; the file has stubs for them, which can be imported but raise an error when used.
"""

from __future__ import annotations

import ast
import base64
import bz2
import json
import re
import textwrap
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import ingot
from ingot.runtime.machine import made_by
from ingot.runtime.processes import ONE_FILE

GOLF, BY_SETTINGS = "ingot.compat.golf.main", "ingot.compat.golf.by_settings"  # entry points: golf's script, or `ingot train`
LEFT_OUT = (
    "ingot.api", "ingot.artifact.fresh_process", "ingot.artifact.gpt_simple", "ingot.artifact.hf_tokenizer", "ingot.backends.mlx",
    "ingot.backends.torch.elastic", "ingot.backends.torch.generate", "ingot.backends.torch.onnx", "ingot.backends.torch.simulate",
    "ingot.data.formats.gpt_simple_folder", "ingot.data.formats.nanogpt_folder", "ingot.data.hub", "ingot.data.prepare.pipeline",
    "ingot.data.store.staging", "ingot.data.store.writer", "ingot.data.text", "ingot.data.tokenizers.gpt2_bpe",
    "ingot.data.tokenizers.hf_json", "ingot.data.tokenizers.learn_vocabulary", "ingot.data.tokenizers.plain",
    "ingot.eval.self_test", "ingot.eval.tasks", "ingot.inference.scoring",
    "ingot.model.gpt2", "ingot.model.llama", "ingot.preflight", "ingot.runs.mirror", "ingot.runs.tracking", "ingot.runs.view",
)  # fmt: skip
LEFT_OUT_OF = {
    GOLF: (
        "ingot.artifact.container", "ingot.artifact.rans", "ingot.backends.torch.gptq", "ingot.data.loading.packing",
        "ingot.inference", "ingot.model.frontier", "ingot.train.fit_artifact",
    ),
    BY_SETTINGS: ("ingot.backends.torch.custom_model", "ingot.model.golf"),
}  # fmt: skip

LOADER = '''\
"""Trains and scores a golf model: python train_gpt.py, or torchrun --standalone --nproc_per_node=N train_gpt.py.

Settings are environment variables (DATA_PATH, TOKENIZER_PATH, RUN_ID, SEED, MAX_WALLCLOCK_SECONDS, ...); EVAL_ONLY_PATH=FILE
scores the artifact FILE and trains nothing. Needs torch, numpy, sentencepiece and pydantic.
The sources ({made_by}) are PACKED below; to read one: python -c "import train_gpt; print(train_gpt.SOURCES[train_gpt.ENTRY])"
"""
import base64, bz2, importlib.abc, importlib.util, json, os, sys, traceback

# The entry point, defaults of environment variables, and the source of a custom model.
ENTRY = None
SETTINGS = {{}}
MODEL = None

PACKED = """
{packed}
"""
SOURCES = json.loads(bz2.decompress(base64.b85decode(PACKED.replace("\\n", ""))))
# A stub for modules that are left out: calling one of its names raises an error.
ABSENT = """
class Absent(type):
    def __call__(cls, *args, **kwargs):
        from ingot.errors import ConfigError
        raise ConfigError(f"{{cls.__module__}}.{{cls.__name__}} is not part of this file; install ingot to use it")
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Absent(name, (), {{"__module__": __name__}})
"""


class Sources(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    one_file, made_by = os.path.abspath(__file__), "{made_by}, one file"

    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_loader(name, self) if name.split(".")[0] == "ingot" else None

    def is_package(self, name):
        return name not in SOURCES or any(other.startswith(name + ".") for other in SOURCES)

    def get_filename(self, name):
        return os.path.join(self.one_file, *name.split(".")) + ".py"

    def get_source(self, name):
        return SOURCES.get(name, ABSENT)

    def get_code(self, name):
        return compile(self.get_source(name), self.get_filename(name), "exec")


sys.meta_path.insert(0, Sources())
sys.excepthook = traceback.print_exception  # shows source lines

if __name__ == "__main__":
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    main = importlib.import_module(ENTRY).main
    sys.exit(main(sys.argv[1:], *filter(None, [MODEL])))
'''


def bundle(settings: Mapping[str, str] | None = None, model: str | None = None, entry: str = GOLF) -> bytes:
    """Build the `train_gpt.py` for an entry point; `settings` holds default values of environment variables.

    `model` is the source of a custom model to embed. The output is deterministic.
    """
    content = Path(ONE_FILE).read_text() if ONE_FILE else _program(entry)
    header = f'ENTRY = "{entry}"\nSETTINGS = {json.dumps(settings or {}, indent=4)}\nMODEL = {model!a}'
    content = re.sub(r"^ENTRY = .*?^MODEL = .*?$", lambda _: header, content, count=1, flags=re.DOTALL | re.MULTILINE)
    return content.encode()


@cache
def _program(entry: str) -> str:
    """Return the loader with the sources of all ingot modules that `entry` imports, even indirectly or inside functions."""
    sources: dict[str, str] = {}
    queue = [entry]
    while queue:
        name = queue.pop()
        path = Path(ingot.__file__).parent.joinpath(*name.split(".")[1:])
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        left_out = any(f"{name}.".startswith(f"{other}.") for other in (*LEFT_OUT, *LEFT_OUT_OF[entry]))
        if name.split(".")[0] != "ingot" or name in sources or left_out or not path.is_file():
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        queue.append(name.rpartition(".")[0])
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and not node.decorator_list:  # torch.library reads the return types of operators
                node.returns = None
            if isinstance(node, ast.Import):
                queue += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                queue += [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
                node.body = node.body[1:] or [ast.Pass()]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Field":
                node.keywords = [keyword for keyword in node.keywords if keyword.arg != "description"]
        sources[name] = ast.unparse(tree)
    # On half a megabyte of Python, bz2's output is 5% smaller than lzma's.
    packed = base64.b85encode(
        bz2.compress(json.dumps(sources, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode())
    ).decode()
    return LOADER.format(made_by=made_by(), packed="\n".join(textwrap.wrap(packed, 132)))
