"""The answers of Nexmark's stateful queries: batch Spark SQL over the same finite events, to hold a streaming run against.

Every oracle gives the *final table*: what is left when the stream has ended, all windows, sessions and auctions are closed and
every update has replaced the row of its key. A run that emits only what a watermark has closed lacks the last windows; it
is compared after an event that closes them, or on the windows before them (all windowed answers carry their window's end).

What is arbitrary in Nexmark's SQL is settled here by the total order of events, (``dateTime``, ``eventNumber``), and an average
of integers is an integer, rounded toward zero, as in Flink. Days and minutes are those of the session's time zone: UTC in
sessions of this project. Where Nexmark's result lacks what names a row (a window, a bid), the answer has it in addition.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pyspark.sql import DataFrame

from benchmarks.nexmark.files import Inputs

#: A query: from three inputs to its result. The streaming form of a query has the same signature and name as its oracle.
Answer = Callable[[Inputs], DataFrame]


@dataclass(frozen=True, slots=True)
class Oracle:
    """The batch answer of a query.

    Attributes
    ----------
    name
        As in Nexmark: ``q3``.
    key
        Columns that name a row of the answer; no two rows have the same.
    answer
        Makes the final table from three batch DataFrames.
    """

    name: str
    key: tuple[str, ...]
    answer: Answer


#: Every stateful query that has a checkable answer, by name.
ORACLES: Final[dict[str, Oracle]] = {}


def _oracle(*key: str) -> Callable[[Answer], Answer]:
    """Put the decorated function into :data:`ORACLES`."""

    def register(answer: Answer) -> Answer:
        name = answer.__name__
        ORACLES[name] = Oracle(name, key, answer)
        return answer

    return register


def _sql(inputs: Inputs, text: str, **frames: DataFrame) -> DataFrame:
    """Run a query in which ``{persons}``, ``{auctions}``, ``{bids}`` and others by name are tables."""
    # Only what the text names is passed: each becomes a temporary view.
    tables = {name: frame for name, frame in {**inputs._asdict(), **frames}.items() if f"{{{name}}}" in text}
    return inputs.bids.sparkSession.sql(text, **tables)


_RANKS: Final = ("", "price < 10000", "price >= 10000 AND price < 1000000", "price >= 1000000")


def _by_rank(aggregate: str, name: str) -> str:
    """The aggregate over all bids and over each of the three price ranks, as columns ``total_..``, ``rank1_..`` to ``rank3_..``."""
    names = (f"total_{name}", *(f"rank{rank}_{name}" for rank in (1, 2, 3)))
    filters = (f" FILTER (WHERE {rank})" if rank else "" for rank in _RANKS)
    return ", ".join(f"{aggregate}{chosen} AS {column}" for column, chosen in zip(names, filters, strict=True))


_BIDS_BY_RANK: Final = _by_rank("count(*)", "bids")
_STATISTICS: Final = ", ".join(
    [_BIDS_BY_RANK, _by_rank("count(DISTINCT bidder)", "bidders"), _by_rank("count(DISTINCT auction)", "auctions")]
)


def _final_prices(inputs: Inputs) -> DataFrame:
    """The highest valid bid of each auction that has one: made from its begin to its expiry, both included."""
    return _sql(
        inputs,
        """
        SELECT a.id, a.seller, a.category, a.expires, max(b.price) AS final
        FROM {auctions} a JOIN {bids} b ON b.auction = a.id AND b.dateTime BETWEEN a.dateTime AND a.expires
        GROUP BY a.id, a.seller, a.category, a.expires
        """,
    )


@_oracle("id")
def q3(inputs: Inputs) -> DataFrame:
    """Who sells in category 10 in Oregon, Idaho or California.

    A join without bounds: an auction may come before its seller (by up to ten ids).
    """
    return _sql(
        inputs,
        """
        SELECT p.name, p.city, p.state, a.id
        FROM {auctions} a JOIN {persons} p ON a.seller = p.id
        WHERE a.category = 10 AND p.state IN ('OR', 'ID', 'CA')
        """,
    )


@_oracle("category")
def q4(inputs: Inputs) -> DataFrame:
    """Average selling price by category, over all auctions that have a valid bid, whether or not they expired in the events.

    A bid is valid from its auction's ``dateTime`` to its ``expires``, both included, regardless of the initial bid and reserve.
    """
    return _sql(
        inputs,
        "SELECT category, sum(final) DIV count(final) AS final FROM {prices} GROUP BY category",
        prices=_final_prices(inputs),
    )


@_oracle("starttime", "auction")
def q5(inputs: Inputs) -> DataFrame:
    """Hot items: the auctions with the most bids in each window of 10 s that slides by 2 s; all of them where several tie.

    Windows are aligned to 1970 and include those that begin before the first event.
    """
    return _sql(
        inputs,
        """
        WITH counts AS (
            SELECT window.start AS starttime, window.end AS endtime, auction, count(*) AS num
            FROM {bids} GROUP BY window(dateTime, '10 seconds', '2 seconds'), auction
        ), ranked AS (
            SELECT *, max(num) OVER (PARTITION BY starttime) AS most FROM counts
        )
        SELECT starttime, endtime, auction, num FROM ranked WHERE num = most
        """,
    )


@_oracle("seller")
def q6(inputs: Inputs) -> DataFrame:
    """Average selling price of each seller's last ten auctions.

    Nexmark has no SQL text of it that Flink can run. Here: the auctions of a seller that have a valid bid (see :func:`q4`) in the
    order of (``expires``, ``id``), the last ten of them or all if there are fewer, and the average of their highest valid bids.
    When the stream has ended every auction is closed, also those that would expire after the last event.
    """
    return _sql(
        inputs,
        """
        WITH closed AS (
            SELECT seller, final, row_number() OVER (PARTITION BY seller ORDER BY expires DESC, id DESC) AS age
            FROM {prices}
        )
        SELECT seller, sum(final) DIV count(final) AS final FROM closed WHERE age <= 10 GROUP BY seller
        """,
        prices=_final_prices(inputs),
    )


@_oracle("endtime", "eventNumber")
def q7(inputs: Inputs) -> DataFrame:
    """The highest bids of each window of 10 s; all of them where several tie.

    As in Nexmark's SQL a bid is compared with the highest price of each window whose begin and end enclose it, *both included*:
    one made at the very end of a window, which belongs to the next, also answers for this one if its price is the same.
    """
    return _sql(
        inputs,
        """
        WITH highest AS (
            SELECT window.start AS starttime, window.end AS endtime, max(price) AS price
            FROM {bids} GROUP BY window(dateTime, '10 seconds')
        )
        SELECT h.endtime, b.auction, b.bidder, b.price, b.dateTime, b.extra, b.eventNumber
        FROM {bids} b JOIN highest h ON b.price = h.price AND b.dateTime BETWEEN h.starttime AND h.endtime
        """,
    )


@_oracle("starttime", "id")
def q8(inputs: Inputs) -> DataFrame:
    """Who arrived and opened an auction in the same window of 10 s."""
    return _sql(
        inputs,
        """
        WITH arrived AS (
            SELECT DISTINCT window(dateTime, '10 seconds') AS period, id, name FROM {persons}
        ), sold AS (
            SELECT DISTINCT window(dateTime, '10 seconds') AS period, seller FROM {auctions}
        )
        SELECT a.id, a.name, a.period.start AS starttime, a.period.end AS endtime
        FROM arrived a JOIN sold s ON s.seller = a.id AND s.period = a.period
        """,
    )


@_oracle("id")
def q9(inputs: Inputs) -> DataFrame:
    """The winning bid of each auction that has a valid one (see :func:`q4`): the highest, of equals the first in the total order."""
    return _sql(
        inputs,
        """
        WITH valid AS (
            SELECT a.*, b.auction, b.bidder, b.price, b.dateTime AS bid_dateTime, b.extra AS bid_extra,
                b.eventNumber AS bid_eventNumber,
                row_number() OVER (PARTITION BY a.id ORDER BY b.price DESC, b.dateTime, b.eventNumber) AS place
            FROM {auctions} a JOIN {bids} b ON b.auction = a.id AND b.dateTime BETWEEN a.dateTime AND a.expires
        )
        SELECT id, itemName, description, initialBid, reserve, dateTime, expires, seller, category, extra,
            auction, bidder, price, bid_dateTime, bid_extra, bid_eventNumber
        FROM valid WHERE place = 1
        """,
    )


@_oracle("bidder", "starttime")
def q11(inputs: Inputs) -> DataFrame:
    """Bids of each bidder's sessions; a session ends 10 s after its last bid.

    Two bids exactly 10 s apart are in one session, as Spark has it: sessions that touch are merged.
    """
    return _sql(
        inputs,
        """
        SELECT bidder, count(*) AS bid_count, session_window.start AS starttime, session_window.end AS endtime
        FROM {bids} GROUP BY bidder, session_window(dateTime, '10 seconds')
        """,
    )


@_oracle("bidder")
def q12(inputs: Inputs) -> DataFrame:
    """Bids of each bidder: what the counts of all its windows add up to.

    The query counts in windows of 10 s of *processing* time, so which window a bid is counted in is chance; the sums are not.
    """
    return _sql(inputs, "SELECT bidder, count(*) AS bid_count FROM {bids} GROUP BY bidder")


@_oracle("day")
def q15(inputs: Inputs) -> DataFrame:
    """Bids, distinct bidders and distinct auctions of each day: all, and of the price ranks below 10^4, below 10^6 and above."""
    return _sql(
        inputs,
        f"""
        SELECT date_format(dateTime, 'yyyy-MM-dd') AS day, {_STATISTICS}
        FROM {{bids}} GROUP BY date_format(dateTime, 'yyyy-MM-dd')
        """,
    )


@_oracle("channel", "day")
def q16(inputs: Inputs) -> DataFrame:
    """:func:`q15` for each channel and day, and the minute of the day's last bid."""
    return _sql(
        inputs,
        f"""
        SELECT channel, date_format(dateTime, 'yyyy-MM-dd') AS day, max(date_format(dateTime, 'HH:mm')) AS minute, {_STATISTICS}
        FROM {{bids}} GROUP BY channel, date_format(dateTime, 'yyyy-MM-dd')
        """,
    )


