"""The benchmark's figures as tables in Markdown, as they are in ``docs/performance.md``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.harness import FLEET, PLAIN, SHUFFLED
from benchmarks.shared import SPARK_STORES

HDFS, ROCKSDB = SPARK_STORES
#: What readers call the sides.
NAMES = {
    PLAIN: "plain shuffle",
    FLEET: "Statefleet",
    SHUFFLED: "Statefleet in two stages",
    HDFS: "Spark HDFSBacked",
    ROCKSDB: "Spark RocksDB",
}
#: The first columns of ratios.
_RATIOS = (f"{FLEET} / {PLAIN}", f"{FLEET} / {SHUFFLED}", f"{HDFS} / {FLEET}", f"{ROCKSDB} / {FLEET}")
_FIGURES = {
    "upsert_ns": "upsert, ns a row",
    "get_ns": "get, ns a row",
    "remove_ns": "remove, ns a row",
    "fold_ns": "count and sum, ns a row",
    "table_ns": "upsert in a hash table that does nothing else, ns a row",
    "bytes_a_key": "memory, bytes a key",
}


def _said(ratio: str) -> str:
    """Return the name of a ratio in readers' words."""
    return " / ".join(NAMES.get(side, side) for side in ratio.split(" / "))


def _number(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _ratio(row: Mapping[str, Any], name: str) -> str:
    """Return a ratio of a row with its quartiles; empty if it was not measured."""
    for ratio in row["ratios"]:
        if ratio["ratio"] == name:
            span = " ({} to {})".format(*map(_number, ratio["quartiles"])) if "quartiles" in ratio else ""
            return f"{_number(ratio['value'])}{span}"
    return ""


def _seconds(row: Mapping[str, Any]) -> str:
    """Return the fleet's seconds, and those above the plain query."""
    above = row.get("above_plain_s")
    return f"{row['sides'][FLEET]['median_s']:.3f}" + (f" (plain + {above['median']:.3f})" if above else "")


def _compared(rows: Iterable[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the columns and cells of all rows with sides, those columns that have a figure."""
    rows = [row for row in rows if "figures" not in row]
    measured = [ratio["ratio"] for row in rows for ratio in row["ratios"]]
    ratios = [name for name in dict.fromkeys((*_RATIOS, *measured)) if name in measured]
    columns = ["", "a batch", *map(_said, ratios), "Statefleet, s"]
    return columns, [
        [row["title"], row["detail"], *(_ratio(row, name) for name in ratios), _seconds(row)] for row in rows
    ]


def figures_table(row: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the columns and cells of a row of figures: what is measured, by kind of key."""
    kinds = list(row["figures"])
    cells = [
        [text, *(f"{kind[name]:,.0f}" if name in kind else "" for kind in row["figures"].values())]
        for name, text in _FIGURES.items()
    ]
    return ["", *kinds], cells


def ran_on(results: Mapping[str, Any]) -> str:
    """Return the machine, the versions and the date in a sentence."""
    machine, versions = results["machine"], results["versions"]
    named = ", ".join(f"{name} {number}" for name, number in versions.items() if name != "statefleet")
    hardware = f"{machine['cores']} cores ({machine['architecture']}), {machine['memory_gib']} GiB, {machine['system']}"
    ran = f"{results['date']}, {results['seconds'] / 60:.0f} minutes, load average {machine['load']} before it"
    return f"Statefleet {versions['statefleet'].split('+')[0]} ({results['commit']}) with {named}; {hardware}; {ran}."


def missed(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a sentence for each ratio beyond its margin."""
    sentences = []
    for row in rows:
        where = f"{row['title']} ({row['detail']})"
        for ratio in row["ratios"]:
            if ratio.get("met") is False:
                spread = (
                    " (quartiles {} to {})".format(*map(_number, ratio["quartiles"])) if "quartiles" in ratio else ""
                )
                sentences.append(
                    f"{where}: {_said(ratio['ratio'])} is {_number(ratio['value'])}{spread}; expected is {ratio['target']}"
                )
    return sentences


def _table(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    rows = [columns, ["---"] * len(columns), *cells]
    return "".join(f"| {' | '.join(row)} |\n".replace("|  |", "| |").replace("|  |", "| |") for row in rows)


def page(results: Mapping[str, Any]) -> str:
    """Return the tables in Markdown."""
    parts = [f"{ran_on(results)}\n"]
    columns, cells = _compared(results["rows"])
    if cells:
        parts.append(_table(columns, cells))
    for row in results["rows"]:
        if "figures" in row:
            parts += [f"{row['title'].capitalize()}: {row['detail']}.\n", _table(*figures_table(row))]
    return "\n".join(parts)
