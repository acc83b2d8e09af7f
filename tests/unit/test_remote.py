"""Failures of an S3-compatible server during a commit, and the errors that report them."""

from __future__ import annotations

import logging
import pickle
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest

from coordinator.ledger.state_ledger import StateLedger
from coordinator.log.manifest_log import ManifestLog
from coordinator.model.errors import CommitUnknownError, InvalidRequestError, StateStoreError, StorageUnavailableError
from coordinator.storage import remote as remote_storage
from coordinator.storage.probe import probe
from coordinator.storage.protocol import ObjectStore
from coordinator.storage.uris import open_object_store
from tests.memory_store import MemoryObjectStore
from tests.unit.s3_with_faults import ACCESS_KEY, DROP_AFTER, DROP_BEFORE, SECRET_KEY, FaultyS3, faulty_s3

URI = "s3://bucket/prefix"
#: 11 MiB: three parts.
LARGE = bytes(range(256)) * (11 << 12)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    for name in ("AWS_ALLOW_HTTP", "AWS_ENDPOINT_URL", "AWS_PROXY_URL"):
        monkeypatch.delenv(name, raising=False)
    with faulty_s3() as running:
        yield running


@pytest.fixture
def store(server: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    # The same rules with shorter pauses.
    backoff = {"init_backoff": timedelta(milliseconds=5), "max_backoff": timedelta(milliseconds=20), "base": 2}
    monkeypatch.setattr(remote_storage, "_RETRIES", {"max_retries": 2, "backoff": backoff})
    monkeypatch.setattr(remote_storage, "_FIRST_PAUSE_S", 0.005)
    return open_object_store(URI, server.options(timeout="1s"))


class TestConditionalPut:
    """put_if_absent under failures of servers and networks."""

    def test_a_409_without_an_object_is_tried_again(self, server: FaultyS3, store: ObjectStore) -> None:
        server.fail_once("PUT", 409, 409)
        assert store.put_if_absent("a", b"mine")
        assert store.get("a") == b"mine"
        assert server.requests.count("PUT") == 3

    def test_a_409_of_a_writer_that_came_first_is_a_loss(self, server: FaultyS3, store: ObjectStore) -> None:
        server.objects["/bucket/prefix/a"] = b"theirs"
        server.fail_once("PUT", 409)
        assert not store.put_if_absent("a", b"mine")

    def test_endless_409_is_unknown_and_not_a_loss(self, server: FaultyS3, store: ObjectStore) -> None:
        server.fault = lambda method, path, conditional: 409 if method == "PUT" else None
        with pytest.raises(CommitUnknownError, match="keep conflicting"):
            store.put_if_absent("a", b"mine")

    @pytest.mark.parametrize("fault", [DROP_AFTER, DROP_BEFORE, 409, 500, 503])
    @pytest.mark.parametrize("body", [b"mine", LARGE], ids=["small", "large"])
    def test_an_attempt_that_failed_is_repeated_and_read_back(
        self, server: FaultyS3, store: ObjectStore, body: bytes, fault: int
    ) -> None:
        server.fail_once("PUT", fault)
        # Not "won" after a lost reply: the object is the writer's own, as reading it back shows.
        assert store.put_if_absent("a", body) == (fault != DROP_AFTER)
        assert not store.put_if_absent("a", b"theirs")
        assert store.get("a") == body
        assert "BEGIN" not in server.requests, "it does not go in parts"

    def test_no_answer_at_all_is_unknown(self, server: FaultyS3, store: ObjectStore) -> None:
        server.fault = lambda method, path, conditional: DROP_AFTER
        with pytest.raises(CommitUnknownError, match=r"may have landed: read it back.*path=`a`"):
            store.put_if_absent("a", b"mine")
        assert server.objects == {"/bucket/prefix/a": b"mine"}

    @pytest.mark.parametrize("status", [401, 403, 404])
    def test_a_refusal_certainly_created_nothing(self, server: FaultyS3, store: ObjectStore, status: int) -> None:
        server.fail_once("PUT", status)
        with pytest.raises(StorageUnavailableError, match=r"bucket exists.*credentials"):
            store.put_if_absent("a", b"mine")
        assert server.requests == ["PUT"]

    def test_a_refusal_after_a_lost_reply_is_unknown(self, server: FaultyS3, store: ObjectStore) -> None:
        server.fail_once("PUT", DROP_AFTER, *[403] * 9)
        with pytest.raises(CommitUnknownError):
            store.put_if_absent("a", b"mine")


class TestOtherRequests:
    """Every failure is an error of Statefleet."""

    @pytest.mark.parametrize("fault", [503, DROP_BEFORE, DROP_AFTER])
    def test_passing_failures_are_not_seen(self, server: FaultyS3, store: ObjectStore, fault: int) -> None:
        server.fail_once("PUT", fault)
        store.put("a", b"1")
        server.fail_once("GET", fault)
        assert store.get("a") == b"1"

    @pytest.mark.parametrize("status", [400, 401, 403, 409, 412, 500, 501, 503, DROP_BEFORE])
    @pytest.mark.parametrize(
        "request_of",
        [
            pytest.param(lambda store: store.put("a", b"1"), id="put"),
            pytest.param(lambda store: store.get("a"), id="get"),
            pytest.param(lambda store: store.list("a"), id="list"),
            pytest.param(lambda store: store.delete("a"), id="delete"),
        ],
    )
    def test_lasting_failures_are_errors_of_statefleet(
        self, server: FaultyS3, store: ObjectStore, status: int, request_of: Callable[[ObjectStore], object]
    ) -> None:
        server.fault = lambda method, path, conditional: status
        with pytest.raises(StorageUnavailableError, match=r"what was committed is untouched.*cause=`"):
            request_of(store)

    def test_a_put_into_a_missing_bucket_is_an_error(self, server: FaultyS3, store: ObjectStore) -> None:
        server.fault = lambda method, path, conditional: 404
        with pytest.raises(StorageUnavailableError, match="bucket exists"):
            store.put("a", b"1")
        with pytest.raises(FileNotFoundError):
            store.get("a")


class TestLargePut:
    """Objects that go in parts: snapshots, and deltas of a large batch."""

    def test_it_goes_in_parts_and_comes_back_whole(self, server: FaultyS3, store: ObjectStore) -> None:
        store.put("a", LARGE)
        assert server.requests.count("PART") == 3
        assert store.get("a") == LARGE
        assert server.uploads == {}

    @pytest.mark.parametrize("kind", ["BEGIN", "PART", "COMPLETE"])
    @pytest.mark.parametrize("fault", [503, DROP_BEFORE, DROP_AFTER])
    def test_a_passing_failure_of_any_request_is_not_seen(
        self, server: FaultyS3, store: ObjectStore, kind: str, fault: int
    ) -> None:
        server.fail_once(kind, fault)
        store.put("a", LARGE)
        assert store.get("a") == LARGE
        # No process knows an upload whose first answer was lost; a rule of the bucket has to end it.
        assert len(server.uploads) == (kind == "BEGIN" and fault == DROP_AFTER)

    @pytest.mark.parametrize("kind", ["PART", "COMPLETE"])
    @pytest.mark.parametrize("status", [403, 500, DROP_BEFORE])
    def test_a_lasting_failure_is_an_error_and_leaves_no_upload_behind(
        self, server: FaultyS3, store: ObjectStore, kind: str, status: int
    ) -> None:
        server.fault = lambda requested, path, conditional: status if requested == kind else None
        with pytest.raises(StorageUnavailableError, match=r"what was committed is untouched.*path=`a`"):
            store.put("a", LARGE)
        assert "ABORT" in server.requests
        assert (server.objects, server.uploads) == ({}, {})

    def test_an_upload_that_is_gone_before_it_was_completed_is_no_success(
        self, server: FaultyS3, store: ObjectStore
    ) -> None:
        def lose_uploads(kind: str, path: str, conditional: bool) -> int | None:
            if kind == "COMPLETE":
                server.uploads.clear()
            return None

        server.fault = lose_uploads
        server.objects["/bucket/prefix/a"] = b"something shorter"
        with pytest.raises(StorageUnavailableError):
            store.put("a", LARGE)


class TestProbe:
    """A fleet starts only on a store where one of two racing writers wins."""

    def test_a_server_that_ignores_the_condition_is_refused(self, server: FaultyS3, store: ObjectStore) -> None:
        server.honours_conditions = False
        with pytest.raises(StorageUnavailableError, match=r"ignores put-if-absent.*another server.*single_writer"):
            probe(store)

    @pytest.mark.parametrize("status", [400, 501, 403])
    def test_a_server_that_lacks_the_condition_is_refused(
        self, server: FaultyS3, store: ObjectStore, status: int
    ) -> None:
        server.fault = lambda method, path, conditional: status if conditional else None
        with pytest.raises(StorageUnavailableError, match=rf"fails at put-if-absent.*single_writer.*{status}"):
            probe(store)

    def test_only_a_bucket_is_offered_the_option_of_a_single_writer(self) -> None:
        class Unconditional(MemoryObjectStore):
            def put_if_absent(self, path: str, data: bytes) -> bool:
                self.put(path, data)
                return True

        with pytest.raises(
            StorageUnavailableError, match=r"ignores put-if-absent.*tell two writers apart.*another server"
        ) as refused:
            probe(Unconditional())
        assert "single_writer" not in str(refused.value)

    def test_a_server_that_lets_two_racers_win_is_refused(self, server: FaultyS3, store: ObjectStore) -> None:
        def forget_races(method: str, path: str, conditional: bool) -> int | None:
            if "race" in path and conditional:
                server.objects.pop(path, None)  # as if each had looked before the other wrote
            return None

        server.fault = forget_races
        with pytest.raises(StorageUnavailableError, match="ignores put-if-absent"):
            probe(store)

    def test_an_unreachable_server_is_an_error(self, server: FaultyS3, store: ObjectStore) -> None:
        server.fault = lambda method, path, conditional: DROP_BEFORE
        with pytest.raises(StorageUnavailableError, match="cannot be used"):
            probe(store)


class TestSingleWriter:
    """The option for servers without conditional puts."""

    def test_it_looks_before_it_writes_and_says_so_loudly(
        self, server: FaultyS3, caplog: pytest.LogCaptureFixture
    ) -> None:
        server.honours_conditions = False
        with caplog.at_level(logging.WARNING):
            store = open_object_store(URI, server.options(single_writer="true"))
        assert "SINGLE WRITER" in caplog.text
        probe(store)
        assert store.put_if_absent("a", b"first")
        assert not store.put_if_absent("a", b"second")
        assert store.get("a") == b"first"

    def test_a_lost_reply_is_unknown(self, server: FaultyS3) -> None:
        store = open_object_store(URI, server.options(single_writer="true", timeout="1s"))
        server.fault = lambda method, path, conditional: 400 if method == "PUT" else None
        with pytest.raises(CommitUnknownError, match="read it back"):
            store.put_if_absent("a", b"1")

    def test_it_is_true_or_false(self, server: FaultyS3) -> None:
        with pytest.raises(InvalidRequestError, match="single_writer"):
            open_object_store(URI, server.options(single_writer="maybe"))


class TestOptions:
    """Options and environment."""

    def test_the_environment_configures_it_as_other_clients(
        self, server: FaultyS3, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name, value in server.options().items():
            monkeypatch.setenv(f"AWS_{name}".upper(), value)
        open_object_store(URI).put("a", b"1")
        assert server.objects == {"/bucket/prefix/a": b"1"}

    @pytest.mark.parametrize(
        "options", [{"nonsense": "1"}, {"timeout": "soon"}, {"allow_http": "perhaps"}, {"secret_access_key": 5}]
    )
    def test_unusable_options_are_refused(self, options: dict[str, str]) -> None:
        with pytest.raises(InvalidRequestError, match=r"options are not usable.*cause=`"):
            open_object_store(URI, options)

    def test_a_password_in_a_uri_is_refused_and_not_repeated(self) -> None:
        with pytest.raises(InvalidRequestError, match="no password") as caught:
            open_object_store(f"s3://key:{SECRET_KEY}@bucket/prefix")
        assert SECRET_KEY not in str(caught.value)


class TestSecrets:
    """Keys appear in no error, pickle or repr."""

    def test_no_error_repeats_a_key(self, server: FaultyS3, store: ObjectStore) -> None:
        requests: list[Callable[[], object]] = [
            lambda: store.put_if_absent("a", b"1"),
            lambda: store.put("a", b"1"),
            lambda: store.get("a"),
            lambda: store.list("a"),
            lambda: store.delete("a"),
            lambda: probe(store),
        ]
        for status in (400, 403, 409):
            server.fault = lambda method, path, conditional, status=status: status  # type: ignore[misc]
            for request in requests:
                with pytest.raises(StateStoreError) as caught:
                    request()
                text = "".join(traceback.format_exception(caught.value))
                assert f"{status}" in text
                assert ACCESS_KEY not in text
                assert SECRET_KEY not in text
                assert ACCESS_KEY.encode() not in pickle.dumps(caught.value)

    def test_a_store_is_not_pickled_and_shows_only_its_uri(self, store: ObjectStore) -> None:
        assert repr(store) == "RemoteObjectStore('s3://bucket/prefix')"
        with pytest.raises(TypeError, match="send its URI"):
            pickle.dumps(store)


def test_a_ledger_is_loaded_through_a_failing_network(server: FaultyS3, store: ObjectStore) -> None:
    server.fail_once("GET", 503, DROP_BEFORE)
    assert isinstance(ManifestLog(store, "clicks", "writer").load(), StateLedger)


def test_objects_are_deleted_one_at_a_time_where_the_server_knows_nothing_else(
    server: FaultyS3, store: ObjectStore
) -> None:
    """The server does not know requests that delete many objects, as some S3-compatible servers."""
    for number in range(3):
        store.put(f"s/{number}", b"1")
    store.delete_all(["s/0", "s/1"])
    assert [path.rpartition("/")[2] for path in server.objects] == ["2"]
