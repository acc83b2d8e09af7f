"""Events that are sent to a topic all the time, and the results that come meanwhile, each in a thread of its own."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from confluent_kafka import Consumer, Producer, TopicPartition

_FLUSH_S = 120


class Load:
    """Sends events to a topic, whatever becomes of them; a key's are in one partition.

    Attributes
    ----------
    sent
        How many events there are of each key and second.
    """

    def __init__(self, address: str, topic: str, *, partitions: int, keys: int, rate: int) -> None:
        self._topic, self._partitions, self._keys, self._rate = topic, partitions, keys, rate
        # Nothing comes twice, and nothing is given up while the broker does not answer.
        self._producer = Producer({"bootstrap.servers": address, "linger.ms": 1, "enable.idempotence": True})
        self._failed: list[str] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.sent: Counter[tuple[int, int]] = Counter()

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        begin, number = time.monotonic(), 0
        while not self._is_over.is_set():
            while number < (time.monotonic() - begin) * self._rate:
                # A prime factor, so that neighbours differ.
                self.send(number * 7919 % self._keys, time.time_ns() // 1000)
                number += 1
            self._producer.poll(0.005)

    def send(self, key: int, at_us: int) -> None:
        """Send an event."""
        value = json.dumps({"k": key, "sent": at_us})
        self._producer.produce(self._topic, value, partition=key % self._partitions, on_delivery=self._delivered)
        self.sent[key, at_us // 1_000_000] += 1

    def _delivered(self, error: Any, _: Any) -> None:
        if error is not None:
            self._failed.append(str(error))

    def stop(self) -> None:
        """Send no more by itself."""
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join()

    def flush(self) -> None:
        """Wait until the broker has all events."""
        left = self._producer.flush(_FLUSH_S)
        assert not left
        assert not self._failed


@dataclass(frozen=True)
class Result:
    """A record of the topic of results, and when it came, by the monotonic clock."""

    key: str
    value: dict[str, Any]
    at_s: float


class Results:
    """The results that have come, in the order of each partition.

    Attributes
    ----------
    all
        Of all partitions.
    """

    def __init__(self, address: str, topic: str, partitions: int) -> None:
        self._consumer = Consumer({"bootstrap.servers": address, "group.id": topic, "enable.auto.commit": False})
        self._consumer.assign([TopicPartition(topic, partition, 0) for partition in range(partitions)])
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.all: list[Result] = []
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over.is_set():
            for message in self._consumer.consume(500, 0.02):
                # Errors are those of a broker that is away; the client goes on by itself.
                if message.error() is None:
                    self.all.append(Result(message.key().decode(), json.loads(message.value()), time.monotonic()))
        self._consumer.close()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()

    def newest(self) -> dict[str, dict[str, Any]]:
        """Return the newest result of each key."""
        return {result.key: result.value for result in self.all}

    def longest_gap_s(self, since_s: float, until_s: float) -> float:
        """Return for how long nothing came at most, where that was in a span of time at least in part."""
        times = [result.at_s for result in self.all]
        gaps = [end - begin for begin, end in pairwise(times) if end > since_s and begin < until_s]
        return max(gaps, default=0.0)


@contextmanager
def under_load(load: Load, results: Results) -> Iterator[None]:
    """Send events, and end both threads afterwards."""
    load.start()
    try:
        yield
    finally:
        load.stop()
        results.stop()
