"""The image, built from the Containerfile and run by its user, who has no rights: ``./run image``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.image.containers import Containers, why_not

pytestmark = [pytest.mark.image, pytest.mark.timeout(3000)]

#: Imports all kernels, while Numba says which it reads and which it compiles.
_LOAD = """
from importlib import import_module
from pathlib import Path
import store_actors.engine as engine
for source in sorted(Path(engine.__path__[0]).glob("*kernels.py")):
    import_module(f"store_actors.engine.{source.stem}")
"""


@pytest.fixture(scope="module")
def containers(tmp_path_factory: pytest.TempPathFactory) -> Containers:
    reason = why_not()
    if reason:
        pytest.skip(f"no image can be built here: {reason}")
    made = Containers(tmp_path_factory.mktemp("image"))
    made.build()
    return made


@pytest.fixture
def container(containers: Containers) -> Iterator[str]:
    name = containers.start()
    yield name
    containers.remove(name)


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    """A folder of the group of the image's user, as a volume is."""
    folder = tmp_path / "data"
    folder.mkdir()
    folder.chmod(0o777)
    return folder


def test_the_user_is_not_root_and_a_login_shell_finds_the_programs(
    containers: Containers, container: str, volume: Path
) -> None:
    printed = containers.run(
        container, "bash", "-lc", "id -u; command -v ray statefleet; java -version 2>&1", volume=volume
    )
    user, ray, statefleet, java = printed.splitlines()[:4]
    assert user == "1000"
    assert (ray, statefleet) == ("/opt/statefleet/bin/ray", "/opt/statefleet/bin/statefleet")
    assert ' version "17.' in java
    assert containers.label("{{.Docker.Config.User}}") == "1000"
    assert "node-health" in containers.label("{{.Docker.Config.Healthcheck}}")


def test_no_kernel_is_compiled_again(containers: Containers, container: str, volume: Path) -> None:
    printed = containers.run(container, "env", "NUMBA_DEBUG_CACHE=1", "python", "-c", _LOAD, volume=volume)
    assert printed.count("data loaded") > 100
    assert "data saved" not in printed


def test_the_quickstart_runs_and_goes_on(containers: Containers, container: str, volume: Path) -> None:
    command = ["statefleet", "quickstart", "--folder", "/data/quickstart", "--rows", "1000", "--batches", "2"]
    assert "starting; Ray" in containers.run(container, *command, volume=volume)
    printed = containers.run(container, *command, volume=volume)
    # Spark ends a run with a batch without rows, and late events are dropped.
    assert "resuming after 3 batches" in printed
    assert "this run read 2,000 rows" in printed


def test_a_ray_node_is_healthy_as_the_probes_ask(containers: Containers, container: str, volume: Path) -> None:
    script = """
        node-health && echo "healthy before Ray"
        ray start --head --num-cpus=0 --dashboard-host=127.0.0.1 >/dev/null
        for second in $(seq 60); do node-health head && break; sleep 1; done
        node-health && node-health head && echo "healthy"
    """
    assert containers.run(container, "bash", "-lc", script, volume=volume).splitlines()[-1:] == ["healthy"]
