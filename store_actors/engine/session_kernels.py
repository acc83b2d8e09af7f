"""Compiled loops of session windows (``operators/session_windows.py``): events in order, cut into sessions, folded into rows.

An event is a session of the state or an input row: a key's place, a start, an end. Those of the state are numbered first.
"""

from __future__ import annotations

import numpy as np
from numba import njit, void
from numba.types import Tuple, boolean, int64, uint8, uint64

from store_actors.engine.index_kernels import _BLOCK
from store_actors.engine.row_kernels import _fold_block

#: Events that are sorted by insertion, before sorted runs of them are merged.
_RUN = 16

u64_2, i64_1, i64_2, u8_1, u8_2 = uint64[:, ::1], int64[::1], int64[:, ::1], uint8[::1], uint8[:, ::1]


@njit(boolean(int64, int64, i64_1, i64_1, int64), cache=True, nogil=True, inline="always")
def _precedes(left, right, starts, ends, states):
    # As Spark sorts: by start; a session of the state before input rows with its start; these by end.
    if starts[left] != starts[right]:
        return starts[left] < starts[right]
    if left < states or right < states:
        return left < states <= right
    return ends[left] < ends[right]


@njit(void(i64_1, i64_1, int64, int64, i64_1, i64_1, int64), cache=True, nogil=True)
def _sort(order, scratch, begin, stop, starts, ends, states):
    """Sort the events ``order[begin:stop]`` of one key; stable."""
    for run in range(begin, stop, _RUN):
        for position in range(run + 1, min(run + _RUN, stop)):
            event, hole = order[position], position
            while hole > run and _precedes(event, order[hole - 1], starts, ends, states):
                order[hole] = order[hole - 1]
                hole -= 1
            order[hole] = event
    width = _RUN
    while width < stop - begin:
        for run in range(begin, stop - width, 2 * width):
            middle, end = run + width, min(run + 2 * width, stop)
            # Input comes about in the order of time: most runs follow each other already.
            if not _precedes(order[middle], order[middle - 1], starts, ends, states):
                continue
            scratch[run:middle] = order[run:middle]
            left, right, position = run, middle, run
            while left < middle:
                if right < end and _precedes(order[right], scratch[left], starts, ends, states):
                    order[position] = order[right]
                    right += 1
                else:
                    order[position] = scratch[left]
                    left += 1
                position += 1
        width *= 2


@njit(void(i64_1, i64_1, i64_1, int64, i64_1, i64_1), cache=True, nogil=True)
def arrange(key_numbers, starts, ends, states, bounds, order):
    """Put events in order within their keys.

    ``bounds`` (one more than keys, zeros) gets where each key's events begin in ``order``. The first ``states`` events are
    sessions of the state.
    """
    for event in range(key_numbers.shape[0]):
        bounds[key_numbers[event] + 1] += 1
    for key in range(1, bounds.shape[0]):
        bounds[key] += bounds[key - 1]
    cursor = bounds.copy()
    for event in range(key_numbers.shape[0]):
        order[cursor[key_numbers[event]]] = event
        cursor[key_numbers[event]] += 1
    scratch = np.empty(key_numbers.shape[0], np.int64)
    for key in range(bounds.shape[0] - 1):
        _sort(order, scratch, bounds[key], bounds[key + 1], starts, ends, states)


@njit(
    Tuple((int64, int64))(i64_1, i64_1, int64, i64_1, i64_1, i64_1, i64_1, i64_1, i64_1, i64_1, i64_2),
    cache=True, nogil=True,
)  # fmt: skip
def cut(
    starts, ends, states, bounds, order, input_order, input_piece, piece_state, piece_session, session_key, session_times
):  # fmt: skip
    """Cut the arranged events into sessions; those without an input row are left out.

    A session consists of pieces: a session of the state (``piece_state``; -1: none) and the input rows that follow it. Input
    rows are given in order, by ``input_order`` and ``input_piece``. Sessions get their key's index, start and end.

    Returns
    -------
    tuple
        (pieces, sessions)
    """
    inputs = pieces = sessions = 0
    for key in range(bounds.shape[0] - 1):
        stop, position = bounds[key + 1], bounds[key]
        while position < stop:
            begin = position
            end = ends[order[begin]]
            fresh = 0
            # Sessions that only touch are merged, too (`sessionStart <= getSessionEnd` of Spark's MergingSessionsIterator).
            while position < stop and starts[order[position]] <= end:
                end = max(end, ends[order[position]])
                fresh += order[position] >= states
                position += 1
            if fresh == 0:
                continue
            for number in range(begin, position):
                event = order[number]
                if event < states or number == begin:
                    piece_state[pieces] = event if event < states else -1
                    piece_session[pieces] = sessions
                    pieces += 1
                if event >= states:
                    input_order[inputs] = event - states
                    input_piece[inputs] = pieces - 1
                    inputs += 1
            session_key[sessions] = key
            session_times[sessions, 0] = starts[order[begin]]
            session_times[sessions, 1] = end
            sessions += 1
    return pieces, sessions


@njit(void(i64_2, u64_2, i64_1, u64_2, u8_2, i64_2, u8_1, i64_1), cache=True, nogil=True)
def fold(operations, rows, targets, values, valid, limits, arena, offsets):
    """Move the accumulators of ``rows[targets]`` by a batch, in its order."""
    rows_i, rows_f, values_f = rows.view(np.int64), rows.view(np.float64), values.view(np.float64)
    for begin in range(0, targets.shape[0], _BLOCK):
        end = min(begin + _BLOCK, targets.shape[0])
        _fold_block(
            operations, rows, rows_i, rows_f, targets[begin:end], values, values_f, valid, begin, end, limits, arena, offsets
        )  # fmt: skip
