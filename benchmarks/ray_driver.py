"""One of the processes of :mod:`benchmarks.drivers`, a Ray driver that calls an actor: a module that Ray's workers can import."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from typing import Any

import ray

from coordinator.service.deploy import init_ray

__all__ = ["deploy", "drive"]

_NAMESPACE = "drivers"


class Echo:
    """An actor that answers."""

    async def ping(self) -> int:
        """A small answer."""
        return 1


def deploy(address: str) -> None:
    """Start the actor, from a process of its own, so that this one is no driver."""
    init_ray(address=address, namespace=_NAMESPACE)
    echo: Any = ray.remote(Echo).options(name="echo", max_concurrency=1000, num_cpus=0, lifetime="detached").remote()
    ray.get(echo.ping.remote())


def drive(address: str, calls: int, pipe: Connection) -> None:
    """One driver: joins, tells how long that took, and then calls as often as it is told."""
    started = time.perf_counter()
    init_ray(address=address)
    actor: Any = ray.get_actor("echo", namespace=_NAMESPACE)
    ray.get(actor.ping.remote())
    pipe.send(time.perf_counter() - started)
    while pipe.recv():
        started = time.perf_counter()
        for _ in range(calls):
            ray.get(actor.ping.remote())
        pipe.send((time.perf_counter() - started) / calls)
