"""A fleet of made-up figures: the status that a coordinator would report of many queries."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

from coordinator.telemetry.slow_batches import phases

_NODES = 5
_ACTORS_EACH = 2
_ROWS = 4000
_BATCHES_REPORTED = 6


def now_ms() -> int:
    """Return the time in milliseconds since the epoch."""
    return int(time.time() * 1000)


class FedFleet:
    """Queries that each make a batch between two requests for the status.

    Parameters
    ----------
    queries, shards
        Number of queries, and of the shards of all together.
    names
        Names of the queries, if they are to have others than ``query-00`` and so on.
    """

    def __init__(self, queries: int, shards: int, names: Sequence[str] = (), seed: int = 7) -> None:
        self._random = random.Random(seed)
        self.actors = [self._actor(number) for number in range(_NODES * _ACTORS_EACH)]
        self.unanswering: set[str] = set()
        self.executors = [self._executor(node) for node in range(_NODES)]
        self.running: dict[str, dict[str, Any]] = {}
        self.queries = {
            name: self._query(name, shards // queries) for name in names or map("query-{:02d}".format, range(queries))
        }

    def status(self) -> dict[str, Any]:
        """Run another batch of each query, and return the status as ``RayProbe`` does; actors in :attr:`unanswering` are lost."""
        for name in self.queries:
            self._batch(name)
        return {
            "fleet_id": "fed", "uri": "s3://bucket/many-queries", "drained": [], "took_ms": 0,
            "coordinator": {"node_id": _node_id(0), "pid": 4001, "started_at_ms": 1_760_000_000_000},
            "store_actors": [
                {**actor, "alive": actor["actor_name"] not in self.unanswering} for actor in self.actors
            ],
            "queries": [dict(query) for query in self.queries.values()],
            "executors": [dict(executor) for executor in self.executors], "running": dict(self.running),
            "behind_records": {"query-01": 1200},
        }  # fmt: skip

    def move(self, name: str, shard: int, to: int, reason: str) -> None:
        """Give a shard to another store actor."""
        query, target = self.queries[name], self.actors[to]
        shards = list(query["shards"])
        previous = shards[shard]
        move = {
            "epoch": previous["epoch"] + 1, "version": previous["version"], "from": previous["actor_name"], "from_instance": "i",
            "to": target["actor_name"], "reason": reason, "moved_bytes": 1_200_000, "moved_ms": 31, "error": "",
        }  # fmt: skip
        shards[shard] = {
            **previous, "actor_name": target["actor_name"], "node_id": target["node_id"], "epoch": previous["epoch"] + 1,
            "moves": [*previous["moves"], move][-4:],
        }  # fmt: skip
        self.queries[name] = {**query, "shards": shards}

    def lose_executor(self, number: int) -> None:
        """Have an executor reported as lost."""
        self.executors[number] |= {"alive": False, "lost_at_ms": now_ms(), "reason": "Remote RPC client disassociated"}

    @staticmethod
    def _executor(node: int) -> dict[str, Any]:
        return {
            "application": "app-1", "executor_id": str(node), "host": f"10.0.0.{node + 4}", "alive": True, "lost_at_ms": None,
            "reason": "", "is_expected": False,
        }  # fmt: skip

    @staticmethod
    def _actor(number: int) -> dict[str, Any]:
        node, index = divmod(number, _ACTORS_EACH)
        return {
            "actor_name": f"statefleet-store-0a1b2c3d-{_node_id(node)[:12]}" + (f"-{index}" if index else ""),
            "instance_id": f"life-{number}", "node_id": _node_id(node), "host": f"10.0.0.{node + 4}", "pid": 4100 + number,
            "alive": True, "memory_limit": 8 * 10**9, "resident_bytes": 3 * 10**9 + number * 10**8, "spilled_bytes": 0,
        }  # fmt: skip

    def _query(self, name: str, shards: int) -> dict[str, Any]:
        return {
            "name": name, "query_id": f"id-{name}", "run_id": "3f2a9c0011223344", "output_mode": "update", "num_shards": shards,
            "active": True, "version": 100, "batch_id": 99, "watermark_ms": now_ms() - 600_000, "rows_per_second": 0.0,
            "state_rows": 0, "state_bytes": 0, "locality": 0.99, "rows_late": 0, "last_commit_ms": now_ms(), "epoch": 7,
            "is_continuous": False, "batches": [], "refusals": [], "slow_batches": [],
            "shards": [self._shard(number) for number in range(shards)],
        }  # fmt: skip

    def _shard(self, number: int) -> dict[str, Any]:
        actor = self._random.choice(self.actors)
        rows = self._random.randrange(10_000, 200_000)
        return {
            "partition_id": number, "actor_name": actor["actor_name"], "node_id": actor["node_id"], "epoch": 3, "version": 100,
            "executor": f"{actor['host']}:{self._random.choice((71, 72))}", "state_rows": rows, "state_bytes": rows * 48,
            "rows_in": 0, "last_commit_ms": now_ms(), "operations": 100, "operations_local": 100, "operations_elsewhere": {},
            "asked_ms": None, "leased_ms": None, "begun_ms": None, "apply_ms": None, "write_ms": None, "counted_ms": None,
            "oldest_version": 80, "snapshot_version": 90, "delta_files": 10, "snapshot_files": 1, "file_bytes": rows * 30, "moves": [],
        }  # fmt: skip

    def _batch(self, name: str) -> None:
        query, draw, end = self.queries[name], self._random, now_ms()
        version = query["version"] + 1
        skew = draw.lognormvariate(0, 0.35)
        shards = [self._committed(shard, version, end, skew) for shard in query["shards"]]
        last = max(shards, key=lambda shard: shard["counted_ms"])
        rows_in = sum(shard["rows_in"] for shard in shards)
        begun_ms = min(shard["begun_ms"] for shard in shards)
        batch = {
            "batch_id": version - 1, "version": version, "planned_ms": begun_ms - draw.randrange(90, 260),
            "first_begun_ms": begun_ms, "last_begun_ms": last["begun_ms"], "ended_ms": end,
            "shards_counted": len(shards), "rows_in": rows_in, "rows_late": draw.choice((0, 0, 0, 12)), "rows_updated": rows_in,
            "rows_removed": 0, "state_rows": sum(shard["state_rows"] for shard in shards), "run_id": query["run_id"],
            "state_bytes": sum(shard["state_bytes"] for shard in shards), "delta_bytes": rows_in * 40, "watermark_ms": end - 600_000,
            "apply_total_ms": 40, "write_total_ms": 60, "last_shard": last["partition_id"],
            **{moment: last[moment] for moment in ("asked_ms", "leased_ms", "begun_ms", "apply_ms", "write_ms", "counted_ms")},
        }  # fmt: skip
        batch |= {"phases": phases(batch), "waited_ms": 8 + version % 2 if query["is_continuous"] else None}
        self.queries[name] = {
            **query, "shards": shards, "version": version, "batch_id": version - 1, "last_commit_ms": end,
            "watermark_ms": end - 600_000, "rows_per_second": rows_in * skew,
            "batches": [*query["batches"], batch][-_BATCHES_REPORTED:],
            "state_rows": batch["state_rows"], "state_bytes": batch["state_bytes"],
        }  # fmt: skip

    def _committed(self, shard: Mapping[str, Any], version: int, end_ms: int, skew: float) -> dict[str, Any]:
        draw = self._random
        apply_ms, write_ms = int(8 * skew) + draw.randrange(6), draw.randrange(12, 40)
        counted_ms = end_ms - draw.randrange(20, 60)
        begun_ms = counted_ms - apply_ms - write_ms - draw.randrange(4, 15)
        rows_in = int(_ROWS * skew * draw.uniform(0.3, 1.6))
        return {
            **shard, "version": version, "rows_in": rows_in, "state_rows": shard["state_rows"] + rows_in // 50,
            "state_bytes": shard["state_bytes"] + rows_in, "begun_ms": begun_ms, "apply_ms": apply_ms, "write_ms": write_ms,
            "counted_ms": counted_ms, "last_commit_ms": begun_ms, "operations": shard["operations"] + 1,
            "operations_local": shard["operations_local"] + 1, "asked_ms": begun_ms - 9, "leased_ms": begun_ms - 6,
        }  # fmt: skip


def _node_id(number: int) -> str:
    return f"{number:02x}f9c1d27e" * 5
