"""A cluster of a head and two workers, which ``ray up`` makes of machines in a box."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.machines.machines import Machines, why_not
from tests.machines.ray_up import LocalCluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    reason = why_not()
    if reason:
        pytest.skip(f"no machines can be made here: {reason}")
    room = Machines(tmp_path_factory.mktemp("machines"), 3)
    with room.running():
        made = LocalCluster(room)
        made.up()
        print(f"both workers were there {made.wait_for_workers(2, within_s=240):.0f} s after the head")
        yield made
