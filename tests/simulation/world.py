"""A schedule: a fleet, a query, and the faults that its seed draws."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from coordinator.ledger.checkpoints import PART_RECORDS
from coordinator.model.identities import ActorLocation
from coordinator.model.maintenance import Maintenance
from coordinator.model.names import store_actor_name
from coordinator.runtime.runtime import Runtime
from coordinator.service.client import CoordinatorClient
from coordinator.service.coordinator import Coordinator
from coordinator.service.deploy import coordinator_name
from coordinator.storage.options import StorageOptions
from coordinator.storage.protocol import ObjectStore
from store_actors.actor.fleet_clients import fleet_client_of
from store_actors.actor.store_actor import StoreProcess
from store_actors.client.fleet_client import FleetAddress, FleetClient
from tests.simulation.audit import audit_log, audit_state, counted_forms, logged
from tests.simulation.beside import Bystander, StateEnds, drop, move, rescale
from tests.simulation.clock import ProcessClock, SimulatedClock, SimulatedIds, SimulatedThreads, Skew
from tests.simulation.cluster import AsyncLife, Cluster, Life, SimulatedActors
from tests.simulation.keyed import KeyedWorkload, Workload
from tests.simulation.reading import Reader
from tests.simulation.rescaling import NUMBERS, RescaledWorkload
from tests.simulation.scheduler import NoEndError, Party, Scheduler, Violation
from tests.simulation.spark import QUERY, STATE, CommitLog, Driver
from tests.simulation.storage import RememberedObjects, SimulatedObjects
from tests.simulation.workload import AggregationWorkload

_URI = "file:///simulated"
#: Moments of a schedule at which faults are still injected; after that it must come to its end.
_FAULTY_STEPS = 1500


def is_keyed(seed: int) -> bool:
    """Whether the query of a schedule works on keyed stores; the others aggregate."""
    return seed % 3 == 2


@dataclass(frozen=True, slots=True)
class FaultProfile:
    """Rates of the faults of a schedule, drawn for each schedule: some schedules have faults of one kind only."""

    stickiness: float
    storage_faults: float
    message_faults: float
    process_faults: float
    #: Of the process faults, how many leave a zombie.
    zombies: float
    second_driver: bool
    checkpoint_interval: int
    seconds_a_step: float
    #: Of the records, how many find their coordinator stopped just before they are written.
    stops_at_records: float
    #: Of the runs, how many have another form of the query than the one before.
    deploys: float
    #: Of the batches, how many are not asked for in one whole: the user's function shows some rows, or fails and goes on.
    partial_batches: float

    @classmethod
    def draw(cls, rng: random.Random) -> FaultProfile:
        return cls(
            stickiness=rng.choice((0.0, 0.0, 0.5, 0.9)),
            storage_faults=rng.choice((0.0, 0.02, 0.1)),
            message_faults=rng.choice((0.0, 0.01, 0.06)),
            process_faults=rng.choice((0.0, 0.005, 0.02)),
            zombies=rng.choice((0.2, 0.8)),
            second_driver=rng.random() < 0.35,
            checkpoint_interval=rng.choice((64, 2, 5)),
            seconds_a_step=rng.choice((0.01, 0.05, 0.1)),
            stops_at_records=rng.choice((0.0, 0.0, 0.03)),
            deploys=rng.choice((0.0, 0.0, 0.5)),
            partial_batches=rng.choice((0.0, 0.0, 0.5)),
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a schedule."""

    seed: int
    steps: int
    records: int
    faults: Counter[str]
    trace: tuple[tuple[int, str, str], ...]
    error: BaseException | None
    #: Of the command that runs it again.
    options: str = ""

    @property
    def broke_a_promise(self) -> bool:
        """Whether an invariant was broken; an endless schedule alone is no proof of a bug."""
        return not (self.error is None or isinstance(self.error, NoEndError))

    def report(self) -> str:
        """Return the trace and how to see it again."""
        lines = [f"{step:6} {who:14} {text}" for step, who, text in self.trace]
        return "\n".join(
            [
                *lines,
                f"seed {self.seed}: {self.error}",
                f"again: python -m tests.simulation --seed {self.seed}{self.options}",
            ]
        )


