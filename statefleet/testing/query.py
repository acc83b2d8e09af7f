"""A user's query run on a fleet that fails by a seed, and on Spark's own state store, which says what its sink should have."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Timer
from typing import Any, Literal

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T
from pyspark.sql.streaming.query import StreamingQuery

from coordinator.model.errors import InvalidRequestError
from coordinator.service.calls import RayActors
from spark_jobs.session.spark_connect import check_classic
from statefleet.fleet import Fleet
from statefleet.testing.faults import Faults
from statefleet.testing.results import ResultsDifferError, difference, normal
from statefleet.testing.source import Input, Inputs

#: Writes the rows of a batch to a sink in a folder: the rows, the batch's number, the folder.
Write = Callable[[DataFrame, int, Path], Any]
#: Returns the content of a sink in a folder: a DataFrame, or rows.
Read = Callable[[SparkSession, Path], Any]
Batch = Mapping[str, Sequence[Any]] | Sequence[Any]


class _SparkStores:
    """Stands for the fleet where a query runs on Spark's own state store; it has nothing to kill or to drop."""

    def stateful(
        self,
        df: DataFrame,
        *,
        name: str,
        outputMode: str | None = None,
        shards: int | None = None,
    ) -> DataFrame:
        """Return the DataFrame, whose next operator is Spark's."""
        return df

    def kill_store_actor(self, victim: int) -> None:
        pass

    def drop_states(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"fleet.{name} is not there where the query runs on Spark's own stores, for which only fleet.stateful has a meaning; test "
            "this query with oracle='fleet'"
        )


class _TestedFleet:
    """A fleet in which states have names of the run's own."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet, self._prefix = fleet, f"test-{uuid.uuid4().hex[:8]}-"

    def stateful(self, df: DataFrame, *, name: str, shards: int | None = None, **options: Any) -> Any:
        """Return a stateful DataFrame, with two shards by default."""
        return self._fleet.stateful(df, name=f"{self._prefix}{name}", shards=2 if shards is None else shards, **options)

    def attach(self, *args: Any, **options: Any) -> DataFrame:
        """Refuse stores of a program's own, whose names the program gives."""
        raise InvalidRequestError(
            "map_partitions_with_state_store cannot be tested with QueryTester, only fleet.stateful"
        )

    def kill_store_actor(self, victim: int) -> None:
        """Kill a store actor, by its number; Ray starts it again."""
        actors = RayActors()
        alive = sorted(actor["actor_name"] for actor in self._fleet.status()["store_actors"] if actor["alive"])
        handle = actors.find(alive[victim % len(alive)]) if alive else None
        if handle is not None:
            actors.kill(handle, restart=True)

    def drop_states(self) -> None:
        for name in self._fleet.states():
            if name.startswith(self._prefix):
                self._fleet.drop(name, is_over=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fleet, name)


@dataclass
class _Memory:
    """The sink without a writer of the user's: the rows of each batch, of which a repetition replaces the rows."""

    batches: dict[int, list[Any]] = field(default_factory=dict)

    def write(self, rows: DataFrame, batch_id: int, folder: Path) -> None:
        self.batches[batch_id] = rows.collect()

    def read(self, spark: SparkSession, folder: Path) -> list[Any]:
        return [row for batch in self.batches.values() for row in batch]


_Stores = _SparkStores | _TestedFleet


class _EndedOnPurposeError(Exception):
    """The query ends here, between its sink's write and Spark's commit."""


#: Logs each error of a function that Java calls, such as that of ``foreachBatch``.
_CALLBACKS = logging.getLogger("py4j.clientserver")


def _is_no_end_on_purpose(record: logging.LogRecord) -> bool:
    """Return whether a log record is of anything but a query that ends on purpose."""
    return record.exc_info is None or not isinstance(record.exc_info[1], _EndedOnPurposeError)


