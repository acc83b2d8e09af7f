"""Layouts of a state's shards: how many there are from which version on, and of which previous ones each is made. Pure.

A row is on shard ``pmod(hash(keys), N)`` of N. When a state is rescaled from N to M shards, shard `t` of the new layout has rows of
those old shards `s` only for which ``s = t (mod gcd(N, M))``: a number that leaves the remainder `s` by N and `t` by M exists for no
others. If M is a multiple of N, each new shard is made of one old one. No file is rewritten: a new shard *is* the old ones' rows, as
far as they hash to it, until it has a snapshot of its own.

Partition ids are unique over all layouts of a state: shard `t` of a layout has the id ``first_partition + t``, and no id is given
twice. So leases, commits and files of a partition belong to one layout.

A layout counts once each of its shards has a commit. Until then it is requested by one run only: a run that comes to nothing leaves no
layout behind, and what other runs committed meanwhile of the same batch, on all shards, stays. Once it counts, all layouts that it is
not made of end, and so does what was committed on its predecessors after it was created.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import gcd
from typing import Any

from msgspec import Struct, to_builtins

from coordinator.model.stored_json import from_json


class ShardLayout(Struct, frozen=True, forbid_unknown_fields=True):
    """The shards of a state from a version on."""

    num_shards: int
    #: Partition id of shard 0.
    first_partition: int = 0
    #: Version that is made of the previous layout, and that the first batch on these shards reads.
    version: int = 0
    #: Run that requested it; empty for the layout that the state was created with.
    run_id: str = ""
    #: ``former_partition``, ``former_shards``: First partition and number of shards of the layout that it is made of.
    former_partition: int = 0
    former_shards: int = 0
    #: Columns by whose hash rows are partitioned.
    keys: tuple[str, ...] = ()

    @property
    def partitions(self) -> range:
        """Partition ids in the order of the shards."""
        return range(self.first_partition, self.first_partition + self.num_shards)

    def parents(self, partition_id: int) -> range:
        """Return the partitions of the previous layout that have rows of a partition of this one."""
        step = gcd(self.num_shards, self.former_shards)
        first = self.former_partition + (partition_id - self.first_partition) % step
        return range(first, self.former_partition + self.former_shards, step)

    def children(self, former: int) -> range:
        """Return the partitions that have rows of a partition of the previous layout."""
        step = gcd(self.num_shards, self.former_shards)
        return range(self.first_partition + (former - self.former_partition) % step, self.partitions.stop, step)


class ShardLayouts:
    """The layouts of a state. The first one, which ``metadata.json`` has, is given by the caller."""

    def __init__(self) -> None:
        #: Later layouts, in the order in which they were decided.
        self.made: list[ShardLayout] = []
        #: First partitions of the layouts that count.
        self._counted: set[int] = set()
        #: Partition ids of later layouts, dropped ones included, are from the first number up to the second.
        self._first_end, self._given = 0, 0

    def next_partition(self, first: ShardLayout) -> int:
        """Return the first partition of the next layout."""
        return max(self._given, first.partitions.stop)

    def of(self, partition_id: int) -> ShardLayout | None:
        """Return the layout of a partition; None if that is the first one."""
        return next((layout for layout in self.made if partition_id in layout.partitions), None)

    def was_given(self, partition_id: int) -> bool:
        """Return whether a partition is of a later layout, which may have been dropped."""
        return self._first_end <= partition_id < self._given

    def counts(self, layout: ShardLayout) -> bool:
        """Return whether every shard of a layout has a commit."""
        return layout.first_partition in self._counted

    def newest(self, first: ShardLayout) -> ShardLayout:
        """Return the newest layout that counts."""
        return next((layout for layout in reversed(self.made) if self.counts(layout)), first)

    def with_version(self, first: ShardLayout, version: int) -> ShardLayout:
        """Return the newest layout that counts and has a version."""
        return next(
            (layout for layout in reversed(self.made) if self.counts(layout) and layout.version <= version), first
        )

    def in_force(self, run_id: str, version: int) -> ShardLayout | None:
        """Return the layout of a run's batch that reads a version; None if that is the first one."""
        layouts = (
            layout
            for layout in reversed(self.made)
            if layout.version <= version and (self.counts(layout) or layout.run_id == run_id)
        )
        return next(layouts, None)

    def line(self, partition_id: int) -> list[ShardLayout]:
        """Return the layout of a partition and those that it is made of, newest first, without the first of all."""
        line = []
        layout = self.of(partition_id)
        while layout is not None:
            line.append(layout)
            layout = self.of(layout.former_partition)
        return line

    def made_of(self, partition_id: int) -> Iterator[ShardLayout]:
        """Return the layouts whose previous one is the layout of a partition."""
        layout = self.of(partition_id)
        first = 0 if layout is None else layout.first_partition
        return (later for later in self.made if later.former_partition == first)

    # -- folding --------------------------------------------------------------------------------------------------

    def add(self, layout: ShardLayout) -> None:
        """Add a layout that was decided."""
        self.made.append(layout)
        self._first_end = self._first_end or layout.first_partition
        self._given = layout.partitions.stop

    def start_run(self, run_id: str) -> list[ShardLayout]:
        """Drop the requested layouts of other runs than the one that began; returns the dropped ones."""
        return self._keep([layout for layout in self.made if self.counts(layout) or layout.run_id == run_id])

    def cut(self, version: int) -> list[ShardLayout]:
        """Keep only layouts that count and were created before a version; returns the dropped ones."""
        return self._keep([layout for layout in self.made if self.counts(layout) and layout.version < version])

    def count(self, partition_id: int, has_commits: Callable[[int], bool]) -> list[ShardLayout] | None:
        """Take in a commit of a partition; returns the layouts that it supersedes, None if the same layouts count as before."""
        layout = self.of(partition_id)
        if layout is None or self.counts(layout) or not all(map(has_commits, layout.partitions)):
            return None
        line, kept = {ancestor.first_partition for ancestor in self.line(partition_id)}, list[ShardLayout]()
        self._counted |= line
        for layout in self.made:
            # A requested layout that is made of a superseded one is void, too.
            is_rooted = layout.former_partition in {0, *(previous.first_partition for previous in kept)}
            if is_rooted and (layout.first_partition in line or not self.counts(layout)):
                kept.append(layout)
        return self._keep(kept)

    def _keep(self, kept: list[ShardLayout]) -> list[ShardLayout]:
        dropped = [layout for layout in self.made if layout not in kept]
        self.made = kept
        self._counted -= {layout.first_partition for layout in dropped}
        return dropped

    def to_json(self) -> dict[str, Any]:
        """Return the field of a checkpoint of the log; empty for a state that was never rescaled."""
        if not self._given:
            return {}
        made = [{**to_builtins(layout), "counts": self.counts(layout)} for layout in self.made]
        return {"generations": {"first": self._first_end, "given": self._given, "made": made}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ShardLayouts:
        """Return the layouts of a checkpoint."""
        layouts, stored = cls(), data.get("generations", {})
        layouts._first_end, layouts._given = stored.get("first", 0), stored.get("given", 0)
        for item in stored.get("made", ()):
            fields = dict(item)
            counts = fields.pop("counts")
            layout = from_json(fields, ShardLayout)
            layouts.made.append(layout)
            if counts:
                layouts._counted.add(layout.first_partition)
        return layouts
