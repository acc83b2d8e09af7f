"""A process of :mod:`benchmarks.costs.drivers`: a Ray driver that calls an actor. Ray's workers can import this module."""

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
        """Return a small answer."""
        return 1


def deploy(address: str) -> None:
    """Start the actor, from a process of its own, so that the caller's is no driver."""
    init_ray(address=address, namespace=_NAMESPACE)
    echo: Any = ray.remote(Echo).options(name="echo", max_concurrency=1000, num_cpus=0, lifetime="detached").remote()
    ray.get(echo.ping.remote())


def drive(address: str, calls: int, pipe: Connection) -> None:
    """Join the cluster, send the seconds that this took, and answer each True in the pipe with the mean seconds of `calls` calls."""
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
