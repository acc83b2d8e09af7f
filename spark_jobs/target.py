"""The state that a stateful frame's operator is to have: what ``fleet.stateful`` was given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from pyspark.sql import DataFrame

from coordinator.errors import InvalidRequestError
from coordinator.names import check_state_name
from spark_jobs.plan.logical import analysed
from spark_jobs.plan.operator_plan import OperatorPlan
from spark_jobs.plan.streaming_rules import check_as_spark_would

__all__ = ["Target"]

_OUTPUT_MODES = ("update", "append", "complete")


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
    run_plan: Callable[[OperatorPlan], DataFrame] = field(compare=False, repr=False)

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
        if mode is not None and mode not in _OUTPUT_MODES:
            raise InvalidRequestError(
                f"the output mode is one of {', '.join(_OUTPUT_MODES)}", state=self.name, outputMode=self.output_mode
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

    def run(self, plan: OperatorPlan, own: DataFrame, mode: str) -> DataFrame:
        """An operator's results.

        Parameters
        ----------
        own
            The query with Spark's own operator; what is below it where Spark has none.
        mode
            Output mode of the operator.
        """
        result = self.run_plan(plan)
        # Last: what the fleet refuses itself comes with its remedy.
        check_as_spark_would(analysed(own), mode, self.name)
        return result
