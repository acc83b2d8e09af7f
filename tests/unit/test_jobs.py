"""The parts of the jobs without Spark: the event source, tables as text, merged results, where a run resumes."""

from __future__ import annotations

import datetime as dt
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from coordinator.model.errors import InvalidRequestError
from coordinator.model.text import format_table
from spark_jobs import page_hits
from spark_jobs.jobs import console
from spark_jobs.jobs.console import error_text, newest_rows
from spark_jobs.jobs.events import make_events, write_events
from spark_jobs.page_hits import _LINE
from spark_jobs.quickstart import _done_batches


def test_a_file_of_events_is_the_same_each_time_and_differs_from_the_next() -> None:
    assert make_events(3, 1000).equals(make_events(3, 1000))
    assert not make_events(3, 1000).equals(make_events(4, 1000))


def test_events_come_out_of_order_with_some_very_late_and_some_null() -> None:
    events = make_events(5, 20_000)
    ts = events.column("ts").cast(pa.int64()).to_numpy()
    assert (ts[1:] < ts[:-1]).any()
    late = int((ts < ts.max() - 1800 * 1_000_000).sum())
    assert 0 < late < 200
    assert 0 < events.column("amount").null_count < 600
    assert pc.all(pc.greater_equal(events.column("user"), 0)).as_py()


def test_written_events_are_kept_and_a_torn_write_has_a_name_that_spark_skips(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_events(tmp_path, range(2), 10)
    before = (tmp_path / "events-000001.parquet").stat().st_mtime_ns
    write_events(tmp_path, range(1, 3), 10)
    assert sorted(file.name for file in tmp_path.iterdir()) == [f"events-{n:06d}.parquet" for n in range(3)]
    assert (tmp_path / "events-000001.parquet").stat().st_mtime_ns == before
    assert pq.read_table(tmp_path / "events-000002.parquet").equals(make_events(2, 10))

    def die(table: pa.Table, path: Path) -> None:
        path.write_bytes(b"PAR1 torn")
        raise KeyboardInterrupt

    monkeypatch.setattr(pq, "write_table", die)
    with pytest.raises(KeyboardInterrupt):
        write_events(tmp_path, range(3, 4), 10)
    (torn,) = [file.name for file in tmp_path.iterdir() if file.read_bytes() == b"PAR1 torn"]
    assert torn.startswith((".", "_"))


#: A line of a real log whose agent was cut off.
CUT = (
    '46.118.127.106 - - [20/May/2015:12:05:17 +0000] "GET /scripts/grok-py-test/configlib.py HTTP/1.1" 200 235 "-" '
    '"Mozilla/5.0 (compatible; Googlebot/2.1; +http://www.google.com/bot.html'
)


@pytest.mark.parametrize(
    "length", [len(CUT), len(CUT) - 40, CUT.index('"Moz') + 1, CUT.index(' "Moz'), CUT.index("-", 100) + 1]
)
@pytest.mark.parametrize("end", ["", "\\", '\\"', " "])
def test_a_line_that_is_cut_off_after_its_numbers_is_well_formed(length: int, end: str) -> None:
    # The expression means the same in Java and in Python.
    match = re.match(_LINE, CUT[:length] + ("" if CUT[:length].endswith('"-"') else end))
    assert match is not None
    assert match.group(1, 6, 8, 9) == ("46.118.127.106", "/scripts/grok-py-test/configlib.py", "200", "235")


@pytest.mark.parametrize(
    "line", [CUT[: CUT.index(" 235")], CUT[: CUT.index("HTTP")], CUT + '" x', CUT.replace('"-"', '"-"x')]
)
def test_a_line_that_lacks_a_number_or_continues_after_its_end_is_malformed(line: str) -> None:
    assert re.match(_LINE, line) is None


@pytest.mark.parametrize(("commits", "done"), [([], 0), ([0, 1, 2], 3), (range(40, 141), 141)])
def test_a_run_resumes_after_the_newest_commit_though_old_ones_are_deleted(
    tmp_path: Path, commits: list[int], done: int
) -> None:
    folder = tmp_path / "checkpoint" / "commits"
    folder.mkdir(parents=True)
    for number in commits:
        (folder / str(number)).touch()
        (folder / f".{number}.crc").touch()
    assert _done_batches(tmp_path) == done
    assert _done_batches(tmp_path / "without a checkpoint") == 0


def test_the_newest_row_of_each_group_is_kept_and_null_keys_are_a_group() -> None:
    hour = dt.datetime(2025, 10, 26, 0, 30, tzinfo=dt.UTC)
    table = pa.table(
        {"row": [hour, None, hour, None, hour], "page": ["a", "a", "b", "a", "a"], "hits": [1, 2, 3, 4, 5]}
    )
    assert newest_rows(table, ("row", "page")).column("hits").to_pylist() == [3, 4, 5]


def test_a_table_as_text_aligns_numbers_right_and_names_nulls() -> None:
    text = format_table(("page", "hits"), [("home", 12345), (None, None), ("x" * 80, 1.5)])
    lines = text.split("\n")
    assert lines[2].split() == ["home", "12,345"]
    assert lines[2].endswith(" 12,345")
    assert lines[3].split() == ["-", "-"]
    assert "x" * 57 + "..." in lines[4]


def test_an_empty_table_is_its_header() -> None:
    assert format_table(("page", "hits"), []).split("\n")[0] == "page  hits"


def test_a_failed_query_has_the_message_of_the_error_that_a_task_carried() -> None:
    spark = (
        "[STREAM_FAILED] Query [id = 1] terminated with exception: Job aborted\n  File x\n"
        "coordinator.model.errors.CorruptStateError: the delta is missing [file=`a/0/1.delta`]\n\n\tat org.apache"
    )
    assert error_text(RuntimeError(spark)) == "the delta is missing [file=`a/0/1.delta`]"
    assert error_text(RuntimeError("[PATH_NOT_FOUND] Path does not exist: /x.\n\tat y")) == (
        "[PATH_NOT_FOUND] Path does not exist: /x."
    )


def test_a_job_that_fails_before_its_session_stops_no_other_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped: list[bool] = []
    monkeypatch.setattr(console, "stop_session", lambda: stopped.append(True))
    monkeypatch.setattr(console, "start_session", lambda *_, **__: None)

    def refused() -> None:
        raise InvalidRequestError("there is no input")

    def with_session() -> None:
        with console.job_session("job"):
            refused()

    assert console.exit_code_of(refused) == 1
    assert (stopped, "there is no input" in capsys.readouterr().err) == ([], True)
    assert console.exit_code_of(with_session) == 1
    assert stopped == [True]


def test_a_topic_for_results_needs_kafka(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        page_hits.main(["logs/", "--to", "page-hits"])
    assert "--to needs --kafka" in capsys.readouterr().err
