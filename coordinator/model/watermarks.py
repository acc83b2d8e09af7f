"""Watermarks of a stateful operator: how far its event time has come. Spark gives them for each batch. Pure."""

from __future__ import annotations

from msgspec import Struct, structs


class Watermarks(Struct, frozen=True):
    """Watermarks of one operator after a version, in milliseconds since the epoch."""

    #: Rows up to it are late in the next batch; state up to it is closed in this one.
    input_ms: int = 0
    #: Rows that the operator emits later are newer.
    output_ms: int = 0

    def reached(self, watermark_ms: int) -> Watermarks:
        """Return the watermarks of a batch for which Spark gives the operator's own; they never go back."""
        return structs.replace(self, input_ms=max(self.input_ms, watermark_ms))
