"""docs/configuration.md agrees with the code."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from coordinator.model.names import PACKAGES
from docs_site.configuration import PAGE, READ, ROOT, SET, described, markdown, page, rows_of

#: How the environment is read or set, besides by subscripts.
_METHODS = ("get", "setdefault", "pop")
_OWN = "STATEFLEET_"
#: A call of this project whose arguments are named by the variables that they set.
_SETTER = "child_environment"


def test_the_page_is_what_the_code_gives() -> None:
    assert PAGE.read_text() == page(), "run: python -m docs_site.configuration"


def documented(first: int, second: str = "x", third: bool = True) -> None:
    """Does it.

    Parameters
    ----------
    first, second
        Both of them, as
        :meth:`Fleet.rescale <statefleet.fleet.Fleet.rescale>` has ``them``.
    third
        A third (docs/operators.md).

    Returns
    -------
    int
        Nothing.
    """


def test_arguments_have_their_defaults_and_their_words() -> None:
    shared_text = "Both of them, as `Fleet.rescale` has `them`."
    assert rows_of(documented) == [
        ("first", "", shared_text),
        ("second", "`'x'`", shared_text),
        ("third", "`True`", "A third ([operators.md](operators.md))."),
    ]
    assert described(documented, "Returns") == {"int": "Nothing."}


def test_an_argument_without_a_description_is_reported() -> None:
    def undescribed(first: int, second: int) -> None: ...

    undescribed.__doc__ = "Does it.\n\nParameters\n----------\nfirst\n    The first.\n"
    with pytest.raises(ValueError, match="second"):
        rows_of(undescribed)


def test_roles_become_names() -> None:
    assert markdown("see :class:`~a.b.Name` | ``x``") == "see `Name` \\| `x`"


def variables(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Yield the names of environment variables in a module, and whether each is set there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == _SETTER:
            yield from ((argument.arg, True) for argument in node.keywords if argument.arg is not None)
            continue
        if isinstance(node, ast.Subscript) and _is_environment(node.value):
            name, sets = node.slice, isinstance(node.ctx, ast.Store)
        elif isinstance(node, ast.Call) and node.args and _called(node):
            name, sets = node.args[0], _called(node) not in ("get", "pop")
        elif isinstance(node, ast.Compare) and any(_is_environment(side) for side in node.comparators):
            name, sets = node.left, False
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(_OWN):
            name, sets = node, False
        else:
            continue
        if isinstance(name, ast.Constant) and isinstance(name.value, str) and name.value.isidentifier():
            yield name.value, sets


def _is_environment(node: ast.AST) -> bool:
    return ast.unparse(node) in ("environ", "os.environ")


def _called(node: ast.Call) -> str:
    """Return which call of the environment it is; empty if it is none."""
    if isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS and _is_environment(node.func.value):
        return node.func.attr
    return ""


def test_variables_are_found_however_they_are_read() -> None:
    program = 'os.environ["A"]; environ.get("B"); os.environ.setdefault("C", "1"); os.environ["D"] = "2"; "E" in os.environ; d.get("F")'
    assert dict(variables(ast.parse(program))) == {"A": False, "B": False, "C": True, "D": True, "E": False}
    assert dict(variables(ast.parse('child_environment(G="1")'))) == {"G": True}


def test_every_variable_that_the_code_reads_or_sets_has_a_meaning() -> None:
    uses = {
        use
        for package in PACKAGES
        for file in (ROOT / package).rglob("*.py")
        for use in variables(ast.parse(file.read_text()))
    }
    assert {name for name, is_set in uses if not is_set} == set(READ)
    assert {name for name, is_set in uses if is_set} == set(SET)
