"""Rows of Markdown made of signatures and NumPy docstrings."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from typing import Any

from numpydoc.docscrape import NumpyDocString

_ROLE = re.compile(r":\w+:`(?:~?[\w.]*?(\w+)|([^<`]+) <[^>]+>)`")
_QUOTED = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_PAGE = re.compile(r"\(docs/([\w-]+\.md)\)")


def markdown(text: str) -> str:
    """Return a docstring's text as Markdown: code in single backticks, pages as links."""
    text = _ROLE.sub(lambda match: f"`{match[1] or match[2]}`", text)
    text = re.sub(r"``([^`]+)``", r"`\1`", text)
    return _PAGE.sub(r"([\1](\1))", text).replace("|", "\\|")


def summary(documented: object) -> str:
    """Return the first paragraph of a docstring, on one line."""
    return markdown(" ".join(inspect.cleandoc(documented.__doc__ or "").split("\n\n")[0].split()))


def described(documented: object, section: str = "Parameters") -> dict[str, str]:
    """Return the entries of a section of a docstring by name. Names that share a text each have it.

    Raises
    ------
    ValueError
        There is no such section.
    """
    entries: dict[str, str] = {}
    for names, kind, lines in NumpyDocString(inspect.cleandoc(documented.__doc__ or ""))[section]:
        entries |= dict.fromkeys((names or kind).split(", "), markdown(" ".join(" ".join(lines).split())))
    if not entries:
        raise ValueError(f"{documented} has no section {section}")
    return entries


def default_of(value: Any) -> str:
    """Return a default as it is typed; empty where there is none."""
    return "" if value is inspect.Parameter.empty else f"`{value!r}`"


def rows_of(documented: Callable[..., Any], *, leave_out: tuple[str, ...] = ()) -> list[tuple[str, str, str]]:
    """Return name, default and meaning of each argument of a function, or of each field of a dataclass.

    Raises
    ------
    ValueError
        An argument is not described, or a description has no argument.
    """
    texts = described(documented, "Attributes" if dataclasses.is_dataclass(documented) else "Parameters")
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(documented).parameters.items()
        if name not in ("self", *leave_out)
    }
    texts = {name: text for name, text in texts.items() if name not in leave_out}
    if set(defaults) != set(texts):
        raise ValueError(
            f"{documented}: its arguments are {sorted(defaults)}, and its docstring describes {sorted(texts)}"
        )
    return [(name, default_of(default), texts[name]) for name, default in defaults.items()]
