"""Watermarks of a stateful operator: how far its event time has come. Spark gives them for each batch. Pure."""

from __future__ import annotations

from msgspec import Struct, structs


class Watermarks(Struct, frozen=True):
    """Watermarks of one operator after a version, in milliseconds since the epoch.

    Attributes
    ----------
    input_ms
        Rows up to it are late in the next batch; state up to it is closed in this one.
    output_ms
        Rows that the operator emits later are newer.
    """

    input_ms: int = 0
    output_ms: int = 0

    def reached(self, watermark_ms: int) -> Watermarks:
        """Return the watermarks of a batch for which Spark gives the operator's own; they never go back."""
        return structs.replace(self, input_ms=max(self.input_ms, watermark_ms))
