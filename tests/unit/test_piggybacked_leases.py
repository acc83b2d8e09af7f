"""Piggybacked leases: a commit returns the lease that the next batch would get, where it is known; other leases rank equally."""

from __future__ import annotations

from msgspec import structs

from coordinator.ledger.state_ledger import AcceptedCommits, LeaseGrant
from coordinator.model.commits import PartitionCommit
from coordinator.model.errors import FencedError, StateMismatchError
from coordinator.model.watermarks import Watermarks
from tests.unit.ledger_harness import actor, task
from tests.unit.service_harness import METADATA, SHARDS, QueriedCoordinator, commit_of


def of_shards() -> QueriedCoordinator:
    return QueriedCoordinator(created=METADATA)


async def following(coordinator: QueriedCoordinator, grants: list[LeaseGrant], version: int) -> list[LeaseGrant | None]:
    """Commit a version of each shard, and return the leases that come with the commits."""
    leases: list[LeaseGrant | None] = []
    for grant in grants:
        outcome = await coordinator.outcome(commit_of(grant, version), is_piggybacked=version > 1)
        assert isinstance(outcome, AcceptedCommits), outcome
        leases.append(outcome.next_lease)
    return leases


def all_piggybacked(leases: list[LeaseGrant | None]) -> list[LeaseGrant]:
    assert None not in leases
    return [lease for lease in leases if lease is not None]


async def test_a_commit_brings_the_lease_that_would_be_given_for_the_next_batch() -> None:
    coordinator = of_shards()
    first = all_piggybacked(await following(coordinator, await coordinator.lease_all(), 1))
    assert first == await coordinator.lease_all(batch=1)
    second = all_piggybacked(await following(coordinator, first, 2))
    assert [grant.base_version for grant in second] == [2] * SHARDS
    # Piggybacked leases count as well: those of the first batch, of the requests above, and of the second batch.
    assert (await coordinator.explain_placement("clicks", 0)).operations == {"local": 3}


async def test_a_batch_whose_base_is_not_on_every_shard_is_refused_though_its_lease_came_with_a_commit() -> None:
    coordinator = of_shards()
    grants = await coordinator.lease_all()
    piggybacked = all_piggybacked(await following(coordinator, grants[:3], 1))
    for grant in piggybacked:
        assert isinstance(await coordinator.outcome(commit_of(grant, 2)), StateMismatchError)
    await coordinator.outcome(commit_of(grants[3], 1))
    for grant in piggybacked:
        assert isinstance(await coordinator.outcome(commit_of(grant, 2)), AcceptedCommits)


async def test_no_lease_comes_with_an_answer_that_is_repeated_or_goes_to_a_store_actor_that_is_lost() -> None:
    coordinator = of_shards()
    grants = await coordinator.lease_all()
    accepted = await coordinator.outcome(commit_of(grants[0], 1))
    assert isinstance(accepted, AcceptedCommits)
    assert accepted.next_lease is not None
    # The shard's present lease is not looked up.
    assert await coordinator.outcome(commit_of(grants[0], 1)) == structs.replace(accepted, next_lease=None)
    await coordinator.report_store_actor_lost(actor("a").instance_id)
    assert await following(coordinator, grants[1:], 1) == [None] * 3


async def test_a_shard_that_is_about_to_move_goes_to_its_next_store_actor() -> None:
    coordinator = of_shards()
    grants = await coordinator.lease_all()
    await coordinator.report_store_actor(actor("b"))
    (move,) = await coordinator.plan_move("clicks", 0, actor("b").node_id)
    assert await coordinator.move_prepared(move, None)
    leases = await following(coordinator, grants, 1)
    assert [lease is None for lease in leases] == [True, False, False, False]
    await coordinator.batch_result(task(), range(SHARDS))
    moved = await coordinator.lease(batch=1, at=actor("b"))
    assert (moved.lease.location, moved.base_version) == (actor("b"), 1)


async def test_commits_that_come_in_one_call_are_counted_or_refused_each_by_itself_in_one_append() -> None:
    coordinator = of_shards()
    entries = [commit_of(grant, 1) for grant in await coordinator.lease_all()]
    before = len(coordinator.objects.list("clicks/manifest"))
    entries[2] = structs.replace(entries[2], epoch=0)
    outcomes = await coordinator.commit_partitions("clicks", [PartitionCommit((entry,)) for entry in entries])
    assert [type(outcome) for outcome in outcomes] == [
        AcceptedCommits,
        AcceptedCommits,
        FencedError,
        AcceptedCommits,
    ]
    assert len(coordinator.objects.list("clicks/manifest")) == before + 1


async def test_a_restarted_coordinator_learns_from_commits_which_store_actors_live() -> None:
    coordinator = of_shards()
    first = all_piggybacked(await following(coordinator, await coordinator.lease_all(), 1))
    restarted = coordinator.restarted()
    assert (await restarted.status())["store_actors"] == []
    assert all_piggybacked(await following(restarted, first, 2))
    assert [row["actor_name"] for row in (await restarted.status())["store_actors"]] == [actor("a").actor_name]


async def test_watermarks_that_come_with_a_commit_are_those_of_a_requested_lease() -> None:
    coordinator = of_shards()
    for shard, names in enumerate((("default", "other"), ("other", "default"), ("other", "more"))):
        commit = commit_of(await coordinator.lease(shard=shard), 1)
        commit = structs.replace(commit, watermark_ms=7, output_watermark_ms=8)
        entries = [structs.replace(commit, store_name=name, file=f"clicks/{name}/1.delta") for name in names]
        next_lease = (await coordinator.accept(*entries)).next_lease
        assert next_lease is not None
        assert next_lease.watermarks == (Watermarks(7, 8) if shard < 2 else Watermarks())
    # A commit of the last shard, so that the batch is whole.
    await coordinator.commit(shard=3)
    requested = await coordinator.lease(batch=1, shard=1)
    assert requested.watermarks == Watermarks(7, 8)
