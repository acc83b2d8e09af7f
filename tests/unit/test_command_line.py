"""The command line without Ray: what commands print of a stored fleet, their widths, shapes and exit codes."""

from __future__ import annotations

import datetime as dt
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from decimal import Decimal
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from coordinator.model.errors import CorruptStateError, InvalidRequestError
from coordinator.model.names import store_actors_prefix
from coordinator.service.dropping import DroppedState
from statefleet.cli import app, main
from statefleet.commands import looking, moving, upkeep
from statefleet.commands.output import WIDTH, ago_text, print_json, print_records, print_table, progress, time_text
from statefleet.reads.json_values import cell_text, key_value
from tests.stored_shards import STORED

COMMANDS = (
    "status", "queries", "shards", "metrics", "dashboard", "get", "scan", "sql", "versions", "changes", "diff", "export",
    "serve-sql", "move",
    "drain", "rebalance", "rescale", "branch", "verify", "gc", "drop", "stop", "warm", "doctor",
    "quickstart",
)  # fmt: skip
#: A row of the stored state of clicks.
ROW = {"k0": "2026-01-01T00:02:50+00:00", "k1": "user-0b", "a0_max": 33, "a1_count": 1, "a2_min": 33}
KEY = ("k0=2026-01-01T00:02:50+00:00", "k1=user-0b")


@pytest.fixture
def uri(tmp_path: Path) -> str:
    """A stored fleet of two states, for this test to change."""
    return f"file://{shutil.copytree(STORED, tmp_path / 'fleet')}"


class CommandResult:
    """Exit code and output of a command."""

    def __init__(self, capsys: pytest.CaptureFixture[str], arguments: Sequence[str]) -> None:
        capsys.readouterr()
        self.code = main(arguments)
        captured = capsys.readouterr()
        self.out, self.err = captured.out, captured.err
        if "--json" not in arguments:
            # Except for a path that is longer.
            assert all(len(line) <= WIDTH or " " not in line.strip() for line in self.out.splitlines())
        assert "\x1b" not in self.out + self.err, "no colour where it is piped"

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., CommandResult]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command of these words."""
    return lambda *arguments: CommandResult(capsys, arguments)


# -- the shape of it ----------------------------------------------------------------------------------------------


def test_every_command_has_help_with_its_options() -> None:
    overview = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["--help"])
    assert overview.exit_code == 0
    assert max(map(len, overview.output.splitlines())) <= WIDTH
    listed = [line.split()[0] for line in overview.output.partition("Commands:")[2].splitlines() if line.strip()]
    assert listed == list(COMMANDS)
    assert "..." not in overview.output.partition("Commands:")[2], "a summary is cut off"
    for command in COMMANDS:
        command_help = CliRunner().invoke(app, [command, "--help"])
        assert command_help.exit_code == 0
        assert ("--json" in command_help.output) == (command not in ("warm", "quickstart")), "which answer nothing"
        needs_ray = command not in ("verify", "warm", "quickstart")
        assert ("--address" in command_help.output) == needs_ray, (
            "checks of files and compiling need no Ray, and the main job starts its own"
        )


def test_the_version_is_printed() -> None:
    output = CliRunner().invoke(app, ["--version"])
    assert (output.exit_code, output.output) == (0, f"statefleet {version('statefleet')}, Python {python_version()}\n")


def test_a_state_that_cannot_be_read_is_named_and_the_others_are_cleaned_and_balanced(
    monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    class Coordinator:
        def load_all_states(self) -> list[str]:
            return ["bad", "clicks"]

        def status(self) -> dict[str, Any]:
            return {"unreadable": [{"name": "bad", "error": "its metadata.json is missing"}]}

        def clean(self, state: str, *, dry_run: bool) -> dict[str, Any]:
            return dict(zip(("floors", "files"), ([], self.plan_rebalance([state])), strict=True))

        def plan_rebalance(self, states: list[str]) -> list[Any]:
            if "bad" in states:
                raise CorruptStateError("its metadata.json is missing")
            return []

    for module in (upkeep, moving):
        monkeypatch.setattr(module, "find", lambda uri, address: Coordinator())
    for command in (["gc"], ["rebalance"]):
        result = run(*command, "file:///x", "--json")
        assert (result.code, "bad cannot be read, and is left out: its metadata.json" in result.err) == (0, True)
        assert result.json == ({"clicks": {"floors": [], "files": []}} if command == ["gc"] else [])
        named = run(*command, "file:///x", "--name", "bad")
        assert (named.code, "metadata.json is missing" in named.err) == (1, True)


def test_a_state_is_dropped_only_with_yes(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    dry_runs: list[bool] = []

    class Coordinator:
        def drop(self, state: str, *, dry_run: bool, is_over: bool) -> DroppedState:
            dry_runs.append(dry_run)
            return DroppedState(state, 3, 7, 2048, ("distinct",))

    monkeypatch.setattr(upkeep, "find", lambda uri, address: Coordinator())
    result = run("drop", "file:///x", "clicks", "--dry-run")
    assert (result.code, dry_runs) == (0, [True])
    assert "3 versions, 7 files, 2.0 kB: would be dropped" in result.out
    assert "the other states of its query stay: distinct" in result.out
    result = run("drop", "file:///x", "clicks")
    assert (result.code, dry_runs) == (1, [True, True])
    assert "nothing was dropped; say --yes" in result.err
    result = run("drop", "file:///x", "clicks", "--yes", "--json")
    assert (result.code, dry_runs) == (0, [True, True, True, False])
    assert json.loads(result.out)["dropped"] is True


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["status"],
        ["move", "file:///x", "s", "three", "n"],
        ["scan", "file:///x", "s", "--limit", "-1"],
        *(
            [command, "file:///x", "s", "1", "--consistency", "newest"]
            for command in ("get", "changes", "diff", "export")
        ),
        *([command, "file:///x", "s", "--consistency", "newest"] for command in ("scan", "sql", "versions")),
    ],
    ids=lambda arguments: "-".join((arguments[0], *arguments[3:])),
)
def test_an_invalid_call_has_code_2(arguments: list[str], run: Run) -> None:
    result = run(*arguments)
    assert (result.code, result.out) == (2, "")
    assert "Usage: statefleet" in result.err


def test_names_of_states_are_completed(uri: str) -> None:
    expected = {
        f"statefleet scan {uri} ": ["clicks", "profiles"],
        f"statefleet get {uri} pro": ["profiles"],
        "statefleet re": ["rebalance", "rescale"],
        "statefleet scan s3a:// ": [],
    }
    program = f"""
