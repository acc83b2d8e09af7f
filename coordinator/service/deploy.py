"""Deployment of the coordinator on Ray: its name, and every option with its reason."""

from __future__ import annotations

import logging
import os
import pwd
import socket
import traceback
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._common.utils import get_ray_address_file
from ray._private import ray_constants, services
from ray._private.node import Node
from ray._raylet import AuthenticationMode, GcsClient, get_authentication_mode  # type: ignore[attr-defined]
from ray.exceptions import AuthenticationError, RpcError

from coordinator.model.errors import SetupError
from coordinator.model.maintenance import Maintenance
from coordinator.model.names import fleet_id_of
from coordinator.runtime.native_notes import native_notes_kept
from coordinator.service.calls import NAMESPACE
from coordinator.storage.options import StorageOptions

log = logging.getLogger(__name__)

#: Options of ``ray.init``: the output of actors goes to their logs.
_QUIET = {"log_to_driver": False, "logging_level": logging.ERROR}
#: Ray's own, of the head only.
HEAD_RESOURCE = "node:__internal_head__"
_ANSWER_S = 10.0


def coordinator_name(uri: str) -> str:
    """Return the actor name of the coordinator of a normalised URI."""
    return f"statefleet-coordinator-{fleet_id_of(uri)}"


def deploy_coordinator(uri: str, storage_options: StorageOptions, maintenance: Maintenance) -> Any:
    """Return the handle of a coordinator, which is started with these options if there is none; it is not proven to work yet.

    Ray keeps its arguments: they hold no credentials.
    """
    # Imported late: only the actor needs it, and most callers find a running one.
    from coordinator.service.actor import CoordinatorActor

    # Its memory is a cache of the manifest logs, so Ray may restart it as often as it dies. Lost answers are repeated by the client,
    # which knows how long to wait and what to say.
    actor = ray.remote(CoordinatorActor).options(**options_on_head(coordinator_name(uri)), max_concurrency=1000)
    return actor.remote(uri, storage_options, maintenance, NAMESPACE)


def options_on_head(name: str) -> dict[str, Any]:
    """Return Ray's options of an actor of which a fleet has one, found by its name, and restarted whenever it dies."""
    return {
        "name": name,
        "namespace": NAMESPACE,
        # The fleet outlives the drivers that use it.
        "lifetime": "detached",
        "get_if_exists": True,
        "max_restarts": -1,
        # Callers repeat calls whose answers were lost.
        "max_task_retries": 0,
        "num_cpus": 0,
        # With the head Ray itself is lost; any other node may go, and would take the actor along.
        "resources": {HEAD_RESOURCE: 0.001},
    }


def ray_address() -> str:
    """Return the address of the Ray cluster that this process is on."""
    address: str = ray.get_runtime_context().gcs_address
    return address


def init_ray(**options: Any) -> None:
    """Start or join Ray, with the Python and the modules that this process has.

    Parameters
    ----------
    options
        Of ``ray.init``. No namespace is among them: RayDP names its own actors, so each driver needs one of its own, and a fleet is
        looked up by its namespace.
    """
    # Else Ray packages the working directory of a process that `uv run` started, and has every actor install its packages again. It
    # reads the variable that turns this off when it is imported, which is too late to set it here.
    packages_for_uv = ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV
    ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV = False
    try:
        ray.init(**options, **_QUIET)  # type: ignore[arg-type]
    except BaseException as error:
        _end_failed_start(error)
        raise
    finally:
        ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV = packages_for_uv


