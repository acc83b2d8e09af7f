"""Kubernetes itself, built once from the Go module proxy: API server, controllers, scheduler, kubelet and kubectl in one program.

Go checks the content against its checksum database. What is built is kept below ``$XDG_CACHE_HOME/statefleet-tests``; the first
build takes a quarter of an hour of two cores.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from tests.go_tool import go_program, made_once, run

#: The last minor version but one that runs where control groups are of version 1, too.
VERSION = "1.34.4"
_BUILD_S = 3000
#: The programs in the cache, and what each is built of.
_SOURCES = {f"kubernetes-v{VERSION}": "programs.go", f"pause-{VERSION}": "pause.go"}
_VERSIONS = {
    "k8s.io/component-base/version": ("gitVersion=v1.34.4", "gitMajor=1", "gitMinor=34"),
    "k8s.io/client-go/pkg/version": ("gitVersion=v1.34.4",),
}


def kubernetes_programs() -> tuple[Path, Path]:
    """Return the paths of Kubernetes' program and of that of a pause container; built first where they are not in the cache.

    Raises
    ------
    GoNotThereError
        They cannot be built; says what failed.
    """
    programs, pause = made_once(list(_SOURCES), _build)
    return programs, pause


def _build(folder: Path) -> None:
    go, environment = go_program(folder)
    environment |= {"CGO_ENABLED": "0", "GOFLAGS": "-mod=mod -modcacherw -buildvcs=false"}
    module = json.loads(run([go, "mod", "download", "-json", f"k8s.io/kubernetes@v{VERSION}"], environment, folder))
    # Kubernetes' own modules are folders of its repository, which are published one by one.
    own = re.findall(r"^\t(\S+) => \./staging", Path(module["GoMod"]).read_text(), re.MULTILINE)
    replaced = "".join(f"replace {name} => {name} v0{VERSION[1:]}\n" for name in own)
    require = f"require k8s.io/kubernetes v{VERSION}\n"
    (folder / "go.mod").write_text(f"module programs\n\ngo 1.24.0\n\ngodebug default=go1.24\n\n{require}{replaced}")
    flags = " ".join(f"-X {package}.{value}" for package, values in _VERSIONS.items() for value in values)
    for name, source in _SOURCES.items():
        shutil.copy(Path(__file__).with_name(source), folder)
        build = ["nice", go, "build", "-p=2", f"-ldflags=-s -w {flags}", "-o", name, source]
        run(build, environment, folder, _BUILD_S)
