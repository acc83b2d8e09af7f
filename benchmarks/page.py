"""The benchmark's figures as one HTML page with charts, which needs nothing else and is light or dark as the reader's system is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Any

from benchmarks.table import NAMES, figures_table, ran_on

_STYLE = """
:root { color-scheme: light dark; --page: #f5f6f8; --card: #fff; --line: #dfe3e8; --text: #18202b; --soft: #566273;
  --plain: #a9b4c2; --statefleet: #1f5fae; --hdfs: #e07b39; --rocksdb: #8a56c2; --other: #1b9e8f; }
@media (prefers-color-scheme: dark) { :root { --page: #10151c; --card: #181f29; --line: #2c3643; --text: #e7ecf3; --soft: #9fabba;
  --plain: #66748a; --statefleet: #4c97e4; --hdfs: #e58a4e; --rocksdb: #a87be0; --other: #35b8a8; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text); font: 15px/1.45 system-ui, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1200px; margin: 0 auto; padding: 1.5rem 1.25rem 4rem; }
h1 { font-size: 1.5rem; margin: 0 0 .5rem; }
h2 { font-size: 1rem; margin: 0; }
p { margin: .3rem 0; max-width: 90ch; }
.soft { color: var(--soft); font-size: .87rem; }
.bad { color: #c0392b; font-weight: 600; }
.cards { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 32rem), 1fr)); margin-top: 1rem; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: .9rem 1rem; min-width: 0; }
svg { display: block; width: 100%; height: auto; margin-top: .5rem; }
text { font: 13px system-ui, sans-serif; fill: var(--text); }
.spread { stroke: var(--text); stroke-width: 1.5; }
.ratios { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; margin: .4rem 0 0; padding: 0; list-style: none; }
.ratios b { font-size: 1.1rem; }
table { border-collapse: collapse; margin-top: .5rem; width: 100%; }
th, td { text-align: left; padding: .25rem .5rem; border-bottom: 1px solid var(--line); font-variant-numeric: tabular-nums; }
"""
_WIDTH, _LEFT, _RIGHT, _ROW = 540, 190, 110, 26


def _seconds(value: float) -> str:
    """Return seconds as people say them."""
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.0f} ms" if value >= 1e-3 else f"{value * 1e9:.0f} ns"


def _chart(row: Mapping[str, Any]) -> str:
    """Return bars of the sides' medians, with lines from the first to the third quartile."""
    sides = {
        side: row["sides"][side]
        for side in (*NAMES, *(side for side in row["sides"] if side not in NAMES))
        if side in row["sides"]
    }
    ends = [end for figures in sides.values() for end in (figures.get("median_s"), *figures.get("quartiles_s", ()))]
    scale = (_WIDTH - _LEFT - _RIGHT) / max([end for end in ends if end is not None], default=1.0)
    bars = []
    for number, (side, figures) in enumerate(sides.items()):
        top = number * _ROW
        middle = top + _ROW / 2
        name = escape(NAMES.get(side, side))
        bars.append(f'<text x="{_LEFT - 8}" y="{middle + 4}" text-anchor="end">{name}</text>')
        if "median_s" not in figures:
            bars.append(f'<text x="{_LEFT}" y="{middle + 4}">{escape(figures["failure"].splitlines()[0][:40])}</text>')
            continue
        width, color = max(1.0, figures["median_s"] * scale), f"var(--{side if side in NAMES else 'other'})"
        label, end = _seconds(figures["median_s"]), width
        if "quartiles_s" in figures:
            first, third = figures["quartiles_s"]
            span = f"{name}: {label}, quartiles {_seconds(first)} and {_seconds(third)}"
            bars.append(f'<g><title>{span}</title><rect x="{_LEFT}" y="{top + 4}" width="{width:.1f}" height="{_ROW - 8}" '
                        f'rx="3" style="fill: {color}"/><line class="spread" x1="{_LEFT + first * scale:.1f}" '
                        f'x2="{_LEFT + third * scale:.1f}" y1="{middle}" y2="{middle}"/></g>')  # fmt: skip
            end = max(width, third * scale)
        else:
            bars.append(
                f'<rect x="{_LEFT}" y="{top + 4}" width="{width:.1f}" height="{_ROW - 8}" rx="3" style="fill: {color}"/>'
            )
        bars.append(f'<text x="{_LEFT + end + 8:.1f}" y="{middle + 4}">{label}</text>')
    return f'<svg viewBox="0 0 {_WIDTH} {len(sides) * _ROW}" role="img" aria-label="{escape(row["title"])}">{"".join(bars)}</svg>'


def _ratios(row: Mapping[str, Any]) -> str:
    items = []
    for ratio in row["ratios"]:
        names = " / ".join(NAMES.get(side, side) for side in ratio["ratio"].split(" / "))
        value = f"{'> ' if ratio['is_lower_bound'] else ''}{ratio['value']:.2f}"
        mark = f' <span class="bad">expected {escape(ratio["target"])}</span>' if ratio.get("met") is False else ""
        items.append(f"<li><b>{escape(value)}</b> <span class=soft>{escape(names)}</span>{mark}</li>")
    above = row.get("above_plain_s")
    if above:
        items.append(f"<li><b>+{above['median']:.3f} s</b> <span class=soft>above the plain shuffle</span></li>")
    return f'<ul class="ratios">{"".join(items)}</ul>'


def _figures(row: Mapping[str, Any]) -> str:
    columns, cells = figures_table(row)
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>" for line in cells)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _card(row: Mapping[str, Any]) -> str:
    content = _figures(row) if "figures" in row else _chart(row)
    return (
        f'<section class="card"><h2>{escape(row["title"])}</h2><p class="soft">{escape(row["detail"])}</p>'
        f"{_ratios(row)}{content}</section>"
    )


def page(results: Mapping[str, Any]) -> str:
    """Return the page; its last element has all figures as JSON, as ``results.json`` does."""
    data = json.dumps(results).replace("</", "<\\/")
    kind = "Quick benchmark" if results["quick"] else "Benchmark"
    return f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Statefleet: {kind.lower()}</title>
<style>{_STYLE}</style></head>
<body><main>
<h1>{kind}</h1>
<p>{escape(ran_on(results))}</p>
<p class="soft">Bars are medians of steady batches, thin lines go from the first to the third quartile. Compare the sides of a
chart, and quote ratios: seconds are of this machine. {escape(results["fairness"])}</p>
<div class="cards">
{"".join(_card(row) for row in results["rows"])}
</div>
</main>
<script type="application/json" id="results">{data}</script>
</body></html>
"""
