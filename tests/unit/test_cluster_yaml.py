"""``cluster.yaml``, ``cluster-gcp.yaml`` and ``cluster-local.yaml`` pass Ray's own validation, and agree on what matters."""

from __future__ import annotations

import functools
import operator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import ValidationError
from ray.autoscaler._private.util import prepare_config, validate_config

ROOT = Path(__file__).parents[2]
#: By file: a field whose type Ray refuses, and the wrong value.
WRONG = {
    "cluster.yaml": ("available_node_types", "worker", "resources", "eight"),
    "cluster-gcp.yaml": ("provider", "project_id", 7),
    "cluster-local.yaml": ("provider", "worker_ips", "none"),
}


def loaded(name: str) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((ROOT / name).read_text())
    return config


AWS, GOOGLE, LOCAL = map(loaded, WRONG)


@pytest.mark.parametrize("name", WRONG)
def test_ray_accepts_the_cluster_and_refuses_a_broken_one(name: str) -> None:
    """As `ray up` does before it asks the cloud for anything: Ray's validation raises nothing."""
    validate_config(prepare_config(loaded(name)))
    broken: Any = loaded(name)
    *path, field, value = WRONG[name]
    functools.reduce(operator.getitem, path, broken)[field] = value
    with pytest.raises(ValidationError):
        validate_config(prepare_config(broken))


def test_store_actors_and_executors_stay_off_the_head() -> None:
    types = AWS["available_node_types"]
    assert types[AWS["head_node_type"]]["resources"]["CPU"] == 0
    assert types["worker"]["resources"]["CPU"] > 0
    assert types["worker"]["min_workers"] >= 1
    assert types["worker"]["resources"]["statefleet_store"] == 1
    assert "statefleet_store" not in types["head"]["resources"]


def test_java_and_this_package_are_set_up_on_every_node() -> None:
    commands = "\n".join(AWS["setup_commands"])
    assert "openjdk-17" in commands
    assert "./run setup" in commands
    assert "." in AWS["file_mounts"].values()


def test_the_head_can_ask_aws_for_workers() -> None:
    # Ray's provider for AWS imports boto3, which is no dependency of Ray.
    assert AWS["provider"]["type"] == "aws"
    assert any("boto3" in command for command in AWS["head_setup_commands"])


def test_a_silent_worker_is_given_up_before_a_minute_is_over() -> None:
    settings = health_checks(AWS)
    silence_ms = int(settings["RAY_health_check_period_ms"]) + int(settings["RAY_health_check_timeout_ms"])
    assert 5_000 < silence_ms * int(settings["RAY_health_check_failure_threshold"]) < 30_000


def health_checks(config: dict[str, Any]) -> dict[str, str]:
    start = config["head_start_ray_commands"][-1]
    return dict(word.split("=") for word in start.split() if word.startswith("RAY_health_check_"))


def options(command: str) -> set[str]:
    """Return the options of a command's `ray start`."""
    return set(command.partition("ray start ")[2].split())


def test_local_machines_are_started_as_those_on_aws() -> None:
    assert health_checks(LOCAL) == health_checks(AWS)
    for kind in ("head", "worker"):
        local_options, aws_options = (options(cluster[f"{kind}_start_ray_commands"][-1]) for cluster in (LOCAL, AWS))
        # On AWS the number of store slots comes from the node type, on local machines from this option.
        assert local_options - aws_options == (
            {"--resources='{\"statefleet_store\":1}'"} if kind == "worker" else set()
        )
        assert aws_options <= local_options
    assert LOCAL["rsync_exclude"] == AWS["rsync_exclude"]
    assert any("./run setup" in command for command in LOCAL["setup_commands"])


def test_the_autoscaler_that_knows_local_machines_is_asked_for() -> None:
    assert LOCAL["provider"]["type"] == "local"
    text = (ROOT / "cluster-local.yaml").read_text()
    assert text.startswith("# `RAY_UP_enable_autoscaler_v2=0 ray up cluster-local.yaml`")


def test_machines_of_google_cloud_are_started_as_those_on_aws() -> None:
    same = ["setup_commands", "head_start_ray_commands", "worker_start_ray_commands", "file_mounts", "rsync_exclude"]
    for key in same:
        assert GOOGLE[key] == AWS[key], key
    for name, of_aws in AWS["available_node_types"].items():
        of_google = GOOGLE["available_node_types"][name]
        assert {**of_google, "node_config": None} == {**of_aws, "node_config": None}
        # The tables of both clouds: machines of eight cores, of the general kind and of the kind with much memory.
        assert of_google["node_config"]["machineType"] == {"head": "n2-standard-8", "worker": "n2-highmem-8"}[name]
        (disk,) = of_google["node_config"]["disks"]
        (of_aws_disk,) = of_aws["node_config"]["BlockDeviceMappings"]
        assert disk["initializeParams"]["diskSizeGb"] == of_aws_disk["Ebs"]["VolumeSize"]


def test_the_machines_of_google_cloud_may_use_the_bucket_and_ask_for_workers() -> None:
    (account,) = GOOGLE["available_node_types"]["worker"]["node_config"]["serviceAccounts"]
    assert account["email"] == f"ray-autoscaler-sa-v1@{GOOGLE['provider']['project_id']}.iam.gserviceaccount.com"
    # Ray's provider imports Google's client, which is no dependency of Ray.
    assert any("google-api-python-client" in command for command in GOOGLE["head_setup_commands"])
