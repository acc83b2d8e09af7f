"""Object storage as parties see it: strongly consistent, but its answers come late, wrong-looking or not at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from coordinator.model.errors import CommitUnknownError, StorageUnavailableError
from coordinator.storage.protocol import ObjectInfo
from tests.memory_store import MemoryObjectStore
from tests.simulation.scheduler import Crashed, Scheduler

Result = TypeVar("Result")

_CONDITIONAL = ("refused", "lost_request", "lost_answer", "lands_late", "conflict_without_object", "phantom_refusal")
_WRITE = ("refused", "lost_answer", "lands_late")


class RememberedObjects(MemoryObjectStore):
    """The objects that are really there, since when, and all that ever were.

    Parameters
    ----------
    now_s
        Seconds since the epoch, as the parties' clocks tell.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        super().__init__()
        self.now_s = now_s
        self._written_s: dict[str, float] = {}
        #: Every object ever written, also those that were deleted since.
        self.ever: dict[str, bytes] = {}
        #: Objects that were written a second time, after a deletion.
        self.rewritten: list[str] = []

    def put_if_absent(self, path: str, data: bytes) -> bool:
        created = super().put_if_absent(path, data)
        if created:
            self._remember(path, data)
        return created

    def put(self, path: str, data: bytes) -> None:
        super().put(path, data)
        self._remember(path, data)

    def _remember(self, path: str, data: bytes) -> None:
        if path in self.ever:
            self.rewritten.append(path)
        else:
            self.ever[path] = data
        self._written_s[path] = self.now_s()

    def list(self, prefix: str) -> list[ObjectInfo]:
        return [ObjectInfo(info.path, info.size, self._written_s[info.path]) for info in super().list(prefix)]


class SimulatedObjects:
    """A MemoryObjectStore behind an unreliable network; a write is two steps: it arrives, its answer arrives.

    Parameters
    ----------
    scheduler
        Draws steps and faults.
    stored
        What is really there.
    fault_rate
        Probability of a fault in one operation.
    before_record
        Called when a record is about to be written: its writer has decided, and may be stopped here.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        stored: RememberedObjects,
        fault_rate: Callable[[], float],
        before_record: Callable[[], None],
    ) -> None:
        self.uri = stored.uri
        self.now_s = stored.now_s
        self._before_record = before_record
        self._scheduler, self._stored, self._fault_rate = scheduler, stored, fault_rate

    def put_if_absent(self, path: str, data: bytes) -> bool:
        def write() -> bool:
            return self._stored.put_if_absent(path, data)

        if "/manifest/" in path:
            self._before_record()
        self._arrive("create", path, write)
        fault = self._draw(_CONDITIONAL, "create", path)
        if fault is None:
            created = write()
            self._answer(f"create {_short(path)}: {created}")
            return created
        if fault == "refused":
            raise StorageUnavailableError("simulated: the store failed and created nothing", path=path)
        if fault == "phantom_refusal":
            # A conflict that is answered like "it exists"; the protocol's user has to look.
            return False if not self._exists(path) else write()
        if fault == "lost_answer":
            write()
        elif fault == "lands_late":
            self._land_late(write)
        self._answer(f"create {_short(path)}: no answer")
        raise CommitUnknownError("simulated: no clear answer to a conditional put", path=path, fault=fault)

    def put(self, path: str, data: bytes) -> None:
        self._write("put", path, lambda: self._stored.put(path, data))

    def delete(self, path: str) -> None:
        self._write("delete", path, lambda: self._stored.delete(path))

    def ensure_durable(self, path: str) -> None:
        """Nothing: a store in the cloud shows what is durable. Power losses of files are in ``tests/unit/test_power_loss.py``."""

    def list_unfinished(self, prefix: str) -> Sequence[ObjectInfo]:
        return ()

    def delete_all(self, paths: Sequence[str]) -> None:
        for path in paths:
            self.delete(path)

    def folders(self) -> Sequence[str]:
        return self._read("list", "", self._stored.folders)

    def get(self, path: str) -> bytes:
        return self._read("get", path, lambda: self._stored.get(path))

    def list(self, prefix: str) -> list[ObjectInfo]:
        return self._read("list", prefix, lambda: self._stored.list(prefix))

    # -- what can happen to an operation ----------------------------------------------------------------------------

    def _write(self, operation: str, path: str, write: Callable[[], None]) -> None:
        self._arrive(operation, path, write)
        fault = self._draw(_WRITE, operation, path)
        if fault is None:
            write()
            self._answer("")
            return
        if fault == "lost_answer":
            write()
        elif fault == "lands_late":
            self._land_late(write)
        raise StorageUnavailableError("simulated: the store failed", path=path, fault=fault)

    def _read(self, operation: str, path: str, read: Callable[[], Result]) -> Result:
        self._arrive(operation, path, None)
        if self._draw(("refused",), operation, path) is not None:
            raise StorageUnavailableError("simulated: the store failed", path=path)
        return read()

    def _arrive(self, operation: str, path: str, write: Callable[[], Any] | None) -> None:
        try:
            self._scheduler.pause(f"{operation} {_short(path)}")
        except Crashed:
            # Its sender is gone, but the request may be on its way.
            if write is not None and self._scheduler.rng.random() < 0.3:
                self._land_late(write)
            raise

    def _answer(self, operation: str) -> None:
        self._scheduler.pause(operation)

    def _land_late(self, write: Callable[[], Any]) -> None:
        self._scheduler.later(lambda: self._landed(write), delay=self._scheduler.rng.randrange(60))

    def _landed(self, write: Callable[[], Any]) -> None:
        self._scheduler.log("storage", f"a late write lands: {write()}")

    def _draw(self, kinds: tuple[str, ...], operation: str, path: str) -> str | None:
        rng = self._scheduler.rng
        if rng.random() >= self._fault_rate():
            return None
        kind = rng.choice(kinds)
        self._scheduler.fault(self._scheduler.party.name, f"storage.{kind}", f"{operation} {_short(path)}")
        return kind

    def _exists(self, path: str) -> bool:
        try:
            self._stored.get(path)
        except FileNotFoundError:
            return False
        return True


def _short(path: str) -> str:
    if path.startswith("_probe/"):
        # What follows is no seed's.
        return "probe"
    folder, _, name = path.rpartition("/")
    head, dash, tail = name.partition("-")
    return f"{folder.partition('/')[2]}/{head.lstrip('0') or '0'}{dash}{tail[:4]}"
