"""A fleet's URI: its canonical form, and the object store that it names."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urlsplit

from coordinator.model.errors import InvalidRequestError
from coordinator.runtime.runtime import Clock
from coordinator.storage.actor_store import CountedObjectStore, ForwardedCredentialsStore, StorageStats
from coordinator.storage.local import LocalObjectStore
from coordinator.storage.options import Secrets, StorageOptions
from coordinator.storage.protocol import ObjectStore

_SCHEMES = ("file", "s3", "gs", "az")
_ALIASES = {"s3a": "s3", "s3n": "s3", "gcs": "gs", "abfs": "az", "abfss": "az"}


def normalize_uri(uri: str) -> str:
    """Return the canonical form of a fleet's URI: known scheme, aliases resolved, no trailing slash.

    Raises
    ------
    InvalidRequestError
        No scheme, a scheme that is not supported, a relative ``file`` path or no bucket.
    """
    parts = urlsplit(uri)
    if parts.password is not None:
        raise InvalidRequestError(
            "a fleet's URI holds no password; credentials belong in the environment", scheme=parts.scheme
        )
    # The text after a question mark, or before an @, may be a secret: no error repeats it.
    public_uri = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}" if parts.scheme else "(no scheme)"
    if parts.username is not None and _ALIASES.get(parts.scheme, parts.scheme) != "az":
        raise InvalidRequestError(
            "a fleet's URI holds no user and no key; credentials belong in the environment or in storage_options",
            uri=public_uri,
        )
    scheme = _ALIASES.get(parts.scheme, parts.scheme)
    if scheme not in _SCHEMES:
        raise InvalidRequestError(
            "a fleet's URI needs one of the schemes file, s3 (or s3a), gs, az, such as file:///var/lib/statefleet or "
            "s3://bucket/prefix",
            uri=public_uri,
        )
    if parts.query or parts.fragment:
        raise InvalidRequestError("a fleet's URI has no '?' or '#' (write %3F or %23 in a file path)", uri=public_uri)
    path = parts.path.rstrip("/")
    if scheme == "file":
        if parts.netloc not in ("", "localhost") or not path.startswith("/"):
            raise InvalidRequestError("a file URI needs an absolute path: file:///folder", uri=public_uri)
        return f"file://{os.path.normpath(path)}"
    if not parts.netloc:
        raise InvalidRequestError(
            f"the URI names no bucket: {scheme}://bucket/prefix (or use file:///folder)", uri=public_uri
        )
    return f"{scheme}://{parts.netloc}{path}"


def open_object_store(
    uri: str, storage_options: Mapping[str, str] | None = None, stats: StorageStats | None = None
) -> ObjectStore:
    """Return the object store of a URI.

    Raises errors as :func:`normalize_uri` and :func:`~coordinator.storage.remote.open_remote_store`.

    Parameters
    ----------
    stats
        Counts conditional puts that are repeated.
    """
    normalized = normalize_uri(uri)
    if normalized.startswith("file://"):
        store = LocalObjectStore(Path(unquote(urlsplit(normalized).path)))
        store.uri = normalized
        return store
    # Imported late, as obstore's threads must not exist before a process forks.
    from coordinator.storage.remote import open_remote_store

    return open_remote_store(normalized, storage_options, (stats or StorageStats()).repeated)


def open_store_in_actor(
    uri: str, options: StorageOptions, ask: Callable[[], Secrets | None], stats: StorageStats, clock: Clock
) -> CountedObjectStore:
    """Return the object store of a URI in an actor, whose withheld options are forwarded later."""
    if options.withheld:
        return ForwardedCredentialsStore(uri, options, ask, partial(open_object_store, stats=stats), stats, clock)
    return CountedObjectStore(uri, open_object_store(uri, dict(options.plain), stats), stats, clock)
