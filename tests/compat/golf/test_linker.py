"""A program cut out of its package does what it did there."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from ingot.compat.golf.linker import link
from ingot.errors import ConfigError


def linked(entry: str, /, left_out: tuple[str, ...] = (), **sources: str) -> dict[str, str]:
    modules = {"p": "", **{f"p.{name.replace('__', '.')}": source for name, source in sources.items()}}
    return link("p", f"p.{entry}", modules.get, left_out)


def ran(source: str) -> dict[str, Any]:
    """What a module without imports of ours defines."""
    scope: dict[str, Any] = {}
    exec(source, scope)
    return scope


def names(source: str) -> set[str]:
    kinds = (ast.FunctionDef, ast.ClassDef)
    found = {node.name for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)}
    return found | {
        node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def test_modules_that_are_imported_inside_functions_come_along() -> None:
    found = linked("a", a="def main():\n    from p.b import f\n    return f()", b="def f(): return 1", c="def g(): return 2")
    assert set(found) == {"p", "p.a", "p.b"}


def test_what_nobody_names_is_dropped_and_what_it_alone_imported_too() -> None:
    b = "from p.c import g\nUSED, UNUSED = 1, 2\nSPARE = 3\ndef f(): return USED\ndef spare(): return g()"
    found = linked("a", a="from p.b import f\ndef main(): return f()", b=b, c="def g(): return 2")
    assert set(found) == {"p", "p.a", "p.b"}
    assert "3" not in found["p.b"] and len(names(found["p.b"])) == 3 and ran(found["p.b"])["f"]() == 1


def test_methods_are_kept_where_their_name_is_mentioned_as_attribute_or_as_text() -> None:
    a = (
        "class Base:\n    def run(self): return self.help()\n    def help(self): return 0\n    def idle(self): return 1\n"
        "class Part(Base):\n    def help(self): return 2\n    def named(self): return 3\n    def __len__(self): return 4\n"
        "def main(): return getattr(Part(), 'named')() + Part().run()"
    )
    assert names(linked("b", a=a, b="from p.a import main")["p.a"]) >= {"run", "help", "named", "__len__", "main"}
    assert "idle" not in names(linked("b", a=a, b="from p.a import main")["p.a"])


def test_methods_that_a_foreign_class_or_a_decorator_may_call_are_kept() -> None:
    a = (
        "import threading\nfrom pydantic import BaseModel, field_validator\n"
        "class Worker(threading.Thread):\n    def run(self): return 1\n"
        "class Model(BaseModel):\n    x: int = 0\n    @field_validator('x')\n    @classmethod\n    def check(cls, x): return x\n"
        "def main(): Worker(); Model()"
    )
    assert {"run", "check"} <= names(linked("b", a=a, b="from p.a import main")["p.a"])


def test_statements_that_do_something_stay_with_what_they_name() -> None:
    found = linked(
        "a", a="from p.b import f\ndef main(): return f()", b="TABLE = {}\ndef put(): TABLE[1] = 2\nput()\ndef f(): return TABLE"
    )
    assert ran(found["p.b"])["f"]() == {1: 2}


def test_a_module_taken_as_a_whole_gives_what_is_read_from_it() -> None:
    found = linked("a", a="from p import b\ndef main(): return b.f()", b="def f(): return 1\ndef g(): return 2")
    assert names(found["p.b"]) == {"f"}


def test_a_module_imported_by_its_whole_name_is_kept_whole() -> None:
    found = linked("a", a="import p.b as other\ndef main(): return other.f()", b="def f(): return 1\ndef g(): return 2")
    assert names(found["p.b"]) == {"f", "g"}


def test_relative_imports_are_refused_with_the_name_of_the_module() -> None:
    with pytest.raises(ConfigError, match=r"p\.a has a relative import"):
        linked("a", a="def main():\n    from . import b", b="")


def test_names_that_pass_through_a_package_are_found_in_their_home() -> None:
    found = linked(
        "a",
        a="from p.room import f\ndef main(): return f()",
        room="from p.room.b import f, g",
        room__b="def f(): pass\ndef g(): pass",
    )
    assert found["p.room"] == "from p.room.b import f" and names(found["p.room.b"]) == {"f"}


def test_modules_left_out_are_still_imported_and_not_followed() -> None:
    found = linked("a", ("p.b",), a="from p.b import f\nfrom p.b.c import g\ndef main(): return f() + g()", b="1", b__c="2")
    assert set(found) == {"p", "p.a"} and "from p.b import f" in found["p.a"] and "from p.b.c import g" in found["p.a"]


def test_hints_and_docstrings_go_and_fields_of_models_keep_their_types() -> None:
    a = (
        '"""Doc."""\nfrom __future__ import annotations\nfrom dataclasses import dataclass\n'
        "from typing import TYPE_CHECKING, Any\n"
        "from pydantic import BaseModel, Field\nif TYPE_CHECKING:\n    from p.b import T\n"
        "class Section(BaseModel):\n    '''Doc.'''\n    x: int = Field(3, description='long words', ge=1)\n"
        "@dataclass\nclass Pair:\n    left: list[Any]\n    right: T = 5\n"
        "class Plain:\n    size: int\n    kind: str = 'k'\n"
        "def main(a: int, *rest: T, b: str = 'x', **more: T) -> T:\n    '''Doc.'''\n"
        "    y: int = a\n    z: int\n    return Section(x=y), Pair(1), Plain.kind, b\n"
    )
    text = linked("a", a=a, b="T = int")["p.a"]
    assert not any(word in text for word in ("Doc", "long words", "TYPE_CHECKING", "Any", "p.b", "size"))
    scope: dict[str, object] = {"__name__": __name__}
    exec(text, scope)
    section, pair, kind, b = scope["main"](4)  # type: ignore[operator]
    assert (section.x, pair.left, pair.right, kind, b) == (4, 1, 5, "k", "x")
    with pytest.raises(ValueError):
        scope["Section"](x="no number")  # type: ignore[operator]


def test_a_body_of_nothing_but_a_docstring_is_still_a_body() -> None:
    text = linked("a", a="class E(Exception):\n    '''Doc.'''\ndef main():\n    '''Doc.'''\n    raise E")["p.a"]
    with pytest.raises(Exception, match=r"^$"):
        exec(text + "\nmain()", {})


def test_texts_with_values_in_them_stay_the_same() -> None:
    body = """
