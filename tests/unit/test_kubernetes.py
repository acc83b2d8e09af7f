"""The manifests of ``deploy/kubernetes`` are of KubeRay's schemas, agree with each other, and ask for what a fleet needs."""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from tests.code_blocks import ROOT
from tests.kuberay import manifests, schemas

FOLDER = ROOT / "deploy" / "kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))
WITH_CLUSTERS = ("raycluster.yaml", "rayjob.yaml")


@pytest.fixture(scope="session")
def of_kuberay() -> dict[str, Any]:
    return schemas()


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def every_document() -> Iterator[dict[str, Any]]:
    """Yield the manifests of all files, and those that the page shows."""
    for text in manifests():
        yield from yaml.safe_load_all(text)


def cluster_of(name: str) -> dict[str, Any]:
    """Return the specification of the Ray cluster in a file."""
    resource = documents(name)[0]
    spec: dict[str, Any] = resource["spec"]
    return {
        "RayCluster": lambda: spec,
        "RayJob": lambda: spec["rayClusterSpec"],
    }[resource["kind"]]()


def templates(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the pods' specifications of head and workers."""
    cluster = cluster_of(name)
    (group,) = cluster["workerGroupSpecs"]
    return cluster["headGroupSpec"]["template"]["spec"], group["template"]["spec"]


def pods() -> Iterator[dict[str, Any]]:
    """Yield the specifications of all pods."""
    for document in every_document():
        yield from _pods_below(document)


def _pods_below(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        if "containers" in value:
            yield value
        for part in value.values():
            yield from _pods_below(part)
    elif isinstance(value, list):
        for part in value:
            yield from _pods_below(part)


# -- schemas ------------------------------------------------------------------------------------------------------


def errors(schema: Any, value: Any) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in Draft202012Validator(schema).iter_errors(value)]


def shape(*, optional: tuple[str, ...] = (), **fields: Any) -> dict[str, Any]:
    required = [name for name in fields if name not in optional]
    return {"type": "object", "properties": fields, "required": required, "additionalProperties": False}


def list_of(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


OBJECT, TEXT, NUMBER = ({"type": name} for name in ("object", "string", "integer"))
TEXTS = {**OBJECT, "additionalProperties": TEXT}


def of_kubernetes(of_kuberay: dict[str, Any]) -> dict[str, Any]:
    """Return schemas of the other kinds' fields, made of the parts of Kubernetes's own that KubeRay's contain."""
    head = of_kuberay["RayCluster"]["properties"]["spec"]["properties"]["headGroupSpec"]["properties"]
    volume = head["template"]["properties"]["spec"]["properties"]["volumes"]["items"]["properties"]
    claim = volume["ephemeral"]["properties"]["volumeClaimTemplate"]
    selector = shape(matchLabels=TEXTS)
    stateful_set = shape(
        serviceName=TEXT,
        replicas=NUMBER,
        selector=selector,
        template=head["template"],
        volumeClaimTemplates=list_of(claim),
    )
    peers = {"podSelector": OBJECT, "namespaceSelector": OBJECT}
    sources = {"from": list_of(shape(optional=tuple(peers), **peers)), "ports": list_of(shape(port=NUMBER))}
    ingress = list_of(shape(optional=("ports",), **sources))
    policy = shape(podSelector=selector, policyTypes={"const": ["Ingress"]}, ingress=ingress)
    return {
        "v1/ConfigMap": {"data": TEXTS},
        "v1/ServiceAccount": {"automountServiceAccountToken": {"type": "boolean"}},
        "v1/PersistentVolumeClaim": {"spec": claim["properties"]["spec"]},
        "v1/Service": {"spec": head["headService"]["properties"]["spec"]},
        "apps/v1/StatefulSet": {"spec": stateful_set},
        "policy/v1/PodDisruptionBudget": {"spec": shape(minAvailable=NUMBER, selector=selector)},
        "networking.k8s.io/v1/NetworkPolicy": {"spec": policy},
    }


def problems(document: dict[str, Any], of_kuberay: dict[str, Any]) -> list[str]:
    """Return what Kubernetes would not accept of a manifest, or drop."""
    assert document["metadata"]["name"]
    if document["apiVersion"] == "ray.io/v1":
        return errors(of_kuberay[document["kind"]], document)
    fields = of_kubernetes(of_kuberay)[f"{document['apiVersion']}/{document['kind']}"]
    return errors(shape(apiVersion={}, kind={}, metadata={"type": "object"}, **fields), document)


def test_every_manifest_is_of_its_schema(of_kuberay: dict[str, Any]) -> None:
    seen = set()
    for document in every_document():
        assert not problems(document, of_kuberay), document["kind"]
        seen.add(document["kind"])
    assert {"RayCluster", "RayJob"} <= seen


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "rayVersions"), "2.60.0"),
        (("spec", "workerGroupSpecs", 0, "replicas"), "two"),
        (("spec", "workerGroupSpecs", 0, "rayStartParams", "num-cpus"), 4),
        (("spec", "headGroupSpec", "template", "spec", "containers", 0, "livenessProbe", "execute"), {}),
        (("spec", "headGroupSpec", "template", "spec", "containers", 0, "resources", "limits", "memory"), "12 GB"),
        (("spec", "gcsFaultToleranceOptions", "redisPassword", "valueFrom", "secretKeyRef", "key"), None),
    ],
)
def test_the_schemas_know_a_wrong_field(of_kuberay: dict[str, Any], path: tuple[Any, ...], value: Any) -> None:
    broken = copy.deepcopy(documents("raycluster.yaml")[0])
    field: Any = broken
    for key in path[:-1]:
        field = field[key]
    field[path[-1]] = value
    assert problems(broken, of_kuberay)


