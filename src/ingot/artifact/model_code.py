"""Generate modeling_ingot.py: the code of one model in one readable file that transformers loads without Ingot.

The file contains the definitions that the model's class needs, directly or indirectly, with their comments. What only training
or GPU kernels use (UNUSED) is replaced by its value in plain evaluation; branches that are then never taken, and members of
classes that nothing refers to, are left out. Settings classes become plain classes with the defaults as attributes.
"""

from __future__ import annotations

import ast
import copy
import re
import sys
import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ingot.artifact.huggingface import CARD, CODE, INGOT, LLAMA_SIZES, write_folder
from ingot.errors import ConfigError
from ingot.model import settings as model_settings
from ingot.model.settings import ModelSettings
from ingot.runtime.machine import made_by
from ingot.runtime.tensors import FLOATS, ITEM_BYTES, TensorRecord

PREFIX, TEMPLATE = "ingot.model.", "ingot.model.for_transformers"
CLASSES = {"gpt2": "GPT2", "llama": "Llama", "golf": "Golf", "frontier": "Frontier"}
# Parameters, attributes and functions that the generated file does without, and the values that replace them.
UNUSED: dict[str, Any] = {
    "documents": None, "targets": None, "starts": None, "ready_mask": None, "form": "repeated", "counts": False,
    "counts_windows": False, "fused_gate": False, "fused_mlp": False, "fused_qkv": False, "fused_rotary": False,
    "fused_scales": False, "fused_stream": False, "uses_flash": False, "flex_supported": False,
}  # fmt: skip
PASSED = {"documents", "targets", "form"}  # of these, the ones that custom models may pass on to our functions
UNUSED_TYPES = ("BlockMask", "Boundaries")
ALWAYS = re.compile(r"__\w+__|forward|_apply")  # methods that Python or torch calls


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

    `settings` is a complete `model` section with the vocabulary size, `stages` what each stage set, `file` the Python file
    of a custom model. For the other parameters, see huggingface.write_model.
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
        "tie_word_embeddings": False,  # a tied head is not a parameter
        "torch_dtype": FLOATS[max((r.dtype for r in records if r.dtype in FLOATS), key=ITEM_BYTES.__getitem__)],
    }
    stored = [replace(record, name=f"model.{record.name}") for record in records]
    texts = {CODE: model_code(settings["family"], file), CARD: card}
    return write_folder(folder, stored, config, settings["context"], tokenizer, scoring, texts)


def model_code(family: str, file: Path | None = None) -> str:
    """Return the text of modeling_ingot.py for a built-in family, or for the custom model in `file`."""
    collector = _Collector()
    template = collector.load(TEMPLATE)
    template.body.remove(placeholder := template.names.pop("Model"))
    if file is None:
        collector.reach(collector.load(PREFIX + family), CLASSES[family])
        template.body.insert(0, ast.copy_location(ast.parse(f"Model = {CLASSES[family]}").body[0], placeholder))
    else:
        collector.keep_all(_Module(file.name, file.read_text(encoding="utf-8")))
    collector.keep_all(template)
    what = f"a model of the family {family}" if file is None else f"a custom model ({file.name})"
    head = f'"""The code of {what} for transformers, written by `ingot export` ({made_by()})."""'
    text = "\n".join([head, "", "from __future__ import annotations", *collector.import_lines(), *collector.lines(), ""])
    if left := re.search(r"^\s*(from|import) ingot\b.*", text, re.MULTILINE):
        raise ConfigError(
            f"a custom model with `{left[0].strip()}` cannot be exported; use `from ... import` at the top of the file"
        )
    return re.sub(r"  # type: ignore.*", "", text)


class _Module:
    """A parsed module: its statements, and its definitions and imports by name. UNUSED is removed from code of ours."""

    def __init__(self, name: str, text: str):
        self.name, self.lines = name, text.splitlines()
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.stmt):
                node.source = _Source(node, self.lines)  # type: ignore[attr-defined]
        imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        self.ours = [str(node.module) for node in imports if isinstance(node, ast.ImportFrom) and _is_ours(node)]
        self.imports = {alias.asname or alias.name: (node, alias) for node in imports for alias in node.names}
        docstring = tree.body[:1] if ast.get_docstring(tree) is not None else []
        if self.ours:
            if not name.startswith(PREFIX) and (used := sorted(_names(tree) & UNUSED.keys() - PASSED)):
                raise ConfigError(f"{name} uses the name {used[0]}, which the exported code must not contain; rename it")
            _Pruner().visit(tree)
        self.body = [node for node in tree.body if node not in docstring and not isinstance(node, ast.Import | ast.ImportFrom)]
        self.names = {name: node for node in self.body for name in _bound(node)}


