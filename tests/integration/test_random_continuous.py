"""Random programs in epochs beside batches: the same results, and the same state, as in micro-batches and by Spark itself.

Which rows are late, and what closes when, depends on where epochs end, and that on the machine. So a program first runs continuously.
Spark's offset log then says which rows each epoch had, and micro-batches are given just these rows, an epoch a batch: the fleet's, and
Spark's own. So late rows may come at any time, and all three have to drop the same. (Between two batches Spark has one without data, as
soon as the watermark moves; so a batch goes by the watermark of all rows before it, as an epoch does.)

A failure names its seed and shows its program; ``-k "seed-17]" -m ''`` runs that one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, Row, SparkSession

from statefleet.fleet import Fleet
from tests.clocks import until
from tests.integration.case_systems import Inputs, configured, on_fleet, on_spark, rescale
from tests.integration.operator_cases import Operators
from tests.integration.random_inputs import COLUMNS
from tests.integration.random_programs import Program, continuous_program
from tests.integration.rate_epochs import NumberedRows, committed, comparable, started, values_read, view
from tests.integration.streams import Run, stopping

#: Seeds that every change is tried with, for two of a program's four steps, one of each kind of operator; and those of `./run replay`.
FEW, ALL = (12, 16, 1, 26), 60
#: Numbers of the source in a second; how many pass before the first row; and from the rows of a file to the next: more than an epoch.
RATE, FIRST, GAP = 400, 800, 140
#: Digits of a state's floats that do not depend on the order in which values were added.
DIGITS = 9


def run_in_epochs(
    frame: DataFrame, rows: NumberedRows, folder: Path, name: str, mode: str, amid: Callable[[], None]
) -> tuple[list[list[int]], list[Row]]:
    """Run a query continuously until all rows were read; return the numbers that each epoch read, and the results.

    Parameters
    ----------
    amid
        Called when an epoch with rows has been committed.
    """
    numbers, read = {*rows.numbers}, list[set[int]]()
    is_amid = False
    with stopping(started(frame, folder, "memory", name, mode)) as query:

        def has_all() -> bool:
            nonlocal is_amid
            while len(read) <= committed(folder):
                read.append({*values_read(folder, len(read))})
            if read and not is_amid and read[-1] & numbers:
                is_amid = True
                amid()
            return query.exception() is not None or (bool(read) and numbers <= read[-1])

        until(has_all)
        assert query.exception() is None
    results = frame.sparkSession.table(view(name)).collect()
    return [sorted(epoch - before) for before, epoch in zip([set[int](), *read], read, strict=False)], results


def run_in_batches(runs: Mapping[str, Run], inputs: Inputs, batches: Iterable[list[Any]]) -> dict[str, list[Row]]:
    """Give queries the rows of batches, one after the other; return what each emitted."""
    results: dict[str, list[Row]] = {side: [] for side in runs}
    for batch in batches:
        inputs.add({"a": batch})
        for side, run in runs.items():
            results[side] += run.take()
    return results


def is_group(column: str) -> bool:
    return re.fullmatch(r"v\d+", column) is None


def newest(rows: Iterable[Row]) -> dict[str, str]:
    """Return the newest row of each group."""
    return {
        repr([value for column, value in zip(row.__fields__, row, strict=True) if is_group(column)]): repr(tuple(row))
        for row in rows
    }


def last_of(draft: Program, rows: list[Row]) -> Any:
    """Return what a reader of a program's results has in the end."""
    if draft.emits_any:
        return len(rows)
    if draft.replaces:
        return newest(rows) if draft.names_groups else None
    return Counter(repr(tuple(row)) for row in rows)


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        # Of equal keys the two zeros differ.
        return float(f"{value:.{DIGITS}g}") + 0.0
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    return [rounded(part) for part in value] if isinstance(value, list) else value


def state_of(fleet: Fleet, state: str, version: int | None = None) -> list[str]:
    live = fleet.state(state) if version is None else fleet.state(state).at(version)
    return comparable(map(rounded, live.scan().to_arrow().to_pylist()))


@pytest.mark.filterwarnings("ignore::statefleet.UnboundedStateWarning")
@pytest.mark.parametrize(
    ("seed", "steps"),
    [
        *(pytest.param(seed, 2, id=f"seed-{seed}-begins") for seed in FEW),
        *(pytest.param(seed, 4, id=f"seed-{seed}", marks=pytest.mark.replay) for seed in range(ALL)),
    ],
)
def test_a_random_program_has_the_same_answers_in_epochs_as_in_batches(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, name: str, seed: int, steps: int
) -> None:
    partitions = 1 + seed % 2
    draft = continuous_program(seed, in_order=partitions == 1)
    actions = draft.actions[:steps]
    rows = NumberedRows(COLUMNS["a"], [file["a"] for action in actions for file in action.files], RATE, FIRST, GAP)
    states = set[str]()

    def ours(side: str) -> Operators:
        stateful = on_fleet(fleet, f"{name}-{side}", actions[0].shards)

        def named(frame: DataFrame, operator: str, mode: str = "append") -> Any:
            states.add(operator)
            return stateful(frame, operator, mode)

        return named

    where = f"seed {seed}, {partitions} partitions: {''.join(draft.lines)}, {draft.mode}"
    with configured(spark, draft.conf):
        frame = draft.query(ours("epochs"), {"a": rows.stream(spark, partitions)})
        (state,) = states

        def rescaled() -> None:
            if actions[-1].shards != actions[0].shards:
                rescale(fleet, f"{name}-epochs-{state}", actions[-1].shards)

        folder = tmp_path / "epochs"
        epochs, in_epochs = run_in_epochs(frame, rows, folder, name, draft.mode, rescaled)
        batches = [batch for epoch in epochs if (batch := rows.of(epoch))]
        assert sum(map(len, batches)) == len(rows.numbers)
        inputs = Inputs(spark, tmp_path / "in", COLUMNS)
        sides = {"batches": ours("batches")}
        if draft.is_sparks and draft.is_compared_with_spark:
            sides["Spark"] = on_spark
        runs = {
            side: Run(draft.query(operators, inputs.streams()), draft.mode, tmp_path / side)
            for side, operators in sides.items()
        }
        with stopping(list(runs.values())):
            emitted = run_in_batches(runs, inputs, batches)
        late = sum(figures[-1] for of_batch in runs["batches"].states().values() for figures in of_batch)
        # With -s, what a seed tries.
        print(f"\n{where}; {len(batches)} epochs with rows, {late} of {len(rows.numbers)} rows were late")
        if not draft.is_compared_with_spark:
            emitted["Spark"] = emitted["batches"]
        elif not draft.is_sparks:
            emitted["Spark"] = draft.query(on_spark, inputs.batch()).collect()
    expected = last_of(draft, emitted["Spark"])
    assert last_of(draft, emitted["batches"]) == expected, where
    assert last_of(draft, in_epochs) == expected, where
    kept = state_of(fleet, f"{name}-epochs-{state}", committed(folder) + 1)
    assert kept == state_of(fleet, f"{name}-batches-{state}"), where
