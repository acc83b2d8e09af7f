"""Runs pytest as a user of the plugin does, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def pytest_in(folder: Path, *arguments: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """Run pytest in a process of its own, with the plugin and no other."""
    # With or without an installed entry point: by its name here.
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-p", "statefleet.testing.plugin", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout_s)
