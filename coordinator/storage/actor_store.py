"""The object store of an actor: its requests are counted, and its credentials may be forwarded and kept only in memory.

A process that restarts has forgotten them and asks the fleet's other processes. If no process has them any more, requests fail until a
driver connects with them again. Nothing is lost, since no request was carried out.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from coordinator.model.errors import CredentialsNeededError
from coordinator.model.metric_table import Sample
from coordinator.runtime.runtime import Clock
from coordinator.storage.options import Secrets, StorageOptions
from coordinator.storage.protocol import ObjectInfo, ObjectStore

#: Path that is read to check credentials. There need not be such an object: "not found" also shows that they are accepted.
_ANY_OBJECT = "_probe/accepted"


@dataclass(slots=True)
class StorageStats:
    """Requests of one process since it started."""

    #: ``requests``, ``seconds``: Number and total duration of requests by operation. Durations include the store's repetitions.
    requests: Counter[str] = field(default_factory=Counter)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    #: Number of requests that failed, after all repetitions, by operation and error.
    errors: Counter[tuple[str, str]] = field(default_factory=Counter)
    #: Number of repeated conditional puts. Requests that obstore repeats are not counted.
    retries: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def repeated(self) -> None:
        """Count the repetition of a conditional put."""
        with self.lock:
            self.retries += 1

    def trouble(self) -> dict[str, int]:
        """Return the number of failed requests by error, and of repeated puts under the name ``repeated``."""
        counts = Counter({"repeated": self.retries})
        with self.lock:
            for (_, error), count in self.errors.items():
                counts[error] += count
        return dict(counts)

    def samples(self, process: str) -> Iterator[Sample]:
        """Yield the counts as metrics of a kind of process."""
        for operation, count in list(self.requests.items()):
            yield Sample("statefleet_object_store_requests_total", count, (process, operation))
        for operation, seconds in list(self.seconds.items()):
            yield Sample("statefleet_object_store_seconds_total", seconds, (process, operation))
        for (operation, error), count in list(self.errors.items()):
            yield Sample("statefleet_object_store_errors_total", count, (process, operation, error))
        yield Sample("statefleet_object_store_retries_total", self.retries, (process,))
        yield Sample("statefleet_object_store_read_bytes_total", self.read_bytes, (process,))
        yield Sample("statefleet_object_store_written_bytes_total", self.written_bytes, (process,))


class CountedObjectStore:
    """Counts the requests to another store; see :class:`coordinator.storage.protocol.ObjectStore`.

    Parameters
    ----------
    store
        The other store; None where a subclass opens it (:meth:`_opened`).
    """

    def __init__(self, uri: str, store: ObjectStore | None, stats: StorageStats, clock: Clock) -> None:
        self.uri = uri
        self._store = store
        self._stats = stats
        self._clock = clock

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.uri!r})"

    def _opened(self) -> ObjectStore:
        assert self._store is not None
        return self._store

    @property
    def tells_writers_apart(self) -> bool:
        return self._opened().tells_writers_apart

    @contextmanager
    def _counted(self, operation: str, written: int = 0) -> Iterator[None]:
        begun_s = self._clock.elapsed_s()
        error: str | None = None
        try:
            yield
        except FileNotFoundError:  # an ordinary answer
            raise
        except Exception as raised:
            error = type(raised).__name__
            raise
        finally:
            took_s = self._clock.elapsed_s() - begun_s
            with self._stats.lock:
                self._stats.requests[operation] += 1
                self._stats.seconds[operation] += took_s
                if error is not None:
                    self._stats.errors[operation, error] += 1
                else:
                    self._stats.written_bytes += written

    def put_if_absent(self, path: str, data: bytes) -> bool:
        with self._counted("put_if_absent", len(data)):
            return self._opened().put_if_absent(path, data)

    def put(self, path: str, data: bytes) -> None:
        with self._counted("put", len(data)):
            self._opened().put(path, data)

    def ensure_durable(self, path: str) -> None:
        with self._counted("ensure_durable"):
            self._opened().ensure_durable(path)

    def get(self, path: str) -> bytes:
        with self._counted("get"):
            data = self._opened().get(path)
        with self._stats.lock:
            self._stats.read_bytes += len(data)
        return data

    def list(self, prefix: str) -> list[ObjectInfo]:
        with self._counted("list"):
            return self._opened().list(prefix)

    def list_unfinished(self, prefix: str) -> Sequence[ObjectInfo]:
        with self._counted("list"):
            return self._opened().list_unfinished(prefix)

    def delete(self, path: str) -> None:
        with self._counted("delete"):
            self._opened().delete(path)

    def delete_all(self, paths: Sequence[str]) -> None:
        with self._counted("delete"):
            self._opened().delete_all(paths)

    def folders(self) -> Sequence[str]:
        with self._counted("list"):
            return self._opened().folders()


class ForwardedCredentialsStore(CountedObjectStore):
    """Opens a store with the first request, or when credentials are forwarded.

    Parameters
    ----------
    options
        Options without credentials.
    ask
        Asks other processes of the fleet for the credentials; returns None if none has them.
    """

    def __init__(
        self,
        uri: str,
        options: StorageOptions,
        ask: Callable[[], Secrets | None],
        open_store: Callable[[str, Mapping[str, str]], ObjectStore],
        stats: StorageStats,
        clock: Clock,
    ) -> None:
        super().__init__(uri, None, stats, clock)
        self._options = options
        self._ask, self._open_store = ask, open_store
        self._secrets: Secrets | None = None
        self._lock = threading.Lock()

    @property
    def secrets(self) -> Secrets | None:
        """The credentials that this process has; None if none were forwarded since it started and it has not asked yet."""
        return self._secrets

    def use_credentials(self, secrets: Secrets) -> None:
        """Use these credentials from now on, if the store accepts them.

        Raises
        ------
        StorageUnavailableError, InvalidRequestError
            It does not accept them; the previous ones stay in use.
        """
        if secrets == self._secrets:
            return
        store = self._open_store(self.uri, dict(self._options.plain + secrets.values))
        with suppress(FileNotFoundError):
            store.get(_ANY_OBJECT)
        self._store, self._secrets = store, secrets

    def _opened(self) -> ObjectStore:
        store = self._store
        if store is not None:
            return store
        with self._lock:
            if self._store is None:
                secrets = self._ask()
                if secrets is None:
                    raise CredentialsNeededError(
                        "the object store's credentials were in the memory of the fleet's processes only, and all that knew them "
                        "have ended; what was committed is untouched and nothing was written; call statefleet.connect with the "
                        "same storage_options again, then restart the query (credentials in each node's environment need "
                        "no such call)",
                        uri=self.uri,
                        options=", ".join(self._options.withheld),
                    )
                self.use_credentials(secrets)
            assert self._store is not None
            return self._store
