"""Runs programs of pages as they stand."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import Any

from tests.code_blocks import Block


def run_blocks(blocks: Iterable[Block], scope: dict[str, Any], places: dict[str, str]) -> None:
    """Run blocks in one scope; what stands behind an expression as a comment is its value.

    Parameters
    ----------
    places
        What a user would put in for places that the page names.
    """
    for block in blocks:
        name, code = str(block), block.code
        for placeholder, replacement in places.items():
            code = code.replace(placeholder, replacement)
        lines = code.splitlines()
        for statement in ast.parse(code).body:
            value = lines[(statement.end_lineno or 1) - 1][statement.end_col_offset or 0 :].partition("# ")[2]
            if isinstance(statement, ast.Expr) and _is_value(value):
                result = eval(compile(ast.Expression(statement.value), name, "eval"), scope)
                assert result == ast.literal_eval(value), f"{name}: {ast.unparse(statement)}"
            else:
                exec(compile(ast.Module([statement], []), name, "exec"), scope)


def _is_value(text: str) -> bool:
    try:
        ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return False
    return True