def _end_failed_start(error: BaseException) -> None:
    """End the processes of a Ray that did not start: Ray forgets them, so only the frames of the error know their node."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        node = frame.f_locals.get("self")
        if isinstance(node, Node):
            node.kill_all_processes(check_alive=False, wait=True)
    ray.shutdown()


def join_cluster(address: str) -> None:
    """Join the Ray cluster at an address (``auto``: the one of this machine), unless this process is on one already.

    Raises
    ------
    SetupError
        The address is a Ray Client's, or no cluster answers there, or one with another Ray or Python.
    """
    if ray.is_initialized():
        return
    if address.startswith("ray://"):
        raise SetupError(
            "Ray Client addresses (ray://) cannot host Spark; run on a node of the cluster, by `ray job submit` for instance",
            address=address,
        )
    try:
        _check_answers(address)
        init_ray(address=address)
    except ValueError as error:  # how Ray says that it is not an address
        raise SetupError(
            "this is no address of a Ray cluster; give host:port, or auto for the one of this machine",
            address=address,
            cause=error,
        ) from error
    except (OSError, RpcError) as error:
        local = " or unset RAY_ADDRESS to use a local one" if os.environ.get("RAY_ADDRESS") else ""
        raise SetupError(
            "no Ray cluster answers at this address, which is host:port as `ray start --head` prints it (6379, not 8265 of Ray's "
            f"dashboard); start one with `ray start --head`{local}",
            address=address,
            cause=" ".join(str(error).split()) or type(error).__name__,
        ) from error
    except AuthenticationError as error:
        raise SetupError(
            "the Ray cluster at this address wants a token: set RAY_AUTH_MODE=token, and have the cluster's token in ~/.ray/auth_token "
            "or RAY_AUTH_TOKEN (`ray get-auth-token` on its head prints it)",
            address=address,
            cause=" ".join(str(error).split())[:300],
        ) from error
    except RuntimeError as error:  # how Ray says that the cluster's Ray or Python is another one
        raise SetupError(
            "the Ray cluster at this address cannot be joined from here; install the same Ray and Python on every node and on this "
            "machine; `statefleet doctor` says what each has",
            address=address,
            cause=" ".join(str(error).split()),
        ) from error


@dataclass(frozen=True, slots=True)
class ClusterOwner:
    """The owner of a Ray cluster whose head is this machine."""

    user: str
    pid: int
    since: datetime

    def __str__(self) -> str:
        return f"of user {self.user}, process {self.pid}, since {self.since:%Y-%m-%d %H:%M} UTC"


def owner_of(address: str) -> ClusterOwner | None:
    """Return the owner of the cluster at an address of this machine, by its GCS process; None if its head is on another machine."""
    port = address.rpartition(":")[2]
    for process in psutil.process_iter(["cmdline", "username", "create_time"]):
        facts = process.info
        words = facts["cmdline"] or [""]
        if words[0].endswith("gcs_server") and f"--gcs_server_port={port}" in words:
            return ClusterOwner(facts["username"], process.pid, datetime.fromtimestamp(facts["create_time"], UTC))
    return None


def _check_owner(address: str) -> None:
    """Refuse a cluster that was found without an address, and that another user started or noted for this machine (SetupError)."""
    owner = owner_of(address)
    if owner is not None:
        user = owner.user
    else:
        note = Path(get_ray_address_file(None))
        user = _user_name(note.stat().st_uid) if note.exists() else _user_name(os.getuid())
    if user not in (_user_name(os.getuid()), _user_name(0)):
        raise SetupError(
            "the Ray cluster that was found on this machine is another user's, and the owner of a cluster can run code in the programs "
            "that join it; nothing was joined; name it by --address HOST:PORT or RAY_ADDRESS if you trust it, or start your own by "
            "`ray start --head`",
            address=address,
            user=user,
        )


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _check_answers(address: str) -> None:
    """Check that a cluster answers and admits this process; Ray itself would try for minutes, and print each attempt.

    ``auto`` leads Ray to the newest cluster that it started on this machine, also if that has ended.

    Raises
    ------
    OSError, RpcError
        No cluster is there, but perhaps another server.
    AuthenticationError
        The cluster asks for a token that this process does not have.
    """
    is_found = address == "auto" and not os.environ.get("RAY_ADDRESS")
    gcs_address = services.get_ray_address_from_environment("auto", None) if address == "auto" else address
    if is_found:
        _check_owner(gcs_address)
    host, _, port = gcs_address.rpartition(":")
    if not (host and port.isdigit()):
        return
    socket.create_connection((host, int(port)), timeout=_ANSWER_S).close()
    if is_found and get_authentication_mode() != AuthenticationMode.TOKEN:
        # Ray takes the token that it finds on this machine, once it joins.
        return
    with native_notes_kept():
        GcsClient(address=gcs_address)
