"""First rows of each key against a plain dict: late rows, eviction, rollback, reload."""

from __future__ import annotations

from hypothesis import settings

from tests.unit.deduplicate_machine import (
    DeduplicateMachine,
)

TestDeduplicate = DeduplicateMachine.TestCase
TestDeduplicate.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
