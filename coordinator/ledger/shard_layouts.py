"""Generations of a state's shards: how many there are from which version on, and of which former ones each is made. Pure.

A row is on shard ``pmod(hash(keys), N)`` of N. When a state is rescaled from N to M shards, shard `t` of the new generation has rows of
those old shards `s` only for which ``s = t (mod gcd(N, M))``: a number that leaves the remainder `s` by N and `t` by M exists for no
others. If M is a multiple of N, each new shard is made of one old one. No file is rewritten: a new shard *is* the old ones' rows, as
far as they hash to it, until it has a snapshot of its own.

Partition ids are unique over all generations of a state: shard `t` of a generation has the id ``first_partition + t``, and no id is
given twice. So whatever is told of a partition (leases, commits, files) is told of one generation.

A generation counts once each of its shards has a counted commit. Until then it is the wish of the run that asked for it, and of
nobody else: a run that comes to nothing leaves none behind, and what others have counted meanwhile of the same batch, on all shards,
stays. When it counts, that is the end of all generations that it is not made of, and of what these counted after it was made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from math import gcd
from typing import Any

__all__ = ["ShardLayout", "ShardLayouts"]


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """The shards of a state from a version on.

    Attributes
    ----------
    first_partition
        Partition id of shard 0.
    version
        Version that is made of the generation before, and that the first batch on these shards reads.
    run_id
        Run that was given it; empty for the one that the state was made with.
    former_partition, former_shards
        First partition and number of shards of the generation that it is made of.
    keys
        Columns by whose hash rows are partitioned.
    """

    num_shards: int
    first_partition: int = 0
    version: int = 0
    run_id: str = ""
    former_partition: int = 0
    former_shards: int = 0
    keys: tuple[str, ...] = ()

    @property
    def partitions(self) -> range:
        """Its partition ids, in the order of its shards."""
        return range(self.first_partition, self.first_partition + self.num_shards)

    def parents(self, partition_id: int) -> range:
        """Partitions of the generation before that have rows of one of this one."""
        step = gcd(self.num_shards, self.former_shards)
        first = self.former_partition + (partition_id - self.first_partition) % step
        return range(first, self.former_partition + self.former_shards, step)

    def children(self, former: int) -> range:
        """Partitions that have rows of one of the generation before."""
        step = gcd(self.num_shards, self.former_shards)
        return range(self.first_partition + (former - self.former_partition) % step, self.partitions.stop, step)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ShardLayout:
        return cls(**{**data, "keys": tuple(data["keys"])})


class ShardLayouts:
    """What became of a state's shards. Its first generation, which ``metadata.json`` tells of, is given by the caller.

    Attributes
    ----------
    made
        Further ones, in the order in which they were decided.
    """

    def __init__(self) -> None:
        self.made: list[ShardLayout] = []
        #: First partitions of those that count.
        self._counted: set[int] = set()
        #: Partition ids of further generations, there or gone, are from the first to the second.
        self._first_end, self._given = 0, 0

    def next_partition(self, first: ShardLayout) -> int:
        """First partition of the next generation."""
        return max(self._given, first.partitions.stop)

    def of(self, partition_id: int) -> ShardLayout | None:
        """Generation of a partition; None if it is of the first one."""
        return next((one for one in self.made if partition_id in one.partitions), None)

    def was_given(self, partition_id: int) -> bool:
        """Whether a partition is of a further generation, there or gone."""
        return self._first_end <= partition_id < self._given

    def counts(self, layout: ShardLayout) -> bool:
        """Whether a generation is more than a wish."""
        return layout.first_partition in self._counted

    def newest(self, first: ShardLayout) -> ShardLayout:
        """The newest generation that counts."""
        return next((one for one in reversed(self.made) if self.counts(one)), first)

    def in_force(self, first: ShardLayout, run_id: str, version: int) -> ShardLayout:
        """Generation whose shards a batch of a run that reads a version works on."""
        return self.later_in_force(run_id, version) or first

    def with_version(self, first: ShardLayout, version: int) -> ShardLayout:
        """Generation that counts and has a version: of one that was taken over, the one that took it."""
        return next((one for one in reversed(self.made) if self.counts(one) and one.version <= version), first)

    def later_in_force(self, run_id: str, version: int) -> ShardLayout | None:
        """:meth:`in_force`; None if that is the first one."""
        mine = (
            one for one in reversed(self.made) if one.version <= version and (self.counts(one) or one.run_id == run_id)
        )
        return next(mine, None)

    def line(self, partition_id: int) -> list[ShardLayout]:
        """Generation of a partition and those that it is made of, newest first, but for the first of all."""
        found = []
        own = self.of(partition_id)
        while own is not None:
            found.append(own)
            own = self.of(own.former_partition)
        return found

    def made_of(self, partition_id: int) -> Iterator[ShardLayout]:
        """Generations that are made of that of a partition, directly."""
        own = self.of(partition_id)
        beginning = 0 if own is None else own.first_partition
        return (one for one in self.made if one.former_partition == beginning)

    # -- folding --------------------------------------------------------------------------------------------------

    def add(self, layout: ShardLayout) -> None:
        """A generation was decided."""
        self.made.append(layout)
        self._first_end = self._first_end or layout.first_partition
        self._given = layout.partitions.stop

    def start_run(self, run_id: str) -> list[ShardLayout]:
        """A run began: wishes of others are void. Returns what is gone."""
        return self._keep([one for one in self.made if self.counts(one) or one.run_id == run_id])

    def cut(self, version: int) -> list[ShardLayout]:
        """Have those that are there at a version; returns what is gone: wishes, and what was made of it or of later ones."""
        return self._keep([one for one in self.made if self.counts(one) and one.version < version])

    def count(self, partition_id: int, has_commits: Callable[[int], bool]) -> list[ShardLayout] | None:
        """A commit of a partition was counted; returns which generations are gone with it; None if which ones count is as before."""
        own = self.of(partition_id)
        if own is None or self.counts(own) or not all(map(has_commits, own.partitions)):
            return None
        line, kept = {one.first_partition for one in self.line(partition_id)}, list[ShardLayout]()
        self._counted |= line
        for one in self.made:
            # A wish that is made of what is gone is void, too.
            is_rooted = one.former_partition in {0, *(other.first_partition for other in kept)}
            if is_rooted and (one.first_partition in line or not self.counts(one)):
                kept.append(one)
        return self._keep(kept)

    def _keep(self, kept: list[ShardLayout]) -> list[ShardLayout]:
        gone = [one for one in self.made if one not in kept]
        self.made = kept
        self._counted -= {one.first_partition for one in gone}
        return gone

    def copy(self) -> ShardLayouts:
        """The same, for good: this one may go on."""
        other = ShardLayouts()
        other.made, other._counted = list(self.made), set(self._counted)
        other._given, other._first_end = self._given, self._first_end
        return other

    def to_json(self) -> dict[str, Any]:
        """Field of a checkpoint of the log; none of a state that was never rescaled."""
        if not self._given:
            return {}
        made = [{**one.to_json(), "counts": self.counts(one)} for one in self.made]
        return {"generations": {"first": self._first_end, "given": self._given, "made": made}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ShardLayouts:
        """Those of a checkpoint; one of earlier versions tells of none."""
        found, told = cls(), data.get("generations", {})
        found._first_end, found._given = told.get("first", 0), told.get("given", 0)
        for one in told.get("made", ()):
            fields = dict(one)
            counts = fields.pop("counts")
            layout = ShardLayout.from_json(fields)
            found.made.append(layout)
            if counts:
                found._counted.add(layout.first_partition)
        return found
