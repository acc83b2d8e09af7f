"""Kinds of the parts of a nested type, as constants of the compiled loops.

They are in a file of kernels because the compiled loops contain them: ``compiled_code.drop_stale`` deletes all compiled kernels once a
file of kernels has changed.
"""

from __future__ import annotations

from enum import IntEnum


class PartKind(IntEnum):
    """Kinds that ``nested_kernels`` compares, each by its name there. A kind takes the last three bits of a part's line.

    A kind that it does not know raises ValueError when a value is compared.
    """

    INTEGER = 0
    FLOAT = 1
    TEXT = 2
    LIST = 3
    STRUCT = 4
