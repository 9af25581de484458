"""Source text with fewer bytes and the same meaning: no docstrings, hints or descriptions, short names for what is used nearby.

Only what a reader needs is taken away. Hints stay in classes that may read them when the program runs. Variables of functions get
short names, and so do functions and constants of a module that no other one mentions; everything else is called what it was.
"""

from __future__ import annotations

import ast
import builtins
import keyword
import re
import string
from collections.abc import Collection, Iterator
from itertools import product

# Classes that do not read the hints in their bodies.
BLIND = {"ABC", "Exception", "Generic", "Module", "Protocol", "object"}
# Arguments that only tell people something: by keyword or position.
TELLING: dict[str, tuple[str, ...] | int] = {"Field": ("description", "json_schema_extra"), "Variable": 3}


def smaller(tree: ast.Module) -> ast.Module:
    """The same program without what only people read."""
    return _Smaller().visit(tree)


def written(body: list[ast.stmt], own: Collection[str] = ()) -> str:
    """The statements of a module as text, indented by one space; names inside functions become short.

    `own`: names that no other module mentions; what it defines by these becomes short too.
    """
    # A name that means one thing in a comprehension may mean the module's or Python's own beside it.
    outside = set(dir(builtins)).union(*map(_names_of, body))
    for node in body:
        for function in [node, *node.body] if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(function, ast.FunctionDef):
                _shorten(function, outside)
    _shorten_own(body, own)
    text = ast.unparse(ast.fix_missing_locations(ast.Module(body, [])))
    if '"""' in text or "'''" in text:  # strings over several lines stay as they are
        return text
    return re.sub("^(?:    )+", lambda spaces: " " * (len(spaces[0]) // 4), text, flags=re.MULTILINE)


def last_names(nodes: list[ast.expr]) -> set[str]:
    """What classes or decorators are called, without arguments and the module in front."""
    bare = [
        node.func if isinstance(node, ast.Call) else node.value if isinstance(node, ast.Subscript) else node for node in nodes
    ]
    return {node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else "?" for node in bare}


class _Smaller(ast.NodeTransformer):
    def visit_Module(self, node: ast.Module) -> ast.Module:
        node.body = _undocumented(node.body)
        return self.generic_visit(node)  # type: ignore[return-value]

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
        for argument in every:
            if argument is not None:
                argument.annotation = None
        node.returns, node.body = None, _undocumented(node.body)
        self.generic_visit(node)
        node.body = node.body or [ast.Pass()]
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        counts = "dataclass" in last_names(node.decorator_list)  # a dataclass wants hints and reads ClassVar at most
        blind = not counts and last_names(node.bases) <= BLIND
        body: list[ast.stmt] = []
        for statement in _undocumented(node.body):
            if isinstance(statement, ast.AnnAssign) and not blind:
                if counts and "ClassVar" not in ast.dump(statement.annotation):
                    statement.annotation = ast.Constant(0)
                self.generic_visit(statement)
                body.append(statement)
            elif (visited := self.visit(statement)) is not None:
                body.append(visited)
        node.body = body or [ast.Pass()]
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.Assign | None:
        self.generic_visit(node)
        return ast.copy_location(ast.Assign([node.target], node.value), node) if node.value is not None else None

    def visit_If(self, node: ast.If) -> ast.AST | None:
        return None if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING" else self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        telling = TELLING.get(node.func.id, ()) if isinstance(node.func, ast.Name) else ()
        if not isinstance(telling, int):
            node.keywords = [word for word in node.keywords if word.arg not in telling]
        elif len(node.args) > telling:
            node.args[telling] = ast.Constant("")
        return self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        """An f-string as a call of format: Python 3.12 writes f-strings that 3.11 cannot read."""
        values: list[ast.expr] = []
        template = _template(node, values)
        method = ast.Attribute(ast.Constant(template), "format", ast.Load())
        return ast.Call(method, [self.visit(value) for value in values], [])


def _template(text: ast.JoinedStr, values: list[ast.expr]) -> str:
    """What `str.format` makes the text of an f-string from; its values are added to the list in their order."""
    template = ""
    for part in text.values:
        if isinstance(part, ast.FormattedValue):
            values.append(part.value)
            conversion = f"!{chr(part.conversion)}" if part.conversion >= 0 else ""
            layout = f":{_template(part.format_spec, values)}" if isinstance(part.format_spec, ast.JoinedStr) else ""
            template += f"{{{conversion}{layout}}}"
        elif isinstance(part, ast.Constant):
            template += str(part.value).replace("{", "{{").replace("}", "}}")
    return template


def _undocumented(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0] if body else None
    says = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    return body[1:] if says else body


def _names_of(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [statement.name]
    return [*_assigned(statement), *(name for node in ast.walk(statement) for name in _fixed_names(node))]


def _shorten(function: ast.FunctionDef, outside: set[str]) -> None:
    """Give the variables of a function and of those inside it short names; arguments keep theirs, callers may use them."""
    found = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
    fixed = outside.union(*map(_fixed_names, ast.walk(function)))
    taken = fixed | {node.id for node in found}
    free = (name for name in _short_names() if name not in taken)
    names = {name: next(free) for name in _assigned(function) if name not in fixed and len(name) > 1}
    for node in found:
        node.id = names.get(node.id, node.id)


def _shorten_own(body: list[ast.stmt], own: Collection[str]) -> None:
    """Give functions and constants of a module short names, where nothing else in it is called so and no text has the name.

    A function that is renamed tells its new name as `__name__`.
    """
    functions = [node for node in body if isinstance(node, ast.FunctionDef)]
    constants = [name for node in body if isinstance(node, ast.Assign) for name in _assigned(node)]
    nodes = [node for statement in body for node in ast.walk(statement)]
    meant = {name for node in nodes if node not in functions for name in mentions(node) if not isinstance(node, ast.Name)}
    meant.update(name for node in nodes if isinstance(node, ast.FunctionDef | ast.Lambda) for name in _assigned(node))
    meant.update(dir(builtins))  # which may be meant before the module gives the name a meaning of its own
    found = [node for node in nodes if isinstance(node, ast.Name)]
    taken = meant.union((node.id for node in found), (node.name for node in functions))
    free = (name for name in _short_names() if name not in taken)
    eligible = [name for name in [*(node.name for node in functions), *constants] if name in own and name not in meant]
    names = {name: next(free) for name in dict.fromkeys(eligible) if len(name) > 2 and not name.startswith("__")}
    for node in found:
        node.id = names.get(node.id, node.id)
    for function in functions:
        function.name = names.get(function.name, function.name)


def mentions(node: ast.AST) -> list[str]:
    """The names that one node has: of variables, attributes, arguments and definitions, in imports and in texts."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        return [node.attr]
    if isinstance(node, ast.keyword):
        return [node.arg or ""]
    if isinstance(node, ast.alias):
        return [*node.name.split("."), node.asname or ""]
    if isinstance(node, ast.Constant):
        return re.findall(r"\w+", node.value) if isinstance(node.value, str) else []
    if isinstance(node, ast.ClassDef):
        return [node.name, *(name for part in node.body if not isinstance(part, ast.FunctionDef) for name in _assigned(part))]
    return _fixed_names(node)


def _assigned(node: ast.AST) -> list[str]:
    """Names that are assigned somewhere in a node, in order and each once."""
    names = (part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store))
    return list(dict.fromkeys(names))


def _fixed_names(node: ast.AST) -> list[str]:
    """Names that a node binds or declares in another way than by assignment."""
    if isinstance(node, ast.arg):
        return [node.arg]
    if isinstance(node, ast.Global | ast.Nonlocal):
        return node.names
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [(alias.asname or alias.name).partition(".")[0] for alias in node.names]
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        inside = ast.walk(node) if isinstance(node, ast.ClassDef) else []  # what a class assigns are its attributes
        return [node.name, *(found.id for found in inside if isinstance(found, ast.Name))]
    name = getattr(node, "name", None) or getattr(node, "rest", None)  # except ... as name, case ... as name
    return [name] if isinstance(name, str) else []


def _short_names() -> Iterator[str]:
    for size in (1, 2):
        for letters in product(string.ascii_letters, repeat=size):
            if not keyword.iskeyword(name := "".join(letters)):
                yield name