import contextlib, io, json, os, sys
from statefleet.cli import app
completed = {{}}
os.environ["_STATEFLEET_COMPLETE"] = "complete_bash"
for words in {list(expected)}:
    os.environ |= {{"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - (not words.endswith(" ")))}}
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        app(prog_name="statefleet")
    completed[words] = out.getvalue().split()
json.dump(completed, sys.stdout)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout) == expected


# -- tables, records, times ---------------------------------------------------------------------------------------


NAMES = ("3f9c1d27e00a-clicks_by_user_and_region_of_the_shop", "192.168.100.200:4123456", "10.0.0.200#11")


@pytest.mark.parametrize("columns", [40, 80, None])
def test_a_table_breaks_no_name_however_narrow_the_terminal_is(
    columns: int | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if columns is not None:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        monkeypatch.setenv("COLUMNS", str(columns))
    print_table(("state", "executor", "store actor", "last commit", "why"), [(*NAMES, "5 s ago", "a reason " * 20)] * 2)
    output = re.sub(r"\x1b\[\d*m", "", capsys.readouterr().out)
    for name in NAMES:
        assert output.count(name) == 2
    assert max(map(len, output.splitlines())) <= sum(map(len, NAMES)) + len("commitreason") + 10, (
        "only names make it wider"
    )
    assert output.count("reason") == 40


FLEET = {
    "fleet_id": "c3bb14d6",
    "uri": "s3://bucket/prefix",
    "store_actors": [
        {
            "actor_name": f"{store_actors_prefix('s3://bucket/prefix')}0af9c1d27e00{number}", "host": host, "pid": 7, "alive": True,
            "resident_bytes": None, "memory_limit": None, "spilled_bytes": None,
        }
        for host, number in (("10.0.0.4", ""), ("10.0.0.4", "-1"))
    ],
    "executors": [
        {
            "executor_id": "2", "host": "10.0.0.7", "alive": False, "lost_at_ms": 1, "reason": "killed by the system",
            "is_expected": False, "application": "app",
        },
    ],
    "queries": [],
}  # fmt: skip


def test_the_status_names_store_actors_by_address_and_says_which_executors_were_lost_and_what_is_overdue(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = {"is_overdue": True, "text": "batch 41 of clicks has been running for 29.3 s"}
    figures = dict.fromkeys(("state_rows", "state_bytes", "output_mode", "last_commit_ms"))
    query = {**figures, "name": "clicks", "version": 4, "num_shards": 2, "active": True, "slow_batches": []}
    status = {**FLEET, "queries": [{**query, "running_batch": running}, {**query, "running_batch": None}]}
    coordinator = SimpleNamespace(load_all_states=list, status=lambda: status)
    monkeypatch.setattr(looking, "find", lambda uri, address: coordinator)
    result = run("status", "s3://bucket/prefix")
    assert result.code == 0
    lines = [" ".join(line.split()) for line in result.out.splitlines()]
    assert "10.0.0.4#0 0af9c1d27e00 7 - - - alive" in lines
    assert "10.0.0.4#1 0af9c1d27e00-1 7 - - - alive" in lines
    assert any(line.startswith("2 10.0.0.7 lost") and line.endswith("killed by the system") for line in lines)
    assert f"now: {running['text']}" in lines


def test_tables_are_100_columns_wide_at_most(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [("a long name " * 12, number * 10**9, 0.5, None, True) for number in range(3)]
    print_table(("name", "number", "part", "nothing", "flag"), rows)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert "\n".join(lines).count("a long name") >= 3
    assert "2,000,000,000" in "\n".join(lines)
    assert all(line == line.rstrip() for line in lines)


def test_rows_that_are_too_wide_are_shown_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    narrow = [{"k": 1, "v": "a"}, {"k": 2, "v": None}]
    print_records(["k", "v"], narrow)
    assert capsys.readouterr().out.splitlines() == ["k  v", "───────", "1  a", "2  null"]
    print_records(["k", "v"], [{"k": 1, "v": "x" * 250}])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "row 1"
    assert max(map(len, lines)) <= WIDTH
    assert sum(line.count("x") for line in lines) == 250


def test_values_that_json_has_no_type_for_are_text(capsys: pytest.CaptureFixture[str]) -> None:
    moment = dt.datetime(2025, 1, 2, 3, 4, 5, tzinfo=dt.UTC)
    values = {"d": Decimal("1.50"), "b": b"\x00\xff", "t": moment, "n": float("nan"), "m": [("k", 1)], "s": {"x": None}}
    print_json([values, {"i": -float("inf"), "day": moment.date(), "ü": "ß", "took": dt.timedelta(seconds=1)}])
    out = capsys.readouterr().out
    assert json.loads(out) == [
        {"d": "1.50", "b": "AP8=", "t": "2025-01-02T03:04:05+00:00", "n": "nan", "m": [["k", 1]], "s": {"x": None}},
        {"i": "-inf", "day": "2025-01-02", "ü": "ß", "took": "0:00:01"},
    ]


def test_times_are_shown_as_their_age() -> None:
    now = 1000 * int(time.time())
    # Clocks differ: what was just now may be ahead of this machine's.
    texts = {3 * 3600 + 60: "3 hours ago", 5 * 86400 + 60: "5 days ago", -60: "now"}
    assert {seconds: ago_text(now - 1000 * seconds) for seconds in texts} == texts
    assert ago_text(None) is None is time_text(None)
    local = dt.datetime.fromtimestamp(now / 1000, dt.UTC).astimezone()
    assert time_text(now) == local.strftime("%Y-%m-%d %H:%M:%S")


def test_no_progress_bar_is_drawn_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("long work", 10) as show:
        show(5)
    assert capsys.readouterr() == ("", "")


def test_diff_and_changes_show_what_changed_between_versions(uri: str, run: Run) -> None:
    def rows_of(*arguments: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = run(*arguments, "--offline", "--json").json
        return rows

    differing, changed = rows_of("diff", uri, "clicks", "42", "43"), rows_of("changes", uri, "clicks", "42")
    assert {change["_commit_version"] for change in changed} == {43}
    written = [{name: change[name] for name in ROW} for change in changed if change["_change_type"] == "upsert"]
    inserted = [{name: change[name] for name in ROW} for change in differing if change["_change_type"] == "insert"]
    assert inserted
    assert all(row in written for row in inserted)
    assert rows_of("changes", uri, "clicks", "42", "42") == rows_of("diff", uri, "clicks", "43") == []
    assert len(rows_of("diff", uri, "clicks", "42", "--limit", "3")) == 3
    assert "_change_type" in run("diff", uri, "clicks", "42", "--offline").out
    assert "no such version" in run("diff", uri, "clicks", "1", "--offline").err


@pytest.mark.parametrize("where", ["false", "a0_max > 30 AND a0_max < 20"])
def test_a_query_that_can_have_no_rows_has_its_columns(uri: str, where: str, run: Run) -> None:
    query = f"select k1, a0_max from clicks where {where}"
    assert run("sql", uri, query, "--offline").out == "no rows (columns: k1, a0_max)\n"


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (pa.int64(), "-7", -7),
        (pa.string(), "", ""),
        (pa.bool_(), "true", True),
        (pa.float64(), "1.5", 1.5),
        (pa.decimal128(9, 2), "1.25", Decimal("1.25")),
        (pa.date32(), "2025-01-02", dt.date(2025, 1, 2)),
        (pa.timestamp("us", tz="UTC"), "2025-01-02 03:04:05", dt.datetime(2025, 1, 2, 3, 4, 5, tzinfo=dt.UTC)),
        (pa.timestamp("us", tz="UTC"), "2025-01-02T03:04:05+01:00", dt.datetime(2025, 1, 2, 2, 4, 5, tzinfo=dt.UTC)),
        (pa.struct([("start", pa.timestamp("us", tz="UTC")), ("n", pa.int32())]), '{"start": "2025-01-02T00:00:00Z", "n": 1}',
         {"start": dt.datetime(2025, 1, 2, tzinfo=dt.UTC), "n": 1}),
        (pa.list_(pa.int64()), "[1, 2]", [1, 2]),
        # As JSON has them.
        (pa.int64(), 7, 7),
        (pa.bool_(), False, False),
        (pa.struct([("n", pa.int32())]), {"n": None}, {"n": None}),
        (pa.string(), None, None),
    ],
    ids=str,
)  # fmt: skip
def test_values_of_keys_are_of_their_columns_types(kind: pa.DataType, text: Any, value: Any) -> None:
    assert key_value(pa.field("k", kind), text) == value


@pytest.mark.parametrize(
    ("kind", "text"),
    [(pa.int64(), "x"), (pa.date32(), "soon"), (pa.timestamp("us", tz="UTC"), "now"), (pa.struct([("n", pa.int32())]), "{"),
     (pa.struct([("n", pa.int32())]), "{}"), (pa.struct([("n", pa.int32())]), "7"), (pa.list_(pa.int8()), "[" * 100_000),
     (pa.string(), 7), (pa.string(), "\ud800"), (pa.int64(), {"a": 1}), (pa.int64(), "")],
    ids=lambda one: str(one)[:20].encode("ascii", "replace").decode(),
)  # fmt: skip
def test_a_value_of_another_type_is_refused(kind: pa.DataType, text: Any) -> None:
    with pytest.raises(InvalidRequestError, match="does not fit its key column"):
        key_value(pa.field("k", kind), text)


def test_cells_are_text_and_nested_values_are_json_that_a_key_takes() -> None:
    window = {"start": dt.datetime(2025, 1, 2, tzinfo=dt.UTC), "n": None}
    assert cell_text(window) == '{"start": "2025-01-02T00:00:00+00:00", "n": null}'
    kind = pa.struct([("start", pa.timestamp("us", tz="UTC")), ("n", pa.int32())])
    assert key_value(pa.field("k", kind), cell_text(window)) == window
    values = (None, 2**60, 1.5, "é", b"\x01", [0.25, {"at": None}], float("nan"), Decimal("1.10"))
    assert [*map(cell_text, values)] == ["null", str(2**60), "1.5", "é", "AQ==", '[0.25, {"at": null}]', "nan", "1.10"]


# -- a stored fleet -----------------------------------------------------------------------------------------------


def test_a_key_is_looked_up(uri: str, run: Run) -> None:
    assert run("get", uri, "clicks", *KEY, "--offline", "--json").json == [ROW]
    some_columns = run("get", uri, "clicks", *KEY, "--offline", "--columns", "k1, a0_max")
    assert some_columns.out.split() == ["k1", "a0_max", "─" * 15, "user-0b", "33"]
    none = run("get", uri, "clicks", KEY[0], "k1=nobody", "--offline", "--json")
    assert (none.code, none.json) == (1, [])
    assert run("get", uri, "clicks", KEY[0], "--null", "k1", "--offline").code == 1
    part = ("--part", "default", "--version", "6", "--offline", "--json")
    (first, *_) = run("scan", uri, "profiles", *part).json
    assert run("get", uri, "profiles", f"user={first['user']}", *part).json == [first]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["get", "clicks", "k0=2026-01-01T00:00:00Z"], "a value for each key column"),
        (["get", "clicks", "k0"], "column=value"),
        (["get", "clicks", "k0=x", "k1=y"], "does not fit its key column"),
        (["get", "clicks", *KEY, "--columns", "nothing"], "no such columns"),
        (["get", "nothing", *KEY], "no such state"),
        (["scan", "clicks", "--version", "1"], "no such version"),
        (["scan", "clicks", "--version", "99"], "no such version"),
        (["scan", "clicks", "--where", "nonsense > 1"], "cannot be answered"),
        (["scan", "clicks", "--where", "1) UNION (SELECT 1 FROM clicks"], "no such columns|cannot be answered|alone"),
        (["scan", "clicks", "--where", "a0_max > 1", "--columns", "nothing"], "no such columns"),
        (["scan", "profiles"], "several parts"),
        (["sql", "drop table clicks"], "no query of SQL"),
        (["versions", "nothing"], "no such state"),
        (["export", "clicks", "/nowhere/at/all.parquet"], "folder to write to is not there"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_failed_read_is_one_line_of_error(uri: str, arguments: list[str], expected: str, run: Run) -> None:
    command, *options = arguments
    answer = run(command, uri, *options, "--offline", "--json")
    assert (answer.code, answer.out) == (1, "")
    (line,) = answer.err.splitlines()
    assert line.startswith("error: ")
    assert any(text in line for text in expected.split("|")), line


def test_a_folder_without_a_fleet_has_nothing_to_verify(tmp_path: Path, run: Run) -> None:
    answer = run("verify", tmp_path.as_uri())
    assert (answer.code, answer.err.startswith("error: there is no state at this URI")) == (1, True)


def test_rows_are_shown_and_chosen(uri: str, run: Run) -> None:
    everything = run("scan", uri, "clicks", "--offline", "--json").json
    assert len(everything) == 12
    assert ROW in everything
    chosen = run("scan", uri, "clicks", "--where", "a0_max > 40 -- many", "--columns", "k1", "--offline", "--json")
    assert sorted(row["k1"] for row in chosen.json) == sorted(row["k1"] for row in everything if row["a0_max"] > 40)
    limited = run("scan", uri, "clicks", "--limit", "3", "--offline")
    assert limited.out.splitlines()[-1] == "(3 rows; there may be more: --limit)"
    assert len(limited.out.splitlines()) == 6
    assert "no rows (columns: k0" in run("scan", uri, "clicks", "--where", "false", "--offline").out
    seen_rows = run("scan", uri, "profiles", "--part", "seen", "--where", "n >= 0", "--offline", "--json").json
    assert seen_rows == run("scan", uri, "profiles", "--part", "seen", "--offline", "--json").json
    older = run("scan", uri, "clicks", "--where", "true", "--version", "42", "--offline", "--json").json
    assert len(older) == 11


def test_sql_is_over_states_and_their_parts(uri: str, run: Run) -> None:
    query = "select count(*) as n, max(a0_max) as best from clicks"
    assert run("sql", uri, query, "--offline", "--json").json == [{"n": 12, "best": 49}]
    table = run("sql", uri, 'select count(*) as n from "profiles.seen"', "--offline")
    assert table.out.split()[0] == "n"


def test_versions_have_their_times_and_figures(uri: str, run: Run) -> None:
    versions = run("versions", uri, "clicks", "--offline", "--json").json
    assert [row["version"] for row in versions] == [43, 42]
    newest = versions[0]
    assert newest["state_rows"] == len(run("scan", uri, "clicks", "--offline", "--json").json)
    files = [*(Path(uri[7:]) / "clicks" / "0").rglob("43-*.delta")]
    assert newest["written_bytes"] == sum(file.stat().st_size for file in files)
    assert newest["num_shards"] == len(files) == 2
    assert newest["committed_at_ms"] > versions[1]["committed_at_ms"]
    table = run("versions", uri, "clicks", "--limit", "1", "--offline").out.splitlines()
    assert len(table) == 3
    assert time_text(newest["committed_at_ms"]) in table[2]  # type: ignore[operator]


def test_what_changed_is_followed_by_positions(uri: str, run: Run) -> None:
    def changes(position_before: str, *more: str) -> CommandResult:
        return run("changes", uri, "clicks", position_before, *more, "--offline", "--json")

    first = changes("42")
    position = first.err.split()[1].rstrip(":")
    assert position.startswith("43:")
    further = changes(position)
    assert (further.json, further.err) == ([], first.err)
    cut = changes("42", "--limit", "1")
    assert (cut.json, cut.err) == (first.json[:1], ""), "what comes after them begins with rows that were not shown"
    # Nothing is cut off when there are exactly as many changes as the limit.
    exact = run("changes", uri, "clicks", "42", "--limit", str(len(first.json)), "--offline")
    assert exact.err == first.err
    assert "there may be more" not in exact.out
    for since, error in (
        ("yesterday", "this is no position"),
        ("43:0123456789abcdef", "made again"),
        ("3", "is not known any more"),
    ):
        wrong = changes(since)
        assert (wrong.code, wrong.out) == (1, "")
        assert error in wrong.err
    assert "changes are of later versions" in changes(position, "42").err


def test_an_export_is_whole_or_not_there(uri: str, tmp_path: Path, run: Run) -> None:
    everything = run("scan", uri, "clicks", "--offline", "--json").json
    file, folder = tmp_path / "out.parquet", tmp_path / "out"
    result = run("export", uri, "clicks", str(file), "--offline", "--json")
    assert result.json == {"state": "clicks", "version": 43, "rows": 12, "target": str(file)}
    assert run("export", uri, "clicks", str(folder), "--version", "42", "--offline").code == 0
    assert pq.read_table(file).num_rows == len(everything)
    assert sorted(path.name for path in folder.iterdir()) == ["part-00000.parquet", "part-00001.parquet"]
    assert pq.read_table(folder).num_rows == 11
    for target in (file, folder):
        repeated = run("export", uri, "clicks", str(target), "--offline")
        assert repeated.code == 1
        assert "there is something of that name already" in repeated.err
        assert run("export", uri, "clicks", str(target), "--overwrite", "--offline").code == 0
    assert pq.read_table(folder).num_rows == 12
    # A damaged delta is read in the middle of the export.
    for delta in (Path(uri[7:]) / "clicks" / "0" / "1").glob("43-*.delta"):
        delta.write_bytes(b"nothing")
    broken = tmp_path / "broken.parquet"
    for target in (broken, tmp_path / "broken"):
        failed = run("export", uri, "clicks", str(target), "--offline")
        assert failed.code == 1
        assert "a delta file cannot be used" in failed.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fleet", "out", "out.parquet"], "nothing half written"


def test_files_are_verified(uri: str, run: Run) -> None:
    whole = run("verify", uri)
    assert whole.code == 0
    assert "is there and whole" in whole.out
    assert [state["damages"] for state in run("verify", uri, "--json").json] == [[], []]
    (delta,) = (Path(uri[7:]) / "clicks" / "0" / "0").glob("43-*.delta")
    delta.unlink()
    broken = run("verify", uri)
    assert broken.code == 1
    for text in (delta.name, "it is missing", "shard 0", "versions that cannot be read: 43", "restore the file"):
        assert text in broken.out
    named = run("verify", uri, "--name", "clicks", "--json")
    assert (named.code, [state["name"] for state in named.json]) == (1, ["clicks"])
    assert named.json[0]["damages"][0]["unreadable"] == [43]
    assert run("verify", uri, "--name", "profiles").code == 0
    nothing = run("verify", uri, "--name", "nothing")
    assert nothing.code == 1
    assert "no such state" in nothing.err
