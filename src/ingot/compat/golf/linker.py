"""The part of the package that a program can reach, as small source text.

Statements at the top of a module are kept where something kept names them, methods where something kept mentions their name. A
mention is a name, an attribute or a text that could be one: `getattr(x, "name")` is followed, `getattr(x, "na" + "me")` is not.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain

from ingot.compat.golf.minify import last_names, mentions, smaller, written
from ingot.errors import ConfigError

Read = Callable[[str], str | None]  # the source of a module by its name; None: there is no such module

# Classes and decorators that call no method by themselves; of anything else a method is kept even if nobody mentions it.
PASSIVE_BASES = {"ABC", "BaseModel", "Exception", "Generic", "NamedTuple", "Protocol", "object"}
PASSIVE_DECORATORS = {"abstractmethod", "cache", "cached_property", "classmethod", "contextmanager", "property", "staticmethod"}


@dataclass(eq=False)
class _Module:
    name: str
    body: list[ast.stmt]
    names: dict[str, list[ast.stmt]]  # what the top of the module defines, imports included, and nothing else
    rooms: dict[str, str]  # names that stand for modules of ours, anywhere in the module
    kept: set[int] = field(default_factory=set)  # ids of statements and methods


NO_MODULE = _Module("", [], {}, {})


def link(package: str, entry: str, read: Read, left_out: Iterable[str] = ()) -> dict[str, str]:
    """The sources of all modules of `package` that the function `main` of `entry` reaches, without what it does not reach.

    Imports of modules in `left_out`, or below them, stay in the text and are not followed.
    """
    linker = _Linker(package, read, tuple(left_out))
    linker.reach(linker.load(entry), "main")
    while linker.todo:
        linker.follow(*linker.todo.pop())
    bodies = {name: _body(module) for name, module in sorted(linker.modules.items()) if module is not NO_MODULE}
    mentioned = {
        name: {word for part in body for node in ast.walk(part) for word in mentions(node)} for name, body in bodies.items()
    }
    modules = Counter(chain.from_iterable(mentioned.values()))  # that mention a name
    return {
        name: written(body, {word for word in mentioned[name] if modules[word] == 1} - {"main"}) for name, body in bodies.items()
    }


class _Linker:
    def __init__(self, package: str, read: Read, left_out: tuple[str, ...]):
        self.package, self.read, self.left_out = package, read, left_out
        self.modules: dict[str, _Module] = {}
        self.todo: list[tuple[_Module, ast.AST]] = []
        self.mentioned: set[str] = set()
        self.waiting: dict[str, list[tuple[_Module, ast.stmt]]] = {}  # methods that nobody has mentioned yet

    def load(self, name: str) -> _Module:
        """A module of ours and the packages it lies in; NO_MODULE: it is not ours, left out, or no module."""
        if name in self.modules:
            return self.modules[name]
        ours = name == self.package or name.startswith(f"{self.package}.")
        left_out = any(name == other or name.startswith(f"{other}.") for other in self.left_out)
        source = self.read(name) if ours and not left_out else None
        self.modules[name] = NO_MODULE
        if source is None:
            return NO_MODULE
        self.load(name.rpartition(".")[0])
        body = list(_one_name_each(smaller(ast.parse(source)).body))
        module = self.modules[name] = _Module(name, body, {}, self._rooms(body))
        for statement in body:
            names = _names_of(statement)
            for defined in names:
                module.names.setdefault(defined, []).append(statement)
            if not names:
                self.keep(module, statement)
        return module

    def _rooms(self, body: list[ast.stmt]) -> dict[str, str]:
        return {
            alias.asname or alias.name: f"{node.module}.{alias.name}"
            for statement in body
            for node in ast.walk(statement)
            if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(f"{self.package}.")
            for alias in node.names
            if self.read(f"{node.module}.{alias.name}") is not None
        }

    def keep(self, module: _Module, node: ast.stmt) -> None:
        if id(node) not in module.kept:
            module.kept.add(id(node))
            self.todo.append((module, node))

    def reach(self, module: _Module, name: str) -> None:
        for statement in module.names.get(name, ()):
            self.keep(module, statement)

    def follow(self, module: _Module, node: ast.AST) -> None:
        """Keep what one statement or expression needs."""
        match node:
            case ast.Name(id=name):
                self.reach(module, name)
            case ast.Attribute(value=value, attr=name):
                self._mention(name)
                if isinstance(value, ast.Name) and value.id in module.rooms:
                    self.reach(self.load(module.rooms[value.id]), name)
            case ast.Constant(value=str(text)) if text.isidentifier():
                self._mention(text)
            case ast.Import(names=aliases):
                for home in [self.load(alias.name) for alias in aliases]:
                    for statement in home.body:
                        self.keep(home, statement)
            case ast.ImportFrom(module=str(source), names=aliases, level=0):
                for alias in aliases:
                    self.load(f"{source}.{alias.name}")
                    self.reach(self.load(source), alias.name)
            case ast.ImportFrom():
                raise ConfigError(f"{module.name} has a relative import; write `from {self.package}.... import`")
        idle = self._idle_methods(module, node) if isinstance(node, ast.ClassDef) else []
        for child in ast.iter_child_nodes(node):
            if child not in idle:
                self.follow(module, child)

    def _mention(self, name: str) -> None:
        self.mentioned.add(name)
        for module, method in self.waiting.pop(name, ()):
            self.keep(module, method)

    def _idle_methods(self, module: _Module, node: ast.ClassDef) -> list[ast.stmt]:
        """Methods of a class that can wait until somebody mentions them; the others are kept."""
        passive = self._is_passive(module, node)
        idle: list[ast.stmt] = []
        for method in node.body:
            if not isinstance(method, ast.FunctionDef):
                continue
            if passive and not method.name.startswith("__") and last_names(method.decorator_list) <= PASSIVE_DECORATORS:
                idle.append(method)
                self.waiting.setdefault(method.name, []).append((module, method))
                if method.name in self.mentioned:
                    self._mention(method.name)
            else:
                module.kept.add(id(method))
        return idle

    def _is_passive(self, module: _Module, node: ast.ClassDef) -> bool:
        """Whether all classes it builds on are ours or known to call no method by themselves."""
        return all(
            any(name in PASSIVE_BASES for name in last_names([base]))
            or (isinstance(base, ast.Name) and self._is_ours(module, base.id))
            for base in node.bases
        )

    def _is_ours(self, module: _Module, name: str) -> bool:
        for found in module.names.get(name, ()):
            if isinstance(found, ast.ClassDef):
                return self._is_passive(module, found)
            if isinstance(found, ast.ImportFrom) and found.module is not None:
                return self._is_ours(self.load(found.module), found.names[0].name)
        return False


def _one_name_each(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements, with imports of several names taken apart."""
    for node in body:
        if isinstance(node, ast.ImportFrom):
            yield from (ast.ImportFrom(node.module, [alias], node.level) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (ast.Import([alias]) for alias in node.names)
        else:
            yield node


def _names_of(node: ast.stmt) -> list[str]:
    """The names that a statement defines, if it does nothing else."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.ImportFrom | ast.Import):
        bound = node.names[0].asname or node.names[0].name.partition(".")[0]
        return [] if isinstance(node, ast.ImportFrom) and node.module == "__future__" else [bound]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    parts = [part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return [part.id for part in parts if isinstance(part, ast.Name)] if all(isinstance(part, ast.Name) for part in parts) else []


def _body(module: _Module) -> list[ast.stmt]:
    """What is kept of a module."""
    body: list[ast.stmt] = []
    for node in module.body:
        if id(node) not in module.kept:
            continue
        above = body[-1] if body else None
        if isinstance(node, ast.ImportFrom) and isinstance(above, ast.ImportFrom) and node.module == above.module:
            above.names += node.names
            continue
        if isinstance(node, ast.ClassDef):
            node.body = [s for s in node.body if not isinstance(s, ast.FunctionDef) or id(s) in module.kept] or [ast.Pass()]
        body.append(node)
    return body
