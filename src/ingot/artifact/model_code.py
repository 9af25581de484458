"""Generate modeling_ingot.py: the code of one model in one readable file that transformers loads without Ingot.

The file contains the definitions that the model's class needs, directly or indirectly, with their source text and comments. GPU
kernels and losses are left out, because only training calls them; in the exported file, calling one raises an error. Settings
classes become plain classes with the defaults as attributes.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ingot.artifact.huggingface import CARD, CODE, INGOT, LLAMA_SIZES, write_folder
from ingot.errors import ConfigError
from ingot.model import settings as model_settings
from ingot.model.settings import ModelSettings
from ingot.runtime.machine import made_by
from ingot.runtime.tensors import FLOATS, ITEM_BYTES, TensorRecord

PLACEHOLDER = "Model: Any = nn.Module  # the class of the exported model"  # a template line, replaced by the model's class
PREFIX, SETTINGS, TEMPLATE = "ingot.model.", "ingot.model.settings", "ingot.model.for_transformers"
CLASSES = {"gpt2": "GPT2", "llama": "Llama", "golf": "Golf", "frontier": "Frontier"}
TRAINING = ("ingot.model.kernels.", "ingot.model.loss", "ingot.model.host")  # modules that are not exported
FOR_TRAINING = """def for_training(*arguments, **named):
    raise RuntimeError("exported models do not contain this function, because only training needs it")"""
REPLACED = {
    "ingot.model.layers.flex_supported": "def flex_supported(*arguments):\n    return False  # masks are tensors",
    "ingot.model.layers.on_host": "def on_host(*tensors):\n    return False  # only training has forms of its own on a CPU",
}


def write_model_with_code(
    folder: Path,
    records: Sequence[TensorRecord],
    settings: Mapping[str, Any],
    stages: Sequence[Mapping[str, float]],
    file: Path | None,
    tokenizer: Mapping[str, Any] | None,
    scoring: Mapping[str, Any] | None = None,
    card: str | None = None,
) -> int:
    """Write a model of any family with its code, for transformers, and return the size of the files in bytes.

    `settings` is a complete `model` section with the vocabulary size, `file` the Python file of a custom model. `stages` holds
    the arguments of the model's method `set` in each training stage. For the other parameters, see huggingface.write_model.
    """
    given = {name: value for name, value in settings.items() if name not in ("family", "file", "settings")}
    config = {
        "architectures": ["IngotForCausalLM"],
        "auto_map": {"AutoConfig": "modeling_ingot.IngotConfig", "AutoModelForCausalLM": "modeling_ingot.IngotForCausalLM"},
        "model_type": INGOT,
        **{theirs: settings[ours] for ours, theirs in LLAMA_SIZES.items() if ours != "inner_width"},
        "settings": given,
        "extra": settings.get("settings", {}),
        "stages": [dict(numbers) for numbers in stages if numbers],
        "tie_word_embeddings": False,  # even if the head is tied: a tied head is not a separate parameter
        "torch_dtype": FLOATS[max((r.dtype for r in records if r.dtype in FLOATS), key=ITEM_BYTES.__getitem__)],
    }
    stored = [replace(record, name=f"model.{record.name}") for record in records]
    texts = {CODE: model_code(settings["family"], file), CARD: card}
    return write_folder(folder, stored, config, settings["context"], tokenizer, scoring, texts)


def model_code(family: str, file: Path | None = None) -> str:
    """Return the text of modeling_ingot.py for a built-in family, or for the custom model in `file`."""
    collector = _Collector()
    if file is None:
        what = f"a model of the family {family}"
        collector.reach(collector.add(PREFIX + family, _source(PREFIX + family)), CLASSES[family])
    else:
        what = f"a custom model ({file.name})"
        collector.keep_all(collector.add(file.name, file.read_text(encoding="utf-8-sig")))
    template = _source(TEMPLATE).replace(PLACEHOLDER, f"Model = {CLASSES[family]}" if file is None else "")
    collector.keep_all(collector.add(TEMPLATE, template))
    head = f'"""The code of {what} for transformers, written by `ingot export` ({made_by()})."""'
    text = f"{head}\n\nfrom __future__ import annotations\n\n{collector.text()}\n"
    if left := re.search(r"^\s*(from|import) ingot\b.*", text, re.MULTILINE):
        raise ConfigError(
            f"a custom model with `{left[0].strip()}` cannot be exported; use `from ... import` at the top of the file"
        )
    try:
        compile(text, file.name if file is not None else family, "exec")
    except SyntaxError as error:
        raise ConfigError(f"the code of this model cannot be exported: {error}") from None
    return text


class _Module:
    """A parsed module: its text, its imports and definitions by name, and the statements collected for the exported file."""

    def __init__(self, name: str, text: str):
        self.name, self.lines, tree = name, text.split("\n"), ast.parse(text)
        imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        used_lines = {node.lineno for node in tree.body if node not in imports}
        if shared := [node.lineno for node in imports if node.lineno in used_lines]:
            raise ConfigError(f"{name}:{shared[0]}: put this import on a separate line, so that the model can be exported")
        self.imports = {alias.asname or alias.name: (node, alias) for node in imports for alias in node.names}
        self.left_out: list[Any] = [*imports, *tree.body[: ast.get_docstring(tree) is not None]]
        self.body: list[Any] = [node for node in tree.body if node not in self.left_out]
        self.names = {name: node for node in self.body for name in _bound(node)}
        self.kept: list[Any] = []
        self.aliases: set[str] = set()  # assignments that replace `from ... import ... as ...`

    def settings(self, node: ast.stmt) -> type[ModelSettings] | None:
        """Return the settings class that a statement defines, or None if it defines none."""
        found = getattr(model_settings, node.name) if self.name == SETTINGS and isinstance(node, ast.ClassDef) else None
        return found if found is not None and issubclass(found, ModelSettings) else None

    def parts(self, node: Any) -> list[Any]:
        """Return the parts of a statement to collect: all of it or, for a settings class, the methods that models use."""
        if self.settings(node) is None:
            return [node]
        methods = [member for member in node.body if isinstance(member, ast.FunctionDef)]
        return [m for m in methods if not m.name.startswith("_") and m.name != "weights_besides_embedding"]

    def text(self) -> str:
        """Return the text of the collected statements."""
        if self.kept is self.body:  # a whole module, with its comments and blank lines
            left_out = {i for node in self.left_out for i in range(node.lineno, node.end_lineno + 1)}
            text = "\n".join(line for i, line in enumerate(self.lines, 1) if i not in left_out).strip("\n")
            return "\n".join([*sorted(self.aliases), text])
        text, before = "\n".join(sorted(self.aliases)), True
        for node in sorted(self.kept, key=lambda node: node.lineno):
            assigns = isinstance(node, ast.Assign | ast.AnnAssign)
            text += ("\n" if assigns and before else "\n\n\n") + self.text_of(node)
            before = assigns
        return text.strip("\n")

    def text_of(self, node: Any) -> str:
        """Return the text of a statement with the comments above it; settings classes become plain classes."""
        if (settings := self.settings(node)) is not None:
            text = f'class {node.name}(SimpleNamespace):\n    """{settings.__doc__}"""\n'
            for name, field in settings.model_fields.items():
                comment = textwrap.wrap(field.description or "", 124, initial_indent="    # ", subsequent_indent="    # ")
                text += "\n".join(["", *comment, f"    {name} = {field.default!r}"])
            return "\n\n".join([text, *("\n".join(self.lines[_first(m) : m.end_lineno]) for m in self.parts(node))])
        start = _first(node)
        while start and self.lines[start - 1].startswith("#"):
            start -= 1
        return "\n".join(self.lines[start : node.end_lineno])


class _Collector:
    """Collects the definitions that a model needs from the modules of ingot.model."""

    def __init__(self) -> None:
        self.modules: dict[str, _Module] = {}  # all modules read so far; each comes after the modules that it imports
        self.imports: set[str] = set()  # `import ...` statements of the exported file
        self.names: dict[str, set[str]] = defaultdict(set)  # names imported by `from ... import`, by module
        self.owners: dict[str, str] = {}  # the module that defines each name of the exported file
        self.replaced: set[str] = set()  # code of the functions that are exported in place of those in REPLACED
        self.for_training: set[str] = set()  # names of functions that only training needs and that are therefore left out

    def add(self, name: str, text: str) -> _Module:
        """Parse a module, after parsing the modules of ingot.model that it imports."""
        module = _Module(name, text)
        for node, alias in module.imports.values():
            if (ours := _ours(node)) and not ours.startswith(TRAINING) and ours not in self.modules:
                if not ours.startswith(PREFIX) or alias.name == "*":
                    raise ConfigError(f"a custom model that imports {ours} cannot be exported; import only names from {PREFIX}*")
                self.add(ours, _source(ours))
        self.modules[name] = module
        return module

    def keep_all(self, module: _Module) -> None:
        """Collect a whole module."""
        for name in module.imports:
            self.reach(module, name)
        module.kept = module.body
        for node in module.body:
            self.use(module, node)

    def use(self, module: _Module, node: Any) -> None:
        """Collect the definitions that a collected statement refers to."""
        for name in _bound(node):
            if (owner := self.owners.setdefault(name, module.name)) != module.name:
                raise ConfigError(f"the model cannot be exported: {module.name} and {owner} both define {name}; rename it")
        if module.settings(node) is not None:
            self.names["types"].add("SimpleNamespace")
        for part in module.parts(node):
            for used in ast.walk(part):
                if isinstance(used, ast.Name):
                    self.reach(module, used.id)

    def reach(self, module: _Module, name: str) -> None:
        """Collect the definition that a name has in a module, unless it has already been collected."""
        if name in module.imports:
            node, alias = module.imports[name]
            text = alias.name + (f" as {alias.asname}" if alias.asname else "")
            if (ours := _ours(node)).startswith(TRAINING):
                self.for_training.add(name)
            elif ours:
                self.reach(self.modules[ours], alias.name)
                module.aliases.update([f"{name} = {alias.name}"] if name != alias.name else [])
            elif isinstance(node, ast.Import):
                self.imports.add(f"import {text}")
            elif node.module != "__future__":
                self.names["." * node.level + (node.module or "")].add(text)
        elif (replacement := REPLACED.get(f"{module.name}.{name}")) is not None:
            self.replaced.add(replacement)
        elif name in module.names and module.names[name] not in module.kept:
            module.kept.append(module.names[name])
            self.use(module, module.names[name])

    def text(self) -> str:
        """Return the code of the exported file: imports, replacements for functions that are left out, and the collected code."""
        lines = sorted(self.imports) + [
            f"from {name} import {', '.join(sorted(self.names[name]))}" for name in sorted(self.names)
        ]
        standard = [line for line in lines if re.split(r"[ .]", line)[1] in sys.stdlib_module_names]
        blocks = ["\n".join([*standard, "", *(line for line in lines if line not in standard)]), *sorted(self.replaced)]
        if self.for_training:
            blocks += [FOR_TRAINING, " = ".join([*sorted(self.for_training), "for_training"])]
        return "\n\n\n".join(blocks + [module.text() for module in self.modules.values() if module.kept or module.aliases])


def _source(name: str) -> str:
    """Return the text of a module of ingot.model."""
    text = Path(model_settings.__file__).with_name(f"{name.removeprefix(PREFIX)}.py").read_text(encoding="utf-8")
    return re.sub(r"  # type: ignore.*", "", text)


def _ours(node: ast.Import | ast.ImportFrom) -> str:
    """Return the module of Ingot that a statement imports names from, or an empty string."""
    module = node.module or "" if isinstance(node, ast.ImportFrom) and not node.level else ""
    return module if module.partition(".")[0] == "ingot" else ""


def _bound(node: ast.stmt) -> list[str]:
    """Return the names that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]


def _first(node: Any) -> int:
    """Return the index of the first line of a statement, including its decorators."""
    return min(part.lineno for part in (node, *getattr(node, "decorator_list", ()))) - 1
