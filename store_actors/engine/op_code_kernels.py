"""Numbers of the steps that move accumulators, as constants of the compiled loops.

They are in a file of kernels because the compiled loops contain them: ``compiled_code.drop_stale`` deletes all compiled kernels once a
file of kernels has changed.
"""

from __future__ import annotations

from enum import IntEnum


class OpCode(IntEnum):
    """Steps of ``row_kernels``, ``fold_kernels`` and ``sketch_kernels``; each code is compared by its name there.

    A code that none of them knows raises ValueError when a row is folded.
    """

    COUNT = 0
    ADD_INT = 1
    ADD_FLOAT = 2
    ADD_DECIMAL = 3
    MIN_INT = 4
    MAX_INT = 5
    MIN_FLOAT = 6
    MAX_FLOAT = 7
    MIN_DECIMAL = 8
    MAX_DECIMAL = 9
    MIN_STRING = 10
    MAX_STRING = 11
    FIRST = 12
    LAST = 13
    MOMENTS = 14
    MERGE_MOMENTS = 15
    MULTIPLY_FLOAT = 16
    AND_INT = 17
    OR_INT = 18
    XOR_INT = 19
    ADD_INT_CHECKED = 20
    MIN_BY_INT = 21
    MAX_BY_INT = 22
    MIN_BY_FLOAT = 23
    MAX_BY_FLOAT = 24
    MIN_BY_DECIMAL = 25
    MAX_BY_DECIMAL = 26
    MIN_BY_STRING = 27
    MAX_BY_STRING = 28
    CO_MOMENTS = 29
    MERGE_CO_MOMENTS = 30
    ADD_HASH = 31
    MERGE_REGISTERS = 32
    SET_BIT = 33
    OR_WORDS = 34
    COUNT_LONG = 35
    COUNT_HASHES = 36
    MERGE_COUNTS = 37
    ADD_TO_BINS = 38
    MERGE_BINS = 39
    MIN_NESTED = 40
    MAX_NESTED = 41
    MIN_BY_NESTED = 42
    MAX_BY_NESTED = 43
