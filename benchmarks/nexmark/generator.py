"""The events of Nexmark, an auction site: persons, auctions and bids, the same for the same seed on every machine.

The data model is that of the Nexmark suite (github.com/nexmark/nexmark, and Apache Beam before it): of 50 events the first is a
new person, the next three are new auctions and the others are bids; half of the bids go to one hot auction, and three quarters of
the auctions and bids are of one hot person, both of which move on as the stream does. The text is ours, and so are the random
numbers: row counts of other generators are others.

An event is a function of the seed and its number, so any range of the stream can be made by itself (:meth:`Nexmark.events`).

The rate of a stream is its *event time*: at 10,000 events/s a million events are 100 s. State it with every result.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, auto
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from benchmarks.nexmark.chance import Ints, Words, below, draw, log_uniform, pattern_text, pick, sliced_text
from coordinator.model.errors import InvalidRequestError

_TIME: Final = pa.timestamp("us", tz="UTC")


def _schema(**types: pa.DataType) -> pa.Schema:
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in types.items()])


#: Columns of the streams. ``eventNumber`` is not Nexmark's: it orders all events, of all streams, where times are equal.
PERSONS: Final = _schema(
    id=pa.int64(), name=pa.string(), emailAddress=pa.string(), creditCard=pa.string(), city=pa.string(),
    state=pa.string(), dateTime=_TIME, extra=pa.string(), eventNumber=pa.int64(),
)  # fmt: skip
AUCTIONS: Final = _schema(
    id=pa.int64(), itemName=pa.string(), description=pa.string(), initialBid=pa.int64(), reserve=pa.int64(),
    dateTime=_TIME, expires=_TIME, seller=pa.int64(), category=pa.int64(), extra=pa.string(), eventNumber=pa.int64(),
)  # fmt: skip
BIDS: Final = _schema(
    auction=pa.int64(), bidder=pa.int64(), price=pa.int64(), channel=pa.string(), url=pa.string(),
    dateTime=_TIME, extra=pa.string(), eventNumber=pa.int64(),
)  # fmt: skip

#: One person, three auctions, then bids.
EVENTS_OF_EPOCH: Final = 50
_AUCTIONS_OF_EPOCH: Final = 3
_FIRST_BID: Final = 1 + _AUCTIONS_OF_EPOCH

_FIRST_ID: Final = 1000
_FIRST_CATEGORY: Final = 10
_CATEGORIES: Final = 5
#: Number of ids beyond the newest that bids may already name.
_LEAD: Final = 10
_OPEN_AUCTIONS: Final = 100
_ACTIVE_PERSONS: Final = 1000
#: The hot auction, bidder and seller change with every so many ids.
_HOT_STEP: Final = 100
#: Events in which as many auctions begin as are open at a time; auctions last up to twice their time.
_EVENTS_OF_OPEN_AUCTIONS: Final = _OPEN_AUCTIONS * EVENTS_OF_EPOCH // _AUCTIONS_OF_EPOCH

_CENT: Final = 100.0
_HIGHEST_PRICE: Final = 1e6
_HOT_CHANNELS: Final = ("Google", "Facebook", "Baidu", "Apple")
_CHANNELS: Final = 10_000
_FIRST_NAMES: Final = ("Ada", "Bo", "Carla", "Dmitri", "Elif", "Farid", "Greta", "Hiro", "Ines", "Jonas")
_LAST_NAMES: Final = ("Abel", "Brandt", "Costa", "Duarte", "Engel", "Fischer", "Garcia", "Haas", "Ito", "Jansen")
_CITIES: Final = ("Tucson", "Fresno", "Oakland", "Nampa", "Moscow", "Salem", "Medford", "Spokane", "Olympia", "Casper")
_STATES: Final = ("AZ", "CA", "ID", "OR", "WA", "WY")
#: Mean letters of `extra`: what is missing to Nexmark's mean sizes of 200, 500 and 100 bytes, counted without channel and URL.
_EXTRA_OF_PERSON: Final = 134
_EXTRA_OF_AUCTION: Final = 389
_EXTRA_OF_BID: Final = 68

#: A prime, so that it goes through every place of a group before it returns to one.
_STRIDE: Final = 953
#: Its time fits 64 bits of microseconds at one event per second.
_LARGEST_NUMBER: Final = 2**42
#: More would not fit the 32-bit offsets of Arrow's strings.
_MOST_AT_ONCE: Final = 2**24
_MS: Final = 1000
_START: Final = 1_735_689_600_000_000  # 2025-01-01 00:00 UTC


class _Draw(IntEnum):
    """The random draws of an event. The values are part of the data: append, never reorder."""

    CHANNEL = auto()
    URL = auto()
    AUCTION = auto()
    BIDDER = auto()
    PRICE = auto()
    BID_EXTRA = auto()
    NAME = auto()
    EMAIL = auto()
    CREDIT_CARD = auto()
    CITY = auto()
    STATE = auto()
    PERSON_EXTRA = auto()
    ITEM_NAME = auto()
    DESCRIPTION = auto()
    INITIAL_BID = auto()
    RESERVE = auto()
    EXPIRES = auto()
    SELLER = auto()
    CATEGORY = auto()
    AUCTION_EXTRA = auto()


class Events(NamedTuple):
    """The three streams: of one range of events, each in the order of arrival, or the DataFrames that queries read."""

    persons: Any
    auctions: Any
    bids: Any


@cache
def _channels() -> tuple[pa.Array, pa.Array]:
    """Return all channels, hot ones first, and the URL of each."""
    names = [*_HOT_CHANNELS, *(f"channel-{number}" for number in range(_CHANNELS))]
    pattern = "https://nexmark.example/*****/*****/*****/item.htm?query=1"
    urls = pattern_text(0, _Draw.URL, np.arange(len(names)), pattern).to_pylist()
    cold = [f"{url}&channel_id={number}" for number, url in enumerate(urls[len(_HOT_CHANNELS) :])]
    return pa.array(names), pa.array([*urls[: len(_HOT_CHANNELS)], *cold])


def _is_hot(words: Words, one_in: int) -> npt.NDArray[np.bool_]:
    """Return a mask that is true for all but one in so many (a power of two), by the lowest bits."""
    return (words & np.uint64(one_in - 1)) != 0


def _newest_person(numbers: Ints) -> Ints:
    """Return the ordinal of the newest person at each event; there is always one."""
    return numbers // EVENTS_OF_EPOCH


def _newest_auction(numbers: Ints) -> Ints:
    """Return the ordinal of the newest auction at each event; -1 before the first."""
    epochs, places = np.divmod(numbers, EVENTS_OF_EPOCH)
    return epochs * _AUCTIONS_OF_EPOCH + np.minimum(places, _AUCTIONS_OF_EPOCH) - 1


def _price(words: Words) -> Ints:
    """Return log-uniform prices from 1 to 1,000,000, in cents: a third each below 10^4, below 10^6 and above."""
    return np.rint(log_uniform(words, _HIGHEST_PRICE) * _CENT).astype(np.int64)


def _active_person(words: Words, newest: Ints, hot_offset: int) -> Ints:
    """Return ids of persons: three quarters the hot one, else uniform over the newest thousand and those to come next."""
    hot = newest // _HOT_STEP * _HOT_STEP + hot_offset
    active = np.minimum(newest + 1, _ACTIVE_PERSONS)
    cold = newest + 1 - active + below(words, active + _LEAD)
    return np.where(_is_hot(words, 4), hot, cold) + _FIRST_ID


def _open_auction(words: Words, newest: Ints) -> Ints:
    """Return ids of auctions to bid for: one half the hot one, else uniform over the newest hundred and those to come next."""
    hot = newest // _HOT_STEP * _HOT_STEP
    oldest = np.maximum(newest - _OPEN_AUCTIONS, 0)
    cold = oldest + below(words, newest - oldest + 1 + _LEAD)
    return np.where(_is_hot(words, 2), hot, cold) + _FIRST_ID


@dataclass(frozen=True, slots=True)
class Nexmark:
    """A stream of events, without end.

    Raises
    ------
    InvalidRequestError
        A parameter is out of its range.
    """

    #: Another seed makes other data.
    seed: int = 1
    #: Events per second of event time. Event `n` happens at ``start + n / rate``, rounded down to a millisecond as Nexmark's
    #: events are: above 1,000 events/s several have the same time.
    rate: int = 10_000
    #: Time of event 0, in microseconds since 1970 UTC, a whole number of milliseconds.
    start: int = _START
    #: Events arrive shuffled within groups of so many by Nexmark's rule, in steps of 953; 1: in order. The rule does nothing for
    #: divisors of 952 (2, 4, 7, 8, ..) and repeats events for multiples of 953, so these are refused.
    out_of_order: int = 1
    #: Whether the column ``extra`` pads events to Nexmark's mean sizes (persons 200, auctions 500, bids 100 bytes, beside the
    #: bids' channel and URL); otherwise it is empty.
    extra: bool = True

    def __post_init__(self) -> None:
        group = self.out_of_order
        permutes = group == 1 or (group > 1 and group % _STRIDE != 0 and _STRIDE % group != 1)
        if self.rate < 1 or not permutes or self.start % _MS:
            raise InvalidRequestError(
                "a Nexmark stream needs a rate of at least 1, a start in whole milliseconds and groups of 1 or a size that its rule "
                "shuffles: neither a multiple of 953 nor a divisor of 952; nothing was made",
                rate=self.rate,
                out_of_order=self.out_of_order,
                start=self.start,
            )

    def events(self, first: int, last: int) -> Events:
        """Return the events that arrive as numbers `first` to `last` - 1 of the stream, in any order of calls.

        Ranges of some 10,000 are fastest per event: what is made in between stays in a processor's cache.

        Raises
        ------
        InvalidRequestError
            The range is none, or has more than 2**24 events.
        """
        numbers = self.arrivals(first, last)
        places = numbers % EVENTS_OF_EPOCH
        return Events(
            self._persons(numbers[places < 1]),
            self._auctions(numbers[(places >= 1) & (places < _FIRST_BID)]),
            self._bids(numbers[places >= _FIRST_BID]),
        )

    def arrivals(self, first: int, last: int) -> Ints:
        """Return the numbers of the events in the order of arrival."""
        if not (0 <= first <= last <= _LARGEST_NUMBER and last - first <= _MOST_AT_ONCE):
            raise InvalidRequestError(
                "a range of events is from 0 on and has at most 16,777,216; ask for it in parts", first=first, last=last
            )
        positions = np.arange(first, last, dtype=np.int64)
        if self.out_of_order == 1:
            return positions
        within = positions % self.out_of_order
        return positions - within + within * _STRIDE % self.out_of_order

    def _milliseconds(self, numbers: Ints) -> Ints:
        return numbers * _MS // self.rate + self.start // _MS

    def _words(self, field: _Draw, numbers: Ints) -> Words:
        return draw(self.seed, field, numbers)

    def _extra(self, field: _Draw, numbers: Ints, mean: int) -> pa.Array:
        if not self.extra:
            return pa.repeat("", len(numbers))
        return sliced_text(self.seed, field, numbers, mean - mean // 5, mean + mean // 5)

    def _persons(self, numbers: Ints) -> pa.RecordBatch:
        names = [f"{first} {last}" for first in _FIRST_NAMES for last in _LAST_NAMES]
        columns = [
            _newest_person(numbers) + _FIRST_ID,
            pick(names, below(self._words(_Draw.NAME, numbers), len(names))),
            pattern_text(self.seed, _Draw.EMAIL, numbers, "*******@*****.example"),
            pattern_text(self.seed, _Draw.CREDIT_CARD, numbers, "#### #### #### ####"),
            pick(_CITIES, below(self._words(_Draw.CITY, numbers), len(_CITIES))),
            pick(_STATES, below(self._words(_Draw.STATE, numbers), len(_STATES))),
            _times(self._milliseconds(numbers)),
            self._extra(_Draw.PERSON_EXTRA, numbers, _EXTRA_OF_PERSON),
            numbers,
        ]
        return pa.record_batch([pa.array(column) for column in columns], schema=PERSONS)

    def _auctions(self, numbers: Ints) -> pa.RecordBatch:
        initial_bid = _price(self._words(_Draw.INITIAL_BID, numbers))
        begins = self._milliseconds(numbers)
        longest = 2 * (self._milliseconds(numbers + _EVENTS_OF_OPEN_AUCTIONS) - begins)
        lasts = 1 + below(self._words(_Draw.EXPIRES, numbers), np.maximum(longest, 1))
        columns = [
            _newest_auction(numbers) + _FIRST_ID,
            sliced_text(self.seed, _Draw.ITEM_NAME, numbers, 3, 20),
            sliced_text(self.seed, _Draw.DESCRIPTION, numbers, 3, 100),
            initial_bid,
            initial_bid + _price(self._words(_Draw.RESERVE, numbers)),
            _times(begins),
            _times(begins + lasts),
            _active_person(self._words(_Draw.SELLER, numbers), _newest_person(numbers), 0),
            _FIRST_CATEGORY + below(self._words(_Draw.CATEGORY, numbers), _CATEGORIES),
            self._extra(_Draw.AUCTION_EXTRA, numbers, _EXTRA_OF_AUCTION),
            numbers,
        ]
        return pa.record_batch([pa.array(column) for column in columns], schema=AUCTIONS)

    def _bids(self, numbers: Ints) -> pa.RecordBatch:
        channel_words = self._words(_Draw.CHANNEL, numbers)
        channel = np.where(
            _is_hot(channel_words, 2),
            below(channel_words, len(_HOT_CHANNELS)),
            len(_HOT_CHANNELS) + below(channel_words, _CHANNELS),
        )
        names, urls = _channels()
        columns = [
            _open_auction(self._words(_Draw.AUCTION, numbers), _newest_auction(numbers)),
            # The hot bidder is not the hot seller: the next id.
            _active_person(self._words(_Draw.BIDDER, numbers), _newest_person(numbers), 1),
            _price(self._words(_Draw.PRICE, numbers)),
            pick(names, channel),
            pick(urls, channel),
            _times(self._milliseconds(numbers)),
            self._extra(_Draw.BID_EXTRA, numbers, _EXTRA_OF_BID),
            numbers,
        ]
        return pa.record_batch([pa.array(column) for column in columns], schema=BIDS)


def _times(milliseconds: Ints) -> pa.Array:
    return pa.array(milliseconds * _MS, pa.timestamp("us")).cast(_TIME)
