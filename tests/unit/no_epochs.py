"""What a server of hand-overs calls for tasks of continuous queries, where a test has none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, BinaryIO


def no_epochs(request: Mapping[str, Any], operator: bytes, source: BinaryIO, sink: BinaryIO) -> None:
    raise AssertionError("no task of a continuous query is expected")
