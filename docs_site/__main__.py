"""``python -m docs_site [FOLDER]`` builds the site from ``docs/``. A broken link fails it. It needs no network."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from sphinx.cmd.build import main as sphinx_build

_ROOT = Path(__file__).parents[1]


def build(source: Path, target: Path) -> int:
    """Build a site from a folder of pages into a folder whose content is replaced; return the exit code, which is not 0 once there is a
    warning.
    """
    shutil.rmtree(target, ignore_errors=True)
    with tempfile.TemporaryDirectory() as parsed:
        strict = ["--fail-on-warning", "--keep-going", "--quiet"]
        folders = ["--conf-dir", str(Path(__file__).parent), "--doctree-dir", parsed, str(source), str(target)]
        return sphinx_build([*strict, "--builder", "html", *folders])


def main() -> int:
    """Build the site of this project, and return the exit code."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else _ROOT / "build" / "site"
    code = build(_ROOT / "docs", target)
    print(f"the site has mistakes: {target}" if code else f"the site: {target.resolve() / 'index.html'}")
    return code


if __name__ == "__main__":
    sys.exit(main())
