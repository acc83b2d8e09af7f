"""Which Ray cluster a program joins, and how."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray._private import ray_constants, services

from coordinator import deploy
from coordinator.errors import SetupError
from statefleet.doctor import cluster
from statefleet.doctor.findings import Outcome


@pytest.fixture
def of_another_user() -> Iterator[str]:
    """Address of what looks like a cluster's head on this machine, started by user ``nobody``, which `auto` leads to."""
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


def test_a_cluster_that_nobody_named_and_another_user_started_is_not_joined(
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
    deploy.join_cluster(of_another_user)
    assert joined == [of_another_user]


def test_a_note_of_another_user_on_which_cluster_is_this_machines_is_not_believed(
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
