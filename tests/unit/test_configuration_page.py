"""docs/configuration.md agrees with the code."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from docs_site.configuration import PAGE, described, environment_rows, markdown, page, rows_of, variables


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


def test_variables_are_found_however_they_are_read() -> None:
    program = 'os.environ["A"]; environ.get("B"); os.environ.setdefault("C", "1"); os.environ["D"] = "2"; "E" in os.environ; d.get("F")'
    assert dict(variables(ast.parse(program))) == {"A": False, "B": False, "C": True, "D": True, "E": False}
    assert dict(variables(ast.parse('child_environment(G="1")'))) == {"G": True}


def test_a_variable_without_a_description_is_reported(tmp_path: Path) -> None:
    (tmp_path / "coordinator").mkdir()
    (tmp_path / "coordinator" / "one.py").write_text('import os\nos.environ.get("NEW")\n')
    with pytest.raises(ValueError, match="NEW"):
        environment_rows(tmp_path)
