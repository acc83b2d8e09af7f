"""Keys as text."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

_DASHES = (8, 13, 18, 23)


def uuids(count: int) -> pa.Array:
    """Return random UUIDs as text, the same for the same number."""
    digits = np.frombuffer(np.random.default_rng(count).bytes(16 * count).hex().encode(), "S1").reshape(count, 32)
    text = np.full((count, 36), b"-", "S1")
    text[:, [place for place in range(36) if place not in _DASHES]] = digits
    offsets = pa.py_buffer(np.arange(0, 36 * count + 1, 36, dtype=np.int32))
    return pa.StringArray.from_buffers(count, offsets, pa.py_buffer(text.tobytes()))