class QueryTester:
    """Tests queries of a user on a fleet that fails, against the same queries on Spark's own state store.

    Parameters
    ----------
    spark, fleet
        A session, and a fleet on its Ray cluster: those of :func:`~statefleet.testing.session.local_session`. No other query may use
        the fleet meanwhile, since its store actors are killed.
    folder
        Folder for inputs, checkpoints and sinks.
    seeds
        Seeds of :meth:`check`, if the call gives none.

    Raises
    ------
    SetupError
        It is a session of Spark Connect.
    """

    def __init__(self, spark: SparkSession, fleet: Fleet, folder: Path, seeds: Sequence[int] = (0, 1)) -> None:
        check_classic(spark)
        self._spark, self._fleet, self._folder, self._seeds = spark, fleet, folder, tuple(seeds)

    def check(
        self,
        query: Callable[..., DataFrame],
        inputs: Mapping[str, T.StructType | str],
        batches: Sequence[Batch],
        *,
        outputMode: str = "append",
        write: Write | None = None,
        read: Read | None = None,
        seeds: Sequence[int] | None = None,
        kills: bool = True,
        repeats: bool = True,
        reorders: bool = True,
        oracle: Literal["spark", "fleet"] = "spark",
    ) -> None:
        """Compare a query's sink on a fleet that fails, after each batch, with that of the query on Spark's own state store.

        Parameters
        ----------
        query
            Builds the query: ``query(fleet, clicks=..)``, from the fleet and the inputs by their names. It calls
            ``fleet.stateful(df, name=..)`` before each stateful operator, as in production; on Spark's stores that returns `df`.
        inputs
            Columns of each input, as Spark's type or in DDL.
        batches
            Rows of each batch by input, as tuples, dicts or Rows; of a single input also without its name.
        outputMode
            Output mode of the query.
        write
            Writes a batch to the sink, ``write(rows, batch_id, folder)``: the query's ``foreachBatch`` with the folder of a run, which
            is empty at first. By default the rows that the query emits are collected.
        read
            Returns what is in the sink, ``read(spark, folder)``: a DataFrame or rows. The order of rows does not count.
        seeds
            A run for each; by default those of the tester.
        kills
            Whether store actors are killed, before batches and in them.
        repeats
            Whether the query ends between the sink's write and Spark's commit, and is started again: Spark then repeats the batch.
        reorders
            Whether the rows of a batch come in another order than on Spark.
        oracle
            ``spark``, or ``fleet`` for the same query on the fleet without faults: for a query that this Spark cannot run by itself,
            such as ``topN``.

        Raises
        ------
        ResultsDifferError
            The sinks differ: the error has the first difference, the faults before it, and the seed.
        InvalidRequestError
            An argument is not valid.
        """
        __tracebackhide__ = True
        if (write is None) != (read is None):
            raise InvalidRequestError("give both write and read: what is written is compared as it is read")
        if not batches:
            raise InvalidRequestError("a query is tested with at least one batch")
        sources = Inputs(self._spark, inputs)
        fed = [sources.rows(batch) for batch in batches]
        case = _Case(self._spark, query, sources, outputMode, write, read)
        without = Faults(0, len(fed), kills=False, repeats=False, reorders=False)
        expected: list[list[Any]] = []
        stores: _Stores = _SparkStores() if oracle == "spark" else _TestedFleet(self._fleet)
        case.run(self._new_folder(), stores, fed, without, lambda _, rows, __: expected.append(rows))
        for seed in self._seeds if seeds is None else seeds:
            faults = Faults(seed, len(fed), kills=kills, repeats=repeats, reorders=reorders)
            try:
                observe = _comparison(seed, expected, oracle)
                case.run(self._new_folder(), _TestedFleet(self._fleet), fed, faults, observe)
            except ResultsDifferError:
                raise
            except Exception as error:
                error.add_note(
                    f"statefleet.testing: on the fleet, with seed {seed}; on {_ORACLES[oracle]} the query ran"
                )
                raise

    def _new_folder(self) -> Path:
        folder = self._folder / uuid.uuid4().hex[:8]
        folder.mkdir(parents=True)
        return folder


#: Called with the number of a step, the sink's rows after it and what was done to the query so far.
Observe = Callable[[int, list[Any], list[str]], None]
_ORACLES = {"spark": "Spark's own state store", "fleet": "the fleet without faults"}


def _comparison(seed: int, expected: Sequence[list[Any]], oracle: str) -> Observe:
    def compare(step: int, rows: list[Any], events: list[str]) -> None:
        __tracebackhide__ = True  # pytest shows the user's line
        change = difference(expected[step], rows)
        if change is not None:
            done = "\n".join(f"  {event}" for event in events) or "  nothing"
            raise ResultsDifferError(
                f"after batch {step} of the test the sink has other rows than on {_ORACLES[oracle]} (seed {seed}):\n{change}\n"
                f"what was done until then:\n{done}\nto run this again: check(.., seeds=[{seed}])",
                seed,
                step,
                change.missing,
                change.extra,
            )

    return compare


