"""A Statefleet cluster that ``ray up`` makes of machines, by ``cluster-local.yaml``."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.clocks import until
from tests.machines.machines import USER, Machines

_ROOT = Path(__file__).parents[2]
_API = "http://127.0.0.1:8265"


class Job:
    """A program that runs on the head; what it prints is kept."""

    def __init__(self, command: Sequence[str]) -> None:
        self._lines: list[str] = []
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        self._lines.extend(self._process.stdout)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def text(self) -> str:
        return "".join(self._lines)

    def wait(self, *, within_s: float) -> None:
        """Until it ends well."""
        code = self._process.wait(within_s)
        self._reader.join(10)
        assert code == 0, self.text

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


class LocalCluster:
    """The first machine is the head, the others are workers.

    Parameters
    ----------
    room
        The machines, booted.
    """

    def __init__(self, room: Machines) -> None:
        self.room = room
        self.head, *self.workers = room.all
        self.file = room.folder / "cluster-local.yaml"
        config: dict[str, Any] = yaml.safe_load((_ROOT / "cluster-local.yaml").read_text())
        config["cluster_name"] = room.name
        config["provider"] |= {"head_ip": self.head.address, "worker_ips": [worker.address for worker in self.workers]}
        config["auth"] = {"ssh_user": USER, "ssh_private_key": str(room.key)}
        self.file.write_text(yaml.safe_dump(config))

    def up(self) -> None:
        """``ray up``, as the file says how."""
        # Ray keeps notes of its clusters; these are not those of the user who runs the tests.
        notes = self.room.folder / "ray"
        notes.mkdir(exist_ok=True)
        environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        environment |= {"RAY_UP_enable_autoscaler_v2": "0", "RAY_TMPDIR": str(notes)}
        done = subprocess.run(
            [f"{sys.prefix}/bin/ray", "up", "-y", "--no-config-cache", str(self.file)],
            cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr

    def nodes(self) -> list[dict[str, Any]]:
        """Return Ray's nodes, also those that it has given up; the autoscaler would also count nodes that are about to start."""
        nodes: list[dict[str, Any]] = json.loads(self.run("./run ray list nodes --format json 2>/dev/null"))
        return nodes

    def living(self) -> set[str]:
        """Addresses of Ray's nodes that are alive."""
        return {node["node_ip"] for node in self.nodes() if node["state"] == "ALIVE"}

    def wait_for_workers(self, count: int, *, within_s: float) -> float:
        """Wait until Ray has some workers; return for how long it took."""
        workers = {worker.address for worker in self.workers}
        return until(lambda: len(self.living() & workers) == count, within_s, f"not {count} workers", 1.0)

    def run(self, command: str) -> str:
        """Run a command on the head, in the folder of the package."""
        return self.head.ssh(f"cd ~/statefleet && {command}").stdout

    def submit(self, *program: str) -> Job:
        """``ray job submit``, as docs/clusters.md has it."""
        job = f"PYTHONUNBUFFERED=1 ./run ray job submit --address {_API} -- {shlex.join(program)}"
        return self._job(job)

    def raydp_submit(self, program: str, settings: dict[str, str]) -> Job:
        """``raydp-submit`` of a Python text, as docs/clusters.md has it."""
        quoted = " ".join(f"--conf {key}={value}" for key, value in settings.items())
        return self._job(
            f"echo 'ray.address = \"{self.head.address}:6379\"' > ray.conf && echo {shlex.quote(program)} > program.py && "
            './run bash -c \'$(python -c "import raydp; print(raydp.__path__[0])")/bin/raydp-submit --ray-conf ray.conf '
            f"{quoted} program.py'"
        )

    def _job(self, command: str) -> Job:
        return Job([*self.room.ssh, f"{USER}@{self.head.address}", f"cd ~/statefleet && {command}"])