def kinds_of(faults: Counter[str]) -> set[str]:
    return {kind.partition(".")[0] for kind in faults}


class World:
    """Everything of one schedule.

    Parameters
    ----------
    seed
        Decides all of it.
    harsh
        Every party has faults, in each seed; but nothing is moved.
    keyed
        Whether the query works on keyed stores; as the seed says by default.
    stops
        Coordinators stop just before they write, and often; nothing else goes wrong.
    moves
        Shards are moved all the time, and processes are killed and frozen; messages and storage do as they should.
    rescales
        The state is rescaled, by runs that ask for other numbers and while they go on.
    reads
        Somebody reads the state all the time.
    drops
        Somebody drops the state while its query runs, and another query begins with its name.
    """

    def __init__(
        self,
        seed: int,
        *,
        harsh: bool = False,
        keyed: bool | None = None,
        stops: bool = False,
        moves: bool = False,
        rescales: bool = False,
        reads: bool = False,
        drops: bool = False,
    ) -> None:
        self._drops_rng = random.Random(seed + 6)
        self._drops_left = self._drops_rng.randint(1, 3) if drops else 0
        #: Who does something beside the batches, by what it is; one of each at a time.
        self._beside: dict[str, Bystander] = {}
        self.rescales = rescales
        self._reads = reads
        self._reads_rng = random.Random(seed + 4)
        self._clocks_rng = random.Random(seed + 5)
        #: Newest batch that was reported as finished, by when that was.
        self._reported: list[tuple[float, int]] = []
        #: Of its own, as that of moves.
        self._rescales_rng = random.Random(seed + 3)
        self.rng = random.Random(seed)
        self.fault_profile = FaultProfile.draw(self.rng)
        #: Of its own, so that schedules in which nothing is moved are what they were.
        self._moves_rng = random.Random(seed + 2)
        self._move_rate = self._moves_rng.choice((0.0, 0.0, 0.01, 0.03))
        #: Of checkpoints; also of its own.
        self._part_records = random.Random(seed + 3).choice((PART_RECORDS, 2, 6))
        #: How many store actors follow what each shard commits, where shards are moved.
        self.standbys = self._moves_rng.randrange(2)
        self._harsh = harsh
        # The end shows what was lost on the way; an audit after each batch shows it earlier, and takes a fifth of the time.
        self._audits_each_batch = harsh or seed % 4 == 0
        if harsh:
            self._move_rate = 0.0
            wild = {
                "storage_faults": 0.1,
                "message_faults": 0.06,
                "process_faults": 0.02,
                "deploys": 0.5,
                "partial_batches": 0.5,
            }
            self.fault_profile = replace(self.fault_profile, stickiness=0.0, **wild)
        if stops:
            calm = dict.fromkeys(
                ("storage_faults", "message_faults", "process_faults", "deploys", "partial_batches"), 0.0
            )
            self.fault_profile = replace(self.fault_profile, second_driver=False, stops_at_records=0.3, **calm)
            self._move_rate = 0.0
        if moves:
            self.fault_profile = replace(
                self.fault_profile, storage_faults=0.0, message_faults=0.0, process_faults=0.02, deploys=0.0
            )
            self._move_rate = 0.1
        if rescales:
            self.fault_profile = replace(self.fault_profile, deploys=0.0)
        further_batches = 5 if moves or rescales or reads or drops else 0
        self.workload = self._draw_workload(is_keyed(seed) if keyed is None else keyed, further_batches)
        self.scheduler = Scheduler(self.rng, self.fault_profile.stickiness)
        self.ids = SimulatedIds(random.Random(seed + 1))
        self.clock = SimulatedClock(self.scheduler, self.fault_profile.seconds_a_step)
        self.stored = RememberedObjects(self.clock.now_s)
        self.objects = SimulatedObjects(
            self.scheduler, self.stored, lambda: self._rate(self.fault_profile.storage_faults), self._before_record
        )
        self.cluster = Cluster(
            self.scheduler, self.clock, lambda: self._rate(self.fault_profile.message_faults), self._restart
        )
        self.actors = SimulatedActors(self.cluster)
        self.runtime = Runtime(self.clock, self.ids, SimulatedThreads(self.scheduler, self.clock), hash_seed=seed)
        self.maintenance = self._draw_maintenance()
        self._address = FleetAddress(_URI, maintenance=self.maintenance)
        self.nodes = ("node-0", "node-1")
        self.commit_log = CommitLog()
        self._state_ends = StateEnds(self.stored, STATE)
        self.attempts: list[Any] = []
        #: Form of the query that each run has.
        self.forms: dict[str, int] = {}
        self.records = 0
        self._present = range(self.workload.shards)
        self._lives = 0
        self._drivers: list[Any] = []
        #: How soon another driver is started where all others are asleep.
        self._impatience = 0.1

    def _draw_workload(self, has_keyed_stores: bool, further_batches: int) -> Workload:
        if self.rescales:
            return RescaledWorkload(self.rng, further_batches)
        if has_keyed_stores:
            return KeyedWorkload(self.rng, further_batches)
        return AggregationWorkload(self.rng, further_batches)

    def _draw_maintenance(self) -> Maintenance:
        """From never to all the time; the grace period is what the protocol relies on, so it is longer than late writes are."""
        step_s = self.fault_profile.seconds_a_step
        return Maintenance(
            interval_s=self.rng.choice((40, 120, 10**9)) * step_s,
            min_deltas_for_snapshot=self.rng.randint(1, 3),
            min_versions_to_retain=self.rng.randint(2, 3),
            # Harsh: about as long as a commit takes when many coordinators reload the log, so many are refused as too slow.
            grace_s=(
                self.rng.choice((150, 400)) * len(self.workload.stores)
                if self._harsh
                # With many shards there is more to do at once, and what was read late is read later.
                else self.rng.choice((800, 2000, 10**6)) * (4 if self.rescales else 1)
            )
            * step_s,
        )

    def _rate(self, rate: float) -> float:
        return rate if self.scheduler.now < _FAULTY_STEPS else 0.0

    # -- parties --------------------------------------------------------------------------------------------------

    def _label(self, kind: str) -> str:
        self._lives += 1
        return f"{kind}#{self._lives}"

    def _of_machine(self) -> Runtime:
        """Surroundings of a process on a machine with a time of day of its own."""
        skew = Skew(self._clocks_rng, min(self.maintenance.grace_s, 3600.0))
        return replace(self.runtime, clock=ProcessClock(self.clock, self.scheduler.party, skew))

    def start_coordinator(self) -> None:
        name = coordinator_name(_URI)

        def make() -> Coordinator:
            return Coordinator(
                _URI,
                self.objects,
                self.maintenance,
                self.nodes[0],
                runtime=self._of_machine(),
                checkpoint_interval=self.fault_profile.checkpoint_interval,
                part_records=self._part_records,
            )

        self.cluster.current[name] = AsyncLife(self.cluster, name, self._label("coordinator"), self.nodes[0], make)

    def start_store(self, node: str) -> None:
        name = store_actor_name(_URI, node)

        def make() -> StoreProcess:
            location = ActorLocation(name, self.ids(), node, "host", 1)
            client = self.new_coordinator_client()
            return StoreProcess(location, self.objects, client, self.maintenance, self._of_machine(), self.actors)

        self.cluster.current[name] = Life(self.cluster, name, self._label(f"store-{node[-1]}"), node, make)

    def new_client(self) -> FleetClient:
        """Return an executor's client of the fleet."""
        return fleet_client_of(self._address, self.actors, self.runtime)

    def new_coordinator_client(self) -> CoordinatorClient:
        """Return a client of the coordinator for any party."""
        return CoordinatorClient.connect(
            _URI, StorageOptions(), self.maintenance, actors=self.actors, runtime=self.runtime
        )

    def store_actor_names(self) -> list[str]:
        """Return the names of the store actors of all nodes."""
        return [store_actor_name(_URI, node) for node in self.nodes]

    @property
    def moves_shards(self) -> bool:
        """Return whether shards are moved in this schedule."""
        return self._move_rate > 0.0

    def start_driver(self) -> None:
        self._drivers.append(Driver(self, self._label("driver")))

    def _restart(self, life: Life) -> None:
        if isinstance(life, AsyncLife):
            self.start_coordinator()
        else:
            self.start_store(life.node)

    # -- what happens to them -------------------------------------------------------------------------------------

    def each_step(self) -> None:
        if self.rng.random() < self._rate(self.fault_profile.process_faults):
            self._fail_process()
        if self.moves_shards and self._moves_rng.random() < self._rate(self._move_rate):
            self._move()
        if self.rescales and self._rescales_rng.random() < self._rate(0.02):
            self._rescale()
        if self._reads and not self._is_there("reader") and self._reads_rng.random() < self._rate(0.02):
            self._begin("reader", self.nodes[0], Reader(self, STATE).read)
        self._drop()
        active = [
            driver
            for driver in self._drivers
            if not driver.dead and not driver.stopped and driver.commit_log is self.commit_log
        ]
        awake = [driver for driver in active if driver.frozen_until <= self.scheduler.now]
        if not self.is_finished() and not awake and (not active or self.rng.random() < self._impatience):
            self.start_driver()
        elif self.fault_profile.second_driver and len(active) < 2 and self.rng.random() < self._rate(0.005):
            self.scheduler.fault("world", "second_driver")
            self.start_driver()

    def _is_there(self, kind: str) -> bool:
        """Whether somebody of a kind is at work beside the batches."""
        present = self._beside.get(kind)
        return present is not None and not present.is_over and not present.dead

    def _begin(self, kind: str, node: str, act: Callable[..., None], *args: Any) -> None:
        self._beside[kind] = Bystander(self, self._label(kind), node, lambda bystander: act(bystander, *args))

    def _move(self) -> None:
        """Somebody moves a shard, and may be killed in the middle of it."""
        if self._is_there("mover"):
            if self._moves_rng.random() < 0.01:
                self._kill(self._beside["mover"], "mover")
            return
        shard = self._moves_rng.randrange(len(self._present))
        node = self._moves_rng.choice(self.nodes)
        self._begin("mover", node, move, STATE, shard, node)

    def _drop(self) -> None:
        """Somebody drops the state now and then."""
        self._notice_drop()
        is_wanted = self._drops_left and self.commit_log.finished and self._drops_rng.random() < self._rate(0.01)
        # A task of the former query that has slept since before its first batch may begin a state: its user drops that, too.
        is_taken = self._state_ends.owner not in ("", self.commit_log.query_id)
        if (is_wanted or is_taken) and not self._is_there("dropper"):
            self._drops_left -= bool(is_wanted)
            self._begin("dropper", self.nodes[0], drop, STATE)

    def _notice_drop(self) -> None:
        """Once the state is dropped, the next query is another one, with a new checkpoint."""
        if self._state_ends.look():
            self.scheduler.fault("world", "dropped", f"state number {self._state_ends.count}")
            self.commit_log = CommitLog(f"{QUERY}-{self._state_ends.count}")

    def is_other_querys_state(self, commit_log: CommitLog) -> bool:
        """Whether the state that a query began with is no more, or its successor has begun by another query."""
        self._notice_drop()
        return commit_log is not self.commit_log or self._state_ends.owner not in ("", commit_log.query_id)

    def _rescale(self) -> None:
        """Somebody asks for more shards, or fewer, while a query runs."""
        if not self._is_there("rescaler"):
            factor = self._rescales_rng.choice((2, 3, -2, -3))
            self._begin("rescaler", self.nodes[0], rescale, STATE, len(self._present), factor)

    def asked_shards(self) -> int | None:
        """Return how many shards a run asks for as it begins."""
        return self._rescales_rng.choice(NUMBERS) if self.rescales else None

    def shards_of_batch(self, shards: range) -> None:
        """Note the shards of a batch that is planned."""
        assert isinstance(self.workload, RescaledWorkload)
        self.workload.begun(shards)
        self._present = shards

    def _fail_process(self) -> None:
        """Kill a party, or freeze it and perhaps replace it meanwhile."""
        actors = list(self.cluster.current.values())
        drivers = [driver for driver in self._drivers if not driver.dead and not driver.stopped]
        executors = [executor for driver in drivers for executor in driver.executors]
        kind = self.rng.choice(("actor", "actor", "driver", "executor"))
        by_kind: dict[str, list[Any]] = {"actor": actors, "driver": drivers, "executor": executors}
        candidates: list[Party] = [candidate for candidate in by_kind[kind] if not candidate.dead]
        if not candidates:
            return
        party = self.rng.choice(candidates)
        kind = party.name.partition("#")[0].partition("-")[0] if kind != "executor" else "executor"
        if self.rng.random() < self.fault_profile.zombies:
            self._freeze(party, kind, int(3 ** self.rng.uniform(1, 6.5)))
        else:
            self._kill(party, kind)

    def _before_record(self) -> None:
        """The worst moment for a coordinator to stop is between a decision and its record, and the worst time the grace period."""
        if self.rng.random() < self._rate(self.fault_profile.stops_at_records):
            grace = min(self.clock.steps(self.maintenance.grace_s), _FAULTY_STEPS)
            self._freeze(self.scheduler.party, "coordinator", int(grace * self.rng.uniform(0.3, 1.2)))

    def _kill(self, party: Party, kind: str) -> None:
        self.scheduler.fault(party.name, f"kill.{kind}")
        if isinstance(party, Life):
            self.cluster.end(party)
            return
        self.scheduler.kill(party)
        if party in self._drivers and self.rng.random() < 0.5:
            for executor in party.executors:  # type: ignore[attr-defined]
                self.scheduler.kill(executor)

    def _freeze(self, party: Party, kind: str, duration: int) -> None:
        party.frozen_until = self.scheduler.now + duration
        party.frozen.append((self.scheduler.now, party.frozen_until))
        if self.rng.random() < 0.3:
            self.scheduler.fault(party.name, f"pause.{kind}", f"for {duration} steps")
            return
        self.scheduler.fault(party.name, f"zombie.{kind}", f"for {duration} steps")
        if isinstance(party, Life):
            self.cluster.zombies.setdefault(party.actor_name, []).append(party)
            self.cluster.lost(party)
            self._restart(party)
        for attempt in self.attempts:
            if attempt.executor is party:
                attempt.given_up = True

    # -- a schedule -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run to the end of the query, then let everybody left come to an end, and audit."""
        self.start_coordinator()
        for node in self.nodes:
            self.start_store(node)
        self.start_driver()
        self.scheduler.run(self.each_step, self._is_over)
        self.records = audit_log(self.stored, self.workload, STATE, self.forms.__getitem__)
        self._audit_state("the end")

    def is_finished(self) -> bool:
        """Return whether Spark's commit log has all that the query is to do."""
        return len(self.commit_log.finished) >= self.workload.batches

    def _is_over(self) -> bool:
        if not self.is_finished():
            return False
        if any(not driver.dead and not driver.stopped for driver in self._drivers):
            return False
        if self._is_there("dropper"):
            return False
        return all(attempt.succeeded is not None or attempt.executor.dead for attempt in self.attempts)

    def begin_run(self) -> str:
        """Begin a run of the query, in some form."""
        run_id, former = self.ids(), next(reversed(self.forms.values()), 0)
        changes = self.workload.forms > 1 and self.rng.random() < self.fault_profile.deploys
        self.forms[run_id] = (former + changes) % self.workload.forms
        return run_id

    def batch_finished(self, commit_log: CommitLog, batch: int) -> None:
        """Spark has recorded a batch: from here on it must never be lost, unless its state is dropped."""
        if self.is_other_querys_state(commit_log):
            return
        if self.commit_log.finished != list(range(batch + 1)):
            raise Violation(f"batches were recorded in the order {self.commit_log.finished}")
        if self._audits_each_batch:
            self._audit_state(f"after batch {batch}")

    def readable_versions(self) -> int:
        """Return the newest version that may be read."""
        return len(self.commit_log.finished)

    def later_steps(self, most: int) -> int:
        """Return for how many moments a reader waits."""
        return self._reads_rng.randrange(most)

    def sink_fails(self) -> bool:
        """Return whether a batch fails after all of its shards have committed."""
        return self._reads and self._reads_rng.random() < self._rate(0.2)

    def report_within_s(self) -> float | None:
        """Return how long a report that a batch is finished may wait for records of the next one; None without readers."""
        return self._reads_rng.choice((0.0, 1.0)) if self._reads else None

    def batch_reported(self, run_id: str, batch: int) -> None:
        """Note that the fleet took the report of a finished batch. It does not count for a run that was replaced by then: the other one
        began with that batch, or a later one.
        """
        runs = [record["run_id"] for record in logged(self.stored, STATE) if record["kind"] == "run_started"]
        if runs[-1] == run_id:
            self._reported.append((self.clock.elapsed_s(), batch))

    def finished_by(self, elapsed_s: float) -> int:
        """Return the newest version whose batch was reported by a time."""
        return max((batch + 1 for when_s, batch in self._reported if when_s <= elapsed_s), default=0)

    def was_begun_again(self, version: int) -> bool:
        """Whether a run began again with the batch that a version is read by, though the log said that it was finished: its driver had
        read Spark's commit log before.
        """
        finished = 0
        for record in logged(self.stored, STATE):
            if record["kind"] == "committed":
                finished = max(finished, record["entry"]["version"] - 1)
            elif record["kind"] == "batch_finished":
                finished = max(finished, record["batch_id"] + 1)
            elif record["kind"] == "run_started" and record["batch_id"] <= version < finished:
                return True
        return False

    def _audit_state(self, when: str) -> None:
        copy = RememberedObjects(self.clock.now_s)
        for info in self.stored.list(""):
            copy.put(info.path, self.stored.get(info.path))
        version = len(self.commit_log.finished)
        forms = counted_forms(self.stored, STATE, self.forms.__getitem__)
        try:
            audit_state(copy, self._coordinator_over, self.workload, STATE, self.commit_log.query_id, version, forms)
        except Exception as error:
            raise Violation(f"{when}: {error}") from error

    def _coordinator_over(self, objects: ObjectStore) -> Coordinator:
        # Ids of its own: an audit must not change what comes after it.
        aside = replace(self.runtime, new_id=self.ids.aside())
        return Coordinator(_URI, objects, Maintenance(), "node-0", runtime=aside)

    def bury(self) -> None:
        """End every process, so that no fiber is left."""
        parties: list[Party] = [*self.cluster.current.values(), *self._drivers, *self._beside.values()]
        parties += [life for lives in self.cluster.zombies.values() for life in lives]
        parties += [attempt.executor for attempt in self.attempts]
        for party in parties:
            self.scheduler.kill(party)


def run_seed(seed: int, **kind: bool | None) -> Outcome:
    """Run one schedule, of a kind by the arguments of :class:`World`; return its outcome, with the error if it failed."""
    return run_world(seed, World(seed, **kind))  # type: ignore[arg-type]


def run_world(seed: int, world: World) -> Outcome:
    """Run a schedule; return its outcome, with the error if it failed."""
    error: BaseException | None = None
    # Warnings of the project to operators have no reader here.
    logging.disable(logging.CRITICAL)
    try:
        world.run()
    except Exception as caught:  # noqa: BLE001 - any error is a finding
        error = caught
    finally:
        world.bury()
        logging.disable(logging.NOTSET)
    scheduler = world.scheduler
    return Outcome(seed, scheduler.now, world.records, scheduler.faults, tuple(scheduler.trace), error)
