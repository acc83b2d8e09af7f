"""What the code says about its own arguments: signatures and NumPy docstrings, as rows of Markdown."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from typing import Any

__all__ = ["default_of", "described", "markdown", "rows_of", "summary"]

_ROLE = re.compile(r":\w+:`(?:~?[\w.]*?(\w+)|([^<`]+) <[^>]+>)`")
_QUOTED = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_PAGE = re.compile(r"\(docs/([\w-]+\.md)\)")


def markdown(text: str) -> str:
    """A docstring's sentence as Markdown: code in single backticks, pages as links."""
    text = _ROLE.sub(lambda found: f"`{found[1] or found[2]}`", text)
    text = re.sub(r"``([^`]+)``", r"`\1`", text)
    return _PAGE.sub(r"([\1](\1))", text).replace("|", "\\|")


def summary(told: object) -> str:
    """The first paragraph of a docstring, on one line."""
    return markdown(" ".join(inspect.cleandoc(told.__doc__ or "").split("\n\n")[0].split()))


def described(told: object, section: str = "Parameters") -> dict[str, str]:
    """Names and texts of a section of a docstring; of several names that share a text each has it.

    Raises
    ------
    ValueError
        There is no such section.
    """
    text = inspect.cleandoc(told.__doc__ or "")
    found = re.search(rf"^{section}\n-+\n(.*?)(?=^\w[^\n]*\n-+\n|\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"{told} has no section {section}")
    entries: dict[str, str] = {}
    for names, lines in re.findall(r"^(\S[^\n]*)\n((?:[ \t]+\S[^\n]*(?:\n|\Z)|\n)+)", found[1], re.MULTILINE):
        entries |= dict.fromkeys(names.split(", "), markdown(" ".join(lines.split())))
    return entries


def default_of(value: Any) -> str:
    """A default as it would be typed; empty where there is none."""
    return "" if value is inspect.Parameter.empty else f"`{value!r}`"


def rows_of(told: Callable[..., Any], *, leave_out: tuple[str, ...] = ()) -> list[tuple[str, str, str]]:
    """Name, default and meaning of each argument of a function, or of each field of a dataclass.

    Raises
    ------
    ValueError
        One of them is not described, or something is described that is none.
    """
    texts = described(told, "Attributes" if dataclasses.is_dataclass(told) else "Parameters")
    defaults = {
        name: one.default
        for name, one in inspect.signature(told).parameters.items()
        if name not in ("self", *leave_out)
    }
    texts = {name: text for name, text in texts.items() if name not in leave_out}
    if set(defaults) != set(texts):
        raise ValueError(f"{told}: its arguments are {sorted(defaults)}, and its docstring describes {sorted(texts)}")
    return [(name, default_of(default), texts[name]) for name, default in defaults.items()]