@_oracle("auction", "day")
def q17(inputs: Inputs) -> DataFrame:
    """Bids of each auction and day: how many, of each price rank, and the lowest, highest, average and sum of prices."""
    return _sql(
        inputs,
        f"""
        SELECT auction, date_format(dateTime, 'yyyy-MM-dd') AS day, {_BIDS_BY_RANK}, min(price) AS min_price,
            max(price) AS max_price, sum(price) DIV count(price) AS avg_price, sum(price) AS sum_price
        FROM {{bids}} GROUP BY auction, date_format(dateTime, 'yyyy-MM-dd')
        """,
    )


@_oracle("bidder", "auction")
def q18(inputs: Inputs) -> DataFrame:
    """The last bid, in the total order, of each bidder for each auction."""
    return _sql(
        inputs,
        """
        WITH numbered AS (
            SELECT *, row_number() OVER (PARTITION BY bidder, auction ORDER BY dateTime DESC, eventNumber DESC) AS place
            FROM {bids}
        )
        SELECT auction, bidder, price, channel, url, dateTime, extra, eventNumber FROM numbered WHERE place = 1
        """,
    )


@_oracle("auction", "rank_number")
def q19(inputs: Inputs) -> DataFrame:
    """The ten highest bids for each auction with their ranks 1 to 10; of equals the first in the total order ranks first."""
    return _sql(
        inputs,
        """
        WITH numbered AS (
            SELECT *, row_number() OVER (PARTITION BY auction ORDER BY price DESC, dateTime, eventNumber) AS rank_number
            FROM {bids}
        )
        SELECT auction, bidder, price, channel, url, dateTime, extra, eventNumber, rank_number
        FROM numbered WHERE rank_number <= 10
        """,
    )


@_oracle("eventNumber")
def q20(inputs: Inputs) -> DataFrame:
    """Every bid for an auction of category 10, with that auction; bids made before it begins or after it expires count too."""
    return _sql(
        inputs,
        """
        SELECT b.auction, b.bidder, b.price, b.channel, b.url, b.dateTime AS bid_dateTime, b.extra AS bid_extra,
            a.itemName, a.description, a.initialBid, a.reserve, a.dateTime, a.expires, a.seller, a.category, a.extra,
            b.eventNumber
        FROM {bids} b JOIN {auctions} a ON b.auction = a.id
        WHERE a.category = 10
        """,
    )
