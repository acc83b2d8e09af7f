"""The object-store layer on a real S3-compatible server: the contract, the probe, and what a user sees when it is set up wrongly."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

import statefleet as sf
from coordinator.storage.probe import probe
from coordinator.storage.protocol import ObjectStore
from coordinator.storage.uris import open_object_store
from statefleet.fleet import Fleet
from tests.conftest import NewUri
from tests.s3_server import BUCKET, S3Server


@pytest.fixture(autouse=True)
def only_with_a_server(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--store") != "s3":
        pytest.skip("needs the S3 server: pytest --store=s3")


@pytest.fixture
def store(new_uri: NewUri) -> ObjectStore:
    return open_object_store(new_uri())


def test_of_eight_racing_writers_exactly_one_wins(store: ObjectStore) -> None:
    bodies = [bytes([writer]) * 1000 for writer in range(8)]
    with ThreadPoolExecutor(len(bodies)) as pool:
        for number in range(100):
            won = list(pool.map(lambda body, path=f"race/{number}": store.put_if_absent(path, body), bodies))
            assert won.count(True) == 1
            assert store.get(f"race/{number}") == bodies[won.index(True)]


def test_a_prefix_is_a_world_of_its_own(new_uri: NewUri) -> None:
    first, second = open_object_store(new_uri()), open_object_store(new_uri())
    for path in ("s/manifest/2", "s/manifest/1", "s/manifests/3"):
        first.put(path, b"12345")
    assert [(info.path, info.size) for info in first.list("s/manifest")] == [("s/manifest/1", 5), ("s/manifest/2", 5)]
    assert second.list("") == []
    first.delete("s/manifest/1")
    first.delete("s/manifest/1")
    assert [info.path for info in first.list("")] == ["s/manifest/2", "s/manifests/3"]
    with pytest.raises(FileNotFoundError):
        second.get("s/manifest/2")


def test_more_objects_than_a_page_are_listed(store: ObjectStore) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: store.put(f"many/{number:05d}", b""), range(1100)))
    assert [info.path for info in store.list("many")] == [f"many/{number:05d}" for number in range(1100)]


def test_a_large_object_goes_there_and_back(store: ObjectStore) -> None:
    body = os.urandom(20 << 20)
    store.put("large", body)
    assert store.get("large") == body
    assert store.put_if_absent("large-too", body)
    assert not store.put_if_absent("large-too", b"")
    assert store.get("large-too") == body


def test_the_probe_accepts_it_and_leaves_nothing(store: ObjectStore) -> None:
    probe(store)
    assert store.list("") == []


def test_a_bucket_that_is_not_there_is_reported_at_once(fleet: Fleet) -> None:
    with pytest.raises(sf.StorageUnavailableError, match="check that the bucket exists"):
        sf.connect("s3://no-such-bucket/x")
    with pytest.raises(sf.StorageUnavailableError, match="NoSuchBucket"):
        open_object_store("s3://no-such-bucket/x").get("state/metadata.json")


@pytest.mark.parametrize("wrong", [{"secret_access_key": "0" * 40}, {"access_key_id": "SOMEBODYELSE"}])
def test_wrong_credentials_are_reported_without_repeating_them(
    fleet: Fleet, new_uri: NewUri, wrong: dict[str, str]
) -> None:
    with pytest.raises(sf.StorageUnavailableError, match="credentials in the environment") as refused:
        sf.connect(new_uri(), storage_options=wrong)
    (secret,) = wrong.values()
    for text in (secret, os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]):
        assert text not in str(refused.value)


def test_no_credential_is_in_any_object(s3_server: S3Server, fleet: Fleet, store: ObjectStore) -> None:
    probe(store)
    secret = os.environ["AWS_SECRET_ACCESS_KEY"].encode()
    objects = open_object_store(f"s3://{BUCKET}")
    assert not any(secret in objects.get(info.path) for info in objects.list(""))
    assert secret.decode() not in s3_server.log()