@dataclass(frozen=True)
class _Case:
    spark: SparkSession
    query: Callable[..., DataFrame]
    inputs: Inputs
    mode: str
    write: Write | None
    read: Read | None

    def run(
        self, folder: Path, stores: _Stores, fed: Sequence[Sequence[Input]], faults: Faults, observe: Observe
    ) -> None:
        """Run the query over all batches, with faults; its sink is observed after each."""
        __tracebackhide__ = True
        run = _Run(self, folder, stores, faults)
        _CALLBACKS.addFilter(_is_no_end_on_purpose)
        try:
            for step, rows in enumerate(fed):
                run.feed(step, rows)
                observe(step, run.rows(), run.events)
        finally:
            _CALLBACKS.removeFilter(_is_no_end_on_purpose)
            run.stop()
            stores.drop_states()


class _Run:
    """A run of a case, which ends and is started again as its faults say."""

    def __init__(self, case: _Case, folder: Path, stores: _Stores, faults: Faults) -> None:
        self._case, self._stores, self._faults = case, stores, faults
        self._input, self._checkpoint, self._sink = (folder / name for name in ("input", "checkpoint", "sink"))
        for part in (self._input, self._sink):
            part.mkdir()
        memory = _Memory()
        self._write_sink, self._read_sink = case.write or memory.write, case.read or memory.read
        self.events: list[str] = []
        self._query: StreamingQuery | None = None
        self._step = 0
        #: Batches of the step, in their order, and those that were ended on purpose.
        self._batches: list[int] = []
        self._ended: set[int] = set()
        #: Number of those after which the query is started again.
        self._starts = 0
        self._timers: list[Timer] = []

    def feed(self, step: int, rows: Sequence[Input]) -> None:
        """Feed the rows of a step, and wait until all its batches are done."""
        self._step, self._batches = step, []
        kill = self._faults.kill(step)
        if kill is not None:
            self.events.append(f"batch {step}: {kill}")
            if kill.after_s is None:
                self._stores.kill_store_actor(kill.victim)
        self._case.inputs.write(self._input, step, self._faults.ordered(step, rows))
        while not self._is_done():
            pass
        for timer in self._timers:
            timer.join()
        self._timers.clear()

    def _start(self) -> None:
        frame: object = self._case.query(self._stores, **self._case.inputs.streams(self._input))
        if not isinstance(frame, DataFrame) or not frame.isStreaming:
            raise InvalidRequestError(
                "the query is a function that returns a streaming DataFrame", got=type(frame).__name__
            )
        writer = frame.writeStream.outputMode(self._case.mode).foreachBatch(self._write)
        self._query = writer.option("checkpointLocation", str(self._checkpoint)).start()

    def _is_done(self) -> bool:
        """Wait for the input so far; return False if the query was ended on purpose, and is to be started again."""
        if self._query is None:
            self._start()
        assert self._query is not None
        try:
            self._query.processAllAvailable()
        except StreamingQueryException:
            if len(self._ended) == self._starts:
                raise
            self._starts, self._query = len(self._ended), None
            return False
        return True

    def _write(self, rows: DataFrame, batch_id: int) -> None:
        """Write a batch to the sink; end the query afterwards, if the batch is to be repeated."""
        if batch_id not in self._batches:
            self._batches.append(batch_id)
        number = self._batches.index(batch_id)
        kill = self._faults.kill(self._step)
        if number == 0 and batch_id not in self._ended and kill is not None and kill.after_s is not None:
            timer = Timer(kill.after_s, self._stores.kill_store_actor, [kill.victim])
            self._timers.append(timer)
            timer.start()
        self._write_sink(rows, batch_id, self._sink)
        if batch_id not in self._ended and self._faults.repeats(self._step, number):
            self._ended.add(batch_id)
            kind = "" if number == 0 else ", which has no rows,"
            self.events.append(
                f"batch {self._step}: the query ended after the sink's write of Spark's batch {batch_id}{kind} before Spark's commit, "
                "and was started again"
            )
            raise _EndedOnPurposeError(f"the test ends the query here; Spark repeats batch {batch_id}")

    def rows(self) -> list[Any]:
        content = self._read_sink(self._case.spark, self._sink)
        rows: Iterable[Any] = content.collect() if isinstance(content, DataFrame) else content
        return normal(rows)

    def stop(self) -> None:
        """End the query; a kill that is still to come does not reach the next run."""
        for timer in self._timers:
            timer.cancel()
        if self._query is not None:
            self._query.stop()