class _Collector:
    """Collects the statements that a model needs."""

    def __init__(self) -> None:
        self.modules: dict[str, _Module] = {}
        self.kept: dict[str, list[ast.stmt]] = defaultdict(list)
        self.plain: set[str] = set()  # imports of modules
        self.parts: dict[str, set[str]] = defaultdict(set)  # names imported from modules
        self.owners: dict[str, str] = {}  # modules that define the names of the generated file
        self.live: set[str] = set()  # names that the collected code uses
        self.parked: dict[str, list[tuple[_Module, ast.ClassDef, ast.stmt]]] = defaultdict(list)  # members not used so far

    def load(self, name: str) -> _Module:
        """Return a module of ingot.model."""
        if name not in self.modules:
            if not name.startswith(PREFIX):
                raise ConfigError(f"a custom model that imports {name} cannot be exported; import only from {PREFIX}*")
            path = Path(model_settings.__file__).parent.joinpath(*name.split(".")[2:]).with_suffix(".py")
            self.modules[name] = _Module(name, path.read_text(encoding="utf-8"))
        return self.modules[name]

    def bind(self, name: str, owner: str) -> None:
        """Record which module defines a name; raise ConfigError if another one does too."""
        if self.owners.setdefault(name, owner) != owner:
            raise ConfigError(f"the model cannot be exported: {owner} and {self.owners[name]} both define {name}; rename it")

    def keep_all(self, module: _Module) -> None:
        """Collect a whole module."""
        self.modules[module.name] = module
        for name in module.imports:
            self.reach(module, name)
        for node in module.body:
            self.keep(module, node)
            self.use(module, node)

    def keep(self, module: _Module, node: ast.stmt) -> None:
        for name in _bound(node):
            self.bind(name, module.name)
        self.kept[module.name].append(node)

    def reach(self, module: _Module, name: str) -> None:
        """Collect the definition of a module's name and all that it needs."""
        if name in module.imports:
            node, alias = module.imports[name]
            text = alias.name + (f" as {alias.asname}" if alias.asname else "")
            if _is_ours(node):
                self.reach(self.load(str(node.module)), alias.name)  # type: ignore[union-attr]
                if name != alias.name and name not in self.owners:
                    self.keep(module, ast.parse(f"{name} = {alias.name}").body[0])
            elif isinstance(node, ast.Import):
                self.plain.add(text)
            elif node.module != "__future__":
                self.parts["." * node.level + (node.module or "")].add(text)
        elif (found := module.names.get(name)) is not None and found not in self.kept[module.name]:
            self.keep(module, found)
            self.use_class(module, found) if isinstance(found, ast.ClassDef) else self.use(module, found)

    def use(self, module: _Module, tree: ast.AST) -> None:
        """Collect what a piece of code refers to."""
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                self.reach(module, node.id)
            name = getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "value", None)
            if isinstance(name, str) and name not in self.live:  # includes strings, as in hasattr(model, "new_cache")
                self.live.add(name)
                for owner, parent, member in self.parked.pop(name, []):
                    parent.body.append(member)
                    self.use(owner, member)

    def use_class(self, module: _Module, node: ast.ClassDef) -> None:
        """Collect what a class needs. Members that nothing refers to so far are parked."""
        members = node.body
        if (settings := _settings(node.name)) is not None:
            classes = [module.names.get(base.__name__) for base in settings.__mro__]
            members = [m for c in classes if isinstance(c, ast.ClassDef) for m in c.body if isinstance(m, ast.FunctionDef)]
            self.parts["types"].add(SimpleNamespace.__name__)
        else:
            for part in (*node.bases, *node.decorator_list):
                self.use(module, part)
        node.body = []
        for member in members:
            names = _bound(member)
            declared = isinstance(member, ast.AnnAssign) and member.value is None
            if not names or declared or any(ALWAYS.fullmatch(name) or name in self.live for name in names):
                node.body.append(member)
                self.use(module, member)
            else:
                self.parked[names[0]].append((module, node, member))

    def import_lines(self) -> list[str]:
        """Return the import statements, those of the standard library first."""
        lines = [(name, f"import {name}") for name in sorted(self.plain)]
        lines += [(name, f"from {name} import {', '.join(sorted(parts))}") for name, parts in sorted(self.parts.items())]
        standard = [line for name, line in lines if name.partition(".")[0] in sys.stdlib_module_names]
        return ["", *standard, "", *(line for _, line in lines if line not in standard)]

    def lines(self) -> list[str]:
        """Return the lines of all collected statements, each module after those that it imports, and the template last."""

        def depth(name: str) -> int:
            return 1 + max((depth(other) for other in self.modules[name].ours if other in self.modules), default=0)

        lines: list[str] = []
        for name in sorted(self.kept, key=lambda name: (name == TEMPLATE, depth(name), name)):
            before = None
            for node in sorted(self.kept[name], key=lambda node: node.lineno):
                block = _settings_lines(node) if _settings(getattr(node, "name", "")) else _lines(node, 0)
                small = isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(before, ast.Assign | ast.AnnAssign)
                lines += [*[""] * (0 if small else 2), *block]
                before = node
        return lines


