"""The state for a stateful frame's operator, as ``fleet.stateful`` got it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from pyspark.sql import DataFrame

from coordinator.model.errors import InvalidRequestError
from coordinator.model.names import check_state_name
from coordinator.model.schema import OperatorKind
from spark_jobs.plan.logical import analysed, refused_modes
from spark_jobs.plan.operator_plan import OperatorPlan, QueryModes
from spark_jobs.plan.operator_rules import OUTPUT_MODES, query_modes
from spark_jobs.plan.spark_errors import InvalidArgumentError, RefusedQueryError

#: Tasks number shards with 16 bits.
_MAX_SHARDS = 1 << 15


@dataclass(frozen=True)
class Target:
    """The name and the options of a state, and the function that gives it to an operator."""

    name: str
    #: None for the operator's default.
    output_mode: str | None
    #: None if the fleet chooses.
    shards: int | None
    run_plan: Callable[[str, OperatorPlan, QueryModes], DataFrame] = field(compare=False, repr=False)

    def checked(self) -> Target:
        """Return the target after a check, with its output mode in lower case.

        Raises
        ------
        InvalidRequestError
            The name, the output mode or the number of shards is not valid.
        """
        check_state_name(self.name)
        # Case does not matter, as in Spark.
        mode = self.output_mode.lower() if isinstance(self.output_mode, str) else self.output_mode
        if mode is not None and mode not in OUTPUT_MODES:
            raise InvalidArgumentError(
                f"the output mode is one of {', '.join(OUTPUT_MODES)}", state=self.name, outputMode=self.output_mode
            )
        if self.shards is not None and (type(self.shards) is not int or not 1 <= self.shards <= _MAX_SHARDS):
            raise InvalidRequestError(
                f"shards is a number from 1 to {_MAX_SHARDS}; leave it out for the cluster's parallelism",
                state=self.name,
                shards=self.shards,
            )
        return replace(self, output_mode=mode)

    def mode(self, default: str) -> str:
        """Return the output mode that the user has set, or an operator's default."""
        return default if self.output_mode is None else self.output_mode

    def run(self, plan: OperatorPlan, spark_frame: DataFrame, refused: Mapping[str, str] | None = None) -> DataFrame:
        """Return an operator's results.

        `spark_frame` is the query with Spark's own operator; where Spark has none, the query below the operator. `refused`, for an
        operator that has the query's output mode, are the modes that the fleet refuses, and why; None if it has a mode of its own.
        Raises InvalidRequestError if it does not run in the mode that the user has set, or in any mode that its query could have.
        """
        possible = query_modes(plan.schema) if refused is None else OUTPUT_MODES
        by_spark = refused_modes(analysed(spark_frame), OUTPUT_MODES)
        # Spark refuses all sessions that are updated, and the fleet has them.
        if plan.schema.operator is OperatorKind.SESSION and "ession window" in by_spark.get("update", ""):
            del by_spark["update"]
        reasons = {**by_spark, **(refused or {})}
        mode = None if refused is not None else plan.schema.output_mode
        modes = QueryModes(
            mode, tuple(possible_mode for possible_mode in possible if possible_mode not in reasons), reasons
        )
        result = self.run_plan(self.name, plan, modes)
        # Checked last, as errors of the fleet itself say how to fix the query.
        needed = possible if self.output_mode is None else (self.output_mode,)
        if reasons.keys() >= {*needed}:
            raise RefusedQueryError(
                "Spark does not run this query with an operator of its own, so neither does the fleet; nothing was started: "
                + by_spark[plan.schema.output_mode],
                state=self.name,
                outputMode=plan.schema.output_mode,
            )
        return result
