"""Watermarks of a stateful operator: how far its event time has come. Pure.

By default Spark gives them for each batch (:meth:`Watermarks.reached`). An operator that closes early goes by the rows of the batch
itself, by Spark's rules for several sources and for chained operators (:meth:`Watermarks.after`):

Each ``withWatermark`` of a query is a source. A source's own watermark is the largest event time seen less its delay; the query's
is the smallest (policy ``min``) or largest (``max``) of all, a source without data counting as 0, and it never goes back
(Spark's ``WatermarkTracker``). An operator that is fed by other operators goes by what those let through: the smallest of their
output watermarks (Spark's ``WatermarkPropagator``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

__all__ = ["Watermarks"]


@dataclass(frozen=True, slots=True)
class Watermarks:
    """Watermarks of one operator after a version, in milliseconds since the epoch.

    Attributes
    ----------
    input_ms
        Rows up to it are late in the next batch; state up to it is closed in this one.
    output_ms
        Rows that the operator emits later are newer.
    sources
        Own watermark of each source that has had data, by name.
    """

    input_ms: int = 0
    output_ms: int = 0
    sources: Mapping[str, int] = field(default_factory=dict)

    def after(
        self,
        observed: Mapping[str, int],
        upstream: Sequence[Watermarks],
        *,
        sources: Sequence[str],
        policy: str,
        is_fed_directly: bool,
    ) -> Watermarks:
        """Return the watermarks that include a batch. The operator says how far the watermark of its output moves.

        Parameters
        ----------
        observed
            Own watermark of each source that the batch had rows of.
        upstream
            Of the operators that feed this one, with this batch included.
        sources
            Every source of the operator and of those that feed it.
        policy
            ``min`` or ``max`` (``spark.sql.streaming.multipleWatermarkPolicy``).
        is_fed_directly
            Whether rows also come from a source without an operator between.
        """
        newest = dict(self.sources)
        for by_source in (observed, *(watermarks.sources for watermarks in upstream)):
            for name, watermark_ms in by_source.items():
                newest[name] = max(watermark_ms, newest.get(name, watermark_ms))
        choose = max if policy == "max" else min
        inputs = [watermarks.output_ms for watermarks in upstream]
        if is_fed_directly and sources:
            inputs.append(choose(newest.get(name, 0) for name in sources))
        input_ms = max(self.input_ms, min(inputs, default=0))
        return Watermarks(input_ms, self.output_ms, newest)

    def reached(self, watermark_ms: int) -> Watermarks:
        """Return the watermarks of a batch for which Spark gives the operator's own; they never go back."""
        return replace(self, input_ms=max(self.input_ms, watermark_ms))

    def to_json(self) -> dict[str, Any]:
        """Return the watermarks as the manifest records them."""
        return asdict(self)
