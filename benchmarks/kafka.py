"""Kafka for :mod:`benchmarks.realtime`: topics of a broker, and a process that sends events at a fixed rate."""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from benchmarks.shared import PARTITIONS

PERCENTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "p99.9": 0.999, "max": 1.0}
#: Milliseconds for which the producer gathers events.
_LINGER_MS = 1
_FLUSH_S = 60


# -- the broker -------------------------------------------------------------------------------------------------------


class Kafka:
    """A broker that runs."""

    def __init__(self, address: str) -> None:
        self.address = address

    @contextmanager
    def topics(self, source: str, sink: str) -> Iterator[None]:
        """Create two topics, and delete them afterwards. Records have the time at which they were appended."""
        stamped = {"message.timestamp.type": "LogAppendTime"}
        topics = [NewTopic(topic, PARTITIONS, 1, config=stamped) for topic in (source, sink)]
        # It has to live until its requests are answered, and would complain of the end of a broker.
        admin = AdminClient({"bootstrap.servers": self.address})
        for created in admin.create_topics(topics).values():
            created.result()
        try:
            yield
        finally:
            for deleted in admin.delete_topics([source, sink]).values():
                deleted.result()

    def ends(self, topic: str) -> dict[str, int]:
        """Return the offset of the end of each partition, by its number as text."""
        consumer = Consumer({"bootstrap.servers": self.address, "group.id": "ends"})
        try:
            partitions = [TopicPartition(topic, number) for number in range(PARTITIONS)]
            return {str(one.partition): consumer.get_watermark_offsets(one)[1] for one in partitions}
        finally:
            consumer.close()


@contextmanager
def broker(address: str | None, folder: Path) -> Iterator[Kafka]:
    """The broker that was asked for, or one of the tests, which ends afterwards."""
    if address is not None:
        yield Kafka(address)
        return
    # Another broker is used without the tests, and without their jars.
    from tests.kafka_broker import KafkaBroker

    started = KafkaBroker(folder / "kafka")
    try:
        yield Kafka(started.address)
    finally:
        started.stop()


# -- the producer -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Events:
    """Events to send."""

    #: In a second.
    rate: int
    count: int
    keys: int
    #: How likely it is that an event has the key of an earlier one, one of the last `keys`; None: a key is drawn out of `keys`.
    repeated: float | None
    seed: int

    def drawn(self) -> Iterator[int]:
        """Yield keys without an end."""
        random, first = np.random.default_rng(self.seed), 0
        while True:
            keys = random.integers(0, self.keys, 10_000)
            if self.repeated is not None:
                numbers = np.arange(first, first + len(keys))
                is_repeated = (random.random(len(keys)) < self.repeated) & (keys < numbers)
                first, keys = first + len(keys), numbers - is_repeated * (keys + 1)
            yield from keys.tolist()


class EventProducer:
    """A process that sends events as they become due, whatever becomes of them."""

    def __init__(self, kafka: Kafka, topic: str, events: Events) -> None:
        processes = multiprocessing.get_context("spawn")
        self._pipe, theirs = processes.Pipe()
        self._process = processes.Process(target=_send, args=(theirs, kafka.address, topic, events), daemon=True)
        self._process.start()
        theirs.close()
        #: When the first one is due, in microseconds since 1970.
        self.begin_us: int = self._pipe.recv()

    def wait(self) -> dict[str, float]:
        """Wait until all are sent; return percentiles of how late they were given to Kafka's client, in milliseconds."""
        late_ms: dict[str, float] = self._pipe.recv()
        return late_ms

    def end(self) -> None:
        """End the process, which goes on for as long as its processor time is to be read."""
        self._process.terminate()
        self._process.join()


def _send(pipe: Connection, servers: str, topic: str, events: Events) -> None:
    settings = {"bootstrap.servers": servers, "linger.ms": _LINGER_MS, "queue.buffering.max.messages": 10**6}
    # Idempotent: nothing comes twice. And no more than five requests are under way: without a bound, after a pause of the broker
    # thousands of small ones would wait for each other, where few large ones do.
    producer = Producer({**settings, "enable.idempotence": True})
    producer.list_topics(topic)
    keys = events.drawn()
    next(keys)
    gc.disable()
    begin_us = time.time_ns() // 1000 + 100_000
    pipe.send(begin_us)
    late_us: list[int] = []
    for number in range(events.count):
        due_us = begin_us + number * 1_000_000 // events.rate
        while (late := time.time_ns() // 1000 - due_us) < 0:
            producer.poll(0)
            # No shorter, so that many events a second do not take a core.
            time.sleep(max(-late, 1000) / 1e6)
        late_us.append(late)
        key = next(keys)
        producer.produce(topic, b'{"k":%d,"due":%d}' % (key, due_us), partition=key % PARTITIONS)
    producer.flush(_FLUSH_S)
    pipe.send({name: float(np.quantile(late_us, at)) / 1000 for name, at in PERCENTILES.items()})
    with suppress(EOFError):
        pipe.recv()
