"""What state machines share that look at a table through many versions."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import initialize

from store_actors.engine import versions
from tests.unit.freezing import FreezingMachine

__all__ = ["CompactingMachine"]


class CompactingMachine(FreezingMachine):
    """Its tables let go of strings and lists with every version, or only when their pools have doubled."""

    def __init__(self) -> None:
        super().__init__()
        self._small_pool = versions._SMALL_POOL

    @initialize(always=st.booleans())
    def choose_when_to_compact(self, always: bool) -> None:
        if always:
            versions._SMALL_POOL = -(1 << 40)

    def teardown(self) -> None:
        super().teardown()
        versions._SMALL_POOL = self._small_pool
