"""Object stores in the cloud or on a server with the S3 protocol. They use obstore, and raise this project's errors.

Rules that the code follows:

- Conditional puts are repeated here and not by obstore, so that it is known whether an earlier attempt may have succeeded. After such
  an attempt, "it exists already" may mean the writer's own object, so callers read it back.
- S3 answers 409 to two conditional puts at the same time; possibly neither has succeeded. obstore reports it like 412.
- Modules import this one late, since obstore's threads must not exist before a process forks.
- A server's text can repeat parts of the request (S3 echoes access keys, Azure's URLs have signatures). So only the summary and the
  code of a cause are kept, and obstore's exceptions are never chained, as Ray would print their text.
"""

from __future__ import annotations

import logging
import os
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import from_url

from coordinator.model.errors import CommitUnknownError, InvalidRequestError, StorageUnavailableError
from coordinator.storage.options import CLIENT_OPTIONS, PREFIXES, bare_name
from coordinator.storage.protocol import ObjectInfo

log = logging.getLogger(__name__)

#: Timeouts of one request; a delta has a few MB.
_CLIENT_DEFAULTS = {"connect_timeout": "5s", "timeout": "30s"}
#: Retries of reads, and of puts under unique names, which can be repeated without a check.
_RETRIES = {
    "max_retries": 6,
    "retry_timeout": timedelta(seconds=40),
    "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=3), "base": 2},
}
_NO_RETRIES = {"max_retries": 0}

#: Attempts of a conditional put, the first pause between two (doubled each time), and the time after which no attempt is begun.
_ATTEMPTS = 5
_FIRST_PAUSE_S = 0.1
_PATIENCE_S = 40.0


def open_remote_store(
    uri: str, storage_options: Mapping[str, str] | None, repeated: Callable[[], None]
) -> RemoteObjectStore:
    """Return the store of a bucket; credentials come from the usual environment unless the options have them.

    Parameters
    ----------
    storage_options
        obstore's names for the scheme, with or without prefix (``aws_region``, ``region``), its client's (``allow_http``,
        ``timeout``, ..), and ``single_writer``.

    Raises
    ------
    InvalidRequestError
        An option is not known or not usable.
    """
    scheme = uri.partition(":")[0]
    config = {bare_name(key, scheme): value for key, value in (storage_options or {}).items()}
    kind = SingleWriterObjectStore if _single_writer(config.pop("single_writer", "false")) else RemoteObjectStore
    client = dict(_CLIENT_DEFAULTS)
    for option in CLIENT_OPTIONS:
        # obstore reads no client options from the environment if any are passed.
        value = config.pop(option, os.environ.get(f"{PREFIXES[scheme]}{option}".upper()))
        if value is not None:
            client[option] = value

    def make(retries: Mapping[str, object]) -> Any:
        return from_url(uri, config=config, client_options=client, retry_config=retries)  # type: ignore[call-overload]

    try:
        store = kind(uri, make(_RETRIES), make(_NO_RETRIES), repeated)
    except (BaseError, ValueError, TypeError) as error:
        raise InvalidRequestError(
            "the object store's options are not usable; see obstore's names for this scheme",
            uri=uri,
            cause=_safe_text(error),
        ) from None
    if not store.tells_writers_apart:
        log.warning(
            "SINGLE WRITER: %s is used without conditional puts, so nothing stops a second fleet of this URI (a forgotten "
            "cluster, another machine) from overwriting commits; run one at a time, and prefer a store with conditional puts",
            uri,
        )
    return store


