"""Options of an object store that Ray and Spark may keep, and a store whose credentials are forwarded while it runs."""

from __future__ import annotations

import pickle
from collections.abc import Mapping

import pytest

from coordinator.model.errors import CredentialsNeededError, StorageUnavailableError
from coordinator.runtime.runtime import MachineClock
from coordinator.storage.actor_store import ForwardedCredentialsStore, StorageStats
from coordinator.storage.memory import MemoryObjectStore
from coordinator.storage.options import Secrets, StorageOptions, split_options
from coordinator.storage.probe import probe
from coordinator.storage.protocol import ObjectStore
from coordinator.storage.uris import open_store_in_actor

URI = "s3://bucket/prefix"


@pytest.mark.parametrize(
    ("uri", "name", "value"),
    [
        (URI, "secret_access_key", "x"), (URI, "aws_secret_access_key", "x"), (URI, "AWS_SESSION_TOKEN", "x"),
        (URI, "access_key_id", "x"), (URI, "token", "x"), (URI, "sse_customer_encryption_key_base64", "x"),
        (URI, "an_option_of_tomorrow", "x"), (URI, "proxy_url", "http://me:pass@proxy:3128"),
        (URI, "endpoint", "https://me:pass@host"), (URI, "endpoint", "https://host/?sig=abc"),
        ("az://container", "azure_storage_sas_key", "x"), ("az://container", "account_key", "x"),
        ("az://container", "client_secret", "x"), ("gs://bucket", "google_service_account_key", "{}"),
        ("gs://bucket", "service_account", "/key.json"),
    ],
)  # fmt: skip
def test_options_that_may_be_credentials_are_withheld(uri: str, name: str, value: str) -> None:
    options, secrets = split_options(uri, {name: value, "timeout": "5s"})
    assert options == StorageOptions((("timeout", "5s"),), (name,))
    assert secrets.values == ((name, value),)
    # Printing or logging them shows names only.
    assert value not in repr(options).replace(name, "") + repr(secrets) + str(secrets)
    assert pickle.loads(pickle.dumps(secrets)) == secrets


@pytest.mark.parametrize(
    ("uri", "name", "value"),
    [
        (URI, "endpoint", "http://127.0.0.1:9000"), (URI, "aws_region", "eu-central-1"), (URI, "AWS_ALLOW_HTTP", "true"),
        (URI, "single_writer", "true"), (URI, "proxy_url", "http://proxy:3128"), ("az://container", "azure_account_name", "me"),
    ],
)  # fmt: skip
def test_addresses_and_settings_are_kept(uri: str, name: str, value: str) -> None:
    assert split_options(uri, {name: value}) == (StorageOptions(((name, value),)), Secrets())


def test_a_folder_needs_no_options() -> None:
    assert split_options("file:///var/lib/sf", {"secret_access_key": "x"}) == (StorageOptions(), Secrets())


def test_a_store_without_withheld_options_is_opened_at_once() -> None:
    store = open_store_in_actor(
        "file:///var/lib/sf", StorageOptions(), lambda: pytest.fail("asked for nothing"), StorageStats(), MachineClock()
    )
    assert not isinstance(store, ForwardedCredentialsStore)


class Bucket:
    """A bucket that opens a store for callers with the key of the day."""

    def __init__(self) -> None:
        self.store, self.key, self.opened = MemoryObjectStore(), "monday", 0

    def open(self, uri: str, options: Mapping[str, str]) -> ObjectStore:
        bucket, key = self, options["secret_access_key"]
        assert uri == URI
        assert options["region"] == "here"
        self.opened += 1

        class Checked(MemoryObjectStore):
            def get(self, path: str) -> bytes:
                if key != bucket.key:
                    raise StorageUnavailableError("simulated: 403")
                return bucket.store.get(path)

            def put(self, path: str, data: bytes) -> None:
                self.get_key()
                bucket.store.put(path, data)

            def get_key(self) -> None:
                if key != bucket.key:
                    raise StorageUnavailableError("simulated: 403")

        return Checked()


def key(value: str) -> Secrets:
    return Secrets((("secret_access_key", value),))


OPTIONS = StorageOptions((("region", "here"),), ("secret_access_key",))


def forwarded_credentials_store(bucket: Bucket, forwarded: Secrets | None) -> ForwardedCredentialsStore:
    return ForwardedCredentialsStore(URI, OPTIONS, lambda: forwarded, bucket.open, StorageStats(), MachineClock())


def test_a_process_without_the_credentials_requests_them_once() -> None:
    bucket = Bucket()
    store = forwarded_credentials_store(bucket, key("monday"))
    assert store.secrets is None
    store.put("a", b"1")
    assert (store.get("a"), store.secrets, bucket.opened) == (b"1", key("monday"), 1)
    assert "monday" not in repr(store) + repr(vars(store)["_secrets"])


def test_where_no_process_has_credentials_each_request_says_what_to_do_until_one_has() -> None:
    bucket = Bucket()
    store = forwarded_credentials_store(bucket, None)
    for _ in range(2):
        with pytest.raises(
            CredentialsNeededError, match=r"nothing was written.*connect.*again.*options=`secret_access_key`"
        ):
            store.put("a", b"1")
    store.use_credentials(key("monday"))
    store.put("a", b"1")
    assert store.get("a") == b"1"


def test_credentials_that_are_refused_replace_none() -> None:
    bucket = Bucket()
    store = forwarded_credentials_store(bucket, key("monday"))
    store.put("a", b"1")
    with pytest.raises(StorageUnavailableError, match="403"):
        store.use_credentials(key("sunday"))
    assert (store.get("a"), store.secrets) == (b"1", key("monday"))
    bucket.key = "tuesday"
    store.use_credentials(key("tuesday"))
    assert (store.get("a"), store.secrets) == (b"1", key("tuesday"))


def test_it_is_an_object_store() -> None:
    memory = MemoryObjectStore()
    store = ForwardedCredentialsStore(
        URI, OPTIONS, lambda: key("any"), lambda uri, options: memory, StorageStats(), MachineClock()
    )
    probe(store)
    store.put("a/b", b"1")
    store.ensure_durable("a/b")
    assert [info.path for info in store.list("a")] == ["a/b"]
    assert list(store.list_unfinished("a")) == []
    store.delete("a/b")
    assert memory.list("") == []
