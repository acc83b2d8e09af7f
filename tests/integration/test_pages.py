"""The programs of README, of pages and of the notebook, run one after the other as they stand, on folders of the test's own."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import statefleet as sf
from tests.code_blocks import ROOT, Block, blocks_of
from tests.integration.streams import Feed, Run
from tests.page_programs import run_blocks

NOON = dt.datetime(2025, 6, 1, 12, tzinfo=dt.UTC)


@pytest.fixture
def on_this_session(spark: SparkSession, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Make sessions and fleets those of the tests, which a program neither starts nor ends; folders are the test's."""
    monkeypatch.setattr(sf, "start_session", lambda *_, **__: spark)
    monkeypatch.setattr(sf, "stop_session", lambda: None)
    monkeypatch.setattr(sf.Fleet, "shutdown", lambda _: None)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def places(fleet: sf.Fleet) -> dict[str, str]:
    return {"file:///var/lib/statefleet": fleet.uri, '(folder / "fleet").as_uri()': repr(fleet.uri)}


@pytest.mark.usefixtures("on_this_session")
@pytest.mark.filterwarnings("ignore::statefleet.UnboundedStateWarning")
def test_the_front_page(spark: SparkSession, fleet: sf.Fleet, places: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "clicks").mkdir()
    row = {"ts": NOON.isoformat(), "user": "u1", "amount": 2.5}
    (tmp_path / "clicks" / "0.json").write_text(json.dumps(row) + "\n" + json.dumps(row) + "\n")
    scores = Feed(tmp_path / "scores", pa.schema([("user", pa.string())]))
    scope: dict[str, Any] = {"pa": pa, "noon": NOON, "five_past": NOON + dt.timedelta(minutes=5)}
    places |= {'"/data/': f'"{tmp_path}/', ".at(12)": ".at(1)", "since=12": "since=0"}
    first, *other_blocks = blocks_of("tests/integration/test_pages.py::test_the_front_page")
    try:
        run_blocks([first], scope, places)
        for query in spark.streams.active:
            query.processAllAvailable()
        scope["stream"] = scores.stream()
        run_blocks(other_blocks, scope, places)
    finally:
        for query in spark.streams.active:
            query.stop()
    state_row = scope["clicks"].get({"window": {"start": NOON, "end": NOON + dt.timedelta(minutes=5)}, "user": "u1"})
    assert state_row["n"] == 2
    assert fleet.read_state_store("scores", **scope["columns"]).get("ann") == {"best": 7}


@pytest.mark.usefixtures("on_this_session")
@pytest.mark.filterwarnings("ignore::statefleet.UnboundedStateWarning")
def test_the_quickstart(places: dict[str, str]) -> None:
    """The programs run to their end, with the values that the page states."""
    scope: dict[str, Any] = {}
    try:
        run_blocks(blocks_of("tests/integration/test_pages.py::test_the_quickstart"), scope, places)
    finally:
        if "query" in scope:
            scope["query"].stop()


@pytest.mark.filterwarnings("ignore::statefleet.UnboundedStateWarning")
def test_a_program_is_moved(fleet: sf.Fleet, tmp_path: Path) -> None:
    """The programs run to their end, with the values that the page states."""
    feed = Feed(tmp_path / "in", pa.schema([("user", pa.string()), ("amount", pa.float64())]))
    scope: dict[str, Any] = {"F": F, "fleet": fleet, "stream": feed.stream()}
    run_blocks(blocks_of("tests/integration/test_pages.py::test_a_program_is_moved"), scope, {})


@pytest.mark.replay
@pytest.mark.filterwarnings("ignore::statefleet.UnboundedStateWarning")
def test_state_is_imported(spark: SparkSession, fleet: sf.Fleet, tmp_path: Path) -> None:
    clicks = Feed(tmp_path / "in", pa.schema([("ts", pa.timestamp("us", "UTC")), ("user", pa.string())]))
    clicks.add([(NOON, "u1"), (NOON, "u2")])
    events = clicks.stream().withWatermark("ts", "10 minutes")
    old = events.groupBy(F.window("ts", "5 minutes"), "user").count()
    Run(old, "update", tmp_path / "old-ck", available_now=True).wait()
    orders = Feed(tmp_path / "orders", pa.schema([("shop", pa.string()), ("amount", pa.float64())]))
    table = pa.table({"shop": ["a"], "n": pa.array([3], pa.int64()), "total": [4.5]})
    (tmp_path / "totals").mkdir()
    pq.write_table(table, tmp_path / "totals" / "0.parquet")
    scope: dict[str, Any] = {"F": F, "fleet": fleet, "spark": spark, "events": events, "orders": orders.stream()}
    of_clicks, of_orders = blocks_of("tests/integration/test_pages.py::test_state_is_imported")
    # Other pages have states of these names.
    replacements = {
        'name="': 'name="moved-',
        "/data/old-ck": str(tmp_path / "old-ck"),
        "totals/": f"{tmp_path}/totals/",
    }
    # A sink is the reader's to choose.
    replacements |= {".writeStream.": '.writeStream.format("noop").'}
    try:
        run_blocks([of_clicks], scope, {**replacements, "/data/ck": str(tmp_path / "first")})
        run_blocks([of_orders], scope, {**replacements, "/data/ck": str(tmp_path / "second")})
        clicks.add([(NOON, "u1")])
        orders.add([("a", 1.0)])
        for query in spark.streams.active:
            query.processAllAvailable()
    finally:
        for query in spark.streams.active:
            query.stop()
    counts = {row["user"]: row["count"] for row in fleet.state("moved-clicks").scan().to_arrow().to_pylist()}
    assert counts == {"u1": 2, "u2": 1}
    assert fleet.state("moved-totals").get({"shop": "a"}) == {"shop": "a", "n": 4, "total": 5.5}


@pytest.mark.usefixtures("on_this_session")
def test_the_notebook(places: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    cells = json.loads((ROOT / "examples" / "live_state.ipynb").read_text())["cells"]
    code = [
        Block("examples/live_state.ipynb", number, "python", "".join(cell["source"]))
        for number, cell in enumerate(cells)
        if cell["cell_type"] == "code"
    ]
    scope: dict[str, Any] = {}
    try:
        run_blocks(code, scope, places)
    finally:
        if "query" in scope:
            scope["query"].stop()
    printed = capsys.readouterr().out
    # What each cell printed is what the notebook shows: its events are the same on every machine.
    texts = [
        "".join(output["text"])
        for cell in cells
        for output in cell.get("outputs", ())
        if output["output_type"] == "stream"
    ]
    assert len(texts) > 3
    assert [text for text in texts if text not in printed] == []
    before, after = scope["before"], scope["state"].version
    assert f"version {before} -> {after}" in printed
    assert (
        sum(scope["chart"].column("n").to_pylist())
        == scope["fleet"].sql("select sum(n) from pages").column(0)[0].as_py()
    )
    # The last batches may have had no data, and changed nothing.
    assert before + 1 in set(scope["changed"]["_commit_version"]) <= set(range(before + 1, after + 1))