def _single_writer(value: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise InvalidRequestError("storage option single_writer is 'true' or 'false'", single_writer=value)
    return value.lower() == "true"


class RemoteObjectStore:
    """Objects in a bucket, through obstore. See :class:`coordinator.storage.protocol.ObjectStore` for the contract.

    Parameters
    ----------
    store
        An obstore store whose root is the URI.
    once
        The same store without retries, for conditional puts.
    repeated
        Called each time a conditional put is repeated.
    """

    tells_writers_apart = True

    def __init__(self, uri: str, store: Any, once: Any, repeated: Callable[[], None]) -> None:
        self._repeated = repeated
        self.uri = uri
        self._store = store
        self._once = once

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.uri!r})"

    def __reduce__(self) -> NoReturn:
        # obstore's pickles contain the credentials.
        raise TypeError("an object store is not sent to another process; send its URI and open it there")

    def put_if_absent(self, path: str, data: bytes) -> bool:
        unclear_error: Exception | None = None
        give_up = time.monotonic() + _PATIENCE_S
        for attempt in range(_ATTEMPTS):
            if attempt:
                if time.monotonic() > give_up:
                    break
                # The pause is random, as conflicting writers have tried at the same time.
                time.sleep(_FIRST_PAUSE_S * 2 ** (attempt - 1) * random.uniform(0.5, 1))
                self._repeated()
            try:
                obstore.put(self._once, path, data, mode="create")
            except (AlreadyExistsError, PreconditionError):
                if self._exists(path):
                    return False
            except (BaseError, OSError, NotImplementedError) as error:
                if _is_refusal(error) and unclear_error is None:
                    raise self._failed(path, error) from None
                unclear_error = error
            else:
                return True
        raise CommitUnknownError(
            "a conditional put got no clear answer; it may have landed: read it back",
            path=path,
            cause="conditional puts keep conflicting (409) and no object appears"
            if unclear_error is None
            else _safe_text(unclear_error),
        )

    def _exists(self, path: str) -> bool:
        try:
            obstore.head(self._store, path)
        except FileNotFoundError:
            return False
        except BaseError as error:
            raise CommitUnknownError(
                "whether an object exists cannot be read", path=path, cause=_safe_text(error)
            ) from None
        return True

    def put(self, path: str, data: bytes) -> None:
        try:
            obstore.put(self._store, path, data)
        except FileNotFoundError as error:
            # A large object is uploaded in parts. If the reply to the last request was lost, its repetition finds no upload.
            if not self._has(path, len(data)):
                raise self._failed(path, error) from None
        except (BaseError, OSError) as error:
            raise self._failed(path, error) from None

    def _has(self, path: str, size: int) -> bool:
        try:
            return obstore.head(self._store, path)["size"] == size
        except (BaseError, OSError):
            return False

    def ensure_durable(self, path: str) -> None:
        """Do nothing: objects of these stores are durable once visible."""

    def get(self, path: str) -> bytes:
        try:
            return bytes(obstore.get(self._store, path).bytes())
        except FileNotFoundError as error:
            if re.search("NoSuchBucket|ContainerNotFound", str(error)):
                # A bucket that was deleted must not look like a state that never existed.
                raise self._failed(path, error) from None
            raise FileNotFoundError(path) from None
        except (BaseError, OSError) as error:
            raise self._failed(path, error) from None

    def list(self, prefix: str) -> list[ObjectInfo]:
        infos = []
        try:
            for page in obstore.list(self._store, prefix):
                infos += [ObjectInfo(meta["path"], meta["size"], meta["last_modified"].timestamp()) for meta in page]
        except (BaseError, OSError) as error:
            raise self._failed(prefix, error) from None
        return sorted(infos, key=lambda info: info.path)

    def list_unfinished(self, prefix: str) -> Sequence[ObjectInfo]:
        return ()

    def delete(self, path: str) -> None:
        try:
            obstore.delete(self._store, path)
        except FileNotFoundError:
            return
        except (BaseError, OSError) as error:
            raise self._failed(path, error) from None

    def delete_all(self, paths: Sequence[str]) -> None:
        if not paths:
            return
        try:
            # S3 accepts 1,000 objects a request; for other stores, obstore sends several requests in parallel.
            obstore.delete(self._store, list(paths))
        except (BaseError, OSError) as error:
            # Some objects were deleted already, or the server has no such request. If the store itself fails, the next request raises.
            log.warning("deleting files one by one, since together it failed: %s", _safe_text(error))
            for path in paths:
                self.delete(path)

    def folders(self) -> Sequence[str]:
        try:
            prefixes = obstore.list_with_delimiter(self._store)["common_prefixes"]
        except (BaseError, OSError) as error:
            raise self._failed("", error) from None
        return sorted(prefix.rstrip("/") for prefix in prefixes)

    def _failed(self, path: str, error: Exception) -> StorageUnavailableError:
        advice = (
            "check that the bucket exists and that the credentials in the environment may read and write it"
            if _is_refusal(error)
            else "retry when it is back"
        )
        return StorageUnavailableError(
            f"the object store failed; what was committed is untouched; {advice}",
            uri=self.uri,
            path=path,
            cause=_safe_text(error),
        )


class SingleWriterObjectStore(RemoteObjectStore):
    """Objects on a server without conditional puts, where the user has promised that only one fleet uses the URI at a time.

    ``put_if_absent`` checks and then writes. A second coordinator that writes in between would be overwritten, and its commits lost.
    """

    tells_writers_apart = False

    def put_if_absent(self, path: str, data: bytes) -> bool:
        if self._exists(path):
            return False
        try:
            obstore.put(self._store, path, data)
        except (BaseError, OSError) as error:
            raise CommitUnknownError(
                "a put got no clear answer; it may have landed: read it back", path=path, cause=_safe_text(error)
            ) from None
        return True


def _is_refusal(error: Exception) -> bool:
    """Return whether the server certainly did nothing, and will do nothing if the request is repeated."""
    refusals = (NotSupportedError, PermissionDeniedError, UnauthenticatedError, FileNotFoundError, NotImplementedError)
    return isinstance(error, refusals)


def _safe_text(error: Exception) -> str:
    """Return the cause of an obstore exception, without text in which a server may repeat its request."""
    text = str(error).partition("\n\nDebug source")[0]
    summary, _, body = text.partition("<")
    summary = re.sub(r"//[^/@\s]*@", "//", re.sub(r"\?\S*", "", summary))[:300].rstrip(" :\n")
    code = re.search(r"<Code>(\w{1,80})</Code>", body)
    return f"{type(error).__name__}: {summary}" + (f" ({code[1]})" if code else "")
