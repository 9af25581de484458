"""Preset files: Python on the outside, settings on the inside. Nothing in them is ever run.

A preset is read as a tree and only what a setting needs is worked out: literals, arithmetic, names, f-strings, a few functions of
numbers and texts, and the clock. Whatever else stands there is refused with its line, so no setting is silently left out.
"""

from __future__ import annotations

import ast
import math
import operator
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ingot.errors import ConfigError
from ingot.runtime.files import readable

OPERATORS: dict[type[ast.operator] | type[ast.unaryop], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
    ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Not: operator.not_,
}  # fmt: skip
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "str": str, "int": int, "float": float, "bool": bool, "round": round, "min": min, "max": max, "abs": abs,
    "time.time": time.time, "time.strftime": time.strftime,
}  # fmt: skip
Setting = tuple[str, Any, str, frozenset[str]]  # a name, its value and place, and the names that went into the value
LARGEST = 1 << 64  # of the numbers on the way to a setting
LONGEST = 10_000  # of the texts


def read_preset(path: Path, known: Mapping[str, Any]) -> tuple[str, list[Setting]]:
    """The text of a preset and what it sets, in order. `known` are the values its names may refer to."""
    with readable(path, ConfigError):
        if not path.exists():
            raise ConfigError(f"there is no preset {path}; presets are files such as config/train_gpt2.py, keys are --key=value")
        text = path.read_bytes().decode("utf-8-sig")
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        reason = getattr(error, "msg", str(error)) or "it is nested too deeply"
        raise ConfigError(f"{path}{line}: this is not Python: {reason}") from None
    return text, _Reader(path, text, known).read(tree)


class _Reader:
    def __init__(self, path: Path, text: str, known: Mapping[str, Any]) -> None:
        self._path, self._text, self._known = path, text, dict(known)
        self._modules = {"time": "time"}  # a name here and what it means; nanoGPT's presets find this one imported
        self._found: list[Setting] = []
        self._behind: dict[str, set[str]] = {}  # the names that went into the value of a name, at any distance
        self._names: set[str] = set()  # of the statement that is read

    def read(self, tree: ast.Module) -> list[Setting]:
        for statement in tree.body:
            self._names = set()
            try:
                self._take(statement)
            except RecursionError:
                raise self._refusal(statement, "is nested too deeply") from None
        return self._found

    def _take(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Assign(targets=targets, value=value):
                found = self._value(value)
                for target in targets:
                    self._assign(target, found)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._assign(target, self._value(value))
            case ast.AugAssign(target=ast.Name(id=name) as target, op=op, value=value):
                self._assign(target, self._compute(statement, op, [self._name(name, statement), self._value(value)]))
            case ast.Expr(value=ast.Constant()) | ast.Pass():
                pass  # a docstring
            case ast.Import(names=names) if all(alias.name == "time" for alias in names):
                self._modules |= {alias.asname or alias.name: "time" for alias in names}
            case ast.ImportFrom(module="time", names=names) if all(f"time.{alias.name}" in FUNCTIONS for alias in names):
                self._modules |= {alias.asname or alias.name: f"time.{alias.name}" for alias in names}
            case ast.Import() | ast.ImportFrom():
                raise self._refusal(statement, "is more than the clock, which is time.time and time.strftime")
            case _:
                raise self._refusal(statement, "is not a setting")

    def _assign(self, target: ast.expr, value: Any) -> None:
        match target:
            case ast.Name(id=name):
                self._known[name] = value
                self._behind[name] = set(self._names)
                self._found.append((name, value, f"{self._path}, line {target.lineno}", frozenset(self._names)))
            case ast.Tuple(elts=parts) if isinstance(value, tuple) and len(parts) == len(value):
                for part, item in zip(parts, value, strict=True):
                    self._assign(part, item)
            case _:
                raise self._refusal(target, "is not the name of a key")

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=int() | float() | str() | None as value):
                return value
            case ast.Name(id=name):
                return self._name(name, node)
            case ast.Tuple(elts=parts):
                return tuple(self._value(part) for part in parts)
            case ast.UnaryOp(op=op, operand=operand):
                return self._compute(node, op, [self._value(operand)])
            case ast.BinOp(left=left, op=op, right=right):
                return self._compute(node, op, [self._value(left), self._value(right)])
            case ast.JoinedStr(values=parts):
                return "".join(str(self._value(part)) for part in parts)
            case ast.FormattedValue(value=value, format_spec=spec, conversion=-1):
                form = self._value(spec) if spec is not None else ""
                if any(int(digits) > LONGEST for digits in "".join(c if c.isdigit() else " " for c in form).split()):
                    raise self._refusal(node, "is too long")
                return self._guarded(node, lambda: format(self._value(value), form))
            case ast.Call(func=function, args=arguments, keywords=[]):
                return self._call(node, function, arguments)
        raise self._refusal(node, "cannot stand here")

    def _name(self, name: str, node: ast.AST) -> Any:
        if name in self._known and name not in self._modules:
            self._names |= {name} | self._behind.get(name, set())
            return self._known[name]
        raise self._refusal(node, "is not a key or a name assigned before")

    def _call(self, node: ast.Call, function: ast.expr, arguments: list[ast.expr]) -> Any:
        match function:
            case ast.Name(id=name):
                called = self._modules.get(name, name)
            case ast.Attribute(value=ast.Name(id=module), attr=name):
                called = f"{self._modules.get(module)}.{name}"
            case _:
                called = ""
        if called not in FUNCTIONS:
            raise self._refusal(node, "is a call of something else")
        values = [self._value(argument) for argument in arguments]
        return self._guarded(node, lambda: FUNCTIONS[called](*values))

    def _compute(self, node: ast.AST, op: ast.operator | ast.unaryop, values: list[Any]) -> Any:
        if type(op) not in OPERATORS:
            raise self._refusal(node, "is more than simple arithmetic")
        numbers = [value for value in values if isinstance(value, int | float)]
        texts = [value for value in values if isinstance(value, str | tuple)]
        if isinstance(op, ast.Pow) and len(numbers) == 2 and abs(numbers[1]) * math.log2(max(2.0, abs(numbers[0]))) > 1024:
            raise self._refusal(node, "is too large")  # before it is computed: 9**9**9 takes for ever
        if isinstance(op, ast.Mult) and texts and numbers and len(texts[0]) * numbers[0] > LONGEST:
            raise self._refusal(node, "is too long")
        if isinstance(op, ast.Mod) and texts:
            raise self._refusal(node, "is more than simple arithmetic")  # '%99999999d' % 1
        return self._guarded(node, lambda: OPERATORS[type(op)](*values))

    def _guarded(self, node: ast.AST, compute: Callable[[], Any]) -> Any:
        """What comes out, if it is a number or text of a size that settings have."""
        try:
            value = compute()
        except (ArithmeticError, TypeError, ValueError, OSError) as error:
            raise self._refusal(node, f"cannot be computed: {error}") from None
        if isinstance(value, complex) or (isinstance(value, int) and abs(value) > LARGEST):
            raise self._refusal(node, "is too large")
        if isinstance(value, str | tuple) and len(value) > LONGEST:
            raise self._refusal(node, "is too long")
        return value

    def _refusal(self, node: ast.AST, why: str) -> ConfigError:
        shown = " ".join((ast.get_source_segment(self._text, node) or "this").split())
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        return ConfigError(
            f"{self._path}, line {getattr(node, 'lineno', 1)}: {shown} {why}; "
            f"a preset is not run: it has literals, arithmetic, names, f-strings and calls of {', '.join(FUNCTIONS)}"
        )
