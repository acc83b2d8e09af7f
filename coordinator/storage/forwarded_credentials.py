"""An object store whose credentials are forwarded to the process and kept only in its memory.

A process that restarts has forgotten them and asks the fleet's other processes. If no process has them any more, requests fail until a
driver connects with them again. Nothing is lost, since no request was carried out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

from coordinator.model.errors import CredentialsNeededError
from coordinator.runtime.runtime import Clock
from coordinator.storage.counted import CountedObjectStore, StorageStats
from coordinator.storage.options import Secrets, StorageOptions
from coordinator.storage.protocol import ObjectStore

#: Path that is read to check credentials. There need not be such an object: "not found" also shows that they are accepted.
_ANY_OBJECT = "_probe/accepted"


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