# -- secrets and images -------------------------------------------------------------------------------------------


def test_no_file_has_a_secret() -> None:
    """Passwords and keys are read from secrets that a user creates."""
    for file in FILES:
        assert all(document["kind"] != "Secret" for document in documents(file.name))
    for pod in pods():
        for container in pod["containers"]:
            for variable in container.get("env", ()):
                is_secret = re.search("PASSWORD|SECRET|KEY|TOKEN", variable["name"])
                assert not is_secret or "secretKeyRef" in variable["valueFrom"], variable
    assert set(cluster_of("raycluster.yaml")["gcsFaultToleranceOptions"]["redisPassword"]) == {"valueFrom"}
    for name in WITH_CLUSTERS:
        for pod in templates(name):
            sources = pod["containers"][0]["envFrom"]
            assert {"secretRef": {"name": "statefleet-object-store", "optional": True}} in sources


def test_every_secret_is_made_on_the_page() -> None:
    text = "".join(file.read_text() for file in FILES)
    named = set(re.findall(r"secret(?:Key)?Ref: \{name: ([\w-]+)", text))
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    assert named == set(re.findall(r"create secret generic ([\w-]+)", page))
    assert named == set(re.findall(r"create secret generic ([\w-]+)", text)), "and in the file that needs it"


def test_images_are_this_release_or_pinned() -> None:
    images = {container["image"] for pod in pods() for container in pod["containers"]}
    release = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools_scm"]["fallback_version"]
    ours = f"registry.example.com/statefleet:{release}"
    assert images == {ours, "docker.io/library/redis:7.4-bookworm"}


def test_no_pod_has_rights_that_it_does_not_need() -> None:
    for pod in pods():
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]


# -- what a fleet needs -------------------------------------------------------------------------------------------


def test_the_clusters_of_all_files_are_alike() -> None:
    """But for Redis, which a job does without."""
    first = cluster_of("raycluster.yaml")
    job = {**cluster_of("rayjob.yaml"), "gcsFaultToleranceOptions": first["gcsFaultToleranceOptions"]}
    assert "gcsFaultToleranceOptions" not in cluster_of("rayjob.yaml")
    assert job == first


def test_ray_is_the_locked_one() -> None:
    (version,) = re.findall(r"^ray==(\S+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    assert cluster_of("raycluster.yaml")["rayVersion"] == version


def test_ray_asks_for_a_token() -> None:
    assert cluster_of("raycluster.yaml")["authOptions"] == {"mode": "token"}


def test_clusters_are_started_as_those_of_ray_up() -> None:
    cluster = cluster_of("raycluster.yaml")
    head, worker = cluster["headGroupSpec"], cluster["workerGroupSpecs"][0]
    assert head["rayStartParams"]["num-cpus"] == "0"
    # KubeRay puts the text behind `--resources=` of a shell's command line.
    assert yaml.safe_load(yaml.safe_load(worker["rayStartParams"]["resources"])) == {"statefleet_store": 1}
    start = yaml.safe_load((ROOT / "cluster.yaml").read_text())["head_start_ray_commands"][-1]
    settings = {variable["name"]: variable["value"] for variable in head["template"]["spec"]["containers"][0]["env"]}
    assert settings == dict(word.split("=") for word in start.split() if word.startswith("RAY_health_check_"))


def test_state_is_spilled_to_a_volume() -> None:
    """Ray's session folder, below which state above the limit goes by default."""
    for pod in templates("raycluster.yaml"):
        (container,) = pod["containers"]
        (spill,) = [mount["name"] for mount in container["volumeMounts"] if mount["mountPath"] == "/tmp/ray"]
        (volume,) = [volume for volume in pod["volumes"] if volume["name"] == spill]
        assert volume["ephemeral"]["volumeClaimTemplate"]["spec"]["resources"]["requests"]["storage"]
        assert pod["securityContext"]["fsGroup"] > 0, "else the volume belongs to root"


def test_a_worker_leaves_before_its_pod_is_killed() -> None:
    _, pod = templates("raycluster.yaml")
    (container,) = pod["containers"]
    command, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "leave-node"
    assert (ROOT / "deploy" / "image" / command).stat().st_mode & 0o111
    assert int(seconds) + 20 <= pod["terminationGracePeriodSeconds"]
    assert {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}} in container["env"]


def test_every_pod_of_ray_is_of_the_network_policy_and_the_workers_of_the_budget() -> None:
    policies = {document["kind"]: document["spec"] for document in documents("fleet.yaml") if "spec" in document}
    labels = policies["NetworkPolicy"]["podSelector"]["matchLabels"]
    for name in WITH_CLUSTERS:
        cluster = cluster_of(name)
        for template in (cluster["headGroupSpec"]["template"], cluster["workerGroupSpecs"][0]["template"]):
            assert template["metadata"]["labels"].items() >= labels.items()
    assert policies["PodDisruptionBudget"]["selector"]["matchLabels"] == {**labels, "ray.io/node-type": "worker"}
    assert (
        policies["PodDisruptionBudget"]["minAvailable"]
        < cluster_of("raycluster.yaml")["workerGroupSpecs"][0]["replicas"]
    )
