"""Routes of rows to shards, and the marker rows by which a map task reaches every shard.

A row's route is Spark's ``hash(keys)`` (Murmur3, seed 42). Spark's hash partitioning then places it on partition
``pmod(murmur3(route), N)``, and partition p is shard p. A map task that has a message for every shard sends one marker
row a shard; :func:`marker_routes` gives the routes that land on shard 0, 1, .. N-1.
"""

from __future__ import annotations

from functools import lru_cache

__all__ = ["marker_routes", "murmur3_int"]

_MASK = 0xFFFFFFFF


def _rotate_left(value: int, bits: int) -> int:
    return ((value << bits) | (value >> (32 - bits))) & _MASK


def murmur3_int(value: int, seed: int = 42) -> int:
    """Return the signed 32-bit Murmur3 (x86_32) of one int32, as Spark's ``hash`` of an int column."""
    block = _rotate_left(((value & _MASK) * 0xCC9E2D51) & _MASK, 15) * 0x1B873593 & _MASK
    hashed = (_rotate_left(seed ^ block, 13) * 5 + 0xE6546B64) & _MASK
    hashed ^= 4  # length in bytes
    hashed = (hashed ^ (hashed >> 16)) * 0x85EBCA6B & _MASK
    hashed = (hashed ^ (hashed >> 13)) * 0xC2B2AE35 & _MASK
    hashed ^= hashed >> 16
    return hashed - (1 << 32) if hashed & 0x80000000 else hashed


@lru_cache(maxsize=64)
def marker_routes(num_shards: int) -> tuple[int, ...]:
    """Return for each shard the smallest non-negative route that lands on it."""
    routes: dict[int, int] = {}
    route = 0
    while len(routes) < num_shards:
        routes.setdefault(murmur3_int(route) % num_shards, route)
        route += 1
    return tuple(routes[shard] for shard in range(num_shards))
