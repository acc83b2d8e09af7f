"""``python -m benchmarks``: its lines, and its figures as a table."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as bench
from benchmarks import table
from benchmarks.engine import uuids
from benchmarks.harness import FLEET, PLAIN, SHUFFLED, Target, ratios_of, summary
from benchmarks.lines import FULL, QUICK, NexmarkLine, OperatorLine
from benchmarks.shared import SPARK_STORES
from benchmarks.workloads import Counts, Deduplicate, Join, Session, TextCounts, Top, Window, Workload

ROOT = Path(__file__).parents[2]


def row(seconds: dict[str, list[float]], *targets: Target) -> dict[str, Any]:
    sides = {side: summary(batch_s) for side, batch_s in seconds.items()}
    return {
        "line": "counts", "title": "counts & sums", "detail": "1,000 rows; 3 batches", "sides": sides,
        "ratios": ratios_of(sides, targets),
    }  # fmt: skip


def results(*rows: dict[str, Any]) -> dict[str, Any]:
    return {
        "machine": {"cores": 2, "architecture": "x86_64", "memory_gib": 16.0, "load": 0.1, "system": "Linux 6"},
        "versions": {"python": "3.11", "statefleet": "1.2.0+local", "pyspark": "3.5"},
        "date": "2026-01-02 03:04 UTC",
        "commit": "abc",
        "seconds": 540.0,
        "rows": list(rows),
    }


ENGINE = {
    "line": "engine", "title": "the engine", "detail": "10 keys", "sides": {}, "ratios": [],
    "figures": {"int64 keys": {"upsert_ns": 251.4, "table_ns": 58.0}, "UUID text keys": {"upsert_ns": 800.0}},
}  # fmt: skip
COMPARED = row(
    {FLEET: [1.0, 2.0, 3.0], PLAIN: [1.0, 1.0, 1.0], "hdfs": [4.0, 4.0, 6.0]},
    Target(FLEET, PLAIN, 1.5, is_least=False), Target("hdfs", FLEET, 1.5),
)  # fmt: skip


# -- lines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lines", [FULL, QUICK], ids=["full", "quick"])
def test_every_line_has_a_name_of_its_own_and_at_least_five_steady_batches(lines: Any) -> None:
    assert len({line.name for line in lines}) == len(lines)
    for line in lines:
        if isinstance(line, OperatorLine):
            assert line.plan.batches >= 5
        if isinstance(line, NexmarkLine):
            assert (line.events // line.batch_events - line.warmup) * line.rounds >= 5


def test_every_ratio_of_the_quick_run_has_a_margin_and_both_sides() -> None:
    for line in QUICK:
        assert line.targets
        assert all(target.bound is not None for target in line.targets)
        if isinstance(line, OperatorLine):
            assert {side for target in line.targets for side in (target.over, target.under)} <= set(line.plan.sides)


def test_a_name_of_the_other_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--quick", "--only", "nexmark"])
    assert "a quick run has engine" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [Counts, Deduplicate, Join, Session, TextCounts, Top, Window])
def test_a_workload_has_the_filling_rows_that_it_says_and_repeats_its_rows(kind: type[Workload]) -> None:
    workload = kind(1_000, 3_000)
    assert sum(rows.num_rows for rows in workload.filling()) == workload.fill
    assert workload.batch(1).num_rows == 1_000
    assert workload.batch(1).equals(workload.batch(1))
    assert not workload.batch(1).equals(workload.batch(2))


def test_uuids_are_uuids() -> None:
    keys = uuids(1_000)
    assert len(keys.unique()) == 1_000
    assert all(re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", key.as_py()) for key in keys)


# -- what is made of the figures ----------------------------------------------------------------------------------


def test_a_ratio_has_the_quartiles_of_its_batches() -> None:
    fleet_plain, hdfs_fleet = COMPARED["ratios"]
    assert (fleet_plain["value"], fleet_plain["quartiles"]) == (2.0, [1.5, 2.5])
    assert (hdfs_fleet["value"], hdfs_fleet["quartiles"]) == (2.0, [2.0, 3.0])


def test_a_ratio_beyond_its_margin_is_a_sentence() -> None:
    (sentence,) = table.missed([COMPARED, ENGINE])
    assert sentence == (
        "counts & sums (1,000 rows; 3 batches): Statefleet / plain shuffle is 2.00 (quartiles 1.50 to 2.50); expected is at most 1.5"
    )


@pytest.mark.parametrize(("bound", "code"), [(3.0, 0), (1.5, 1)])
def test_a_quick_run_ends_with_1_on_a_regression(
    bound: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = row({FLEET: [2.0] * 3, PLAIN: [1.0] * 3}, Target(FLEET, PLAIN, bound, is_least=False))
    monkeypatch.setattr(bench, "_rows", lambda *_: iter([measured]))
    assert bench.main(["--quick", "--out", str(tmp_path)]) == code
    assert ("bench: regression: counts & sums" in capsys.readouterr().err) == bool(code)
    written = json.loads((tmp_path / "results.json").read_text())
    assert written["rows"] == [measured]
    assert {"machine", "versions", "date", "commit", "seconds"} <= written.keys()


def test_the_tables_are_markdown() -> None:
    lines = table.page(results(COMPARED, ENGINE)).splitlines()
    assert "| counts & sums | 1,000 rows; 3 batches | 2.00 (1.50 to 2.50) | 2.00 (2.00 to 3.00) | 2.000 |" in lines
    assert "| upsert, ns a row | 251 | 800 |" in lines
    ran_on = "Statefleet 1.2.0 (abc) with python 3.11, pyspark 3.5; 2 cores (x86_64), 16.0 GiB, Linux 6; 2026"
    assert lines[0].startswith(ran_on)


def test_the_sides_have_names() -> None:
    assert set(table.NAMES) == {FLEET, PLAIN, SHUFFLED, *SPARK_STORES}