def _names(tree: ast.AST) -> set[str]:
    return {str(getattr(node, key)) for node in ast.walk(tree) for key in ("id", "attr", "arg", "name") if hasattr(node, key)}


def _is_ours(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "ingot"


def _bound(node: ast.stmt) -> list[str]:
    """Return the names that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]


def _settings(name: str) -> type[ModelSettings] | None:
    """Return the settings class of this name, if there is one."""
    found = getattr(model_settings, name, None)
    return found if isinstance(found, type) and issubclass(found, ModelSettings) else None


def _settings_lines(node: Any) -> list[str]:
    settings = _settings(node.name)
    assert settings is not None
    lines = [f"class {node.name}(SimpleNamespace):", f'    """{settings.__doc__}"""', ""]
    for name, field in settings.model_fields.items():
        comment = textwrap.wrap(field.description or "", 124, initial_indent="    # ", subsequent_indent="    # ")
        lines += [*comment, f"    {name} = {field.default!r}"]
    return lines + [line for member in node.body for line in ("", *_lines(member, 4))]


# Code without what only training uses.


class _Pruner(ast.NodeTransformer):
    """Replaces the names in UNUSED by their values, removes them as parameters and arguments, and removes dead branches."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(UNUSED[node.id]) if node.id in UNUSED else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return ast.Constant(UNUSED[node.attr]) if node.attr in UNUSED else self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        name, second = getattr(node.func, "id", None), node.args[1] if len(node.args) > 1 else None
        if name in UNUSED:
            return ast.Constant(UNUSED[name])
        if name == "isinstance" and isinstance(second, ast.Name) and second.id in UNUSED_TYPES:
            return ast.Constant(False)
        if name == "getattr" and isinstance(second, ast.Constant) and second.value in UNUSED:
            return ast.Constant(UNUSED[second.value])
        node.args = [part for part in node.args if not _is_unused(part)]
        node.keywords = [part for part in node.keywords if part.arg not in UNUSED]
        return self.generic_visit(node)

    def visit_arguments(self, node: ast.arguments) -> ast.AST:
        first = len(node.args) - len(node.defaults)
        node.defaults = [value for arg, value in zip(node.args[first:], node.defaults, strict=True) if arg.arg not in UNUSED]
        node.args = [arg for arg in node.args if arg.arg not in UNUSED]
        return self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        ends = isinstance(node.op, ast.Or)  # the value that decides the result
        if any(isinstance(value, ast.Constant) and value.value is ends for value in node.values):
            return ast.Constant(ends)
        node.values = [value for value in node.values if not (isinstance(value, ast.Constant) and value.value is not ends)]
        return node if len(node.values) > 1 else node.values[0] if node.values else ast.Constant(not ends)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        left, right = node.left, node.comparators[0]
        if isinstance(left, ast.Constant) and isinstance(right, ast.Constant) and len(node.ops) == 1:
            return ast.Constant((left.value == right.value) is isinstance(node.ops[0], ast.Is | ast.Eq))
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        for part, other in ((node.left, node.right), (node.right, node.left)):
            if isinstance(node.op, ast.BitOr) and isinstance(part, ast.Name) and part.id in UNUSED_TYPES:
                return self.visit(other)
        return self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        return node if not isinstance(node.test, ast.Constant) else node.body if node.test.value else node.orelse

    def visit_If(self, node: ast.If) -> Any:
        node.test = self.visit(node.test)
        if isinstance(node.test, ast.Constant):
            return self._block(node.body if node.test.value else node.orelse)
        node.body, node.orelse = self._block(node.body), self._block(node.orelse)
        return node if node.body else None

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST | None:
        if node.name in UNUSED:
            return None
        node.args, node.body = self.visit(node.args), self._block(node.body) or [ast.Pass()]
        return node

    def visit_Assign(self, node: Any) -> Any:
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = [pair for pair in zip(target.elts, node.value.elts, strict=True) if not _is_unused(pair[0])]
            target.elts, node.value.elts = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
            if len(pairs) < 2:
                return self.visit(ast.copy_location(ast.Assign([pairs[0][0]], pairs[0][1]), node)) if pairs else None
        return None if _is_unused(target) else self.generic_visit(node)

    visit_AnnAssign = visit_Assign

    def _block(self, nodes: list[ast.stmt]) -> list[ast.stmt]:
        """Return the statements of a block after pruning, up to the first return."""
        kept: list[ast.stmt] = []
        for node in nodes:
            found = self.visit(node)
            kept += found if isinstance(found, list) else [found] if found is not None else []
            if kept and isinstance(kept[-1], ast.Return | ast.Raise):
                break
        return kept


def _is_unused(node: ast.expr) -> bool:
    return getattr(node, "id", None) in UNUSED or getattr(node, "attr", None) in UNUSED


# The text of a statement: its own lines where pruning did not change it, so that comments and layout stay.


class _Source:
    """The original text of a statement, and the dumps that tell whether it or its first lines were changed."""

    def __init__(self, node: Any, lines: list[str]):
        self.lines, self.dump, self.head = lines, ast.dump(node), _head(node)
        self.first = min([node.lineno, *(part.lineno for part in getattr(node, "decorator_list", ()))]) - 1
        self.start = self.first  # of the comments above the statement
        while self.start and lines[self.start - 1].lstrip().startswith("#"):
            self.start -= 1
        self.spaced = self.start > 0 and not lines[self.start - 1].strip()
        self.end, body = node.end_lineno, getattr(node, "body", None)
        self.head_end = _Source(body[0], lines).start - _Source(body[0], lines).spaced if isinstance(body, list) else self.end


def _head(node: ast.stmt) -> str:
    """Dump a statement without the statements in it."""
    alone = copy.copy(node)
    alone.body = alone.orelse = []  # type: ignore[attr-defined]
    return ast.dump(alone)


def _lines(node: Any, indent: int, branch: str = "if") -> list[str]:
    """Return the lines of a statement, indented by `indent` spaces."""
    source: Any = getattr(node, "source", None)

    def shifted(first: int, end: int) -> list[str]:
        return [" " * indent + line[node.col_offset :] if line.strip() else "" for line in source.lines[first:end]]

    if source is not None and ast.dump(node) == source.dump:
        lines = shifted(source.first, source.end)
    elif not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.If | ast.For | ast.With):
        lines = textwrap.indent(ast.unparse(ast.Module([node], [])), " " * indent).splitlines()
    else:
        if _head(node) == source.head:
            lines = shifted(source.first, source.head_end)
        else:
            alone: Any = copy.copy(node)
            alone.body, alone.orelse = [ast.Pass()], []
            lines = textwrap.indent(ast.unparse(alone), " " * indent).splitlines()[:-1]
            if isinstance(node, ast.FunctionDef):  # as formatters write it, and without what the docstring says of parameters
                lines[-1:] = _wrapped(re.sub(r"(: [^,:=]+)=", r"\1 = ", lines[-1]))
                node.body[0] = _first_paragraph(node.body[0])
        for i, member in enumerate(sorted(node.body, key=lambda member: member.lineno)):
            spaced = i > 0 and getattr(getattr(member, "source", None), "spaced", False)
            lines += [*[""] * spaced, *_lines(member, indent + 4)]
        if orelse := getattr(node, "orelse", []):
            if len(orelse) == 1 and isinstance(orelse[0], ast.If):
                lines += _lines(orelse[0], indent, "elif")
            else:
                lines += [" " * indent + "else:", *(line for member in orelse for line in _lines(member, indent + 4))]
    if isinstance(node, ast.If):
        lines[0] = re.sub(r"^( *)(el)?if\b", rf"\1{branch}", lines[0])
    return [*(shifted(source.start, source.first) if source is not None and branch == "if" else []), *lines]


def _wrapped(line: str) -> list[str]:
    """Return a signature on one line, or, if it is too long, with its parameters on a line of their own."""
    before, inside, after = re.fullmatch(r"(.*?\()(.*)(\).*)", line).groups()  # type: ignore[union-attr]
    space = re.match(" *", line)[0]  # type: ignore[index]
    return [line] if len(line) <= 130 else [before, f"{space}    {inside}", space + after]


def _first_paragraph(node: ast.stmt) -> ast.stmt:
    """Return a docstring without its details, or any other statement as it is."""
    text = ast.get_docstring(ast.Module([node], [])) or ""
    return ast.copy_location(ast.Expr(ast.Constant(text.partition("\n\n")[0])), node) if "\n\n" in text else node
