"""Every kind of shard against its model: operations, versions, aborts, rollbacks and reloads; in memory, and with arrays in files."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tests.unit.aggregate_machine import AggregateMachine
from tests.unit.as_of_machine import AsOfMachine
from tests.unit.deduplicate_machine import DeduplicateMachine
from tests.unit.join_machine import JoinMachine
from tests.unit.keyed_machine import KeyedMachine
from tests.unit.session_machine import SessionMachine
from tests.unit.spilled import everything_spilled, open_files
from tests.unit.top_machine import TopMachine

#: By machine: how many examples there are, of how many steps.
MACHINES: dict[type[RuleBasedStateMachine], tuple[int, int]] = {
    AggregateMachine: (60, 30),
    AsOfMachine: (60, 25),
    DeduplicateMachine: (45, 25),
    JoinMachine: (60, 25),
    KeyedMachine: (45, 40),
    SessionMachine: (40, 25),
    TopMachine: (45, 20),
}
each_machine = pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.__name__)


@each_machine
def test_every_kind_of_shard_is_as_its_model(machine: type[RuleBasedStateMachine]) -> None:
    examples, steps = MACHINES[machine]
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=steps))


@each_machine
def test_every_kind_of_shard_is_the_same_when_it_is_spilled(
    machine: type[RuleBasedStateMachine], tmp_path: Path
) -> None:
    with everything_spilled(str(tmp_path)):
        run_state_machine_as_test(
            machine,
            settings=settings(max_examples=10, stateful_step_count=15, suppress_health_check=list(HealthCheck)),
        )
    assert not list(tmp_path.iterdir()), "files have no names, so that none is left behind"
    # Exceptions that Hypothesis keeps may hold a table or two.
    assert open_files(tmp_path) < 60
