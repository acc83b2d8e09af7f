"""The schemas of KubeRay's resources: those of its CustomResourceDefinitions, by which Kubernetes accepts or refuses a manifest.

They come from KubeRay's Go module (Apache License 2.0), whose content is compared with a checksum, and are kept below
``$XDG_CACHE_HOME/statefleet-tests``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.code_blocks import ROOT, every_block
from tests.go_tool import GoNotThereError, go_program, made_once, run

MODULE = "github.com/ray-project/kuberay/ray-operator"
VERSION = "v1.6.2"
_SCHEMAS = f"kuberay-{VERSION}.json"
_CHECKSUM = "h1:XUckRswLMyk71D00L62d2Vanh0fVkNqu56+IF/rr+O0="
API = "ray.io/v1"


def schemas() -> dict[str, Any]:
    """Return the JSON schema of each kind of ``ray.io/v1``. A field that KubeRay does not know is an error in them.

    Raises
    ------
    GoNotThereError
        The module cannot be downloaded, or its content is another one.
    """
    (cached,) = made_once([_SCHEMAS], _write)
    loaded: dict[str, Any] = json.loads(cached.read_text())
    return {kind: _closed(schema) for kind, schema in loaded.items()}


def _write(folder: Path) -> None:
    (folder / _SCHEMAS).write_text(json.dumps(_read(download(folder))))


def manifests() -> list[str]:
    """Return the files of ``deploy/kubernetes``, and what the page shows of the kind."""
    files = [file.read_text() for file in sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))]
    blocks = (block for block in every_block() if block.page == "docs/kubernetes.md" and block.language == "yaml")
    return [*files, *(block.code for block in blocks)]


def download(folder: Path) -> Path:
    """Return the folder of the module's content."""
    go, environment = go_program(folder)
    Path(folder, "go.mod").write_text("module statefleet.test\n")
    environment |= {"GOFLAGS": "-modcacherw"}
    module = json.loads(run([go, "mod", "download", "-json", f"{MODULE}@{VERSION}"], environment, folder))
    if module["Sum"] != _CHECKSUM:
        raise GoNotThereError(f"{MODULE}@{VERSION} has the checksum {module['Sum']}, not {_CHECKSUM}")
    return Path(module["Dir"])


def _read(module: Path) -> dict[str, Any]:
    kinds = {}
    for file in sorted(module.glob("config/crd/bases/*.yaml")):
        spec = yaml.load(file.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))["spec"]
        (version,) = [version for version in spec["versions"] if version["name"] == API.partition("/")[2]]
        kinds[spec["names"]["kind"]] = version["schema"]["openAPIV3Schema"]
    return kinds


def _closed(schema: Any) -> Any:
    """Return a schema in which objects have no other fields than those that are named: Kubernetes would drop these without a word."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    closed = {key: _closed(part) for key, part in schema.items()}
    names_fields = isinstance(closed.get("properties"), dict) and closed.get("type") == "object"
    if names_fields and not closed.get("x-kubernetes-preserve-unknown-fields"):
        closed.setdefault("additionalProperties", False)
    return closed
