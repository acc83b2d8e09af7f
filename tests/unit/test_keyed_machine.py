"""A keyed store against plain dicts: every operation, many versions and scans open at once, reloads from its files."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import settings

from tests.unit.keyed_machine import (
    KEYS,
    KeyedMachine,
)

KEY_SCHEMA = pa.schema([field.arrow() for field in KEYS])


KeyedMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestKeyedAgainstDicts = KeyedMachine.TestCase
