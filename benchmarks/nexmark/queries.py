"""All of Nexmark's stateful queries that the fleet runs, by name."""

from __future__ import annotations

from typing import Final

from benchmarks.nexmark.joined import JOINED
from benchmarks.nexmark.query import Query
from benchmarks.nexmark.totals import TOTALS
from benchmarks.nexmark.windowed import WINDOWED

#: In the order of their numbers.
QUERIES: Final[dict[str, Query]] = {
    query.name: query for query in sorted((*WINDOWED, *TOTALS, *JOINED), key=lambda query: int(query.name[1:]))
}