def main():
    x, w, n = 3.14159, 12, {"a": 1}
    def f(x): return f"<{x}>"
    return [
        f"plain", f"{{{x}}} {n['a']!r:>4}", f"{x:.2f} {x:{w}.3f} {x!s:{w}}|", f"{x=} {f(f'{w:,}')} {'quoted' + '!'!a}",
        f"{10**6:,}" "{not one}" f"{w:02d}"
    ]
"""
    scopes: list[dict[str, object]] = [{}, {}]
    for text, scope in zip((body, linked("a", a=body)["p.a"]), scopes, strict=True):
        exec(text, scope)
    assert scopes[0]["main"]() == scopes[1]["main"]()  # type: ignore[operator]


def test_names_inside_functions_become_short_and_never_another_ones() -> None:
    body = """
import math
total = 7
def helper(value): return value + total
def main(first=2, *, second=3):
    values = [id for id in range(first)]
    amounts = {value: helper(value) for value in values}
    def inner(third):
        nonlocal amounts
        amounts = dict(amounts, third=third)
        number = second
        return number
    inner(1)
    class Box:
        content = second
    try:
        raise ValueError("seen")
    except ValueError as error:
        seen = str(error)
    match amounts:
        case {"third": found, **others}:
            pass
    lots = [sum(n for n in values) for sum in [sum]]
    with_id = id(values) > 0
    return values, amounts, inner(4), Box.content, seen, found, others, lots, with_id, total, math.pi
"""
    text = linked("a", a=body)["p.a"]
    before, after = ran(body)["main"], ran(text)["main"]
    assert before() == after() and after(1, second=9)
    assert "values" not in text and "with_id" not in text and "second" in text


def test_what_only_its_own_module_mentions_becomes_short() -> None:
    a = "from p.b import used, LIMIT\ndef main(): return used() + LIMIT"
    b = """
LIMIT = 10
STEPS, parts = 3, 4
def _helper(value): return value * STEPS + parts
def used(): return _helper(2)
"""
    found = linked("a", a=a, b=b)
    assert not any(name in found["p.b"] for name in ("_helper", "STEPS", "parts"))
    assert ran(found["p.b"])["used"]() == 10 and ran(found["p.b"])["LIMIT"] == 10


def test_names_of_python_keep_theirs() -> None:
    body = """
from functools import partial
round = partial(round, ndigits=2)
TABLE = {type: 1 for type in "ab"}
raw = open
def open(): return raw
def main(): return round(1.234), TABLE, type(3), open()
"""
    assert ran(linked("a", a=body)["p.a"])["main"]() == (1.23, {"a": 1, "b": 1}, int, open)


def test_what_a_module_mentions_in_any_other_way_keeps_its_name() -> None:
    body = """
import sys
named, drawn, field, switched, hidden, worded = 1, 2, 3, 4, 5, 6
class Box:
    field = 30
    def drawn(self): return drawn
def switch():
    global switched
    switched = 40
def shadow():
    hidden = 50
    return hidden
def call(worded): return worded
def own(): return named + drawn + field + switched + hidden + worded
def main(module):
    switch()
    return own(), getattr(module, "named"), Box().drawn(), Box.field, shadow(), call(worded=60), f"{named} named"
"""
    text = linked("a", a=body)["p.a"]
    assert "own" not in names(text) and {"named", "switched", "hidden"} <= names(text)
    module = type("Module", (), {"named": 7})
    assert ran(text)["main"](module) == ran(body)["main"](module) == (57, 7, 2, 30, 50, 60, "1 named")


def test_texts_over_several_lines_keep_their_spaces() -> None:
    text = linked("a", a="def main():\n    if True:\n        x = 1\n        return f'''a\n        b{x}'''\n")["p.a"]
    scope: dict[str, object] = {}
    exec(text, scope)
    assert scope["main"]() == "a\n        b1"  # type: ignore[operator]
