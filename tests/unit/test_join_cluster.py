"""The choice of the Ray cluster that a program joins."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray._private import ray_constants, services
from ray.exceptions import RpcError

from coordinator.model.errors import SetupError
from coordinator.runtime.native_notes import native_notes_kept, stderr_without_notes
from coordinator.runtime.runtime import Runtime
from coordinator.service import deploy
from coordinator.service.calls import RayActors
from coordinator.service.client import CoordinatorClient
from statefleet.doctor import cluster
from statefleet.doctor.findings import Outcome


@pytest.fixture
def of_another_user() -> Iterator[str]:
    """Address of a process on this machine that looks like a cluster's head of the user ``nobody``, which `auto` finds."""
    if os.getuid() != 0:
        pytest.skip("only root can start a process of another user")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        words = ["/ray/gcs_server", "-c", "read line", "sh", f"--gcs_server_port={port}"]
        stranger = subprocess.Popen(words, executable="/bin/sh", user="nobody", stdin=subprocess.PIPE)
        try:
            yield f"127.0.0.1:{port}"
        finally:
            stranger.communicate()


def test_a_cluster_that_was_not_named_and_that_another_user_started_is_not_joined(
    of_another_user: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined: list[Any] = []
    monkeypatch.setattr(deploy.ray, "init", lambda **options: joined.append(options["address"]))
    monkeypatch.setattr(services, "get_ray_address_from_environment", lambda *_: of_another_user)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(SetupError, match=r"another user's.*nothing was joined.*user=`nobody`"):
        deploy.join_cluster("auto")
    *_, finding = cluster.findings("auto", "")
    assert (finding.outcome, joined) == (Outcome.WRONG, [])
    monkeypatch.setattr(deploy, "GcsClient", lambda address: None)
    deploy.join_cluster(of_another_user)
    assert joined == [of_another_user]


def test_a_server_that_is_not_rays_is_an_error_and_ray_does_not_try(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed_out(address: str) -> None:
        raise RpcError("Timed out while waiting for GCS to become available.")

    monkeypatch.setattr(deploy.ray, "init", lambda **_: pytest.fail("Ray would try for minutes"))
    monkeypatch.setattr(deploy, "GcsClient", timed_out)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(SetupError, match=r"no Ray cluster answers.*6379, not 8265.*Timed out"),
    ):
        deploy.join_cluster(f"127.0.0.1:{server.getsockname()[1]}")


def test_another_users_file_of_this_machines_cluster_address_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = tmp_path / "ray_current_cluster"
    note.write_text("10.9.8.7:6379")
    monkeypatch.setattr(deploy, "get_ray_address_file", lambda _: str(note))
    deploy._check_owner("10.9.8.7:6379")
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    if note.stat().st_uid == 0:
        deploy._check_owner("10.9.8.7:6379")
        os.chown(note, 23456, -1)
    with pytest.raises(SetupError, match="another user's"):
        deploy._check_owner("10.9.8.7:6379")


def test_ray_does_not_package_the_folder_of_a_program_that_uv_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    packages: list[bool] = []
    monkeypatch.setattr(deploy.ray, "init", lambda **_: packages.append(ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV))
    before = ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV
    deploy.init_ray(address="local")
    assert packages == [False]
    assert before == ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV


NOTE = "[2026-11-24 15:29:37,160 I 700 708] gcs_client.cc:96: GcsClient has no Cluster ID set"


def test_only_notes_of_rays_compiled_parts_are_held_back(capfd: pytest.CaptureFixture[str]) -> None:
    with native_notes_kept():
        # Written by descriptor, as compiled code and child processes write.
        os.write(2, f"{NOTE}\nan error\n".encode())
        subprocess.run([sys.executable, "-c", "import sys; sys.stderr.write(sys.argv[1])", "of a process"], check=True)
    os.write(2, f"{NOTE} afterwards\n".encode())
    assert capfd.readouterr().err == f"an error\nof a process{NOTE} afterwards\n"


def test_a_process_that_keeps_running_writes_to_the_same_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    write, passing = stderr_without_notes()
    program = "import sys\nfor _ in range(20_000): print(sys.argv[1], '[a line of Spark', sep=chr(10), file=sys.stderr)"
    subprocess.run([sys.executable, "-c", program, NOTE], stderr=write, check=True)
    os.close(write)
    passing.join(timeout=30)
    assert capfd.readouterr().err == "[a line of Spark\n" * 20_000


def test_a_coordinator_of_another_release_is_an_error_that_says_so() -> None:
    """Ray compares a call with the actor's class of the time when the actor was started."""

    class Method:
        def remote(self, *args: Any, **kwargs: Any) -> None:
            raise TypeError("too many positional arguments")

    class OfBefore:
        read_view = Method()

    for method in ("read_view", "told_later"):
        with pytest.raises(SetupError, match=rf"another release of Statefleet.*`statefleet stop`.*method=`{method}`"):
            CoordinatorClient("file:///fleet", OfBefore(), RayActors(), Runtime())._call(method, "clicks")
