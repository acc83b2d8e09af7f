"""The images of the pods: executors that have Python, Java, PySpark and this package, but no Ray; and what holds a pod's network."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from tests.code_blocks import ROOT
from tests.image.containers import Containers

EXECUTOR = "localhost/statefleet-executor:test"
PAUSE = "localhost/pause:test"
#: What the Containerfile copies.
_COPIED = ("coordinator", "deploy/image", "spark_jobs", "statefleet", "store_actors")
_FILES = ("Containerfile", "LICENSE", "README.md", "pyproject.toml", "requirements-build.lock", "requirements.lock")


def build_images(folder: Path, pause: Path) -> dict[str, str]:
    """Build the images in a temporary folder, where they are not in the cache; return the id of each.

    Parameters
    ----------
    pause
        The program of :func:`~tests.kubernetes.programs.kubernetes_programs`.
    """
    containers = Containers(folder)
    # Of the session's extras only Spark; and of what the package requires all but Ray, of which executors need nothing.
    containers.build(_without_ray(folder / "executor"), EXECUTOR, EXTRAS="spark35", VERSION="0.1.0")
    of_pause = folder / "pause"
    of_pause.mkdir()
    shutil.copy(pause, of_pause / "pause")
    (of_pause / "Containerfile").write_text('FROM scratch\nCOPY pause /pause\nUSER 65534\nENTRYPOINT ["/pause"]\n')
    containers.build(of_pause, PAUSE)
    return {image: containers.image_id(image) for image in (EXECUTOR, PAUSE)}


def _without_ray(folder: Path) -> Path:
    """Make a copy of what the image is built of, whose package does not require Ray; return its folder."""
    left_out = shutil.ignore_patterns("__pycache__", "jars")
    for name in _COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=left_out)
    for name in _FILES:
        shutil.copy2(ROOT / name, folder / name)
    project = folder / "pyproject.toml"
    text, count = re.subn(r'^ +"ray\[default\]==.*\n', "", project.read_text(), flags=re.MULTILINE)
    assert count == 1, "the package requires Ray by one line"
    project.write_text(text)
    shutil.copystat(ROOT / project.name, project)  # the layers that are in the cache have its time
    return folder
