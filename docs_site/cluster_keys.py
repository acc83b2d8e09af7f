"""The keys of the cluster files, with their values there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

_FILES = ("cluster.yaml", "cluster-local.yaml")
_MEANINGS = {
    "auth.ssh_private_key": "the key that logs in everywhere",
    "auth.ssh_user": "the user that logs in",
    "available_node_types.head.node_config": "the machine of the coordinator, the Spark driver and Ray's services: general purpose",
    "available_node_types.head.resources": "no CPU: only what must run there does",
    "available_node_types.head.min_workers": "no further machine of this kind",
    "available_node_types.head.max_workers": "no further machine of this kind",
    "available_node_types.worker.node_config": "memory optimised: state is in memory",
    "available_node_types.worker.resources": "its cores, and a slot for one executor and for one store actor of each fleet",
    "available_node_types.worker.min_workers": "workers at first",
    "available_node_types.worker.max_workers": "workers of this kind at most",
    "cluster_name": "the name by which `ray up`, `ray attach` and `ray down` know the cluster",
    "file_mounts": "this folder, which is copied to every node",
    "head_node_type": "which of the types is the head",
    "head_setup_commands": "boto3, by which Ray's autoscaler asks AWS for workers",
    "head_start_ray_commands": "Ray on the head, and how soon a silent worker counts as lost",
    "max_workers": "workers at most",
    "provider.cache_stopped_nodes": "`ray down` deletes nodes, and does not only stop them",
    "provider.head_ip": "the head's address; put in yours",
    "provider.region": "AWS's region",
    "provider.type": "where the machines are",
    "provider.worker_ips": "the workers' addresses; put in yours",
    "rsync_exclude": "what is not copied",
    "setup_commands": "Java, Python and this package from its lock, the same on every node",
    "worker_start_ray_commands": "Ray on a worker",
}  # fmt: skip


def _leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Return values by their path. Machines' descriptions, resources and lists are values as a whole."""
    whole = path.rpartition(".")[2] in ("node_config", "resources", "file_mounts")
    if not isinstance(value, dict) or whole:
        return {path: value}
    return {
        leaf: leaf_value
        for key, below in value.items()
        for leaf, leaf_value in _leaves(below, f"{path}.{key}" if path else key).items()
    }


def _shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list) and any(" " in str(item) for item in value):
        return "commands"
    if isinstance(value, dict):
        return ", ".join(f"`{key}`: `{item}`" for key, item in value.items() if not isinstance(item, list | dict))
    return ", ".join(f"`{item}`" for item in value) if isinstance(value, list) else f"`{value}`"


def cluster_rows(root: Path) -> list[tuple[str, str, str, str]]:
    """Return rows of key, value on AWS, value on machines of one's own, meaning.

    Raises
    ------
    ValueError
        A key has no meaning here, or a meaning here has no key in the files.
    """
    aws, local = (_leaves(yaml.safe_load((root / name).read_text())) for name in _FILES)
    keys = aws.keys() | local.keys()
    if keys != _MEANINGS.keys():
        raise ValueError(f"say in {__name__} what these mean: {sorted(keys ^ _MEANINGS.keys())}")
    return [(f"`{key}`", _shown(aws.get(key)), _shown(local.get(key)), _MEANINGS[key]) for key in sorted(keys)]
