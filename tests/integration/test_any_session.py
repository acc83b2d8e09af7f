"""Sessions that RayDP did not make: their tasks need a socket to a store actor, and nothing of Ray."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import ray

import statefleet as sf
from tests.code_blocks import blocks_of
from tests.conftest import NewUri
from tests.integration.streams import short_list

WORDS = [{"a": 2, "b": 1}, {"a": 3, "b": 1, "c": 1}]


def ran(uri: str, way: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (page,) = blocks_of("tests/integration/test_any_session.py::test_a_session_on_threads_counts_beside_ray")
    (folder / "page.py").write_text(page.code)
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-m", "tests.integration.plain_session", uri, address, way, str(folder)]
    root = Path(__file__).parents[2]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=root)


@pytest.mark.parametrize("way", short_list(["near", "far", "killed", "standalone"], ["near"]))
def test_a_session_on_threads_counts_beside_ray(fleet: sf.Fleet, new_uri: NewUri, tmp_path: Path, way: str) -> None:
    """By the sockets of its machine; by a port of another one; while its store actors are killed after each batch; and by executors.

    These are of a standalone cluster, of which a continuous query counts, too.
    """
    done = ran(fleet.uri, way, tmp_path)
    assert done.returncode == 0, done.stderr
    for counts, expected in zip(
        json.loads(done.stdout.splitlines()[-1]), WORDS if way != "near" else WORDS[:1], strict=True
    ):
        assert list(counts.values()) == [expected, expected]


@pytest.mark.replay
def test_a_session_that_reaches_no_store_actor_is_refused_when_its_query_is_built(
    fleet: sf.Fleet, tmp_path: Path
) -> None:
    done = ran(fleet.uri, "refused", tmp_path)
    assert done.returncode == 1
    error = done.stderr.splitlines()[-1]
    assert "SetupError: Spark's executors cannot connect to the fleet's store actors" in done.stderr, error
    assert "which only takes connections of its own machine" in done.stderr
