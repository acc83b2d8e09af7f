"""One contract for every object store, the valid URIs, and options that Ray and Spark may keep or that are forwarded as credentials."""

from __future__ import annotations

import pickle
import stat
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from coordinator.model.errors import CredentialsNeededError, InvalidRequestError, StorageUnavailableError
from coordinator.runtime.runtime import Clock
from coordinator.storage.actor_store import ForwardedCredentialsStore, StorageStats
from coordinator.storage.local import LocalObjectStore
from coordinator.storage.options import Secrets, StorageOptions, split_options
from coordinator.storage.probe import probe
from coordinator.storage.protocol import ObjectStore
from coordinator.storage.remote import RemoteObjectStore
from coordinator.storage.uris import normalize_uri, open_object_store, open_store_in_actor
from tests.memory_store import MemoryObjectStore
from tests.unit.observed_objects import ObservedObjectStore

URI = "s3://bucket/prefix"


def remote(_: Path) -> ObjectStore:
    from obstore.store import MemoryStore

    store = MemoryStore()
    return RemoteObjectStore("s3://bucket", store, store, lambda: None)


@pytest.fixture(
    params=[
        pytest.param(LocalObjectStore, id="local"),
        pytest.param(lambda _: MemoryObjectStore(), id="memory"),
        pytest.param(remote, id="obstore"),
        pytest.param(lambda _: forwarded_credentials_store(Bucket(), key("monday")), id="forwarded credentials"),
    ]
)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    make: Callable[[Path], ObjectStore] = request.param
    return make(tmp_path / "root")


class TestContract:
    """The guarantees that the commit protocol relies on."""

    def test_the_first_put_wins_and_the_second_changes_nothing(self, store: ObjectStore) -> None:
        assert store.put_if_absent("a/b", b"first")
        store.ensure_durable("a/b")
        assert list(store.list_unfinished("a")) == []
        assert not store.put_if_absent("a/b", b"second")
        assert store.get("a/b") == b"first"

    def test_of_racing_writers_exactly_one_wins(self, store: ObjectStore) -> None:
        for number in range(20):
            with ThreadPoolExecutor(8) as pool:
                bodies = [bytes([writer]) * 100 for writer in range(8)]
                won = list(pool.map(lambda body, path=f"race/{number}": store.put_if_absent(path, body), bodies))
            assert won.count(True) == 1
            assert store.get(f"race/{number}") == bodies[won.index(True)]

    def test_missing_objects(self, store: ObjectStore) -> None:
        with pytest.raises(FileNotFoundError):
            store.get("nothing")
        assert store.list("nothing") == []
        assert list(store.list_unfinished("nothing")) == []
        store.delete("nothing")

    def test_a_folder_lists_its_own_objects_in_order(self, store: ObjectStore) -> None:
        for path in ("s/manifest/2", "s/manifest/1", "s/manifests/3", "t/manifest/4"):
            store.put(path, b"12345")
        assert [(info.path, info.size) for info in store.list("s/manifest")] == [
            ("s/manifest/1", 5),
            ("s/manifest/2", 5),
        ]
        store.delete("s/manifest/1")
        assert [info.path for info in store.list("s/manifest")] == ["s/manifest/2"]
        assert len(store.list("")) == 3

    def test_many_are_deleted_at_once_also_if_some_are_missing(self, store: ObjectStore) -> None:
        paths = [f"s/0/{number}" for number in range(30)]
        for path in paths:
            store.put(path, b"1")
        store.delete(paths[3])
        store.delete_all(paths[:20])
        assert [info.path for info in store.list("s")] == sorted(paths[20:])
        store.delete_all([])

    def test_folders_at_the_top_are_listed_without_their_content(self, store: ObjectStore) -> None:
        assert store.folders() == []
        for path in ("t/manifest/1", "s/0/1/2", "s/metadata.json", "file"):
            store.put(path, b"1")
        assert store.folders() == ["s", "t"]

    def test_the_probe_accepts_it_and_leaves_nothing(self, store: ObjectStore) -> None:
        probe(store)
        assert store.list("") == []


def test_a_fleets_folder_is_private_unless_it_existed_before(tmp_path: Path) -> None:
    created, existing = tmp_path / "above" / "made", tmp_path / "existing"
    existing.mkdir()
    existing.chmod(0o750)
    for root in (created, existing):
        LocalObjectStore(root).put_if_absent("state/file", b"x")
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in (created, existing)] == [0o700, 0o750]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StorageUnavailableError, match=r"permissions and free space.*file=`"):
        probe(LocalObjectStore(tmp_path / "file" / "fleet"))


@pytest.mark.parametrize(
    ("uri", "normal"),
    [
        ("file:///var/lib/sf/", "file:///var/lib/sf"),
        ("file:///a/../b//c", "file:///b/c"),
        ("s3a://bucket/prefix/", "s3://bucket/prefix"),
        ("s3://bucket", "s3://bucket"),
        ("gs://bucket/x", "gs://bucket/x"),
    ],
)
def test_uris_have_one_form(uri: str, normal: str) -> None:
    assert normalize_uri(uri) == normal


@pytest.mark.parametrize(
    "uri",
    [
        "s3://bucket/x?secret_key=hunter2",
        "s3://bucket/x#hunter2",
        "s3://hunter2@bucket/x",
        "s3://user:hunter2@bucket/x",
        "http://hunter2@host/x?key=hunter2",
        "hunter2",
    ],
)
def test_no_error_repeats_a_secret_of_a_uri(uri: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        normalize_uri(uri)
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize("uri", ["", "/var/lib", "hdfs://x/y", "file://relative/x", "http://x/y", "s3:///prefix"])
def test_other_uris_are_refused_with_what_is_supported(uri: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"file.*uri=`"):
        open_object_store(uri)


# -- options and credentials ---------------------------------------------------------------------------------------


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
        "file:///var/lib/sf", StorageOptions(), lambda: pytest.fail("asked for nothing"), StorageStats(), Clock()
    )
    assert not isinstance(store, ForwardedCredentialsStore)


class Bucket(MemoryObjectStore):
    """A bucket that opens a store for callers with the key of the day."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.opened = "monday", 0

    def open(self, uri: str, options: Mapping[str, str]) -> ObjectStore:
        assert (uri, options["region"]) == (URI, "here")
        self.opened += 1

        def check(operation: str, path: str) -> None:
            if options["secret_access_key"] != self.key:
                raise StorageUnavailableError("simulated: 403")

        store = ObservedObjectStore(check)
        store._objects, store._modified_s = self._objects, self._modified_s
        return store


def key(value: str) -> Secrets:
    return Secrets((("secret_access_key", value),))


OPTIONS = StorageOptions((("region", "here"),), ("secret_access_key",))


def forwarded_credentials_store(bucket: Bucket, forwarded: Secrets | None) -> ForwardedCredentialsStore:
    return ForwardedCredentialsStore(URI, OPTIONS, lambda: forwarded, bucket.open, StorageStats(), Clock())


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
