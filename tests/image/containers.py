"""Images and their containers by buildah, without a registry: the base is a Debian 12 that debootstrap makes.

A container has a network of its own with a loopback only, and processes of its own; its user has no capabilities. Needs root, buildah,
debootstrap and util-linux. What is built is kept below ``$XDG_CACHE_HOME/statefleet-tests``, so that a second build takes seconds.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from tests.code_blocks import ROOT
from tests.go_tool import cache_folder

IMAGE = "localhost/statefleet:test"
_BASE = "localhost/debian:bookworm"
_TOOLS = ("buildah", "debootstrap", "unshare", "ip")
_SOURCES = Path("/etc/apt/sources.list.d")
#: What of this machine leads to its package registries, if there is such a thing.
_REGISTRIES = ("/etc/pip.conf", "/etc/apt/apt.conf.d", str(_SOURCES), "/usr/local/share/ca-certificates")


def why_not() -> str:
    """Return what keeps the image from being built here; nothing if it can be built."""
    if os.geteuid() != 0:
        return "debootstrap needs root"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    return f"these are not installed (Debian: buildah, debootstrap, iproute2): {', '.join(missing)}" if missing else ""


class Containers:
    """buildah's images and containers in a folder.

    Parameters
    ----------
    folder
        Temporary folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        storage = cache_folder() / "image"
        storage.mkdir(parents=True, exist_ok=True)
        self._buildah = [
            "buildah",
            "--root",
            str(storage),
            "--runroot",
            str(folder / "run"),
            "--storage-driver",
            "overlay",
        ]
        #: Names of hosts: Spark looks its own up.
        self._hosts = folder / "hosts"
        self._hosts.write_text("127.0.0.1 localhost pod\n")

    def build(self, context: Path = ROOT, image: str = IMAGE, **arguments: str) -> None:
        """Build an image from this repository, or from a copy of it, and its base if that is not there."""
        if self._call("images", "--quiet", "--filter", f"reference={_BASE}", check=False) == "":
            self._make_base()
        pairs = [f"--build-arg={name}={value}" for name, value in {"BASE": _BASE, **arguments}.items()]
        self._call(
            "build", "--isolation", "chroot", "--format", "docker", "--layers", *pairs, "--tag", image, str(context)
        )

    def _make_base(self) -> None:
        root = self._folder / "debian"
        sources = "".join(file.read_text() for file in _SOURCES.glob("debian.sources"))
        mirror = re.findall(r"^URIs: (\S+/debian/?)$", sources, re.MULTILINE)[:1]
        subprocess.run(
            ["debootstrap", "--variant=minbase", "bookworm", str(root), *mirror], check=True, stdout=subprocess.DEVNULL
        )
        for path in map(Path, _REGISTRIES):
            if path.is_dir():
                shutil.copytree(path, root / path.relative_to("/"), dirs_exist_ok=True)
            elif path.exists():
                shutil.copy(path, root / path.relative_to("/"))
        container = self._call("from", "scratch")
        self._call("copy", "--quiet", container, str(root), "/")
        self._call("commit", "--rm", "--quiet", container, _BASE)
        shutil.rmtree(root)

    def save(self, image: str, archive: Path) -> None:
        """Write an image to a file, as `ctr images import` reads it."""
        self._call("push", "--quiet", image, f"docker-archive:{archive}:{image}")

    def image_id(self, image: str) -> str:
        return self._call("images", "--quiet", "--no-trunc", image)

    def start(self) -> str:
        """Return the name of a new container of the image."""
        return self._call("from", IMAGE)

    def run(self, container: str, *command: str, volume: Path) -> str:
        """Run a command in a container as the image's user, with a folder as ``/data``; return its output.

        Raises
        ------
        subprocess.CalledProcessError
            The command failed.
        """
        inside = [*self._buildah, "run", "--isolation", "chroot", "--cap-drop", "all", "--no-hosts", "--hostname", "pod",
                  "--volume", f"{self._hosts}:/etc/hosts", "--volume", f"{volume}:/data", container, "--", *command]  # fmt: skip
        spaces = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-c"]
        done = subprocess.run([*spaces, 'ip link set lo up; exec "$@"', "pod", *inside],
                              capture_output=True, text=True, check=False, timeout=600)  # fmt: skip
        print(done.stdout, done.stderr)
        done.check_returncode()
        return done.stdout

    def remove(self, container: str) -> None:
        self._call("rm", container)

    def label(self, field: str) -> str:
        """Return a field of the image's configuration, in Go's template language."""
        return self._call("inspect", "--type", "image", "--format", field, IMAGE)

    def _call(self, *words: str, check: bool = True) -> str:
        return subprocess.run([*self._buildah, *words], stdout=subprocess.PIPE, text=True, check=check).stdout.strip()
