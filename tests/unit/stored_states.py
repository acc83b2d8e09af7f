"""Folders of states that earlier versions wrote."""

from __future__ import annotations

from pathlib import Path

STORED = Path(__file__).parents[1] / "data" / "state-5d87e91"
