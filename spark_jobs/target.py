"""The state that a stateful frame's operator is to have: what ``fleet.stateful`` was given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from pyspark.sql import DataFrame

from coordinator.model.errors import InvalidRequestError
from coordinator.model.names import check_state_name
from spark_jobs.plan.logical import analysed
from spark_jobs.plan.operator_plan import OperatorPlan, QueryModes
from spark_jobs.plan.streaming_rules import refused_modes
from spark_jobs.plan.timing import OUTPUT_MODES, query_modes

__all__ = ["Target"]

#: As tasks number them.
_MAX_SHARDS = 1 << 15


@dataclass(frozen=True)
class Target:
    """A state by name, and how an operator gets it.

    Attributes
    ----------
    output_mode
        None if the operator has its usual one.
    shards
        None if the fleet chooses.
    closing
        By which watermark state is let go: ``spark`` or ``early``.
    run_plan
        Gives an operator its state, and its results.
    """

    name: str
    output_mode: str | None
    shards: int | None
    closing: str
    run_plan: Callable[[OperatorPlan, QueryModes], DataFrame] = field(compare=False, repr=False)

    def checked(self) -> Target:
        """The target, with its output mode in Spark's spelling.

        Raises
        ------
        InvalidRequestError
            The name, the output mode, the number of shards or the closing is not valid.
        """
        check_state_name(self.name)
        # In any case, as Spark takes them.
        mode = self.output_mode.lower() if isinstance(self.output_mode, str) else self.output_mode
        if mode is not None and mode not in OUTPUT_MODES:
            raise InvalidRequestError(
                f"the output mode is one of {', '.join(OUTPUT_MODES)}", state=self.name, outputMode=self.output_mode
            )
        if self.shards is not None and (type(self.shards) is not int or not 1 <= self.shards <= _MAX_SHARDS):
            raise InvalidRequestError(
                f"shards is a number from 1 to {_MAX_SHARDS}; leave it out for the cluster's parallelism",
                state=self.name,
                shards=self.shards,
            )
        if self.closing not in ("spark", "early"):
            raise InvalidRequestError("closing is spark or early", state=self.name, closing=self.closing)
        return replace(self, output_mode=mode)

    def mode(self, usual: str) -> str:
        """The output mode that was given, or an operator's usual one."""
        return usual if self.output_mode is None else self.output_mode

    def run(self, plan: OperatorPlan, own: DataFrame, refused: Mapping[str, str] | None = None) -> DataFrame:
        """An operator's results.

        Parameters
        ----------
        own
            The query with Spark's own operator; what is below it where Spark has none.
        refused
            Of an operator that has the query's output mode, modes that the fleet refuses, and why; None if it has one of its own.

        Raises
        ------
        InvalidRequestError
            It does not run in the mode that was given, or in any that its query could have.
        """
        possible = query_modes(plan.schema) if refused is None else OUTPUT_MODES
        by_spark = refused_modes(analysed(own), OUTPUT_MODES)
        words = {**by_spark, **(refused or {})}
        mode = None if refused is not None else plan.schema.output_mode
        modes = QueryModes(mode, tuple(one for one in possible if one not in words), words)
        result = self.run_plan(plan, modes)
        # Last: what the fleet refuses itself comes with its remedy.
        needed = possible if self.output_mode is None else (self.output_mode,)
        if words.keys() >= {*needed}:
            raise InvalidRequestError(
                "Spark does not run this query with an operator of its own, so neither does the fleet; nothing was started: "
                + by_spark[plan.schema.output_mode],
                state=self.name,
                outputMode=plan.schema.output_mode,
            )
        return result
