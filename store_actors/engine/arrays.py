"""What the engine's arrays hold."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["Bytes", "Mask", "Slots", "Words"]

#: Rows, keys and values as 64-bit words (``words.py``).
Words = npt.NDArray[np.uint64]
#: Places of rows in a table, and other whole numbers.
Slots = npt.NDArray[np.int64]
#: Bytes of strings; or, for compiled loops, 1 and 0.
Bytes = npt.NDArray[np.uint8]
#: Which of some rows.
Mask = npt.NDArray[np.bool_]
